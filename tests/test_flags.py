"""The command line: what is understood, what is refused in one line, what a workdir remembers."""

import errno
import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from absl import flags as absl_flags

import dora_jax
from dora_jax import config as configs
from dora_jax import config_files, exits, flags, workdirs
from dora_jax.config import ConfigError
from tests.fakes.hf_models import MODEL

ROOT = Path(__file__).parent.parent


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    """A folder with a config file, a model folder without weights and a program that says what it got."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DORA_DEVICES", raising=False)
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(MODEL))
    Path("c.py").write_text(
        textwrap.dedent("""
        from dora_jax import config
        def get_config(arg=None):
            c = config.defaults()
            c.model.path = "model"
            c.task.name = "reasoning_gym:chain_sum"
            c.task.params = {"terms": 2, "label": "a", "token": "sesame"}
            c.steps = int(arg or 7)
            return c
        """)
    )
    Path("program.py").write_text(
        textwrap.dedent('''
        """Says what it got."""
        import sys
        from dora_jax import flags
        def main(config, workdir):
            print("ran", config.steps, workdir, "jax" in sys.modules)
            return 3
        flags.run(main)
        ''')
    )
    return tmp_path


def parse(*args, purpose="train"):
    return flags.parse(["program", *args], purpose, absl_flags.FlagValues())


def refusal(*args, purpose="train"):
    with pytest.raises(ConfigError) as caught:
        parse(*args, purpose=purpose)
    assert all("\n" not in problem for problem in caught.value.problems)
    return caught.value.problems


def program(*args):
    return subprocess.run(
        [sys.executable, "program.py", *args],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        timeout=60,
        check=False,
    )


def test_overrides_reach_the_config(workspace):
    asked = parse(
        "--config=c.py",
        "--config.seed=5",
        "--config.trainer.learning_rate=1",
        "--config.task.rewards=a.b",
        "--config.task.shuffle_rewards",
        "--config.task.params.terms=4",
        "--workdir=w",
    )
    assert (asked.config.seed, asked.config.trainer.learning_rate, asked.config.task.rewards) == (5, 1.0, ("a.b",))
    assert asked.config.task.shuffle_rewards and asked.config.task.params["terms"] == 4
    assert asked.workdir == Path("w") and not asked.dry_run
    assert asked.overrides == {
        "seed": 5,
        "trainer.learning_rate": 1.0,
        "task.rewards": ("a.b",),
        "task.shuffle_rewards": True,
        "task.params.terms": 4,
    }


def test_other_spellings(workspace):
    assert parse("--config.seed", "5", "--config", "c.py:9").config.steps == 9  # --config need not come first
    assert parse("--config=c.py", "--noconfig.task.shuffle_rewards").config.task.shuffle_rewards is False
    assert parse("--config=c.py", "--config.task.rewards=('a.b','c.d')").config.task.rewards == ("a.b", "c.d")
    assert parse("--config=c.py", "--config.trainer.loss_params={'eps_lo': 0.1}").config.trainer.loss_params == {
        "eps_lo": 0.1
    }


def test_the_default_workdir_is_named_after_the_config_and_its_argument(workspace):
    assert parse("--config=c.py").workdir == Path("runs/c")
    assert parse("--config=c.py:9").workdir == Path("runs/c_9")


@pytest.mark.parametrize(
    "args, why",
    [
        (
            ["--config.trainer.learnin_rate=1"],
            "config.trainer.learnin_rate: unknown field; the nearest is config.trainer.learning_rate",
        ),
        (["--config.task.params.term=1"], "the nearest is config.task.params.terms"),
        (["--config.trainer=1"], "config.trainer: a section"),
        (["--noconfig.task.shuffle"], "config.task.shuffle_rewards"),
        (["--config.steps=ten"], "config.steps: 'ten' is not of its type, int"),
        (["--config.steps=1e3"], "config.steps: '1e3' is not of its type, int"),
        (["--config.task.shuffle_rewards=no"], "is not of its type, bool"),
        (["--config.task.rewards=(1,2)"], "task.rewards: 1 is not a str"),
        (["--config.steps=0"], "steps: 0 is not at least 1"),
        ([f"--config.seed={2**64}"], "seed: 18446744073709551616 is not at least 0 and below 2**63"),
        ([f"--config.sft.n_layers={10**9}"], "sft.n_layers: 1000000000 is more than 10000"),
        (
            [f"--config.sft.d_model={10**9}", "--config.sft.out=new", "--config.model.path=new"],
            "of sft.d_model, n_layers, n_heads, head_dim and d_ff, takes",
        ),
        (["steps=3"], "argument 'steps=3': not a flag; the nearest is --config.steps=..."),
        (["--", "--config.steps=3"], "argument '--config.steps=3': nothing behind \"--\" is read"),
        (["--"], 'nothing behind "--"'),
        (["--wrkdir=x"], "Unknown command line flag 'wrkdir'. Did you mean: workdir ?"),
        (
            ["--config.cpu_devices=4", "--config.trainer.data=3", "--config.trainer.fsdp=2"],
            "trainer.data: the mesh data * fsdp * tensor * context = 3 * 2 * 1 * 1 needs 6 devices, there are 4",
        ),
        (
            ["--config.cpu_devices=3", "--config.placement=shared", "--config.trainer.tensor=2"],
            "trainer.fsdp: 3 devices are not divisible",
        ),
        (["--config.model.path=gone"], "model.path: gone does not exist"),
        (["--config.model.path=."], "model.path: . holds no config.json, so it is no Hugging Face folder"),
        (["--config.model.path=.", "--config.sft.out=."], "sft.out: . exists and is not an empty folder"),
        (
            ["--config.model.path=new", "--config.sft.out=new/", "--config.sft.init=."],
            "sft.init: . holds no config.json",
        ),
        (["--config.model.path=new", "--config.sft.out=old"], "model.path: new does not exist"),
        (
            ["--config.rollout.max_new_tokens=173", "--config.trainer.pack_tokens=301"],
            "rollout.max_new_tokens: the longest sample, max_prompt_tokens + max_new_tokens = 301, is longer than the model's 300 positions",
        ),
        (
            [
                "--config.rollout.max_new_tokens=65536",
                "--config.trainer.pack_tokens=65664",
                "--config.model.path=new",
                "--config.sft.out=new",
            ],
            "= 65664, is longer than the model's 32768 positions",
        ),
        (
            [
                "--config.rollout.max_new_tokens=65536",
                "--config.trainer.pack_tokens=65664",
                "--config.model.path=new",
                "--config.model.size=Qwen3-8B",
                "--dry_run",
            ],
            "= 65664, is longer than the model's 40960 positions",
        ),
    ],
)
def test_a_wrong_argument_is_one_line_that_names_it(workspace, args, why):
    (problem,) = refusal("--config=c.py", *args)
    assert why in problem


@pytest.mark.parametrize(
    "spec, why",
    [
        ("", "config: missing"),
        ("gone.py", "config: gone.py does not exist"),
        ("c.py:many", "c.py:8: ValueError: invalid literal for int()"),
    ],
)
def test_a_wrong_config_file_argument(workspace, spec, why):
    (problem,) = refusal(f"--config={spec}")
    assert why in problem


@pytest.mark.parametrize(
    "body, why",
    [
        ("def get_config(arg=None):\n  return None", "returned NoneType"),
        ("def get_config(:", "bad.py:1: SyntaxError"),
        ("import no_such_module", "bad.py:1: ModuleNotFoundError"),
        ("x = 1", "get_config"),
        (
            "from dora_jax import config\ndef get_config():\n  c = config.defaults()\n  c.trainer.learning_rat = 1\n  return c",
            "bad.py:4: unknown field learning_rat; the nearest is",
        ),
        (
            "from dora_jax import config\ndef get_config():\n  c = config.defaults()\n  c.steps = 'many'\n  return c",
            "bad.py:4: TypeError",
        ),
    ],
)
def test_a_config_file_that_raises(workspace, body, why):
    Path("bad.py").write_text(body)
    (problem,) = refusal("--config=bad.py")
    assert why in problem


def test_an_indivisible_mesh_names_its_axis(workspace):
    sizes = ["--config.sft.out=base", "--config.model.path=base", "--config.sft.d_model=30", "--config.sft.n_heads=2"]
    assert refusal("--config=c.py", "--config.cpu_devices=8", *sizes) == (
        "trainer.fsdp: model d_model 30 is not divisible by mesh axis fsdp=4",
    )
    assert refusal(
        "--config=c.py",
        "--config.cpu_devices=8",
        "--config.rollout.tensor=4",
        "--config.rollout.instances=1",
        "--config.trainer.fsdp=2",
        *sizes,
    ) == ("rollout.tensor: model n_heads 2 is not divisible by mesh axis tensor=4",)


def test_an_instance_may_have_more_devices_than_kv_heads(workspace):
    sizes = [
        "--config.sft.out=base",
        "--config.model.path=base",
        "--config.rollout.instances=1",
        "--config.trainer.fsdp=2",
    ]
    parse("--config=c.py", "--config.cpu_devices=8", *sizes, "--config.rollout.tensor=4", "--config.sft.n_heads=4")
    assert refusal(
        "--config=c.py", "--config.cpu_devices=8", *sizes, "--config.rollout.tensor=3", "--config.sft.n_heads=6"
    ) == ("rollout.tensor: model n_kv_heads 2 is not divisible by mesh axis tensor=3",)


def test_processes_that_cannot_divide_or_share_the_kv_heads_are_refused(workspace):
    cluster = [
        "--config.cluster.launcher=process",
        "--config.model.path=gone",
        "--config.model.size=Qwen3-8B",
        "--dry_run",
        "--config.rollout.instances=1",
        "--config.cluster.devices_per_host=1",
    ]
    parse("--config=c.py", *cluster, "--config.cluster.hosts_per_replica=16", "--config.rollout.tensor=16")
    assert refusal("--config=c.py", *cluster, "--config.cluster.hosts_per_replica=3", "--config.rollout.tensor=3") == (
        "cluster.hosts_per_replica: 3 processes can neither split nor share the model's 8 KV heads evenly",
    )


def test_problems_of_several_kinds_come_together(workspace):
    assert len(refusal("--config=c.py", "--config.steps=0", "--config.seed=-1", "--config.rollout.page_size=3")) == 3


def begin(workdir):
    """As a run does with its first step."""
    Path(workdir, "metrics.jsonl").touch()


@pytest.mark.parametrize("left", ["journal/000001.log", "metrics.jsonl", "checkpoints/3/manifest.json"])
def test_a_run_that_never_began_does_not_hold_its_workdir(workspace, left):
    flags.record(parse("--config=c.py", "--workdir=w", "--config.task.rewards=no.such"))
    Path("w/journal").mkdir()  # the journal is opened before the model is
    parse("--config=c.py", "--workdir=w")
    Path("w", left).parent.mkdir(parents=True, exist_ok=True)
    Path("w", left).touch()
    assert "differs in task.rewards" in refusal("--config=c.py", "--workdir=w")[0]


@pytest.mark.parametrize(
    "workdir, why",
    [("c.py", "File exists"), ("c.py/below", "Not a directory"), ("/proc/nowhere", "No such file or directory")],
)
def test_a_workdir_that_cannot_be_written(workspace, workdir, why):
    done = program("--config=c.py", f"--workdir={workdir}")
    assert (done.returncode, done.stderr) == (2, f"error: workdir: {workdir} cannot be written: {why}\n")


def test_a_config_of_a_run_that_was_cut_short_or_is_nested_too_deep(workspace):
    Path("w").mkdir()
    begin("w")
    for text, why in (("{", "is not JSON: "), ("[" * 10**6, "is nested too deep to be read")):
        Path("w/config.json").write_text(text)
        for args in (["--config=c.py", "--workdir=w"], ["--workdir=w"]):
            (problem,) = refusal(*args, purpose="train" if len(args) == 2 else "evaluate")
            assert problem.startswith(f"workdir: w/config.json {why}")


@pytest.mark.parametrize(
    "error, sentence",
    [
        (OSError(errno.ENOSPC, "No space left on device"), "the disk is full: .*No space left"),
        (RuntimeError("I/O error: No space left on device (os error 28)"), "the disk is full"),
        (RuntimeError("Failed writing: Disk quota exceeded"), "the disk is full"),
        (PermissionError(errno.EACCES, "Permission denied", "a/b"), "a/b: Permission denied"),
        (OSError(errno.EROFS, "Read-only file system", "a/b"), "a/b: Read-only file system"),
        (MemoryError(), "out of memory: of this machine"),
        (RuntimeError("trainer failed: RESOURCE_EXHAUSTED: 8 GB"), "out of memory: trainer failed"),
        (OSError(errno.ENOENT, "No such file or directory", "a"), None),
        (KeyError("a"), None),
    ],
)
def test_what_the_machine_refuses_is_a_sentence(error, sentence):
    for raised in (error, RuntimeError("a stage failed")):
        raised.__cause__ = None if raised is error else error
        found = exits.refusal(raised)
        assert found is None if sentence is None else re.match(sentence if raised is error else sentence[:9], found)


def test_a_script_may_name_its_workdir_by_a_string(workspace, monkeypatch):
    from dora_jax.runtime import job

    ran = []
    monkeypatch.setattr(job, "train", lambda config, workdir: ran.append((config, workdir)) or 0)
    tree = parse("--config=c.py").config
    assert dora_jax.fit(config_files.load_file("c.py"), "w") == dora_jax.fit(tree, "w") == 0
    assert ran[0] == ran[1]
    assert ran[-1] == (tree, Path("w")) and json.loads(Path("w/config.json").read_text())["steps"] == 7
    with pytest.raises(ConfigError, match="workdir: gone holds no run"):
        dora_jax.load_policy("gone")
    monkeypatch.setattr(job, "pick", lambda directory, step: 3)
    monkeypatch.setattr(job.hf, "read_config", lambda path: path)
    monkeypatch.setattr(job.checkpoint, "read_params", lambda directory, step: (directory, step))
    monkeypatch.setattr(job.Tokenizer, "load", lambda path: None)
    assert dora_jax.load_policy("w") == ("model", (Path("w/checkpoints"), 3), None)


def test_the_workdir_remembers_its_config(workspace):
    flags.record(parse("--config=c.py", "--workdir=w", "--config.seed=5", "--config.task.params.token=open"))
    saved = json.loads(Path("w/config.json").read_text())
    assert saved["dora_jax"] == dora_jax.__version__
    assert saved["seed"] == 5 and saved["task"]["params"] == {"terms": 2, "label": "a", "token": "<redacted>"}
    assert json.loads(Path("w/overrides.json").read_text()) == {"seed": 5, "task.params.token": "<redacted>"}
    assert sorted(p.name for p in Path("w").iterdir()) == ["config.json", "overrides.json"]

    begin("w")
    parse("--config=c.py:99", "--workdir=w", "--config.seed=5", "--config.eval.every=3", "--config.checkpoint.keep=9")
    (problem,) = refusal("--config=c.py", "--workdir=w", "--config.rollout.temperature=0.5")
    assert problem == (
        "workdir: w belongs to another config, which differs in seed, rollout.temperature; choose another --workdir"
    )


def test_a_field_that_an_older_config_lacks_is_no_difference(workspace):
    flags.record(parse("--config=c.py", "--workdir=w"))
    saved = json.loads(Path("w/config.json").read_text())
    del saved["rollout"]["decode_steps"], saved["sft"]
    begin("w")
    Path("w/config.json").write_text(json.dumps(saved))
    parse("--config=c.py", "--workdir=w")


@pytest.mark.parametrize(
    "change, why",
    [
        (
            {"dora_jax": "9.1.0"},
            (
                f"workdir: w was written by dora_jax 9.1.0, and this is {dora_jax.__version__}, which does not "
                "read it: go on with dora_jax 9.1.0, or choose another --workdir"
            ),
        ),
        ({"dora_jax": 7}, "workdir: w was written by dora_jax 7, and this is"),
        (
            {"trainer": {"learning_rat": 1, "rows": 0}, "task": 3},
            (
                "workdir: w was written by another version of dora_jax: its "
                "config.json has task, trainer.learning_rat, which this one does not know; choose another --workdir"
            ),
        ),
        (None, "workdir: w/config.json is not JSON: "),
    ],
)
def test_a_workdir_of_another_version_is_refused(workspace, change, why):
    flags.record(parse("--config=c.py", "--workdir=w"))
    begin("w")
    text = Path("w/config.json").read_text()
    Path("w/config.json").write_text(json.dumps(json.loads(text) | change) if change else text[:99])
    (problem,) = refusal("--config=c.py", "--workdir=w")
    assert problem.startswith(why)
    if "trainer" not in (change or ()):
        assert refusal("--workdir=w", purpose="evaluate") == (problem,)


def test_a_workdir_that_names_no_version_is_of_the_first(workspace, monkeypatch):
    flags.record(parse("--config=c.py", "--workdir=w"))
    saved = json.loads(Path("w/config.json").read_text())
    del saved["dora_jax"]
    begin("w")
    Path("w/config.json").write_text(json.dumps(saved))
    monkeypatch.setattr(workdirs, "READS", ("0.1.0",))
    assert parse("--workdir=w", purpose="evaluate").config.steps == 7
    monkeypatch.setattr(workdirs, "READS", ("0.2.0",))
    assert "was written by dora_jax 0.1.0, and" in refusal("--config=c.py", "--workdir=w")[0]


def test_evaluate_reads_the_config_of_the_workdir(workspace):
    flags.record(parse("--config=c.py", "--workdir=w", "--config.seed=5"))
    asked = parse("--workdir=w", "--config.eval.samples=4", purpose="evaluate")
    assert (asked.config.seed, asked.config.eval.samples) == (5, 4)
    assert "holds no run" in refusal("--workdir=gone", purpose="evaluate")[0]
    assert "workdir: missing" in refusal(purpose="evaluate")[0]
    assert "leave --config out" in refusal("--config=c.py", "--workdir=w", purpose="evaluate")[0]


def test_a_program_runs_with_its_config_and_exit_code(workspace):
    done = program("--config=c.py", "--workdir=w")
    assert (done.stdout, done.returncode) == ("ran 7 w False\n", 3), done.stderr
    assert Path("w/config.json").exists()


def test_a_program_refuses_in_one_line_before_jax(workspace):
    Path("jax.py").write_text("raise SystemExit('jax is imported')")
    done = program("--config=c.py", "--config.stepss=3")
    assert (done.stdout, done.returncode) == ("", 2)
    assert done.stderr == "error: config.stepss: unknown field; the nearest is config.steps\n"


def test_dry_run_prints_config_and_mesh_and_writes_nothing(workspace):
    done = program("--config=c.py", "--dry_run", "--config.cpu_devices=4", "--workdir=w", "--config.model.path=gone")
    assert done.returncode == 0, done.stderr
    printed, _, plan = done.stdout.partition("workdir: w\n")
    assert json.loads(printed)["cpu_devices"] == 4 and "sesame" not in done.stdout
    chosen, _, plan = plan.partition("devices:")
    assert chosen.startswith("chosen for cpu, as no slice is named:\n  rollout.attention=reference ")
    assert plan == (
        " 4, trainer and instances own theirs\n  trainer     0,1  mesh data=1 fsdp=2 tensor=1 context=1\n"
        "  instance 0  2  tensor=1\n  instance 1  3  tensor=1\n"
        "memory: not planned, for the machine or the model is not known yet\nnote: model.path: gone does not exist\n"
    )
    assert not Path("w").exists()


def test_help_shows_what_the_program_is_its_flags_and_every_field(workspace):
    done = program("--help")
    assert done.returncode == 0 and done.stderr == ""
    assert "Says what it got." in done.stdout
    assert all(flag in done.stdout for flag in ("--config:", "--workdir:", "--[no]dry_run:"))
    words = " ".join(done.stdout.split())
    assert "trainer.pack_tokens=512 L: packed row length" in words and "placement=auto auto, disjoint, shared:" in words
    assert all(f" {name}=" in words for name in configs.fields())


@pytest.mark.parametrize(
    "name, said",
    [
        ("train", "seed=0"),
        ("sft", "sft.steps=300"),
        ("evaluate", "--step:"),
        ("export_hf", "--out:"),
        ("sweep", "--only:"),
        ("simulate", "hardware.chip=h800"),
    ],
)
def test_every_program_has_help(workspace, name, said):
    done = subprocess.run(
        [sys.executable, "-m", f"dora_jax.{name}", "-h"],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "") and said in done.stdout


@pytest.mark.parametrize(
    "spec",
    [
        f"{path}{arg}"
        for path in sorted((ROOT / "configs").glob("*.py"))
        for arg in {"quickstart": ("", ":tiny"), "qwen3": (":0.6B,laptop",)}.get(path.stem, ("",))
    ],
)
def test_every_shipped_config_is_valid(spec, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    asks = (
        ["--config.model.path=a", "--config.task.path=b.jsonl"] if "quickstart" not in str(spec) else []
    )  # what only its user has
    flags.parse(["program", f"--config={spec}", "--dry_run", *asks], "train", absl_flags.FlagValues())
