"""What it costs an episode to go on once its environment has answered, by where its KV was meanwhile.

    python -m dora_jax.bench.waiting [--contexts=512,2048,4096] [--observed=64] [--rounds=3] [--seconds=0]

kept    its pages stayed on the device: only what it observed is prefilled
out     its pages are copied to host memory
in      they come back, and what it observed is prefilled
again   its KV was dropped: all of its tokens are prefilled
swap    (out + in - kept) / (again - kept): the share of a second prefill that host memory costs
Times are in milliseconds until the episode's next tokens are back, the best of the rounds. `same` says whether the tokens
and log-probs of the next turn are those of the episode that kept its pages, bit by bit. --seconds: how long it waits.
"""

from __future__ import annotations

import argparse
import dataclasses
import time

import jax
import numpy as np

from dora_jax.bench.decode import MODEL
from dora_jax.bench.migrate import MOVED, forget, new_engine
from dora_jax.models import decoder
from dora_jax.rollout.engine import Engine
from dora_jax.rollout.migrate import InFlightSample, observed, without_pages
from dora_jax.types import SampleId

TURN = 16  # tokens of a turn


def turn_over(engine: Engine) -> InFlightSample:
    while not (waiting := engine.tick().waiting):
        pass
    return waiting[0]


def settle(engine: Engine) -> None:
    """Until weights that were just loaded lie as they are used."""
    engine.submit(SampleId(1, 0), np.arange(3, 11), 0, 1)
    while not engine.idle:
        engine.tick()


def go_on(engine: Engine, held: InFlightSample, answer: np.ndarray) -> tuple[float, InFlightSample]:
    """(milliseconds until the episode has sampled again, the end of its next turn); takes it out."""
    began = time.perf_counter()
    engine.import_(observed(held, answer))
    while not (result := engine.tick()).progress:
        pass
    took_ms = 1e3 * (time.perf_counter() - began)
    after = result.waiting[0] if result.waiting else turn_over(engine)
    engine.forget(MOVED)
    return took_ms, after


def measure(context: int, n_observed: int, rounds: int, seconds: float, params) -> str:
    """One line of the page."""
    engine = new_engine(context, 0, params)
    rng = np.random.default_rng(0)
    prompt, answer = rng.integers(3, MODEL.vocab_size, context), rng.integers(3, MODEL.vocab_size, n_observed)
    times: dict[str, list[float]] = {name: [] for name in ("kept", "out", "in", "again")}
    same = True
    for _ in range(rounds):
        turns = {}
        for name in ("kept", "in", "again"):
            engine.submit(MOVED, prompt, 0, 3 * TURN, turn_tokens=TURN)
            held = turn_over(engine)
            began = time.perf_counter()
            if name != "kept":
                held = engine.with_kept(held)
            if name == "in":
                times["out"].append(1e3 * (time.perf_counter() - began))
                kv_bytes = held.kv_bytes
            if name != "kept":
                forget(engine, params)  # of the prompt's prefix too nothing stays
            settle(engine)
            time.sleep(seconds)
            took_ms, turns[name] = go_on(engine, without_pages(held) if name == "again" else held, answer)
            times[name].append(took_ms)
            forget(engine, params)
        kept, back = (dataclasses.astuple(turns[name])[3:5] for name in ("kept", "in"))
        same &= all(np.array_equal(x, y) for x, y in zip(kept, back, strict=True))
    best = {name: min(each) for name, each in times.items()}
    share = (best["out"] + best["in"] - best["kept"]) / (best["again"] - best["kept"])
    columns = "".join(f"{best[name]:9.1f}" for name in ("kept", "out", "in", "again"))
    return f"{context:8d}{kv_bytes / 1e6:8.1f}{columns}{share:8.1%}{'yes' if same else 'NO':>6s}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contexts", default="512,2048,4096")
    parser.add_argument("--observed", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.0)
    args = parser.parse_args()
    params = jax.jit(decoder.serving_layout)(decoder.init_params(MODEL, 0))
    print(f"{'context':>8s}{'KV MB':>8s}{'kept':>9s}{'out':>9s}{'in':>9s}{'again':>9s}{'swap':>8s}{'same':>6s}")
    for context in [int(c) for c in args.contexts.split(",")]:
        print(measure(context, args.observed, args.rounds, args.seconds, params), flush=True)


if __name__ == "__main__":
    main()
