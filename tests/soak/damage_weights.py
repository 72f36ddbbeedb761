"""Damage to versions that travel by storage: WORKDIR/weights, made of the run's true weights.

Consumes the trainer's true params and a random source; a case is a copy of the folder that is damaged and read as an
instance reads it. A version that is not whole, or cannot be read, is refused, and so is one whose digest is not that of
what was put: the run publishes it again. Law: what is read and not refused is equal to the byte.
"""

from __future__ import annotations

import random
import shutil
import traceback
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dora_jax.base.digest import digest
from dora_jax.config import ConfigError, RunError
from dora_jax.runtime.journal.object_storage import StoreError
from dora_jax.runtime.transfer import slices
from dora_jax.runtime.transfer.transfer_manifest import WireError
from dora_jax.runtime.transfer.weight_storage import StoredWeights
from tests.soak.damage_kinds import GARBAGE, edit, exchange, remove, replace_by_folder
from tests.soak.damage_truth import EXACT, REFUSED, TRACE, WRONG, hashes

VERSION = 3
REFUSALS = (StoreError, WireError, ConfigError, RunError)


class StoredCases:
    def __init__(self, folder: Path, params: Any):
        self._true, self._scratch = folder / f"weights.{id(self)}", folder / f"weights.{id(self)}.case"
        where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        params = jax.tree.map(lambda x: jax.device_put(np.array(x), where), params)
        self._like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), params)
        self._hashes, self._digest = hashes(params), digest(params)
        store = StoredWeights(self._true)
        store.put(VERSION, slices.offered(params))
        store.seal(VERSION)

    def close(self) -> None:
        shutil.rmtree(self._true)

    def run(self, draw: random.Random) -> tuple[str, str, str]:
        """(what was done, verdict, why)"""
        shutil.copytree(self._true, self._scratch)
        try:
            what = _harm(self._scratch, draw)
            return what, *self._read()
        finally:
            shutil.rmtree(self._scratch)

    def _read(self) -> tuple[str, str]:
        try:
            store = StoredWeights(self._scratch)
            store.look()
            if VERSION not in store.versions:
                return REFUSED, "the version is not whole"
            received = store.get(VERSION, self._like)
            is_leaf = lambda x: hasattr(x, "boxes")
            arrays = jax.tree.map(lambda leaf: leaf.at(((0,) * len(leaf.shape), leaf.shape)), received, is_leaf=is_leaf)
        except REFUSALS as error:
            return (REFUSED, str(error)) if "\n" not in str(error) else (TRACE, str(error))
        except Exception as error:
            return TRACE, traceback.format_exception_only(error)[-1].strip()[:200]
        if digest(jax.tree.map(jax.numpy.asarray, arrays)) != self._digest:
            return REFUSED, "the digest is another"
        return (EXACT, "") if hashes(arrays) == self._hashes else (WRONG, "other bytes are read without a word")


def _harm(root: Path, draw: random.Random) -> str:
    files = sorted(path for path in root.rglob("*") if path.is_file())
    big = sorted(files, key=lambda path: path.stat().st_size)[-6:]
    victim = draw.choice(big) if draw.random() < 0.6 else draw.choice(files)
    name = victim.relative_to(root)
    match draw.choices(range(5), (12, 2, 1, 2, 1))[0]:
        case 0:
            return f"{name}: {edit(victim, draw)[0]}"
        case 1:
            remove(victim)
            return f"{name}: missing"
        case 2:
            return f"{name}: {replace_by_folder(victim, draw)}"
        case 3:
            other = draw.choice([path for path in files if path != victim])
            exchange(victim, other)
            return f"{name} exchanged with {other.relative_to(root)}"
        case _:
            extra = draw.choice([root / "weights", victim.parent]) / draw.choice(("extra", "v9", "v9.whole", "vx"))
            extra.write_bytes(draw.choice(GARBAGE))
            return f"an extra file {extra.relative_to(root)}"
