"""Supervised warm start:  python -m dora_jax.sft --config=configs/x.py [--config.sft.steps=300] --workdir=runs/a

Writes the Hugging Face folder `sft.out`, from `sft.init` or from a new model (runtime/training/warm_start.py). A run
whose model.path is the same folder makes it first, so this program is for a warm start alone.
"""

from __future__ import annotations

from dora_jax.base import exits

if __name__ == "__main__":
    exits.listen()  # before the imports, which take a second

from pathlib import Path

from dora_jax.cli import flags
from dora_jax.config import Config, ConfigError


def main(config: Config, workdir: Path) -> int:
    from dora_jax.base.metrics import Writer
    from dora_jax.plan import devices  # JAX starts only after the configuration has passed
    from dora_jax.runtime.common.shutdown import Guard
    from dora_jax.runtime.training import warm_start

    if (Path(config.sft.out) / "config.json").exists():
        raise ConfigError(f"sft.out: {config.sft.out} already holds a model; name another folder, or remove it")
    devices.setup_platform(config)
    with Writer(workdir) as writer, Guard(0.0, owner=True) as guard:
        warm_start.run(config, workdir, writer, guard.stepped)
    return 0


if __name__ == "__main__":
    flags.run(main, purpose="sft")
