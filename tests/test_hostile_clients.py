"""What the endpoint bounds: connections, headers and bodies that do not come, prompts that cannot fit, other hosts."""

import concurrent.futures
import contextlib
import http.client
import json
import logging
import socket
import threading
import time

import pytest

from dora_jax.serving import app, request, server
from dora_jax.types import MAX_BIASES
from tests.fakes.endpoint import LIMITS, Letters, Rig

HEADERS = {"Content-Type": "application/json"}


@contextlib.contextmanager
def endpoint(**options):
    """(host, port) of a real server."""
    with Rig(**options).live() as url:
        host, port = url.removeprefix("http://").split(":")
        yield host, int(port)


def post(address, body, path="/v1/completions", **headers):
    """(status, headers, JSON) of one request."""
    connection = http.client.HTTPConnection(*address, timeout=30)
    text = body if isinstance(body, bytes | str) else json.dumps(body)
    connection.request("POST", path, text, HEADERS | headers)
    answer = connection.getresponse()
    found = answer.status, dict(answer.getheaders()), json.loads(answer.read())
    connection.close()
    return found


def closed_after_s(opened):
    """Seconds until the other side has closed."""
    began_s = time.monotonic()
    opened.settimeout(20)
    while opened.recv(1 << 16):
        pass
    return time.monotonic() - began_s


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenised(path, monkeypatch):
    encoded, encode = [], Letters.encode
    monkeypatch.setattr(Letters, "encode", lambda self, text: encoded.append(text) or encode(self, text))
    text = "a" * LIMITS.context
    with endpoint() as address:
        body = {"prompt": text, "messages": [{"role": "user", "content": text}]}
        body.pop("messages" if path == "/v1/completions" else "prompt")
        status, _, found = post(address, body, path)
    assert status == 400 and found["error"]["code"] == "context_length_exceeded" and not encoded
    assert "the prompt has at least 1" in found["error"]["message"]


@pytest.mark.parametrize(
    "many, message",
    [({"messages": [{"role": "user", "content": ""}] * LIMITS.context}, f"the prompt has at least {LIMITS.context}"),
     ({"tools": [{"type": "function", "function": {"name": "f"}}] * LIMITS.context}, "the prompt has at least"),
     ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["a" * (1 << 17)]}}}},
      "response_format: a form of 131")],
)  # fmt: skip
def test_what_takes_long_to_render_or_compile_is_refused_before(many, message, monkeypatch):
    monkeypatch.setattr(Letters, "chat", None)
    with endpoint() as address:
        body = {"messages": [{"role": "user", "content": "a"}]} | many
        status, _, found = post(address, body, "/v1/chat/completions")
    assert status == 400 and message in found["error"]["message"]


def test_a_logit_bias_of_too_many_tokens_is_refused_before_they_are_read():
    class Many(dict):
        def items(self):
            raise AssertionError("they are read")

    body = {"prompt": "a", "logit_bias": Many(dict.fromkeys(map(str, range(MAX_BIASES + 1)), 0.0))}
    with pytest.raises(request.Refused, match="logit_bias: not an object of at most"):
        request.completion(body, LIMITS, Letters().encode)


def test_large_bodies_are_read_one_at_a_time_and_small_ones_beside_them(monkeypatch):
    made, reading, together, small = request.completion, [], [], threading.Event()

    def completion(body, *rest):
        large = len(body["prompt"]) > 1000
        reading.extend([body] * large)
        together.append(len(reading))
        if large:
            assert small.wait(20)
            reading.pop()
        else:
            small.set()
        return made(body, *rest)

    monkeypatch.setattr(request, "completion", completion)
    with endpoint() as address, concurrent.futures.ThreadPoolExecutor() as pool:
        large = [pool.submit(post, address, {"prompt": "a" * (1 << 17)}) for _ in range(3)]
        while not together:
            time.sleep(0.01)
        assert post(address, {"prompt": "a", "max_tokens": 1})[0] == 200
        assert [answer.result()[0] for answer in large] == [400] * 3
    assert max(together) == 1


def test_a_client_that_leaves_in_the_middle_of_a_body_is_no_error_of_the_endpoint(monkeypatch):
    errors = []
    with endpoint() as address:
        monkeypatch.setattr(logging.getLogger("uvicorn.error"), "error", lambda *given, **_: errors.append(given))
        with socket.create_connection(address) as opened:
            opened.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                b"Content-Length: 100\r\n\r\n{"
            )
            time.sleep(0.2)
        assert post(address, {"prompt": "a", "max_tokens": 1})[0] == 200
    assert not errors


def test_a_body_is_bounded_by_what_a_request_may_hold():
    assert (1 << 20) < LIMITS.body_bytes < 2 << 20
    with endpoint() as address:
        status, headers, found = post(address, b"[" * (LIMITS.body_bytes + 1))
    assert status == 413 and headers["connection"] == "close"
    assert found["error"]["message"] == f"the body is longer than {LIMITS.body_bytes} bytes"


@pytest.mark.parametrize(
    "host, status",
    [("evil.example", 403), ("evil.example:8000", 403), ("169.254.0.1", 403), ("localhost:9", 200), ("[::1]:9", 200),
     ("a.localhost", 200), ("127.0.0.2", 200)],
)  # fmt: skip
def test_without_a_token_a_request_names_this_machine(host, status):
    """A page of the web may give its own name this machine's address: then the browser sends that name."""
    with endpoint() as address:
        found, headers, body = post(address, {"prompt": "a", "max_tokens": 1}, Host=host)
    assert found == status
    assert status == 200 or (headers["connection"] == "close" and host.split(":")[0] in body["error"]["message"])


def test_with_a_token_any_host_is_asked():
    with endpoint(token="secret") as address:
        headers = {"Host": "pod.example", "Authorization": "Bearer secret"}
        assert post(address, {"prompt": "a", "max_tokens": 1}, **headers)[0] == 200


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp", b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nA: b"])
def test_a_connection_without_whole_headers_is_closed(sent, monkeypatch):
    monkeypatch.setattr(server, "HEADER_S", 0.5)
    with endpoint() as address, socket.create_connection(address) as opened:
        opened.sendall(sent)
        assert 0.2 < closed_after_s(opened) < 10


def test_an_idle_connection_that_had_an_answer_stays(monkeypatch):
    monkeypatch.setattr(server, "HEADER_S", 0.3)
    with endpoint() as address:
        connection = http.client.HTTPConnection(*address, timeout=30)
        for wait_s in (0, 1.0):
            time.sleep(wait_s)
            connection.request("POST", "/v1/completions", json.dumps({"prompt": "a", "max_tokens": 1}), HEADERS)
            answer = connection.getresponse()
            assert answer.status == 200 and json.loads(answer.read())["choices"]
        connection.sock.sendall(b"POST /v1/comp")  # and a request that does not come is one here, too
        assert closed_after_s(connection.sock) < 10


def test_a_body_that_does_not_come_is_an_answer(monkeypatch):
    monkeypatch.setattr(app, "BODY_S", 0.3)
    with endpoint() as address, socket.create_connection(address) as opened:
        opened.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: 100\r\n\r\n{"
        )
        opened.settimeout(20)
        assert opened.recv(1 << 16).startswith(b"HTTP/1.1 408 ")


def test_beyond_the_limit_of_connections_a_request_is_answered(monkeypatch):
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 3)
    with endpoint() as address, contextlib.ExitStack() as held:
        for _ in range(3):
            held.enter_context(socket.create_connection(address))
        connection = http.client.HTTPConnection(*address, timeout=30)
        connection.request("GET", "/v1/models")
        assert connection.getresponse().status == 503
