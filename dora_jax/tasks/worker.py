"""Stage 3, one reward worker: `python -m dora_jax.tasks.worker FD`, which worker_process.py starts.

Protocol (calls.py): setup {"rewards", "answer_pattern", "asynchronous", "timeout_s"} -> {"kinds"}: of each reward by
its name whether it is awaited and whether it sees a group; then {"rewards", "prompt", "responses", "answer", "row"} ->
{"scores"}: of each response the terms of each of these rewards by its name. Where all rewards are awaited, or it serves
only those (`asynchronous`), it takes all requests at once, each within timeout_s; else one at a time, outside an event
loop.
Laws: imports neither JAX nor the models nor numpy; ends when its caller does.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Coroutine

from dora_jax.tasks import rewards
from dora_jax.tasks.sandbox import calls


def prepare(setup: calls.Request) -> tuple[calls.Request, calls.Answer]:
    try:
        known = rewards.resolve(setup["rewards"])
        for reward in known.values():
            getattr(reward, "prepare", lambda: None)()
    except rewards.RewardError as error:
        raise calls.Declined(str(error), error.kind) from error
    kinds = {name: [rewards.asynchronous(reward), rewards.of_group(reward)] for name, reward in known.items()}
    pattern = re.compile(setup["answer_pattern"]) if setup["answer_pattern"] else None

    def scoring(request: calls.Request) -> Coroutine[object, None, list[dict[str, dict[str, float]]]]:
        responses = request["responses"]
        if pattern is not None:
            matches = [pattern.search(response) for response in responses]
            responses = [(match.group(1) or "") if match else "" for match in matches]
        asked = {name: known[name] for name in request["rewards"]}
        return rewards.score(asked, request["prompt"], responses, request["answer"], request["row"])

    def answer(request: calls.Request) -> calls.Request:
        try:
            return {"scores": rewards.finished(scoring(request))}
        except rewards.RewardError as error:
            raise calls.Declined(str(error), error.kind) from error

    async def answer_all(request: calls.Request, send: calls.Send) -> calls.Request:
        import asyncio

        deadline = asyncio.timeout(setup["timeout_s"])
        try:
            async with deadline:
                return {"scores": await scoring(request)}
        except rewards.RewardError as error:
            raise calls.Declined(str(error), error.kind) from error
        except TimeoutError as error:
            reason = f"reward {', '.join(request['rewards'])} took over {setup['timeout_s']:g} s"
            raise calls.Declined(reason, reason) from error

    return {"kinds": kinds}, answer_all if setup["asynchronous"] or all(
        awaited for awaited, _ in kinds.values()
    ) else answer


if __name__ == "__main__":
    calls.serve(int(sys.argv[1]), prepare)
