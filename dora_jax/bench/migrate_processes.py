"""Moving one running sample with its KV to another process against computing that KV again there.

    python -m dora_jax.bench.migrate_processes [--contexts=512,2048,8192] [--rounds=3] [--latent]

move      export here, pages over the wire, import there, until the sample's next tokens are back there; of it
  wire      from the export's end until the pages have arrived: lend, control plane, fetch
prefill   the same sample imported there as tokens only, until its next tokens are back
stay      the sample's next tokens where it is: the part of both that is no moving at all
Engines as in bench.migrate, one sample and nothing else. Best of the rounds. With --latent: of a mixture with latent
attention, whose pages hold one latent a token in the place of every head's K and V.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from multiprocessing import connection

import jax
import numpy as np

from dora_jax.bench import bandwidth
from dora_jax.bench.decode import MODEL
from dora_jax.bench.migrate import MOVED, NEW, forget, new_engine, next_tokens_s
from dora_jax.models import decoder
from dora_jax.models.families.config import Experts, Latent
from dora_jax.rollout.migrate import InFlightSample, without_pages
from dora_jax.runtime.transfer.device_transfer import Wire
from dora_jax.runtime.transfer.kv_transfer import CODEC, fetch, layout_of, lend
from dora_jax.runtime.transfer.transfer_manifest import Key

HERE = "127.0.0.1", b"bench"  # where the wires listen, and what they know each other by
LATENT = decoder.new_config(
    "deepseek_v3",
    **bandwidth.TOY | {"n_kv_heads": 8},
    latent=Latent(kv_rank=48, rope_dim=16, nope_dim=16, v_dim=32),
    experts=Experts(count=8, per_token=2, width=192, shared=1, router="sigmoid", corrected=True),
)


def key(sequence: int) -> Key:
    return Key(epoch=1, version=0, receiver="there/0", sequence=sequence)


def new_params(model: decoder.ModelConfig):
    return jax.jit(decoder.serving_layout)(decoder.init_params(model, 0))


def run_there(end: connection.Connection, context: int, model: decoder.ModelConfig) -> None:
    """The destination: fetches and imports what is lent; says when it has the pages, and when it has sampled."""
    params, wire = new_params(model), Wire(*HERE)
    engine = new_engine(context, 0, params, model)
    layout = layout_of(engine.page())
    end.send_bytes(b"ready")
    number = 0
    while data := end.recv_bytes():
        number += 1
        parcel = fetch(wire, CODEC.decode(data), key(number), layout)
        end.send_bytes(b"fetched")
        next_tokens_s(engine, parcel)
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

    def goes_on(self, parcel: InFlightSample, began: float) -> tuple[float, float]:
        """Seconds from now until the parcel is there, and from `began` until its sample has sampled there."""
        self.number += 1
        lending = time.perf_counter()
        self.end.send_bytes(CODEC.encode(lend(self.wire, key(self.number), parcel)))
        self._heard(b"fetched")
        fetched = time.perf_counter() - lending
        self._heard(b"sampled")
        took = time.perf_counter() - began
        self.wire.release(key(self.number))
        self._heard(b"forgotten")
        return fetched, took

    def ready(self) -> None:
        self._heard(b"ready")

    def close(self) -> None:
        self.end.send_bytes(b"")
        self.child.join(30)

    def _heard(self, word: bytes) -> None:
        if (said := self.end.recv_bytes()) != word:
            raise RuntimeError(f"the other process said {said!r} where {word!r} was expected")


def next_here_s(engine) -> float:
    began = time.perf_counter()
    while MOVED not in engine.tick().progress:
        pass
    return time.perf_counter() - began


def measure(context: int, rounds: int, model: decoder.ModelConfig) -> tuple[float, float, float, float, int]:
    """(move, wire, prefill, stay) in seconds and the parcel's bytes."""
    there, params = There(context, model), new_params(model)
    here = new_engine(context, 0, params, model)
    there.ready()
    prompt = np.random.default_rng(0).integers(3, model.vocab_size, context)
    moves, wires, prefills, stays = [], [], [], []
    for _ in range(rounds):
        here.submit(MOVED, prompt, 0, NEW)
        next_here_s(here)
        stays.append(next_here_s(here))
        began = time.perf_counter()
        parcel = here.export(MOVED)
        fetched, took = there.goes_on(parcel, began)
        moves.append(took)
        wires.append(fetched)
        prefills.append(there.goes_on(without_pages(parcel), time.perf_counter())[1])
        forget(here, params)
    there.close()
    return min(moves), min(wires), min(prefills), min(stays), parcel.kv_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contexts", default="512,2048,8192")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--latent", action="store_true", help="latent attention and experts")
    args = parser.parse_args()
    print(
        f"{'context':>8s}{'KV MB':>8s}{'move ms':>9s}{'wire ms':>9s}{'GiB/s':>7s}{'prefill ms':>12s}{'stay ms':>9s}"
        f"{'share':>8s}"
    )
    for context in [int(c) for c in args.contexts.split(",")]:
        move, wire, prefill, stay, size = measure(context, args.rounds, LATENT if args.latent else MODEL)
        print(
            f"{context:8d}{size / 1e6:8.1f}{move * 1e3:9.1f}{wire * 1e3:9.1f}{size / wire / 2**30:7.2f}"
            f"{prefill * 1e3:12.1f}{stay * 1e3:9.1f}{move / prefill:8.1%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
