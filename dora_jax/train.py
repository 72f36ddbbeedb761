"""The main job:  python -m dora_jax.train --config=configs/quickstart.py [--config.steps=50] --workdir=runs/a

Run again with the same workdir it resumes from the newest checkpoint.
"""

from __future__ import annotations

from dora_jax.base import exits

if __name__ == "__main__":
    exits.listen()  # before the imports, which take a second

from dora_jax.cli import flags


def main(config, workdir):
    from dora_jax.runtime.job import train  # JAX starts only after the configuration has passed
    from dora_jax.serving import live

    with live.opened(config) as endpoint:
        return train(config, workdir, owner=True, endpoint=endpoint)


if __name__ == "__main__":
    flags.run(main)
