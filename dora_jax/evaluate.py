"""avg@k, pass@k on held-out prompts:  python -m dora_jax.evaluate --workdir=runs/a [--step=40] [--config.eval.samples=8]

Reads the run's own config and, of its checkpoint, the params only.
"""

from __future__ import annotations

from dora_jax import exits

if __name__ == "__main__":
    exits.listen()  # before the imports, which take a second

from pathlib import Path

from absl import flags as absl_flags

from dora_jax import flags
from dora_jax.config import Config


def define_flags() -> None:
    absl_flags.DEFINE_integer("step", None, "checkpoint to evaluate; default: the newest that verifies", lower_bound=0)


def main(config: Config, workdir: Path) -> int:
    from dora_jax.runtime.job import evaluate  # JAX starts only after the configuration has passed

    return evaluate(config, workdir, absl_flags.FLAGS.step)


if __name__ == "__main__":
    define_flags()
    flags.run(main, purpose="evaluate")
