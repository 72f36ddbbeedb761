"""What becomes of a sample's KV: moved to another engine, sent to another process, kept in host memory, or computed
again.

    python -m dora_jax.bench.migrate [--contexts=512,2048,8192,32768] [--others=8] [--rounds=3]
    python -m dora_jax.bench.migrate --processes [--contexts=512,2048,8192] [--rounds=3] [--latent]
    python -m dora_jax.bench.migrate --waiting [--contexts=512,2048,4096] [--observed=64] [--rounds=3] [--seconds=0]

move      export from one engine, import into another, until the sample's next tokens are back
prefill   the same sample imported as tokens only, until its next tokens are back
stay      the sample's next tokens where it is: the part of both that is no moving at all
share     (move - stay) / (prefill - stay); move / prefill between processes
out, in   by how much slower the other samples of the source and of the destination decode while it leaves and arrives,
          and how many ticks that is
Both engines stand on one device, and host memory lies between them: what one process does. Best of the rounds.

With --processes the destination is another process, and there is one sample and nothing else; of a move is then
wire      from the export's end until the pages have arrived: lend, control plane, fetch
With --latent: of a mixture with latent attention, whose pages hold one latent a token in the place of every head's K
and V.

With --waiting: what it costs an episode to go on once its environment has answered, by where its KV was meanwhile.
kept    its pages stayed on the device: only what it observed is prefilled
out     its pages are copied to host memory
in      they come back, and what it observed is prefilled
again   its KV was dropped: all of its tokens are prefilled
swap    (out + in - kept) / (again - kept): the share of a second prefill that host memory costs
Times are in milliseconds until the episode's next tokens are back, the best of the rounds. `same` says whether the
tokens and log-probs of the next turn are those of the episode that kept its pages, bit by bit. --seconds: how long it
waits.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import statistics
import time
from multiprocessing import connection
from typing import Any

import jax
import numpy as np

from dora_jax.bench import harness
from dora_jax.bench.decode import MODEL
from dora_jax.models import decoder
from dora_jax.models.families.config import Experts, Latent
from dora_jax.rollout.engine import Engine
from dora_jax.rollout.migrate import InFlightSample, observed, without_pages
from dora_jax.runtime.transfer.device_transfer import Wire
from dora_jax.runtime.transfer.kv_transfer import CODEC, fetch, layout_of, lend
from dora_jax.runtime.transfer.transfer_manifest import Key
from dora_jax.types import SampleId

NEW = 128  # tokens that the moved sample may still sample: enough to measure a few ticks
OTHERS_NEW = 1280  # tokens of the others: they decode all the while
MOVED = SampleId(0, 0)


def new_engine(context: int, others: int, params, model: decoder.ModelConfig = MODEL) -> Engine:
    longest = OTHERS_NEW if others else NEW
    engine = harness.new_engine(
        model,
        slots=1 + others,
        decode_rows=1,
        pages=(context + longest) // 16 + 2 + others * (OTHERS_NEW // 16 + 3),
        max_prompt_tokens=context,
        max_new_tokens=longest,
        prefill_tokens=1 << 20,
        prefill_chunk=512,
        context_block=max(128, context // 16),
    )
    engine.load(0, jax.device_put(params, engine.param_shardings))
    engine.warmup()
    return engine


def next_tokens_s(engine: Engine, request: InFlightSample) -> float:
    """Seconds from the import until the sample has sampled again; takes it out afterwards."""
    began = time.perf_counter()
    engine.import_(request)
    sampled_s(engine)
    took = time.perf_counter() - began
    engine.cancel(MOVED)
    return took


def sampled_s(engine: Engine) -> float:
    """Seconds until the sample has sampled."""
    began = time.perf_counter()
    while MOVED not in engine.tick().progress:
        pass
    return time.perf_counter() - began


def forget(engine: Engine, params) -> None:
    """Drops every prefix, so that the next import finds none."""
    engine.drop(0)
    engine.load(0, jax.device_put(params, engine.param_shardings))


def slowed(engine: Engine, request: InFlightSample, others: int) -> tuple[tuple[float, int], tuple[float, int]]:
    """((share by which others decode slower while the sample arrives, ticks), the same while it leaves again)."""
    for index in range(others):
        engine.submit(SampleId(1, index), np.arange(3, 35), 0, OTHERS_NEW)
    engine.tick()
    before = statistics.median(harness.timed(engine.tick)[0] for _ in range(5))
    engine.import_(request)
    arriving = [harness.timed(engine.tick)[0]]
    while not len(engine.sampled(MOVED)[0]) > len(request.out_ids):
        arriving.append(harness.timed(engine.tick)[0])
    both = statistics.median(harness.timed(engine.tick)[0] for _ in range(3))
    sampled = len(engine.sampled(SampleId(1, 0))[0])
    took, _ = harness.timed(lambda: engine.export(MOVED))
    leaving = max(1, (len(engine.sampled(SampleId(1, 0))[0]) - sampled) // engine.shapes.steps)
    after = statistics.median(harness.timed(engine.tick)[0] for _ in range(5))
    ticks = len(arriving) + 3 + leaving

    def alone(tick: float) -> float:
        """Seconds a tick of the others by themselves: they grow, and slow down, all the while."""
        return before + (after - before) * tick / ticks

    own = max(0.0, both - alone(len(arriving) + 1.5))  # the moved sample decodes too, once it is there
    came = (sum(arriving) - own) / (len(arriving) * alone(len(arriving) / 2)) - 1
    left = took / (leaving * alone(ticks - leaving / 2)) - 1
    for index in range(others):
        engine.cancel(SampleId(1, index))
    return (came, len(arriving)), (left, leaving)


def measure(context: int, others: int, rounds: int, params) -> list[Any]:
    """One line of the page."""
    here, there = (new_engine(context, others, params) for _ in range(2))
    prompt = np.random.default_rng(0).integers(3, MODEL.vocab_size, context)
    moves, prefills, stays, comes, leaves = [], [], [], [], []
    for _ in range(rounds):
        here.submit(MOVED, prompt, 0, NEW)
        sampled_s(here)
        stays.append(harness.timed(here.tick)[0])
        exported, request = harness.timed(lambda: here.export(MOVED))
        moves.append(exported + next_tokens_s(there, request))
        forget(there, params)
        came, left = slowed(there, request, others)
        comes.append(came)
        leaves.append(left)
        forget(there, params)
        prefills.append(next_tokens_s(there, without_pages(request)))
        forget(there, params)
    move, prefill, stay = min(moves), min(prefills), min(stays)
    (out, out_ticks), (into, in_ticks) = min(leaves), min(comes)
    return [context, request.kv_bytes / 1e6, 1e3 * move, 1e3 * prefill, 1e3 * stay, (move - stay) / (prefill - stay),
            f"{out:.1%} /{out_ticks:3d}", f"{into:.1%} /{in_ticks:3d}"]  # fmt: skip


HERE = "127.0.0.1", b"bench"  # where the wires listen, and what they know each other by
LATENT = decoder.new_config(
    "deepseek_v3",
    **harness.TOY | {"n_kv_heads": 8},
    latent=Latent(kv_rank=48, rope_dim=16, nope_dim=16, v_dim=32),
    experts=Experts(count=8, per_token=2, width=192, shared=1, router="sigmoid", corrected=True),
)


def key(sequence: int) -> Key:
    return Key(epoch=1, version=0, receiver="there/0", sequence=sequence)


def run_there(end: connection.Connection, context: int, model: decoder.ModelConfig) -> None:
    """The destination: fetches and imports what is lent; says when it has the pages, and when it has sampled."""
    params, wire = harness.serving_params(model), Wire(*HERE)
    engine = new_engine(context, 0, params, model)
    layout = layout_of(engine.page())
    end.send_bytes(b"ready")
    number = 0
    while data := end.recv_bytes():
        number += 1
        request = fetch(wire, CODEC.decode(data), key(number), layout)
        end.send_bytes(b"fetched")
        next_tokens_s(engine, request)
        end.send_bytes(b"sampled")
        forget(engine, params)
        end.send_bytes(b"forgotten")


class There:
    def __init__(self, context: int, model: decoder.ModelConfig):
        self.end, theirs = multiprocessing.get_context("spawn").Pipe()
        self.child = multiprocessing.get_context("spawn").Process(target=run_there, args=(theirs, context, model))
        self.child.start()
        theirs.close()
        self.wire = Wire(*HERE)
        self.number = 0

    def goes_on(self, request: InFlightSample, began: float) -> tuple[float, float]:
        """Seconds from now until the request is there, and from `began` until its sample has sampled there."""
        self.number += 1
        lending = time.perf_counter()
        self.end.send_bytes(CODEC.encode(lend(self.wire, key(self.number), request)))
        self._expect(b"fetched")
        fetched = time.perf_counter() - lending
        self._expect(b"sampled")
        took = time.perf_counter() - began
        self.wire.release(key(self.number))
        self._expect(b"forgotten")
        return fetched, took

    def ready(self) -> None:
        self._expect(b"ready")

    def close(self) -> None:
        self.end.send_bytes(b"")
        self.child.join(30)

    def _expect(self, word: bytes) -> None:
        if (received := self.end.recv_bytes()) != word:
            raise RuntimeError(f"the other process sent {received!r} where {word!r} was expected")


def measure_there(context: int, rounds: int, model: decoder.ModelConfig) -> list[Any]:
    """One line of the page."""
    there, params = There(context, model), harness.serving_params(model)
    here = new_engine(context, 0, params, model)
    there.ready()
    prompt = np.random.default_rng(0).integers(3, model.vocab_size, context)
    moves, wires, prefills, stays = [], [], [], []
    for _ in range(rounds):
        here.submit(MOVED, prompt, 0, NEW)
        sampled_s(here)
        stays.append(sampled_s(here))
        began = time.perf_counter()
        request = here.export(MOVED)
        fetched, took = there.goes_on(request, began)
        moves.append(took)
        wires.append(fetched)
        prefills.append(there.goes_on(without_pages(request), time.perf_counter())[1])
        forget(here, params)
    there.close()
    move, wire, prefill, stay = (min(each) for each in (moves, wires, prefills, stays))
    return [context, request.kv_bytes / 1e6, 1e3 * move, 1e3 * wire, request.kv_bytes / wire / 2**30, 1e3 * prefill,
            1e3 * stay, move / prefill]  # fmt: skip


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


def measure_wait(context: int, n_observed: int, rounds: int, seconds: float, params) -> list[Any]:
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
    return [context, kv_bytes / 1e6, *best.values(), share, "yes" if same else "NO"]


def main() -> None:
    args = harness.flags(__doc__, contexts=(0,), others=8, rounds=3, processes=False, latent=False, waiting=False,
                         observed=64, seconds=0.0)  # fmt: skip
    head: dict[str, str] = {"context": "8d", "KV MB": "8.1f"}
    contexts: tuple[int, ...] = (512, 2048, 8192)
    if args.processes:
        head |= {"move ms": "9.1f", "wire ms": "9.1f", "GiB/s": "7.2f", "prefill ms": "12.1f", "stay ms": "9.1f",
                 "share": "8.1%"}  # fmt: skip
        row = lambda context: measure_there(context, args.rounds, LATENT if args.latent else MODEL)
    elif args.waiting:
        contexts, params = (512, 2048, 4096), harness.serving_params(MODEL)
        head |= {**dict.fromkeys(("kept", "out", "in", "again"), "9.1f"), "swap": "8.1%", "same": ">6s"}
        row = lambda context: measure_wait(context, args.observed, args.rounds, args.seconds, params)
    else:
        contexts, params = (*contexts, 32768), harness.serving_params(MODEL)
        head |= {"move ms": "9.1f", "prefill ms": "12.1f", "stay ms": "9.1f", "share": "8.1%", "out / ticks": ">14s",
                 "in / ticks": ">14s"}  # fmt: skip
        row = lambda context: measure(context, args.others, args.rounds, params)
    table = harness.Table(head)
    print(table.head)
    for context in args.contexts if any(args.contexts) else contexts:
        print(table.row(*row(context)), flush=True)


if __name__ == "__main__":
    main()
