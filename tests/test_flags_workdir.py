"""What a workdir remembers of its run, and what is refused in one that holds another."""

import dataclasses
import errno
import fcntl
import json
import re
from pathlib import Path

import pytest

import dora_jax
from dora_jax.base import config_tree, exits, state_files
from dora_jax.cli import flags
from dora_jax.config import Config, ConfigError, workdirs
from dora_jax.config.task import TaskPart
from tests.fakes.command_line import parse, program, refusal, write_workspace


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DORA_DEVICES", raising=False)
    write_workspace()
    return tmp_path


def saved_config():
    """What w/config.json holds, as a dora_jax before format 2 wrote it: a file without a checksum."""
    tree = json.loads(Path("w/config.json").read_text())
    return {name: value for name, value in tree.items() if name not in (state_files.FORMAT, state_files.CHECKSUM)}


def begin(workdir):
    """Write what a run writes with its first step."""
    Path(workdir, "metrics.jsonl").touch()


@pytest.mark.parametrize("left", ["journal/000001.log", "metrics.jsonl", "checkpoints/3/manifest.json"])
def test_a_run_that_never_began_does_not_hold_its_workdir(workspace, left):
    flags.record(parse("--config=c.py", "--workdir=w", "--config.task.rewards=no.such"))
    Path("w/journal").mkdir()  # the journal is opened before the model is
    parse("--config=c.py", "--workdir=w")
    Path("w", left).parent.mkdir(parents=True, exist_ok=True)
    Path("w", left).touch()
    assert "differs in task.rewards: that changes what is learned" in refusal("--config=c.py", "--workdir=w")[0]


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
        (OSError(errno.EIO, "Input/output error", "a/b"), "a/b: Input/output error; the same command goes on"),
        (OSError(errno.EIO, "Input/output error"), "the disk: Input/output error"),
        (MemoryError(), "out of memory: of this machine"),
        (RuntimeError("trainer failed: RESOURCE_EXHAUSTED: 8 GB"), "out of memory: trainer failed"),
        (RuntimeError("Unable to initialize backend 'tpu': NOT_FOUND"), "JAX_PLATFORMS=cpu: this machine has no such"),
        (OSError(errno.ENOENT, "No such file or directory", "a"), None),
        (KeyError("a"), None),
    ],
)
def test_what_the_machine_refuses_is_a_sentence(error, sentence):
    for raised in (error, RuntimeError("a stage failed")):
        raised.__cause__ = None if raised is error else error
        found = exits.refusal(raised)
        assert found is None if sentence is None else re.match(sentence if raised is error else sentence[:9], found)


def test_the_workdir_remembers_its_config(workspace):
    flags.record(parse("--config=c.py", "--workdir=w", "--config.seed=5", "--config.task.params.token=open"))
    saved = json.loads(Path("w/config.json").read_text())
    assert saved["dora_jax"] == dora_jax.__version__
    assert saved["seed"] == 5 and saved["task"]["params"] == {"terms": 2, "label": "a", "token": "<redacted>"}
    assert json.loads(Path("w/overrides.json").read_text()) == {"seed": 5, "task.params.token": "<redacted>"}
    assert sorted(p.name for p in Path("w").iterdir()) == ["config.json", "overrides.json"]

    begin("w")
    changes = ("eval.every=3", "checkpoint.keep=9", "monitor.port=9400")
    parse("--config=c.py:99", "--workdir=w", "--config.seed=5", *(f"--config.{change}" for change in changes))
    (problem,) = refusal("--config=c.py", "--workdir=w", "--config.rollout.temperature=0.5")
    assert problem == (
        "workdir: w belongs to another config, which differs in seed, rollout.temperature: that changes what is "
        "learned; with --accept_changes the run goes on, for seed, rollout.temperature from its newest checkpoint, or "
        "choose another --workdir"
    )


FREED = ("rollout.slots=16", "rollout.decode_steps=2", "trainer.micro_batches=2", "environment.workers=3",
         "serving.port=9401", "rollout.instances=1", "cluster.stall_timeout_s=9", "steps=9")  # fmt: skip


def test_a_run_goes_on_with_other_values_of_what_teaches_it_nothing(workspace):
    flags.record(parse("--config=c.py", "--workdir=w"))
    begin("w")
    assert parse("--config=c.py", "--workdir=w", *(f"--config.{change}" for change in FREED)).config.rollout.slots == 16


