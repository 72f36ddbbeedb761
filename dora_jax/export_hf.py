"""A checkpoint as a Hugging Face folder:  python -m dora_jax.export_hf --workdir=runs/a [--step=40] --out=FOLDER
[--padded]

Reads the run's config and, of its checkpoint, the params only; config fields, end ids and tokenizer come from the
folder that the run started from (model.path). transformers, vLLM and lm-eval load the result. A run that trained an
adapter (lora.rank) gives a PEFT folder, adapter_config.json and adapter_model.safetensors, or with --merged the whole
model, the adapter added up into it.
"""

from __future__ import annotations

from dora_jax.base import exits

if __name__ == "__main__":
    exits.listen()  # before the imports, which take a second

import os
from pathlib import Path

from absl import flags as absl_flags

from dora_jax.cli import flags
from dora_jax.config import Config, ConfigError


def main(config: Config, workdir: Path) -> int:
    given = absl_flags.FLAGS
    if not given.out:
        raise ConfigError("out: missing; name the folder to write, --out=FOLDER")
    os.environ["JAX_PLATFORMS"] = "cpu"  # copying weights needs no accelerator, and the run may be holding it
    try:
        adapter = config.lora.on and not given.merged
        step = export(workdir, given.step, config, Path(given.out), given.dtype, given.padded, adapter)
    except ValueError as error:  # a sentence that names the file at fault
        raise ConfigError(str(error)) from error
    print(f"step {step} of {workdir} is in {given.out}")
    return 0


def export(
    workdir: Path, step: int | None, config: Config, out: Path, dtype: str, padded: bool = False, adapter: bool = False
) -> int:
    """Writes `out`, returns the step taken (None asked for: the newest that verifies). adapter: a PEFT folder of what
    the run trained, whose base is model.path. ValueError: a sentence."""
    import jax.numpy as jnp  # JAX starts only after the flags have passed

    from dora_jax.models import hf, peft
    from dora_jax.runtime.assembly import checkpoint_weights
    from dora_jax.runtime.job import pick

    source = config.model.path
    hf.check_vacant(out)
    cfg = hf.read_config(source)
    directory = workdir / "checkpoints"
    step = pick(directory, step)
    if adapter:
        trained = checkpoint_weights.read_trained(directory, step)
        peft.save(out, cfg, config.lora, trained, source, jnp.dtype(dtype))
    else:
        whole = checkpoint_weights.read(config, directory, step)
        hf.save(out, cfg, whole, source, dtype=jnp.dtype(dtype), padded=padded)
    return step


if __name__ == "__main__":
    absl_flags.DEFINE_integer("step", None, "checkpoint to export; default: the newest that verifies", lower_bound=0)
    absl_flags.DEFINE_string("out", "", "folder to write; it must not hold anything yet")
    absl_flags.DEFINE_bool("padded", False, "LongCat: matrices of zeros for experts without any, as transformers asks")
    absl_flags.DEFINE_bool("merged", False, "of a run that trained an adapter: the whole model instead of the adapter")
    absl_flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16", "float16"], "type of the weights on disk")
    flags.run(main, purpose="evaluate")
