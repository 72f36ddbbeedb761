"""avg@k, pass@k on held-out prompts:  python -m dora_jax.evaluate --workdir=runs/a [--step=40]
[--config.eval.samples=8]

Reads the run's own config and, of its checkpoint, the params only; writes WORKDIR/evaluations. With --follow it
evaluates every checkpoint that has no record there and, beside a run that goes on, each new one, until the last step
has its record.
"""

from __future__ import annotations

from dora_jax.base import exits

if __name__ == "__main__":
    exits.listen()  # before the imports, which take a second

from pathlib import Path

from absl import flags as absl_flags

from dora_jax.cli import flags
from dora_jax.config import Config, ConfigError


def main(config: Config, workdir: Path) -> int:
    given = absl_flags.FLAGS
    if given.follow and given.step is not None:
        raise ConfigError("follow: it evaluates every checkpoint; leave --step out")
    from dora_jax.runtime import evaluation_job  # JAX starts only after the configuration has passed

    if given.follow:
        return evaluation_job.follow(config, workdir)
    return evaluation_job.evaluate(config, workdir, given.step)


if __name__ == "__main__":
    absl_flags.DEFINE_integer("step", None, "checkpoint to evaluate; default: the newest that verifies", lower_bound=0)
    absl_flags.DEFINE_bool(
        "follow", False, "every checkpoint that has no record, and each new one of a run that goes on"
    )
    flags.run(main, purpose="evaluate")
