"""Models and datasets that are named as the hub does: refused with the command that fetches them, or fetched from a hub
of this process."""

import http.server
import json
import subprocess
import sys
import threading
import typing
from pathlib import Path

import pytest

from dora_jax.tasks.rows import files_of
from tests.fakes.hf_models import MODEL

ROOT = Path(__file__).parent.parent

FILES = {
    "config.json": json.dumps(MODEL).encode(),
    "model.safetensors": b"weights",
    "sub/tokenizer.json": b"{}",
    "setup.py": b"raise SystemExit",
    "pytorch_model.bin": b"a pickle",
}
SHARDS = {
    f"main/{split}-{i:05}-of-{of:05}.jsonl": "".join(
        json.dumps({"question": f"{split} {i} {n}", "answer": "1"}) + "\n" for n in range(4)
    ).encode()
    for split, of in (("train", 2), ("test", 1))
    for i in range(of)
}
ROWS = {"README.md": b"a card", "dataset_infos.json": b"{}", "load.py": b"raise SystemExit", **SHARDS}
REPOSITORIES = {"models/org/tiny": FILES, "datasets/org/sums": ROWS}
COMMIT = "a" * 40


class Hub(http.server.BaseHTTPRequestHandler):
    """The model org/tiny and the dataset org/sums; org/gated, which asks for a token; `broken` files are not given."""

    broken: typing.ClassVar[set[str]] = set()
    asked: typing.ClassVar[list[str]] = []

    def log_message(self, *args):
        pass

    def answer(self, body, code=200, **headers):
        self.send_response(code)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self):
        path = self.path.partition("?")[0]
        self.asked.append(path)
        for repository, held in REPOSITORIES.items():
            address, name = f"/api/{repository}", path.partition(f"{COMMIT}/")[2]
            if path == f"{address}/revision/main":
                files = [{"rfilename": each} for each in held]
                return self.answer(json.dumps({"id": "org/any", "sha": COMMIT, "siblings": files}).encode())
            if path in (f"{address}/tree/{COMMIT}", f"{address}/tree/main"):
                files = [{"type": "file", "path": each, "size": len(held[each]), "oid": tag(each)} for each in held]
                return self.answer(json.dumps(files).encode())
            if path.startswith(f"/{repository.removeprefix('models/')}/resolve/{COMMIT}/"):
                lost = name in self.broken and self.command == "GET"
                return self.answer(held[name], 403 if lost else 200, ETag=f'"{tag(name)}"', X_Repo_Commit=COMMIT)
        if "/gated/" in path:
            self.answer(b"{}", 403, X_Error_Code="GatedRepo")
        else:
            self.answer(b"{}", 404, X_Error_Code="RepoNotFound")

    do_HEAD = do_GET


def tag(name):
    return f"{[*FILES, *ROWS].index(name):040x}"


