"""An engine in a process of its own: `python -m tests.fakes.engine_peer`. A line on stdin is a lent in_flight as hex
and a sequence number; its sample is fetched, run to its end, and printed as hex."""

import sys

from tests.fakes import engine_rig
from tests.fakes.wire_peer import peer_wire


def main():
    from dora_jax.runtime.common.codec import Codec
    from dora_jax.runtime.transfer.kv_transfer import CODEC, PageShape, fetch
    from dora_jax.runtime.transfer.transfer_manifest import Key

    engine, wire = engine_rig.shared_engine("a"), peer_wire()
    engine.load(0, engine_rig.weights(engine))
    layout = PageShape(layers=2, heads=2, head_dim=16, dtype="float32")
    print("ready", flush=True)
    for line in sys.stdin:
        data, sequence = line.split()
        key = Key(epoch=1, version=0, receiver="rollout0/0", sequence=int(sequence))
        engine.import_(fetch(wire, CODEC.decode(bytes.fromhex(data)), key, layout, 20))
        (sample,) = engine_rig.finish(engine).values()
        print(Codec().encode(sample).hex(), flush=True)


if __name__ == "__main__":
    main()
