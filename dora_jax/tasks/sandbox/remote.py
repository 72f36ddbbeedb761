"""Sandboxes elsewhere: a container of docker or podman, an agent-sandbox of Kubernetes, a sandbox of E2B.

    box = Container(image="python:3.12-slim")
    box.write("/code/a.py", b"print(input())")
    ran = box.run(["python3", "/code/a.py"], stdin="4\n", wall_s=10.0)   # a Ran, as of programs.py
    box.close()

The constructor makes one, which ends by itself after lifetime_s, whatever becomes of its owner. Each is a
RemoteSandbox with an `exchange` of its own: what a command read and wrote over the wire of the service. Everything else
stands once here: in the sandbox a shell (WRAPPER; `sh` and `timeout` of any coreutils or busybox) reports that it
has started, ends the command at its time, and reports how it ended.
Laws: what a command does is a Ran; a service that does not start it, or that goes away meanwhile, is a SandboxError and
never a Ran; output and files are bounded as they are read. Calls block: environments are called in threads of their
own (environment.threads). Standard library only.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import http.client
import json
import os
import secrets
import selectors
import signal
import subprocess
import tempfile
import time
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass

from dora_jax.tasks.sandbox.programs import MIB, Ran, SandboxError

MADE_S = 300.0  # until a sandbox is there; an image may have to be pulled
GRACE_S = 30.0  # beyond the time of a command, for the wire
BROKEN = (signal.SIGINT, signal.SIGPIPE, signal.SIGTERM)  # of which a shell reports nothing
# Arguments: mark, seconds, command. Its last line on stderr: the mark, a word where a signal ended it, the exit code.
WRAPPER = (
    'mark=$1 limit=$2; shift 2; command -v timeout > /dev/null || exit 125; echo "$mark" >&2; exec 6>&2 7>&1; '
    'reported=$({ (exec timeout -s KILL "$limit" "$@" >&7 2>&6 6>&- 7>&-); echo $?; } 2>&1); '
    'printf "\\n%s" "$mark" >&2; echo "" $reported >&2'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """What came of a command over the wire."""

    stdout: bytes
    stderr: bytes
    code: int | None = None  # as the service tells it
    cut: str = ""  # "time", "output": it was not waited for


class RemoteSandbox:
    """name: in sentences. A sandbox of yours has `exchange` and `close`."""

    name = ""

    def exchange(self, command: Sequence[str], stdin: bytes, until_s: float, most: int) -> Exchange:
        """Runs a command in the sandbox until the time until_s of the monotonic clock, or `most` bytes of output.
        SandboxError: the service answers otherwise than with its output."""
        raise NotImplementedError

    def close(self) -> None:
        """The sandbox, and all that runs in it, ends; may be called twice."""
        raise NotImplementedError

    def run(
        self, command: Sequence[str], stdin: str | bytes = "", wall_s: float = 10.0, output_bytes: int = MIB
    ) -> Ran:
        """Runs a command to its end, at most for wall_s of the sandbox's own clock."""
        ran, _ = self._run(command, stdin if isinstance(stdin, bytes) else stdin.encode(), wall_s, output_bytes)
        return ran

    def write(self, path: str, data: bytes) -> None:
        """SandboxError: it cannot be written."""
        script = 'mkdir -p -- "$(dirname -- "$1")" && cat > "$1"'
        ran = self.run(["sh", "-c", script, "sh", path], data, GRACE_S)
        if ran.exit_code or ran.ended_by:
            raise SandboxError(f"{self.name}: {path}: {ran.stderr.strip() or ran.ended_by or 'not written'}")

    def read(self, path: str, most: int = MIB) -> bytes:
        """FileNotFoundError: there is no such file, or none that can be read, or it has more bytes."""
        ran, data = self._run(["head", "-c", str(most + 1), "--", path], b"", GRACE_S, most + 1 + MIB)
        if ran.exit_code or ran.ended_by or len(data) > most:
            raise FileNotFoundError(f"{path}: {ran.stderr.strip() or ran.ended_by or f'more than {most} bytes'}")
        return data

    # ------------------------------------------------------------ private

    def _run(self, command: Sequence[str], stdin: bytes, wall_s: float, output_bytes: int) -> tuple[Ran, bytes]:
        """(what the command did, its output as bytes)."""
        mark, began_s = secrets.token_hex(16), time.monotonic()
        argv = ["sh", "-c", WRAPPER, "sh", mark, f"{wall_s:g}", *command]
        answer = self.exchange(argv, stdin, began_s + wall_s + GRACE_S, output_bytes)
        took_s = time.monotonic() - began_s
        before, started, errors = answer.stderr.partition(f"{mark}\n".encode())
        if not started:
            lines = (before or answer.stdout).decode(errors="replace").strip().splitlines()
            reason = answer.cut or (lines or [f"exit code {answer.code}"])[-1]
            raise SandboxError(f"{self.name} did not start a command: {reason}")
        errors, ended, reported = errors.rpartition(f"\n{mark}".encode())
        if ended:
            report = reported.split()
            if not (report and report[-1].isdigit()):
                report = [b"Killed", b"137"]  # the command has killed what waited for it, or writes such lines itself
            long = len(answer.stdout) + len(errors) > output_bytes
            code, ended_by = int(report[-1]), "output" if long or answer.cut == "output" else ""
            if took_s >= wall_s and code in (124, 137):
                ended_by = "time"
            if 128 < code <= 192 and (len(report) > 1 or code - 128 in BROKEN):
                code = 128 - code
        else:  # the shell itself was cut off or killed
            errors, code, ended_by = errors + reported, -signal.SIGKILL, answer.cut
            killed = answer.code is not None and 128 < answer.code <= 192
            if ended_by != "output":
                probe = self.exchange(["sh", "-c", "exit 0"], b"", time.monotonic() + GRACE_S, MIB)
                if probe.code != 0 or not (ended_by or killed):
                    raise SandboxError(f"{self.name} went away while a command ran (exit code {answer.code})")
        stdout, stderr = (chunk[:output_bytes].decode(errors="replace") for chunk in (answer.stdout, errors))
        ran = Ran(
            stdout=stdout, stderr=stderr, exit_code=code, ended_by=ended_by, wall_s=took_s, spent_s=min(took_s, wall_s)
        )
        return ran, answer.stdout


