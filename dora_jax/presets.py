"""What a platform chooses where the configuration leaves a field open: kernels, types, sizes. No JAX.

Consumes a `config.Config` as asked and the `Machine` that it runs on; produces a Config in which nothing is open, and
one `Choice` with its reason for each field that it filled in. Every stage gets the resolved Config.
Laws: what the user sets is kept; the same configuration and machine give the same choices; a CPU keeps what is tuned
for it.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

from dora_jax import chips

if TYPE_CHECKING:
    from dora_jax.config import Config, RolloutSection, TrainerSection

OPEN: tuple[Any, ...] = ("auto", 0, {})  # the values that leave a field to the platform
MIB = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """The devices of one role; the trainer's and the instances' may differ."""

    platform: str  # cpu, tpu or gpu
    chip: str = ""  # a key of chips.CHIPS; empty on a CPU


class Choice(NamedTuple):
    field: str
    value: Any
    reason: str


CPU = Machine(platform="cpu")


def machine_of(config: Config) -> Machine:
    """The machine that the configuration names, else a CPU; ValueError where the name is unknown."""
    if config.slice in ("", "laptop"):
        return CPU
    chip, _ = chips.parse(config.slice)
    return Machine(platform="gpu" if chip in chips.GPUS else "tpu", chip=chip)


def resolve(config: Config, machine: Machine) -> tuple[Config, tuple[Choice, ...]]:
    """(the configuration with every open field filled in, what was filled in and why)."""
    choices: list[Choice] = []
    rollout = _filled("rollout", config.rollout, _rollout(config.rollout, machine), choices)
    trainer = _filled("trainer", config.trainer, _trainer(machine), choices)
    model = _filled("model", config.model, _model(machine), choices)
    return dataclasses.replace(config, rollout=rollout, trainer=trainer, model=model), tuple(choices)


def on_cpu(section: Any) -> Any:
    """A RolloutSection or TrainerSection as a CPU runs it: for sections that no Config holds."""
    open_ = _rollout(section, CPU) if hasattr(section, "slots") else _trainer(CPU)
    return _filled("", section, open_, [])


# ---------------------------------------------------------------- private


def _filled(prefix: str, section: Any, presets: dict[str, tuple[Any, str]], choices: list[Choice]) -> Any:
    filled = {name: found for name, found in presets.items() if getattr(section, name) in OPEN}
    choices += [Choice(f"{prefix}.{name}", value, reason) for name, (value, reason) in filled.items()]
    return dataclasses.replace(section, **{name: value for name, (value, _) in filled.items()})


def _model(machine: Machine) -> dict[str, tuple[Any, str]]:
    if machine.platform == "cpu":
        return {"dtype": ("float32", "a CPU computes bfloat16 no faster")}
    return {"dtype": ("bfloat16", "the chip's matrix units take it, and weights and KV take half the memory")}


def _rollout(section: RolloutSection, machine: Machine) -> dict[str, tuple[Any, str]]:
    on_cpu = machine.platform == "cpu"
    kernel = {"cpu": "reference", "tpu": "tpu", "gpu": "gpu"}[machine.platform]
    page = section.page_size or (16 if on_cpu else 64)
    context = section.max_prompt_tokens + section.max_new_tokens
    pages = max(section.slots * -(-context // page), -(-context // page) + 1)
    return {
        "attention": (kernel, f"the kernel for this platform, {machine.platform}"),
        "page_size": (page, "small pages waste little" if on_cpu else "a table of larger pages fits the chip's memory"),
        "prefill_chunk": ((64, "prompts share chunks of it") if on_cpu else
                          (512, "one pass over the weights serves so many tokens")),
        "prefill_tokens": ((256, "so many keep decoding samples waiting only a moment") if on_cpu else
                           (1024, "matrix products of so many rows are bound by compute")),
        "pages": (pages, "every slot can hold a longest sample"),
        "late_results": (("off", "host and device are the same cores") if on_cpu else
                         ("on", "the device decodes while the host plans")),
    }


def _trainer(machine: Machine) -> dict[str, tuple[Any, str]]:
    on_cpu = machine.platform == "cpu"
    kernel = {"cpu": "reference", "tpu": "splash", "gpu": "cudnn"}[machine.platform]
    return {
        "attention": (kernel, f"the kernel for this platform, {machine.platform}"),
        "logits_bytes": ((64 * MIB, "larger chunks leave the cache") if on_cpu else
                         (1024 * MIB, "the head is read once for so many logits")),
    }
