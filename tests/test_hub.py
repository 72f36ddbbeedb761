"""Models that are named as the hub does: refused with the command that fetches them, or fetched from a hub of this
process."""

import http.server
import json
import subprocess
import sys
import threading
import typing
from pathlib import Path

import pytest

from tests.fakes.hf_models import MODEL

ROOT = Path(__file__).parent.parent

FILES = {
    "config.json": json.dumps(MODEL).encode(),
    "model.safetensors": b"weights",
    "sub/tokenizer.json": b"{}",
    "setup.py": b"raise SystemExit",
    "pytorch_model.bin": b"a pickle",
}
COMMIT = "a" * 40


class Hub(http.server.BaseHTTPRequestHandler):
    """The model org/tiny; org/gated, which asks for a token; `broken` files are not given."""

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
        if path == "/api/models/org/tiny/revision/main":
            files = [{"rfilename": name} for name in FILES]
            self.answer(json.dumps({"id": "org/tiny", "sha": COMMIT, "siblings": files}).encode())
        elif path == f"/api/models/org/tiny/tree/{COMMIT}":
            files = [{"type": "file", "path": name, "size": len(FILES[name]), "oid": tag(name)} for name in FILES]
            self.answer(json.dumps(files).encode())
        elif path.startswith(f"/org/tiny/resolve/{COMMIT}/"):
            name = path.partition(f"{COMMIT}/")[2]
            lost = name in self.broken and self.command == "GET"
            self.answer(FILES[name], 403 if lost else 200, ETag=f'"{tag(name)}"', X_Repo_Commit=COMMIT)
        elif "/gated/" in path:
            self.answer(b"{}", 403, X_Error_Code="GatedRepo")
        else:
            self.answer(b"{}", 404, X_Error_Code="RepoNotFound")

    do_HEAD = do_GET


def tag(name):
    return f"{list(FILES).index(name):040x}"


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
        "from dora_jax import flags\nflags.run(lambda config, workdir: print('ran', config.model.path))\n"
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
    code, out, said = download("org/tiny", "--download", "--dry_run")
    assert code == 0 and "note: model.path: --download would fetch org/tiny" in out and Hub.asked == [], said
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
