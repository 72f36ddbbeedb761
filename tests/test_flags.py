"""The command line: what is understood, what is refused in one line, what a workdir remembers."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from absl import flags as absl_flags

from dora_jax import config as configs
from dora_jax.base import config_tree
from dora_jax.cli import flags
from dora_jax.cli.arguments import apply_overrides
from dora_jax.config import Config, ConfigError
from dora_jax.plan import presets
from tests.fakes.command_line import ROOT, parse, program, refusal, write_workspace


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DORA_DEVICES", raising=False)
    write_workspace()
    return tmp_path


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
        (["--workdir=v", "--workdir", "w"], "flag --workdir=w: already defined as v"),
        (["--config=d.py"], "config: c.py and d.py are both named; leave one of them out"),
        (["--wrkdir=x"], "Unknown command line flag 'wrkdir'. Did you mean: workdir ?"),
        (
            ["--config.cpu_devices=4", "--config.trainer.data=3", "--config.trainer.fsdp=2"],
            (
                "trainer.data: the mesh data * fsdp * tensor * context * expert = 3 * 2 * 1 * 1 * 1 needs 6 devices, there "
                "are 4"
            ),
        ),
        (
            ["--config.cpu_devices=3", "--config.placement=shared", "--config.trainer.tensor=2"],
            "trainer.fsdp: 3 devices are not divisible",
        ),
        (["--config.model.path=gone"], "model.path: gone does not exist"),
        (["--config.model.path=."], "model.path: . holds no config.json, so it is no Hugging Face folder"),
        (
            ["--config.model.path=adapter"],
            "model.path: adapter is a PEFT folder, an adapter without its base: lora.path takes it",
        ),
        (["--config.model.path=.", "--config.sft.out=."], "sft.out: . exists and is not an empty folder"),
        (
            ["--config.model.path=new", "--config.sft.out=new/", "--config.sft.init=."],
            "sft.init: . holds no config.json",
        ),
        (["--config.model.path=new", "--config.sft.out=old"], "model.path: new does not exist"),
        (
            ["--config.rollout.max_new_tokens=173", "--config.trainer.pack_tokens=301"],
            (
                "rollout.max_new_tokens: the longest sample, max_prompt_tokens + max_new_tokens = 301, is longer than the "
                "model's 300 positions"
            ),
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
            (
                "from dora_jax import config\ndef get_config():\n  c = config.defaults()\n  c.trainer.learning_rat = 1\n  "
                "return c"
            ),
            "bad.py:4: unknown field trainer.learning_rat; the nearest is trainer.learning_rate",
        ),
        (
            "from dora_jax import config\ndef get_config():\n  c = config.defaults()\n  c.trainer.lr = 1e-4\n  return c",
            "bad.py:4: unknown field trainer.lr; the nearest is trainer.learning_rate",
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


def test_a_config_of_another_program_or_language_is_refused(workspace):
    demo = ROOT / "configs/sim/demo.py"
    assert refusal(f"--config={demo}") == (
        f"config: {demo} is a configuration of another program, for it has no cluster",
    )
    Path("c.yaml").write_text("steps: 3")
    assert refusal("--config=c.yaml") == ("config: c.yaml is no Python file; a config is path.py with get_config()",)


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
    parse("--config=c.py", *cluster, "--config.cluster.hosts_per_instance=16", "--config.rollout.tensor=16")
    assert refusal("--config=c.py", *cluster, "--config.cluster.hosts_per_instance=3", "--config.rollout.tensor=3") == (
        "cluster.hosts_per_instance: 3 processes can neither split nor share the model's 8 KV heads evenly",
    )


def test_problems_of_several_kinds_come_together(workspace):
    assert len(refusal("--config=c.py", "--config.steps=0", "--config.seed=-1", "--config.rollout.page_size=3")) == 3


def test_a_program_runs_with_its_config_and_exit_code(workspace):
    done = program("--config=c.py", "--workdir=w")
    assert (done.stdout, done.returncode) == ("ran 7 w False\n", 3), done.stderr
    assert Path("w/config.json").exists()


def test_a_program_ends_in_silence_where_the_reader_of_its_output_has_left(workspace):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "dora_jax.train", "--help"]
    done = subprocess.run(command, cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


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


def test_a_command_line_asks_for_machines_model_and_presets_once(workspace, monkeypatch):
    calls = []
    for name in ("machines", "model_of", "plan", "with_model"):
        real = getattr(presets, name)
        monkeypatch.setattr(presets, name, lambda *args, name=name, real=real: calls.append(name) or real(*args))
    flags.describe(parse("--config=c.py", "--dry_run", "--config.slice=laptop"))
    assert calls == ["machines", "plan", "with_model", "model_of", "with_model"], (
        "first of a model that is not read yet"
    )


def test_help_shows_what_the_program_is_its_flags_and_every_field(workspace):
    done = program("--help")
    assert done.returncode == 0 and done.stderr == ""
    assert "Says what it got." in done.stdout
    assert all(flag in done.stdout for flag in ("--config:", "--workdir:", "--[no]dry_run:"))
    words = " ".join(done.stdout.split())
    assert "trainer.pack_tokens=512 L: packed row length" in words and "placement=auto auto, disjoint, shared;" in words
    tuning = {name for name, one in config_tree.declared(Config).items() if one.tuning}
    assert {name for name in configs.fields() if f" {name}=" not in words} == tuning != set()
    words = " ".join(program("--helpfull").stdout.split())
    assert all(f" {name}=" in words for name in configs.fields())


def test_every_flag_that_commands_may_have_is_accepted_or_refused_with_its_new_name():
    """tests/data/config_flags.txt: the flags of 10b51e5 with their defaults, and those that were renamed before."""
    lines = (ROOT / "tests/data/config_flags.txt").read_text().splitlines()
    names = [line.partition("=")[0] for line in lines]
    assert set(configs.fields()) | set(configs.RENAMED) >= set(names) > set(configs.RENAMED)
    tree = configs.defaults().lock()
    kept = [f"--config.{line}" for line, name in zip(lines, names, strict=True) if name not in configs.RENAMED]
    overrides = apply_overrides(tree, ["program", *kept], absl_flags.FlagValues(), Config, configs.RENAMED)
    assert len(overrides) == len(kept) > 220 and config_tree.build(Config, tree)[1] == []
    for line in set(lines) - {arg.removeprefix("--config.") for arg in kept}:
        name = line.partition("=")[0]
        with pytest.raises(ConfigError, match=f"config.{name}: renamed to config.{configs.RENAMED[name]}"):
            apply_overrides(tree, ["program", f"--config.{line}"], absl_flags.FlagValues(), Config, configs.RENAMED)


@pytest.mark.parametrize(
    "name, message",
    [
        ("train", "seed=0"),
        ("sft", "sft.steps=300"),
        ("evaluate", "--step:"),
        ("export_hf", "--out:"),
        ("sweep", "--only:"),
        ("simulate", "hardware.chip=h800"),
    ],
)
def test_every_program_has_help(workspace, name, message):
    done = subprocess.run(
        [sys.executable, "-m", f"dora_jax.{name}", "-h"],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "") and message in done.stdout


@pytest.mark.parametrize(
    "spec",
    [
        f"{path}{arg}"
        for path in sorted((ROOT / "configs").glob("*.py"))
        for arg in {"quickstart": ("", ":tiny"), "qwen3": (":0.6B,laptop",), "sparse": (":Qwen3-30B-A3B,v6e-64",)}.get(
            path.stem, ("",)
        )
    ],
)
def test_every_shipped_config_is_valid(spec, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    asks = (
        ["--config.model.path=a", "--config.task.path=b.jsonl"] if "quickstart" not in str(spec) else []
    )  # what only its user has
    flags.parse(["program", f"--config={spec}", "--dry_run", *asks], "train", absl_flags.FlagValues())