def test_what_changes_the_learning_is_accepted_by_name_and_some_fields_never_are(workspace):
    flags.record(parse("--config=c.py", "--workdir=w"))
    begin("w")
    given = ("--config=c.py", "--workdir=w", "--config.trainer.learning_rate=0.1", "--config.orchestrator.inflight=2.0")
    (problem,) = refusal(*given)
    assert problem == (
        "workdir: w belongs to another config, which differs in orchestrator.inflight, trainer.learning_rate: that "
        "changes what is learned; with --accept_changes the run goes on, or choose another --workdir"
    )
    assert parse(*given, "--accept_changes").config.trainer.learning_rate == 0.1
    assert "accept_changes: --accept_changes goes with dora_jax.train alone" in refusal(
        "--workdir=w", "--accept_changes", purpose="evaluate"
    )
    for change, why in (
        (
            "lora.rank=4",
            "lora.rank cannot change there (versions of the run are adapters of one shape, beside one base)",
        ),
        ("trainer.moments=bfloat16", "trainer.moments cannot change there (checkpoints hold them in that type)"),
        ("trainer.advantage=gae", "trainer.advantage cannot change there (checkpoints hold a value model only where"),
    ):
        value = ["--config.trainer.value_learning_rate=0.1"] * ("gae" in change)
        (problem,) = refusal("--config=c.py", "--workdir=w", "--accept_changes", f"--config.{change}", *value)
        assert problem.startswith(f"workdir: w belongs to another config: {why}")
        assert problem.endswith("; choose another --workdir")
    assert parse("--config=c.py", "--workdir=w", "--accept_changes", "--config.trainer.advantage=rloo")


def test_every_field_says_what_a_change_of_it_means_to_a_run_that_goes_on():
    fields = config_tree.declared(Config) | config_tree.declared(TaskPart)
    assert not [name for name, one in fields.items() if not one.change]
    kinds = {one.change for one in fields.values()} - {config_tree.FREE, config_tree.LEARNS, config_tree.AFRESH}
    assert all(" " in why for why in kinds), "why it cannot change, or a word that is misspelt"


def test_a_dry_run_checks_the_workdir_that_is_named_and_no_other(workspace):
    other = ("--config=c.py", "--dry_run", "--config.rollout.temperature=0.5")
    assert not parse(*other).workdir.exists()
    flags.record(parse("--config=c.py"))
    begin(str(parse("--config=c.py").workdir))
    assert parse(*other).config.rollout.temperature == 0.5
    (problem,) = refusal(*other, f"--workdir={parse('--config=c.py').workdir}")
    assert "belongs to another config, which differs in rollout.temperature" in problem


def test_a_field_under_its_former_name_in_a_workdir_is_read(workspace):
    flags.record(parse("--config=c.py", "--workdir=w", "--config.task.reward_sandbox=weak"))
    saved = saved_config()
    saved["task"]["reward_walls"] = saved["task"].pop("reward_sandbox")
    begin("w")
    Path("w/config.json").write_text(json.dumps(saved))
    assert workdirs.read(Path("w"))["task"]["reward_sandbox"] == "weak"
    parse("--config=c.py", "--workdir=w", "--config.task.reward_sandbox=weak")


def test_a_field_that_an_older_config_lacks_is_no_difference(workspace):
    flags.record(parse("--config=c.py", "--workdir=w"))
    saved = saved_config()
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
    Path("w/config.json").write_text(json.dumps(saved_config() | change) if change else text[:99])
    (problem,) = refusal("--config=c.py", "--workdir=w")
    assert problem.startswith(why)
    if "trainer" not in (change or ()):
        assert refusal("--workdir=w", purpose="evaluate") == (problem,)


def test_a_workdir_that_names_no_version_is_of_the_first(workspace, monkeypatch):
    flags.record(parse("--config=c.py", "--workdir=w"))
    saved = saved_config()
    del saved["dora_jax"]
    begin("w")
    Path("w/config.json").write_text(json.dumps(saved))
    monkeypatch.setattr(workdirs, "READS", ("0.1.0",))
    assert parse("--workdir=w", purpose="evaluate").config.steps == 7
    monkeypatch.setattr(workdirs, "READS", ("0.2.0",))
    assert "was written by dora_jax 0.1.0, and" in refusal("--config=c.py", "--workdir=w")[0]


def test_a_config_of_a_newer_format_is_refused_and_one_that_is_changed_too(workspace):
    flags.record(parse("--config=c.py", "--workdir=w"))
    begin("w")
    file, written = Path("w/config.json"), Path("w/config.json").read_bytes()
    assert json.loads(written)["format"] == workdirs.FORMAT
    file.write_bytes(state_files.encode(saved_config(), workdirs.FORMAT + 1))
    newer = f"has format {workdirs.FORMAT + 1}, and this dora_jax reads formats up to {workdirs.FORMAT}: go on with"
    for damaged, why in ((None, newer), (written.replace(b'"steps": 7', b'"steps": 6'), "does not match its checksum")):
        if damaged:
            file.write_bytes(damaged)
        for args, purpose in ((["--config=c.py", "--workdir=w"], "train"), (["--workdir=w"], "evaluate")):
            (problem,) = refusal(*args, purpose=purpose)
            assert problem.startswith(f"workdir: w/config.json {why}")
    file.unlink()  # as the sentence says
    flags.record(parse("--config=c.py", "--workdir=w"))
    assert file.read_bytes() == written


