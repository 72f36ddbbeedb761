"""A session of an agent on the endpoint of a run that trains on it: headers for any client, rewards, its end.

    with AgentSession("http://127.0.0.1:8000", task="gsm8k-17") as session:
        client = openai.OpenAI(base_url=session.base_url, api_key=session.token, default_headers=session.headers)
        answer = client.chat.completions.create(model="policy", messages=[...])     # as often as the agent likes
        session.reward(1.0)                                                         # then it is over

Standard library only, so that this file may be copied beside an agent whose environment has nothing of ours. Laws: what
is posted again after an error of the network counts once; a session that ends in an exception posts no reward, so its
group is given up after `serving.reward_s` and no reward of 0 is trained on.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
import uuid
from typing import Any, Self

ATTEMPTS, BACK_OFF_S, PATIENCE_S = 5, 0.5, 30.0


class AgentSession:
    """One episode: what one client asks under one id. task: sessions of the same one, and of the same `group` where
    that is given, are compared with each other."""

    def __init__(self, url: str, *, task: str = "", group: str = "", token: str = "none", id: str = ""):
        """url: of the endpoint, without /v1. token: DORA_SERVE_TOKEN of the run."""
        self.url, self.token, self.id = url.rstrip("/"), token, id or uuid.uuid4().hex
        self.base_url = f"{self.url}/v1"
        self.headers = {"X-Session-ID": self.id, "X-Task-ID": task, "X-Group-ID": group}

    def reward(self, value: float, turn: int | None = None) -> None:
        """Posts what the session was worth, which ends it; or one turn of it, counted from 0: those add up.
        RuntimeError: it is not taken, with the reason."""
        self._call("POST", f"/sessions/{self.id}/reward", {"reward": value} | ({} if turn is None else {"turn": turn}))

    def end(self) -> None:
        """Ends it: no turn follows. RuntimeError: no turn of it is trained."""
        self._call("DELETE", f"/sessions/{self.id}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is not None:
            try:
                self.end()
            except (OSError, RuntimeError):  # the agent's own error is the one to see
                pass

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> None:
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        for attempt in range(ATTEMPTS):
            asked = urllib.request.Request(self.base_url + path, data, headers, method=method)
            try:
                urllib.request.urlopen(asked, timeout=PATIENCE_S).close()
                return
            except urllib.error.HTTPError as error:
                raise RuntimeError(f"{method} {path}: {error.code} {error.read().decode()[:500]}") from error
            except OSError:  # it may have been taken: again
                if attempt == ATTEMPTS - 1:
                    raise
                time.sleep(BACK_OFF_S * 2**attempt)