class _ByProgram(RemoteSandbox):
    """One that a program of the machine reaches: `inside` is what stands before a command, `ending` ends it."""

    inside: Sequence[str]
    ending: Sequence[str]

    def exchange(self, command: Sequence[str], stdin: bytes, until_s: float, most: int) -> Exchange:
        return self._program([*self.inside, *command], stdin, until_s, most)

    def close(self) -> None:
        with contextlib.suppress(SandboxError):  # it ends by itself
            self._program(self.ending, b"", time.monotonic() + GRACE_S, MIB)

    def _program(self, argv: Sequence[str], stdin: bytes, until_s: float, most: int) -> Exchange:
        cut = ""
        with tempfile.TemporaryFile() as given, selectors.DefaultSelector() as selector:
            given.write(stdin)
            given.seek(0)
            try:
                process = subprocess.Popen(
                    argv, stdin=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
                )
            except OSError as error:
                raise SandboxError(f"{argv[0]}: {error.strerror}") from error
            assert process.stdout is not None and process.stderr is not None
            held = {process.stdout: bytearray(), process.stderr: bytearray()}
            for file in held:
                selector.register(file, selectors.EVENT_READ)
            while selector.get_map() and not cut:
                ready = selector.select(max(0.0, until_s - time.monotonic()))
                for key, _ in ready:
                    chunk = os.read(key.fd, 1 << 16)
                    held[key.fileobj] += chunk  # type: ignore[index]
                    if not chunk:
                        selector.unregister(key.fileobj)
                cut = "output" if sum(map(len, held.values())) > most + 4096 else "" if ready else "time"
            if cut:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            stdout, stderr = map(bytes, held.values())
            process.stdout.close()
            process.stderr.close()
            return Exchange(stdout=stdout, stderr=stderr, code=process.wait(), cut=cut)

    def _made(self, argv: Sequence[str], stdin: bytes = b"") -> None:
        """A step on the way to a sandbox; SandboxError with the last line of the program."""
        done = self._program(argv, stdin, time.monotonic() + MADE_S, MIB)
        if done.code != 0:
            self.close()
            lines = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.code}"]
            raise SandboxError(f"{self.name}: {lines[-1]}")


