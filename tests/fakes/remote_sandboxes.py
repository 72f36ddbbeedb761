"""Services of sandboxes at their wires: the command `docker` (or podman), the API server that the real kubectl asks, and
E2B's HTTP API. What they run, they run here behind bwrap, in a /tmp and a /code that last as long as the sandbox.

`python remote_sandboxes.py STATE ENGINE ARGUMENT...` is the command. In STATE, `boxes/NAME` is a sandbox, and a file
`broken` holds what the service answers instead of starting commands.
"""

import base64
import contextlib
import hashlib
import http.server
import json
import shutil
import struct
import subprocess
import sys
import threading
import time
import urllib.parse
from email import message_from_bytes
from pathlib import Path

KIND = "sandboxes.agents.x-k8s.io"
GROUP = "/apis/agents.x-k8s.io/v1beta1"
MAGIC = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # of a websocket's handshake


def made(state, name):
    for part in ("tmp", "work"):
        (state / "boxes" / name / part).mkdir(parents=True, exist_ok=True)


def gone(state, name):
    shutil.rmtree(state / "boxes" / name, ignore_errors=True)


def inside(state, name, command):
    """What runs a command in a sandbox."""
    box, links = state / "boxes" / name, ("bin", "lib", "lib64", "sbin")
    walls = [
        "bwrap",
        "--unshare-all",
        "--die-with-parent",
        "--ro-bind",
        "/usr",
        "/usr",
        "--proc",
        "/proc",
        "--dev",
        "/dev",
    ]
    for link in (link for link in links if Path(f"/usr/{link}").is_dir()):
        walls += ["--symlink", f"usr/{link}", f"/{link}"]
    return [*walls, "--bind", box / "tmp", "/tmp", "--bind", box / "work", "/code", "--chdir", "/code", "--", *command]


def engine(state, name, *arguments):
    """The command line of docker or podman; its exit code. Where STATE has a file `open`, nothing stands around what
    runs in a container, which then has this machine's files and network: for programs that install and ask others."""
    verb, rest = arguments[0], list(arguments[1:])
    broken, walls = state / "broken", not (state / "open").exists()
    with (state / "calls.txt").open("a") as calls:
        print(name, *arguments, file=calls)
    if verb == "run" and "--rm" in rest and "--volume" in rest:  # a helper with a folder of its caller
        folder, inner, _ = rest[rest.index("--volume") + 1].split(":")
        code = rest[rest.index("-c") + 1].replace(inner, folder)
        return subprocess.run([sys.executable, "-I", "-S", "-c", code], check=False).returncode
    if verb == "run":
        if "no-such-image" in rest:
            print(f"{name}: Error response from daemon: No such image: no-such-image", file=sys.stderr)
            return 125
        made(state, rest[rest.index("--name") + 1])
    reported = {"run": "f" * 64, "version": "28.0.0", "inspect": '{"Env": [], "User": ""}', "port": "127.0.0.1:9"}
    if verb in reported:
        print(reported[verb])
        return 0
    if verb == "rm":
        gone(state, rest[-1])
        return 0
    assert verb == "exec", arguments
    env, folder = [], None
    while rest[0].startswith("-"):
        option = rest.pop(0)
        value = "" if option in ("-i", "--detach") else rest.pop(0)
        env += [value] if option == "--env" else []
        folder = value if option == "--workdir" else folder
    box, *command = rest
    if broken.exists() or not (state / "boxes" / box).exists():
        print(
            broken.read_text() if broken.exists() else f"Error response from daemon: No such container: {box}",
            file=sys.stderr,
        )
        return 1
    folder = folder if folder and Path(folder).is_dir() else state
    how = {"cwd": folder, "stdin": None if "-i" in arguments else subprocess.DEVNULL}
    argv = inside(state, box, command) if walls else ["env", *env, *command]
    code = subprocess.run(argv, check=False, **how).returncode
    return 128 - code if code < 0 else code


def install(folder, state, name="docker"):
    """The command in a folder for PATH."""
    folder.mkdir(parents=True, exist_ok=True)
    state.mkdir(parents=True, exist_ok=True)
    program = folder / name
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {Path(__file__).resolve()} {state} {name} "$@"\n')
    program.chmod(0o755)