def test_evaluate_reads_the_config_of_the_workdir(workspace):
    flags.record(parse("--config=c.py", "--workdir=w", "--config.seed=5"))
    asked = parse("--workdir=w", "--config.eval.samples=4", purpose="evaluate")
    assert (asked.config.seed, asked.config.eval.samples) == (5, 4)
    assert "holds no run" in refusal("--workdir=gone", purpose="evaluate")[0]
    assert "workdir: missing" in refusal(purpose="evaluate")[0]
    assert "leave --config out" in refusal("--config=c.py", "--workdir=w", purpose="evaluate")[0]


def history_of(workdir):
    """What a run leaves behind, with a folder that its configuration names."""
    flags.record(parse("--config=c.py", f"--workdir={workdir}"))
    for name in ("journal/000001.log", "checkpoints/3/manifest.json", "metrics.jsonl", "wanted_instances", "hf/3/x"):
        Path(workdir, name).parent.mkdir(parents=True, exist_ok=True)
        Path(workdir, name).write_text(name)


def anew(workdir, name="history.1"):
    asked = parse("--config=c.py", f"--workdir={workdir}", f"--begin_anew={name}")
    return workdirs.put_history_aside(asked.workdir, asked.config, asked.begin_anew)


def test_a_run_that_begins_anew_puts_what_was_there_into_a_folder_once(workspace):
    history_of("w")
    assert workdirs.free_history(Path("w")) == "history.1"
    assert "version 0" in anew("w") and not workdirs.begun(Path("w"))
    kept = {str(path.relative_to("w/history.1")) for path in Path("w/history.1").rglob("*") if path.is_file()}
    assert kept == {
        *("journal/000001.log", "checkpoints/3/manifest.json", "metrics.jsonl", "hf/3/x"),
        *("config.json", "overrides.json"),
    }
    assert {path.name for path in Path("w").iterdir()} == {
        "config.json",
        "overrides.json",
        "wanted_instances",
        "history.1",
    }
    begin("w")
    assert "the run goes on" in anew("w") and Path("w/metrics.jsonl").exists(), "a restart of the same command"
    assert workdirs.free_history(Path("w")) == "history.2"
    anew("w", "history.2")
    assert Path("w/history.2/metrics.jsonl").exists() and Path("w/history.1/metrics.jsonl").exists()


def test_a_kill_in_the_middle_of_it_leaves_the_rest_to_the_next_start(workspace, monkeypatch):
    history_of("w")
    rename, moved = Path.rename, []

    def killed(path, target):
        if len(moved) == 2:
            raise KeyboardInterrupt
        moved.append(path)
        return rename(path, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "rename", killed)
        anew("w")
    assert not Path("w/history.1").exists() and moved
    anew("w")
    assert Path("w/history.1/journal/000001.log").exists() and Path("w/history.1/metrics.jsonl").exists()


def test_what_the_configuration_names_stays_where_it_is(workspace):
    history_of("w")
    Path("w/base").mkdir()
    Path("w/base/config.json").write_text("{}")
    config = parse("--config=c.py", "--workdir=w").config
    config = dataclasses.replace(config, sft=dataclasses.replace(config.sft, out="w/base"))
    workdirs.put_history_aside(Path("w"), config, "history.1")
    assert Path("w/base/config.json").exists() and not Path("w/hf").exists()


@pytest.mark.parametrize(
    "args, message",
    [
        (["--workdir=w", "--begin_anew=../elsewhere"], "is no name of a history folder"),
        (["--workdir=w", "--begin_anew=checkpoints"], "is no name of a history folder"),
        (["--workdir=file:///tmp/w", "--begin_anew=history.1", "--dry_run"], "a run in a bucket cannot"),
    ],
)
def test_where_a_run_cannot_begin_anew(workspace, args, message):
    (problem,) = refusal("--config=c.py", *args)
    assert problem.startswith("begin_anew: ") and message in problem


def test_a_run_does_not_begin_anew_beside_another(workspace):
    history_of("w")
    with Path("w/journal/lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="begin_anew: another run writes w"):
            anew("w")
    assert Path("w/journal/000001.log").exists()
