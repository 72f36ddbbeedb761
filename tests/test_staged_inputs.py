"""Models and rows that are named by URL: copied here before they are read, each start anew where the store has changed."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import tensorstore

import dora_jax
from dora_jax.config import Config, ConfigError, ModelSection, RunError, TaskSection
from dora_jax.config.task import TaskPart
from dora_jax.plan import validate
from dora_jax.runtime.journal import object_storage, staged_inputs, workdir_mirror
from tests.fakes.command_line import parse, write_workspace
from tests.fakes.hf_models import MODEL
from tests.fakes.tasks import sums, write


@pytest.fixture
def store(tmp_path, monkeypatch):
    """The URL of a bucket with a model and two splits of rows."""
    monkeypatch.setattr(workdir_mirror.tempfile, "gettempdir", lambda: str(tmp_path / "scratch"))
    bucket = tmp_path / "bucket"
    for folder in ("models/mine/nested", "models/mine_too", "data"):
        (bucket / folder).mkdir(parents=True)
    (bucket / "models/mine/config.json").write_text(json.dumps(MODEL | {"max_position_embeddings": 512}))
    for name in ("mine/model.safetensors", "mine/nested/tokenizer.json", "mine/setup.py", "mine_too/config.json"):
        (bucket / "models" / name).write_text("{}")
    write(bucket / "data/train-00000-of-00001.jsonl", sums(100))
    write(bucket / "data/test.jsonl", sums(9))
    return f"file://{bucket}"


def files_under(folder):
    return {str(file.relative_to(folder)) for file in Path(folder).rglob("*") if file.is_file()}


def copied(config):
    return staged_inputs.staged(config, validate.urls(config))


def test_a_model_and_rows_are_copied_without_code_or_neighbours(store):
    config = Config(
        model=ModelSection(path=f"{store}/models/mine/"),
        task=TaskSection(
            mix={"a": TaskPart(path=f"{store}/data/train"), "b": TaskPart(path=f"{store}/data/test.jsonl")}
        ),
    )
    here = copied(config)
    assert files_under(here.model.path) == {"config.json", "model.safetensors", "nested/tokenizer.json"}
    rows = [Path(here.task.mix[name].path) for name in "ab"]
    assert rows[1].read_text().count("\n") == 9 and [file.name for file in rows[0].parent.glob("train*")] == [
        "train-00000-of-00001.jsonl"
    ]
    assert validate.missing_paths(here) == [] and validate.missing_paths(config) == []
    assert "mine_too" not in {file.name for file in Path(here.model.path).parent.iterdir()}


def test_each_start_reads_what_is_another_file_by_now_and_nothing_else(store, tmp_path):
    config = Config(model=ModelSection(path=f"{store}/models/mine"))
    folder = Path(copied(config).model.path)
    first = {name: (folder / name).stat().st_ino for name in files_under(folder)}
    assert copied(config).model.path == str(folder)
    assert {name: (folder / name).stat().st_ino for name in files_under(folder)} == first
    (tmp_path / "bucket/models/mine/model.safetensors").write_text("other")
    (tmp_path / "bucket/models/mine/nested/tokenizer.json").unlink()
    (folder / "config.json").unlink()
    copied(config)
    assert files_under(folder) == {"config.json", "model.safetensors"}
    assert (folder / "model.safetensors").read_text() == "other"


def test_a_copy_on_another_machine_is_made_anew_from_its_name(store, tmp_path):
    path = copied(Config(model=ModelSection(path=f"{store}/models/mine"))).model.path
    shutil.rmtree(tmp_path / "scratch")
    theirs = re.sub(r"^.*/dora_jax-\d+/", "/mnt/tmp/dora_jax-12345/", path)
    assert staged_inputs.url_of(theirs) == f"{store}/models/mine" and not staged_inputs.url_of("/models/mine")
    here = staged_inputs.staged(Config(), {"model.path": staged_inputs.url_of(theirs)})
    assert here.model.path == path and (Path(path) / "config.json").is_file()


@pytest.mark.parametrize(
    "path, error, why",
    [
        ("{}/models/none", ConfigError, "model.path: there is nothing at file://.*/models/none that a run reads"),
        ("ftp://host/model", ConfigError, "model.path: ftp://host cannot be opened: "),
        ("s3://bucket/model", RunError, "model.path: s3://bucket/model cannot be read: .*; the same command goes on"),
    ],
)
def test_what_cannot_be_copied_is_one_sentence(store, monkeypatch, path, error, why):
    for name, value in {"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9", "AWS_EC2_METADATA_DISABLED": "true"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(object_storage, "ANSWER_S", 1.0)
    with pytest.raises(error, match=why):
        copied(Config(model=ModelSection(path=path.format(store))))


@pytest.mark.parametrize("name", ["mine/../../../escaped.txt", "mine//etc/escaped.txt"])
def test_a_name_that_leads_out_of_the_copy_is_refused(store, tmp_path, monkeypatch, name):
    memory = tensorstore.KvStore.open({"driver": "memory", "path": "models/"}).result()
    for key in ("mine/config.json", name):
        memory.write(key, b"{}").result()
    monkeypatch.setattr(object_storage, "opened", lambda *_: memory)
    with pytest.raises(RunError, match="model.path: .* cannot be read: .* holds an object named '.*escaped.txt'"):
        copied(Config(model=ModelSection(path=f"{store}/models/mine")))
    assert not list(tmp_path.rglob("escaped.txt"))


def test_a_run_records_the_url_and_reads_the_copy(store, tmp_path, monkeypatch):
    from dora_jax.runtime import job

    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    write_workspace()
    ran = []
    monkeypatch.setattr(job, "train", lambda config, workdir, **_: ran.append(config) or 0)
    for _ in range(2):  # and the same call goes on with it
        dora_jax.fit({"steps": 3}, "w", model=f"{store}/models/mine", prompts=f"{store}/data/test.jsonl")
        Path("w/metrics.jsonl").touch()
    recorded = json.loads(Path("w/config.json").read_text())
    assert (recorded["model"]["path"], recorded["task"]["path"]) == (f"{store}/models/mine", f"{store}/data/test.jsonl")
    assert all(os.path.exists(path) for config in ran for path in (config.model.path, config.task.path))
    with pytest.raises(ConfigError, match="model.path: .*mine_too/config.json "):
        dora_jax.fit({"steps": 3}, "v", model=f"{store}/models/mine_too", prompts=f"{store}/data/test.jsonl")
    with pytest.raises(ConfigError, match="sft.out: gs://b/base is no local folder"):
        parse("--config=c.py", "--config.sft.out=gs://b/base")
