"""What the benches share: their flags, clocks and tables, an engine on one device, rivals and programs as processes.

JAX is imported where a device is used: some processes of a bench leave it alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# --------------------------------------------------------------------- flags


def parser_of(doc: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """One flag for each default, of its type: False is a switch, a tuple a list with commas, and a list the choices of
    which its first is the default; ARGUMENTS is without dashes where the default is Ellipsis."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        match default:
            case False:
                parser.add_argument(f"--{name}", action="store_true")
            case list():
                parser.add_argument(f"--{name}", choices=default, default=default[0], type=type(default[0]))
            case tuple():
                kind = type(default[0]) if default else str
                parse = lambda text, kind=kind: tuple(kind(part) for part in text.split(",") if part)
                parser.add_argument(f"--{name}", type=parse, default=default)
            case _:
                parser.add_argument(f"--{name}", type=str if default is None else type(default), default=default)
    return parser


def flags(doc: str | None, **defaults: Any) -> argparse.Namespace:
    """The command line, as `parser_of` reads it."""
    return parser_of(doc, **defaults).parse_args()


# -------------------------------------------------------------------- clocks


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """(seconds, what the call has returned)."""
    began = time.perf_counter()
    result = call()
    return time.perf_counter() - began, result


def best_s(call: Callable[[], object], rounds: int = 3) -> float:
    """Seconds of the quickest call; one before them is not counted, since it may compile."""
    call()
    return min(timed(call)[0] for _ in range(rounds))


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


def new_engine(model: Any, mesh: Any = None, sections: Mapping[str, Any] | None = None, **rollout: Any) -> Any:
    """The engine that a run assembles with this rollout section, other sections and presets; by default on one
    device."""
    from dora_jax.config import Config, RolloutSection
    from dora_jax.plan import presets
    from dora_jax.runtime.assembly.run import engine_of

    config = presets.filled(Config(rollout=RolloutSection(**rollout), **(sections or {})))
    return engine_of(config, model, mesh or one_device())


def serving_params(model: Any) -> Any:
    """Random weights as an engine's calls take them."""
    import jax

    from dora_jax.models import decoder

    return jax.jit(decoder.serving_layout)(decoder.init_params(model, 0))


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

ENVIRONMENTS = {  # rival -> what its environment needs
    "transformers": ("torch==2.13.0+cpu", "transformers==5.23.0",
                     "--extra-index-url", "https://download.pytorch.org/whl/cpu"),
    "tunix": ("google-tunix==0.1.7",),
}  # fmt: skip


class Rival:
    """rivals.py in an interpreter that has the rival, `copies` at once: a JSON line in, one out."""

    def __init__(self, name: str, library: str, folder: Path, install: bool, copies: int = 1):
        root = Path(".bench") / library
        python = root / "bin" / "python"
        if install and not _imports(python, library):
            venv.create(root, with_pip=True)
            subprocess.run([python, "-m", "pip", "install", "-q", *ENVIRONMENTS[library]], check=True)
        here = [Path(sys.executable)] if importlib.util.find_spec(library) else []
        found = next((p for p in (python, *here) if _imports(p, library)), None)
        if found is None:
            raise SystemExit(f"error: the rival {library} is not installed; --install makes its environment in {root}")
        command = [str(found), str(Path(__file__).with_name("rivals.py")), name, str(folder)]
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


def _imports(python: Path, library: str) -> bool:
    """False also where an installation was cut short."""
    libraries = "torch, transformers" if library == "transformers" else library
    tried = [str(python), "-c", f"import {libraries}"]
    return python.exists() and not subprocess.run(tried, capture_output=True, check=False).returncode


def program(module: str, *arguments: str) -> None:
    """Runs a program of the package to its end; exits with what it printed where it fails."""
    print(f"{module} {arguments[-1]}", file=sys.stderr, flush=True)
    done = subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"error: {module} ended with code {done.returncode}: {done.stderr[-2000:]}")


def records_of(workdir: Path, name: str = "") -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that have this metric."""
    records = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if not name or name in record]


def overrides(config: str, fields: Mapping[str, Any]) -> list[str]:
    """The command line of a run."""
    return [f"--config={config}", *(f"--config.{field}={value}" for field, value in fields.items())]