@pytest.fixture
def download(tmp_path):
    """Runs a program that says its model's path, in a folder of its own, against `Hub` unless another endpoint is
    named."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Hub.broken, Hub.asked = set(), []
    (tmp_path / "c.py").write_text(
        "from dora_jax import config\ndef get_config():\n  c = config.defaults()\n"
        "  c.task.name = 'reasoning_gym:chain_sum'\n  return c\n"
    )
    (tmp_path / "program.py").write_text(
        "from dora_jax import flags\n"
        "flags.run(lambda config, workdir: print('ran', config.model.path or config.task.path))\n"
    )

    def run(name, *args, endpoint=f"http://127.0.0.1:{server.server_address[1]}"):
        env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HF_ENDPOINT": endpoint, "HOME": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "program.py", "--config=c.py", "--workdir=w", f"--config.model.path={name}", *args],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        return done.returncode, done.stdout, errors or done.stderr

    yield run
    server.shutdown()
    server.server_close()


def test_a_name_of_the_hub_is_refused_with_the_command_that_downloads_it(download):
    code, out, errors = download("org/tiny")
    assert (code, out, errors) == (
        2,
        "",
        [
            (
                "error: model.path: org/tiny does not exist; if it is a model of the Hugging Face hub, run `hf "
                "download org/tiny --local-dir models/org/tiny` and name that folder, or add --download"
            )
        ],
    )
    assert Hub.asked == []


def test_a_download_is_whole_holds_no_code_and_is_made_once(download, tmp_path):
    folder = tmp_path / "models/org/tiny"
    code, out, output = download("org/tiny", "--download", "--dry_run")
    assert code == 0 and "note: model.path: --download would fetch org/tiny" in out and Hub.asked == [], output
    Hub.broken.add("model.safetensors")
    code, out, errors = download("org/tiny", "--download")
    assert (code, out, len(errors)) == (1, "", 1) and "model.path: org/tiny cannot be downloaded: " in errors[0], errors
    assert not folder.exists() and not (tmp_path / "w").exists()
    Hub.broken.clear()
    assert download("org/tiny", "--download")[:2] == (0, "ran models/org/tiny\n")
    found = {
        str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file() and ".cache" not in file.parts
    }
    assert found == {"config.json", "model.safetensors", "sub/tokenizer.json"}
    Hub.asked.clear()
    assert download("org/tiny", "--download")[:2] == (0, "ran models/org/tiny\n") and Hub.asked == []
    assert json.loads((tmp_path / "w/config.json").read_text())["model"]["path"] == "models/org/tiny"
    assert (
        download("org/tiny")[2][0] == "error: model.path: org/tiny does not exist, but models/org/tiny does: name that"
    )


ROWS_OF = ("--config.task.name=rows", "--config.sft.out=made", "--config.model.path=made")


def rows_of(download, name, *args, **more):
    return download("made", *ROWS_OF, f"--config.task.path={name}", *args, **more)


def test_a_split_of_a_dataset_is_downloaded_whole_and_once(download, tmp_path):
    folder = tmp_path / "data/org/sums"
    code, out, errors = rows_of(download, "org/sums/main/train")
    why = "error: task.path: org/sums/main/train does not exist; if it is a dataset of the Hugging Face hub, add --download"
    assert (code, out, errors) == (2, "", [why])
    Hub.broken.add("main/train-00001-of-00002.jsonl")
    code, out, errors = rows_of(download, "org/sums/main/train", "--download")
    assert code == 1 and "task.path: org/sums cannot be downloaded: " in errors[0] and not folder.exists()
    Hub.broken.clear()
    assert rows_of(download, "org/sums/main/train", "--download")[:2] == (0, "ran made\n")
    found = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    assert found == {name for name in SHARDS if "train" in name}
    assert len(files_of(folder / "main/train")) == 2
    Hub.asked.clear()
    assert rows_of(download, "org/sums/main/train", "--download")[0] == 0 and Hub.asked == []
    assert json.loads((tmp_path / "w/config.json").read_text())["task"]["path"] == "data/org/sums/main/train"
    assert rows_of(download, "data/org/sums/main/train")[:2] == (0, "ran made\n")
    Hub.asked.clear()
    test = ("--config.task.heldout_path=org/sums/main/test", "--download")
    assert rows_of(download, "org/sums/main/train", *test)[0] == 0 and len(files_of(folder / "main/test")) == 1


@pytest.mark.parametrize(
    "name, why",
    [
        ("org/sums", "the dataset org/sums has org/sums/main/test, org/sums/main/train; name one of them"),
        ("org/sums/main/valid", "the dataset org/sums has org/sums/main/test, org/sums/main/train; name one of them"),
        ("org/none", "the hub has no dataset org/none, or does not show it without HF_TOKEN"),
    ],
)
def test_a_dataset_without_such_a_split_is_one_line(download, name, why):
    assert rows_of(download, name, "--download") == (2, "", [f"error: task.path: {why}"])


@pytest.mark.parametrize(
    "name, endpoint, code, why",
    [
        ("org/none", {}, 2, "error: model.path: the hub has no model org/none, or does not show it without HF_TOKEN"),
        (
            "org/gated",
            {},
            2,
            "error: model.path: the hub gives org/gated only to accounts that have accepted its terms: ",
        ),
        ("org/tiny", {"endpoint": "http://127.0.0.1:9"}, 1, "error: model.path: org/tiny cannot be downloaded: "),
        ("c.py/tiny", {}, 2, "error: model.path: c.py/tiny does not exist"),
        ("models/tiny", {}, 2, "error: model.path: models/tiny does not exist"),
    ],
)
def test_what_cannot_be_downloaded_is_one_line(download, name, endpoint, code, why):
    got, out, errors = download(name, "--download", **endpoint)
    assert (got, out, len(errors)) == (code, "", 1) and errors[0].startswith(why), errors