class Container(_ByProgram):
    """A container of an engine of this machine, docker or podman, by its command line. options: more arguments of its
    `run`, such as ["--gpus", "all"]."""

    def __init__(
        self,
        image: str = "python:3.12-slim",
        engine: str = "docker",
        memory_bytes: int = 512 * MIB,
        processes: int = 256,
        cpus: float = 1.0,
        network: str = "none",
        lifetime_s: float = 3600.0,
        options: Sequence[str] = (),
    ):
        self.name, box = engine, f"dora-{secrets.token_hex(8)}"
        self.inside, self.ending = (engine, "exec", "-i", box), (engine, "rm", "--force", box)
        limits = ["--memory", str(memory_bytes), "--pids-limit", str(processes), "--cpus", f"{cpus:g}"]
        how = ["--detach", "--rm", "--init", "--name", box, "--network", network, *limits, *options]
        self._made([engine, "run", *how, "--entrypoint", "sleep", image, f"{lifetime_s:.0f}"])


class Kubernetes(_ByProgram):
    """An agent-sandbox (agents.x-k8s.io) of the cluster that kubectl reaches; arguments: more of kubectl's, such as
    ["--context", "mine"]. pod: more fields of its pod's spec, such as {"runtimeClassName": "gvisor"}. What it may reach
    is for a NetworkPolicy of its namespace to decide."""

    def __init__(
        self,
        image: str = "python:3.12-slim",
        namespace: str = "default",
        memory_bytes: int = 512 * MIB,
        cpus: float = 1.0,
        lifetime_s: float = 3600.0,
        arguments: Sequence[str] = (),
        pod: dict[str, object] | None = None,
    ):
        self.name, box = "kubectl", f"dora-{secrets.token_hex(8)}"
        program = ["kubectl", *arguments, "--namespace", namespace]
        self.inside = (*program, "exec", "-i", box, "--container", "sandbox", "--")
        kind = "sandboxes.agents.x-k8s.io"
        self.ending = (*program, "delete", kind, box, "--wait=false", "--ignore-not-found")
        limits = {"memory": str(memory_bytes), "cpu": f"{cpus:g}"}
        until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=lifetime_s)
        container = {"name": "sandbox", "image": image, "command": ["sleep", f"{lifetime_s:.0f}"]}
        spec = {"automountServiceAccountToken": False, "enableServiceLinks": False, "restartPolicy": "Never"}
        manifest = {
            "apiVersion": "agents.x-k8s.io/v1beta1",
            "kind": "Sandbox",
            "metadata": {"name": box},
            "spec": {
                "podTemplate": {
                    "spec": spec | {"containers": [container | {"resources": {"limits": limits}}]} | (pod or {})
                },
                "shutdownTime": until.strftime("%Y-%m-%dT%H:%M:%SZ"),
                "shutdownPolicy": "Delete",
            },
        }
        self._made([*program, "create", "--validate=false", "-f", "-"], json.dumps(manifest).encode())
        self._made([*program, "wait", "--for=condition=Ready", f"{kind}/{box}", f"--timeout={MADE_S:.0f}s"])


