"""Stage 3, one reward worker: `python -m dora_jax.tasks.worker FD`, started and killed by pool.py.

Protocol (calls.py): setup {"rewards", "weights", "answer_pattern"}; then {"prompt", "response", "answer", "row"} ->
{"parts": {name: number}, "reward": number}. Laws: imports neither JAX nor the models; ends when its caller does.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable

from dora_jax.tasks import rewards
from dora_jax.tasks.sandbox import calls


def prepare(setup: calls.Request) -> Callable[[calls.Request], calls.Request]:
    try:
        terms = rewards.resolve(setup["rewards"])
        for reward in terms.values():
            getattr(reward, "prepare", lambda: None)()
    except rewards.RewardError as error:
        raise calls.Declined(str(error), error.kind) from error
    pattern = re.compile(setup["answer_pattern"]) if setup["answer_pattern"] else None

    def answer(request: calls.Request) -> calls.Request:
        response = request["response"]
        if pattern is not None:
            match = pattern.search(response)
            response = (match.group(1) or "") if match else ""
        try:
            of_terms, total = rewards.score(
                terms, request["prompt"], response, request["answer"], request["row"], setup["weights"]
            )
            return {"parts": of_terms, "reward": total}
        except rewards.RewardError as error:
            raise calls.Declined(str(error), error.kind) from error

    return answer


if __name__ == "__main__":
    calls.serve(int(sys.argv[1]), prepare)
