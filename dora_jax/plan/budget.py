"""The memory plan of a run: what the trainer and an instance need of a device, against what it has. No JAX.

Consumes a resolved configuration, the machines of both roles and the model's sizes; produces a `Budget`: its lines, the
pages that fit, advice, and a refusal that names the field that helps. The formulas are in memory.py.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from dora_jax.base.chips import Machine
from dora_jax.config import Config
from dora_jax.costs.update import expected
from dora_jax.models.families.config import ModelConfig
from dora_jax.plan import devices, memory
from dora_jax.plan.memory import GIB, PlanLine

TRAINER_KNOBS: tuple[tuple[str, Any], ...] = (  # in the order of what they cost
    ("micro_batches", 0),
    ("remat", "full"),
    ("moments", "bfloat16"),
    ("optimizer_memory", "host"),
)
SPARE = 0.1  # of a device's memory, where the plan may choose


class Machines(NamedTuple):
    """The machines of both roles; one machine twice where a process has both roles."""

    trainer: Machine
    instances: Machine

    def __str__(self) -> str:
        return " and ".join(dict.fromkeys(map(str, self)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """The memory plan of the device that holds the most."""

    config: Config
    model: ModelConfig
    machines: Machines
    mesh: memory.Mesh  # the trainer's
    shared: bool  # trainer and instances have devices in common
    crowd: int  # instances on one device
    aliased: bool  # all on one CPU: an instance runs the published version itself

    @property
    def trainer(self) -> list[PlanLine]:
        return [*self._trainer_alone, *([] if self._swaps or not self._lends else [self._lent_pages])]

    @property
    def lent(self) -> list[PlanLine]:
        """The device of the trainer while it is an instance's (orchestrator.elastic); empty where it is lent to
        none."""
        return [*self._lent_without_pages, self._lent_pages] if self._lends else []

    @property
    def instance(self) -> list[PlanLine]:
        """All instances of the device, without their pages."""
        return [line._replace(bytes=self.crowd * line.bytes) for line in self._one_instance]

    @property
    def _one_instance(self) -> list[PlanLine]:
        aliased = self.aliased and not self.config.lora.on  # a base is an instance's own
        weights = [] if aliased else memory.instance_weights(self.model, self.config)
        return [*weights, *memory.instance_work(self.model, self.config)]

    @property
    def _lends(self) -> bool:
        return self.config.orchestrator.elastic

    @property
    def _swaps(self) -> bool:
        """The state leaves a device that is lent, and the pages of the KV leave one that is not."""
        return self.config.trainer.lent_memory == "host"

    @property
    def _state(self) -> list[PlanLine]:
        on_host = self.config.trainer.optimizer_memory == "host" and self.machines.trainer.platform != "cpu"
        return memory.trainer_state(self.model, self.config, self.mesh, on_host)

    @property
    def _trainer_alone(self) -> list[PlanLine]:
        """Without the pages of the instance that the device is while it is lent."""
        base = [line for line in self._one_instance if self._lends and line.what == memory.BASE]
        return [*self._state, *memory.trainer_work(self.model, self.config, self.mesh), *base]

    @property
    def _lent_without_pages(self) -> list[PlanLine]:
        stays = [line for line in self._state if not self._swaps or line.what == memory.PUBLISHED]
        return [*stays, *self._one_instance]

    @property
    def _lent_pages(self) -> PlanLine:
        return PlanLine("KV pages", self._pages_bytes, "of the instance that the device is while it is lent")

    @property
    def pages_bytes(self) -> float:
        return self.crowd * self._pages_bytes

    @property
    def _pages_bytes(self) -> float:
        """Of one instance; one page takes what belongs to no row."""
        return (self.config.rollout.pages + 1) * self._page_bytes

    @property
    def pages(self) -> int:
        """KV pages of an instance: they take `memory_share` of the memory that is left, also on devices that are
        lent."""
        free = self.machines.instances.memory_bytes - memory.total(self.instance)
        free = (free - memory.total(self.trainer) if self.shared else free) / self.crowd
        if self._lends:
            held = [self._lent_without_pages, *([] if self._swaps else [self._trainer_alone])]
            free = min(free, self.machines.trainer.memory_bytes - max(map(memory.total, held)))
        return max(int(self.config.rollout.memory_share * free / self._page_bytes) - 1, 0)

    @property
    def needed_pages(self) -> int:
        """KV pages of one longest sample."""
        rollout = self.config.rollout
        return -(-(rollout.max_prompt_tokens + rollout.max_new_tokens) // rollout.page_size) + 1

    @property
    def slots(self) -> int:
        """Samples that the pages hold at once, if half of them are at full length and the others at half of it."""
        return max(int(self.config.rollout.pages / (0.75 * self.needed_pages)), 1)

    @property
    def micro_batches(self) -> int:
        """The fewest micro-batches that fit and leave a tenth for what is only estimated; 0: no number fits."""
        fitting = (
            n for n in range(1, self.rows + 1) if self.rows % n == 0 and self._trainer_fits(1 - SPARE, micro_batches=n)
        )
        return next(fitting, 0)

    @property
    def rows(self) -> int:
        """Rows of an update on one shard."""
        return memory.batch_layout(self.config, self.mesh).rows // self.mesh.rows

    @property
    def _page_bytes(self) -> float:
        return memory.page_bytes(self.model, self.config.rollout, self.config.model.dtype)

    def with_trainer(self, **changes: Any) -> Budget:
        section = dataclasses.replace(self.config.trainer, **changes)
        return dataclasses.replace(self, config=dataclasses.replace(self.config, trainer=section))

    def _trainer_fits(self, share: float = 1.0, **changes: Any) -> bool:
        return memory.total(self.with_trainer(**changes).trainer) <= share * self.machines.trainer.memory_bytes


def of(config: Config, machines: Machines, model: ModelConfig | None) -> Budget | None:
    """The plan of a configuration in which all but `rollout.pages` is resolved; None where something is not known.

    ConfigError where the meshes do not fit the devices.
    """
    if model is None or not all(machine.devices and machine.memory_bytes for machine in machines):
        return None
    if config.cluster.launcher:
        mesh = devices.trainer_mesh(machines.trainer.devices, config)
        return Budget(
            config=config, model=model, machines=machines, mesh=memory.Mesh(*mesh), shared=False, crowd=1, aliased=False
        )
    plan = devices.plan(machines.trainer.devices, config)
    crowd = max(Counter(itertools.chain(*plan.instances)).values())
    return Budget(
        config=config,
        model=model,
        machines=machines,
        mesh=memory.Mesh(*plan.trainer_mesh),
        shared=plan.shared,
        crowd=crowd,
        aliased=plan.n_devices == 1 and machines.trainer.platform == "cpu",
    )


def problems(budget: Budget) -> list[str]:
    """One sentence for each reason why the plan does not fit, with the field that helps."""
    return [*_trainer_problems(budget), *_lent_problems(budget), *_instance_problems(budget)]


def describe(budget: Budget) -> str:
    """The lines of the plan that --dry_run prints."""
    lines = [_model_line(budget.model)]
    for role, machine, parts in (
        ("trainer", budget.machines.trainer, budget.trainer),
        ("instance", budget.machines.instances, [*budget.instance, _pages_line(budget)]),
    ):
        has = machine.memory_bytes / GIB
        lines += [
            f"memory of a device of the {role}: {memory.total(parts) / GIB:.2f} of {has:.2f} GiB",
            *memory.table(parts),
        ]
    if budget.lent:
        has = budget.machines.trainer.memory_bytes / GIB
        lines += [
            (
                "memory of a device of the trainer while it is lent: "
                f"{memory.total(budget.lent) / GIB:.2f} of {has:.2f} GiB"
            ),
            *memory.table(budget.lent),
        ]
    if budget.shared:
        lines.append("trainer and instances share devices: both sums together have to fit")
    return "\n".join([*lines, *_advice(budget)])


# ---------------------------------------------------------------- private


def _model_line(model: ModelConfig) -> str:
    params = f"model: {(model.matrix_params + model.gain_params) / 1e9:,.2f}e9 parameters"
    if model.experts is None:
        return params
    return f"{params}, of which a token meets {(model.active_params + model.gain_params) / 1e9:,.2f}e9 ({model.family})"


def _pages_line(budget: Budget) -> PlanLine:
    rollout = budget.config.rollout
    of_all = f"{budget.crowd} instances of " if budget.crowd > 1 else ""
    return PlanLine("KV pages", budget.pages_bytes, f"{of_all}{rollout.pages} pages of {rollout.page_size} tokens")


def _advice(budget: Budget) -> Iterator[str]:
    rollout, t = budget.config.rollout, budget.config.trainer
    yield (
        f"rollout.slots: {rollout.slots}; the pages hold {rollout.pages // budget.needed_pages} longest samples, or "
        f"{budget.slots} of mixed lengths"
    )
    if fewest := budget.micro_batches:
        yield f"trainer.micro_batches: {t.micro_batches}; the fewest that fit, and leave a tenth, are {fewest}"
    if chip := budget.machines.trainer.chip:
        shape = memory.batch_layout(budget.config, budget.mesh)
        yield f"trainer: {expected(budget.model, t, budget.mesh, chip, shape.rows, shape.tokens, budget.config.lora)}"


def _trainer_problems(budget: Budget) -> Iterator[str]:
    has, needs = budget.machines.trainer.memory_bytes, memory.total(budget.trainer)
    if needs <= has:
        return
    knob = next(iter(_enough(budget)), "fsdp")
    yield (
        f"trainer.{knob}: an update needs {needs / GIB:.1f} GiB a device of {budget.machines.trainer}, "
        f"which has {has / GIB:.1f}; {_help(budget)}"
    )


def _lent_problems(budget: Budget) -> Iterator[str]:
    has, needs = budget.machines.trainer.memory_bytes, memory.total(budget.lent)
    if needs > has:
        moved = budget.config.trainer.lent_memory == "host"
        yield (
            f"{'rollout.pages' if moved else 'trainer.lent_memory'}: while it is lent (orchestrator.elastic), a device "
            f"of the trainer holds {needs / GIB:.1f} GiB, and {budget.machines.trainer} has {has / GIB:.1f}; "
            + (
                "fewer pages need less"
                if moved
                else "trainer.lent_memory=host moves the state to host memory meanwhile"
            )
        )


def _knobs(budget: Budget) -> Iterator[dict[str, Any]]:
    """Changes of the trainer's section, the gentlest first: each alone, then all up to each."""
    changes = [
        {name: value or budget.rows}
        for name, value in TRAINER_KNOBS
        if getattr(budget.config.trainer, name) != (value or budget.rows)
    ]
    yield from changes
    for count in range(2, len(changes) + 1):
        yield {name: value for change in changes[:count] for name, value in change.items()}