class E2B(RemoteSandbox):
    """A sandbox of E2B, by its HTTP API. The key is in the variable E2B_API_KEY: environment.env lets it through. url,
    sandbox_url: of a deployment of one's own, else those of `domain`."""

    name = "e2b"

    def __init__(
        self,
        template: str = "base",
        domain: str = "e2b.app",
        url: str = "",
        sandbox_url: str = "",
        user: str = "root",
        internet: bool = False,
        lifetime_s: float = 3600.0,
    ):
        self._url, self._user, self._box = url or f"https://api.{domain}", user, ""
        self._key = {"X-API-Key": os.environ.get("E2B_API_KEY", "")}
        wanted = {"templateID": template, "timeout": int(lifetime_s), "secure": True, "allow_internet_access": internet}
        until_s = time.monotonic() + MADE_S
        made = json.loads(
            self._asked("POST", f"{self._url}/sandboxes", self._key, json.dumps(wanted).encode(), until_s)
        )
        self._box = made["sandboxID"]
        self._sandbox_url = sandbox_url or f"https://49983-{self._box}.{made.get('domain') or domain}"
        by = base64.b64encode(f"{user}:".encode()).decode()
        self._token = {"X-Access-Token": made.get("envdAccessToken") or "", "Authorization": f"Basic {by}"}

    def exchange(self, command: Sequence[str], stdin: bytes, until_s: float, most: int) -> Exchange:
        if stdin:  # goes there as a file
            path, edge = f"/tmp/.stdin-{secrets.token_hex(8)}", secrets.token_hex(16)
            head = f'--{edge}\r\nContent-Disposition: form-data; name="file"; filename="stdin"\r\n\r\n'
            where = urllib.parse.urlencode({"path": path, "username": self._user})
            form = self._token | {"Content-Type": f"multipart/form-data; boundary={edge}"}
            body = head.encode() + stdin + f"\r\n--{edge}--\r\n".encode()
            self._asked("POST", f"{self._sandbox_url}/files?{where}", form, body, until_s)
            command = ["sh", "-c", 'exec < "$1"; rm -f "$1"; shift; exec "$@"', "sh", path, *command]
        asked = {"process": {"cmd": command[0], "args": [*command[1:]]}, "stdin": False}
        data = json.dumps(asked).encode()
        stream = self._token | {"Content-Type": "application/connect+json", "Connect-Protocol-Version": "1"}
        return self._events(stream, b"\0" + len(data).to_bytes(4, "big") + data, until_s, most)

    def close(self) -> None:
        if self._box:
            with contextlib.suppress(SandboxError):  # it ends by itself
                self._asked("DELETE", f"{self._url}/sandboxes/{self._box}", self._key, b"", time.monotonic() + GRACE_S)
            self._box = ""

    # ------------------------------------------------------------ private

    def _events(self, headers: dict[str, str], body: bytes, until_s: float, most: int) -> Exchange:
        """What process.Process/Start streams: frames of a flag byte, four of a length, and JSON."""
        held, cut, code = {"stdout": bytearray(), "stderr": bytearray()}, "", None
        url = urllib.parse.urlsplit(f"{self._sandbox_url}/process.Process/Start")
        try:
            with contextlib.closing(_connection(url, until_s)) as connection:
                connection.request("POST", url.path, body, headers)
                response = connection.getresponse()
                if response.status != 200:
                    raise SandboxError(f"e2b: {response.status} {response.read(1000).decode(errors='replace')}")
                while code is None and not cut and len(head := response.read(5)) == 5:
                    frame = json.loads(response.read(int.from_bytes(head[1:], "big")))
                    if head[0] & 2:  # the last one, which tells an error
                        raise SandboxError(f"e2b: {(frame.get('error') or {}).get('message', 'it ended early')}")
                    event = frame.get("event") or {}
                    for name, text in (event.get("data") or {}).items():
                        held[name] += base64.b64decode(text)
                    if "end" in event:
                        signalled = str(event["end"].get("status", "")).startswith("signal")
                        code = 128 + signal.SIGKILL if signalled else int(event["end"].get("exitCode", 0))
                    cut = "output" if sum(map(len, held.values())) > most + 4096 else ""
                    if time.monotonic() > until_s:
                        cut = "time"
                    elif connection.sock is not None:
                        connection.sock.settimeout(max(0.01, until_s - time.monotonic()))
        except TimeoutError:
            cut = "time"
        except (OSError, ValueError, KeyError, http.client.HTTPException) as error:
            raise SandboxError(f"e2b: {url.netloc}: {type(error).__name__}: {error}") from error
        return Exchange(stdout=bytes(held["stdout"]), stderr=bytes(held["stderr"]), code=code, cut=cut)

    def _asked(self, method: str, url: str, headers: dict[str, str], body: bytes, until_s: float) -> bytes:
        where = urllib.parse.urlsplit(url)
        path = f"{where.path}?{where.query}" if where.query else where.path
        try:
            with contextlib.closing(_connection(where, until_s)) as connection:
                connection.request(method, path, body, {"Content-Type": "application/json"} | headers)
                response = connection.getresponse()
                text = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise SandboxError(f"e2b: {where.netloc}: {type(error).__name__}: {error}") from error
        if response.status >= 300:
            raise SandboxError(f"e2b: {method} {where.path}: {response.status} {text[:1000].decode(errors='replace')}")
        return text


def _connection(url: urllib.parse.SplitResult, until_s: float) -> http.client.HTTPConnection:
    kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    return kind(url.hostname or "", url.port, timeout=max(0.01, until_s - time.monotonic()))