class Service:
    """An HTTP server of one of the two APIs, while it is entered; `url`. seen: methods and paths."""

    def __init__(self, state, handler):
        self.state, self.objects, self.seen = state, {}, []
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads, self._server.service = True, self
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()

    @property
    def broken(self):
        return (self.state / "broken").read_text() if (self.state / "broken").exists() else ""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        """Nothing."""

    def do_GET(self):
        self.service = self.server.service
        url = urllib.parse.urlsplit(self.path)
        self.path, self.query = url.path, urllib.parse.parse_qs(url.query)
        self.service.seen.append(f"{self.command} {self.path}")
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.answer()

    do_POST = do_DELETE = do_GET

    def say(self, found, status=200):
        data = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def ran(self, name, command, chunk, stdin=subprocess.DEVNULL):
        """Runs it, and tells what it writes by chunk(1 or 2, bytes); its exit code."""
        process = subprocess.Popen(
            inside(self.service.state, name, command), stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

        def pump(number, file):
            with contextlib.suppress(OSError):
                while part := file.read1(1 << 15):
                    chunk(number, part)

        threads = [threading.Thread(target=pump, args=(i, f)) for i, f in ((1, process.stdout), (2, process.stderr))]
        for thread in threads:
            thread.start()
        if stdin == subprocess.PIPE:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(self.given)
            process.stdin.close()
        for thread in threads:
            thread.join()
        return process.wait()


class KubernetesApi(_Handler):
    """Sandbox objects whose pods are ready at the second look; exec over a websocket."""

    def answer(self):
        sandboxes = f"{GROUP}/namespaces/default/sandboxes"
        name = self.path.rpartition("/")[2]
        if self.path == "/api":
            return self.say({"kind": "APIVersions", "versions": ["v1"]})
        if self.path == "/apis":
            version = {"groupVersion": GROUP.removeprefix("/apis/"), "version": "v1beta1"}
            group = {"name": "agents.x-k8s.io", "versions": [version], "preferredVersion": version}
            return self.say({"kind": "APIGroupList", "apiVersion": "v1", "groups": [group]})
        if self.path in (GROUP, "/api/v1"):
            kinds = [("sandboxes", "Sandbox")] if self.path == GROUP else [("pods", "Pod")]
            verbs = ["create", "delete", "get", "list", "watch"]
            found = [
                {"name": a, "singularName": b.lower(), "kind": b, "namespaced": True, "verbs": verbs} for a, b in kinds
            ]
            version = self.path.removeprefix("/apis/").removeprefix("/api/")
            return self.say(
                {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": found}
            )
        if self.command == "POST" and self.path == sandboxes:
            if self.service.broken:
                return self.failed(403, self.service.broken)
            wanted = json.loads(self.body)
            name = wanted["metadata"]["name"]
            wanted["metadata"] |= {"namespace": "default", "uid": name, "resourceVersion": "1"}
            self.service.objects[name] = wanted
            return self.say(wanted, 201)
        if self.path == sandboxes:
            (name,) = (text.removeprefix("metadata.name=") for text in self.query["fieldSelector"])
            thing = self.service.objects[name]
            if "watch" in self.query:
                made(self.service.state, name)
                thing["status"] = {"conditions": [{"type": "Ready", "status": "True", "reason": "DependenciesReady"}]}
                return self.say({"type": "MODIFIED", "object": thing})
            listed = {"kind": "SandboxList", "apiVersion": thing["apiVersion"], "metadata": {"resourceVersion": "1"}}
            return self.say(listed | {"items": [thing]})
        if self.command == "DELETE":
            gone(self.service.state, name)
            return self.say(self.service.objects.pop(name))
        if name in self.service.objects and self.path.startswith(sandboxes):
            return self.say(self.service.objects[name])
        if self.path.endswith("/exec"):
            return self.exec(self.path.split("/")[-2])
        if name in self.service.objects and "/pods/" in self.path:
            spec = self.service.objects[name]["spec"]["podTemplate"]["spec"]
            pod = {"kind": "Pod", "apiVersion": "v1", "metadata": {"name": name, "namespace": "default"}}
            return self.say(pod | {"spec": spec, "status": {"phase": "Running"}})
        return self.failed(404, f"{self.path} not found")

    def failed(self, code, message):
        self.say({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code}, code)

    def exec(self, name):
        """RemoteCommand of v5.channel.k8s.io: the first byte of a frame is its channel."""
        key = base64.b64encode(hashlib.sha1((self.headers["Sec-WebSocket-Key"] + MAGIC).encode()).digest()).decode()
        lines = [
            "HTTP/1.1 101 Switching Protocols",
            "Upgrade: websocket",
            "Connection: Upgrade",
            f"Sec-WebSocket-Accept: {key}",
        ]
        lines += ["Sec-WebSocket-Protocol: v5.channel.k8s.io", "", ""]
        self.wfile.write("\r\n".join(lines).encode())
        self.close_connection, lock = True, threading.Lock()

        def chunk(channel, data):
            size = len(data) + 1
            head = struct.pack("!BB", 0x82, size) if size < 126 else struct.pack("!BBH", 0x82, 126, size)
            with lock:
                self.wfile.write(head + bytes([channel]) + data)

        given, going = bytearray(), True
        while going:  # all of stdin, up to the frame that closes its channel
            _, size = self.rfile.read(2)
            size &= 127
            if size > 125:
                (size,) = struct.unpack("!H" if size == 126 else "!Q", self.rfile.read(2 if size == 126 else 8))
            mask, data = self.rfile.read(4), self.rfile.read(size)
            data = bytes(byte ^ mask[i % 4] for i, byte in enumerate(data))
            going = not data.startswith(b"\xff")
            given += data[1:] if data.startswith(b"\0") else b""
        self.given = bytes(given)
        code = 1 if self.service.broken else self.ran(name, self.query["command"], chunk, subprocess.PIPE)
        status = {"status": "Success"}
        if self.service.broken:
            status = {"status": "Failure", "reason": "InternalError", "message": self.service.broken}
        elif code:
            causes = [{"reason": "ExitCode", "message": str(128 - code if code < 0 else code)}]
            status = {
                "status": "Failure",
                "reason": "NonZeroExitCode",
                "details": {"causes": causes},
                "message": "ended",
            }
        chunk(3, json.dumps({"metadata": {}} | status).encode())
        with contextlib.suppress(OSError):
            self.wfile.write(struct.pack("!BBH", 0x88, 2, 1000))
            time.sleep(0.05)


class E2BApi(_Handler):
    """The API and the daemons of its sandboxes, at one address; the key is "key", a sandbox' token is its name."""

    def answer(self):
        name, broken = self.path.rpartition("/")[2], self.service.broken
        if self.path.startswith("/sandboxes"):
            if self.headers["X-API-Key"] != "key":
                return self.say({"code": 401, "message": "Invalid API key"}, 401)
            if self.command == "DELETE":
                gone(self.service.state, name)
                return self.say({}, 204)
            name = f"i{len(self.service.objects)}"
            self.service.objects[name] = json.loads(self.body)
            made(self.service.state, name)
            return self.say({"sandboxID": name, "envdVersion": "0.4.0", "envdAccessToken": name, "domain": None}, 201)
        name = self.headers["X-Access-Token"]
        assert name in self.service.objects and self.headers["Authorization"] == "Basic cm9vdDo="
        if broken:
            return self.say({"code": "unavailable", "message": broken}, 502)
        if self.path == "/files":
            form = message_from_bytes(
                b"Content-Type: " + self.headers["Content-Type"].encode() + b"\r\n\r\n" + self.body
            )
            (part,) = form.get_payload()
            (path,) = self.query["path"]
            (self.service.state / "boxes" / name / path[1:]).write_bytes(part.get_payload(decode=True))
            return self.say([{"name": path, "path": path, "type": "file"}])
        assert self.path == "/process.Process/Start" and self.headers["Content-Type"] == "application/connect+json"
        process = json.loads(self.body[5:])["process"]
        self.send_response(200)
        self.send_header("Content-Type", "application/connect+json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        lock = threading.Lock()

        def frame(found, flags=0):
            data = json.dumps(found).encode()
            data = bytes([flags]) + len(data).to_bytes(4, "big") + data
            with lock, contextlib.suppress(OSError):
                self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

        def chunk(number, part):
            frame({"event": {"data": {{1: "stdout", 2: "stderr"}[number]: base64.b64encode(part).decode()}}})

        frame({"event": {"start": {"pid": 7}}})
        frame({"event": {"keepalive": {}}})
        code = self.ran(name, [process["cmd"], *process["args"]], chunk)
        ended = {"exited": code >= 0, "status": f"exit status {code}" if code >= 0 else "signal: killed"}
        frame({"event": {"end": ended | ({"exitCode": code} if code else {})}})
        frame({}, 2)
        with contextlib.suppress(OSError):
            self.wfile.write(b"0\r\n\r\n")


if __name__ == "__main__":
    sys.exit(engine(Path(sys.argv[1]), *sys.argv[2:]))