def _enough(budget: Budget) -> dict[str, Any]:
    """The first of the knobs that makes the update fit; empty where none does."""
    return next((change for change in _knobs(budget) if budget._trainer_fits(**change)), {})


def _help(budget: Budget) -> str:
    change = dict(_enough(budget))
    if not change:
        return "no setting of one device is enough: give the trainer more devices"
    if "micro_batches" in change:
        less = budget.with_trainer(**{k: v for k, v in change.items() if k != "micro_batches"})
        change["micro_batches"] = less.micro_batches or change["micro_batches"]
    return "it fits with " + ", ".join(f"trainer.{name}={value}" for name, value in change.items())


def _instance_problems(budget: Budget) -> Iterator[str]:
    rollout, machine = budget.config.rollout, budget.machines.instances
    with_trainer = memory.total(budget.trainer) if budget.shared else 0.0
    needs = memory.total(budget.instance) + with_trainer
    least = needs + budget.crowd * (budget.needed_pages + 1) * budget._page_bytes
    beside = ", the trainer's part included," if budget.shared else ""
    if least > machine.memory_bytes:
        knob = "residents" if rollout.residents > 1 and not budget.config.lora.on else "tensor"
        yield (
            f"rollout.{knob}: weights, calls and one longest sample{beside} need {least / GIB:.1f} "
            f"GiB a device of {machine}, which has {machine.memory_bytes / GIB:.1f}; {_instance_help(budget)}"
        )
    elif needs + budget.pages_bytes > machine.memory_bytes:
        yield (
            f"rollout.pages: {rollout.pages} pages take {budget.pages_bytes / GIB:.1f} GiB of a device of {machine}, "
            f"where weights and calls{beside} leave {(machine.memory_bytes - needs) / GIB:.1f}; 0 takes what fits"
        )


def _instance_help(budget: Budget) -> str:
    rollout = budget.config.rollout
    if budget.shared:
        return "placement=disjoint gives the instances devices of their own"
    if budget.config.rollout.residents > 1 and not budget.config.lora.on:
        return "fewer residents need less"
    return f"more than {rollout.tensor} devices an instance need less of each" + (
        "" if rollout.weights else ", as does rollout.weights=int8"
    )
