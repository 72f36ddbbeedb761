"""The memory plan of a run: what the trainer and an instance need of a device, against what it has. No JAX.

Consumes a resolved configuration, the machines of both roles and the model's sizes; produces a `Budget`: its lines, the
pages that fit, advice, and a refusal that names the field that helps. The formulas are in memory.py.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from typing import Any, NamedTuple

from dora_jax.base.chips import Machine
from dora_jax.config import Config
from dora_jax.models.families.config import ModelConfig
from dora_jax.orchestrate.modes import OrchestratorConfig
from dora_jax.plan import devices, memory
from dora_jax.plan.memory import GIB, PlanLine

TRAINER_KNOBS: tuple[tuple[str, Any], ...] = (  # in the order of what they cost
    ("micro_batches", 0),
    ("remat", "full"),
    ("moments", "bfloat16"),
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
    instances: int
    aliased: bool  # all on one CPU: an instance runs the published version itself

    @property
    def trainer(self) -> list[PlanLine]:
        lends = self.config.orchestrator.elastic
        return [*self._trainer_alone, *([] if self._swaps or not lends else [self._lent_pages])]

    @property
    def lent(self) -> list[PlanLine]:
        """The device of the trainer while it is an instance's (orchestrator.elastic); empty where it is lent to
        none."""
        return [*self._lent_without_pages, self._lent_pages] if self.config.orchestrator.elastic else []

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
    def _swaps(self) -> bool:
        """The state leaves a device that is lent, and the pages of the KV leave one that is not."""
        return self.config.trainer.lent_memory == "host"

    @property
    def _state(self) -> list[PlanLine]:
        return memory.trainer_state(self.model, self.config, self.mesh)

    @property
    def _trainer_alone(self) -> list[PlanLine]:
        """Without the pages of the instance that the device is while it is lent."""
        lends = self.config.orchestrator.elastic
        base = [line for line in self._one_instance if lends and line.what == memory.BASE]
        return [*self._state, *memory.trainer_work(self.model, self.config, self.mesh), *base]

    @property
    def _lent_without_pages(self) -> list[PlanLine]:
        away = {memory.MOMENTS} if self.config.trainer.optimizer_memory == "host" else set()
        stays = [x for x in self._state if x.what == memory.PUBLISHED or not (self._swaps or x.what in away)]
        return [*stays, *self._one_instance]

    @property
    def _lent_pages(self) -> PlanLine:
        return PlanLine("KV pages", self._pages_bytes, "of the instance that the device is while it is lent")

    @property
    def pages_bytes(self) -> float:
        return self.crowd * self._pages_bytes

    @property
    def _pages_bytes(self) -> float:
        """Bytes of one instance's pages."""
        return memory.pages_bytes(self.model, self.config.rollout, self.config.model.dtype)

    @property
    def pools(self) -> tuple[int, int]:
        """(KV pages of an instance, those of its layers with a window): they take `memory_share` of the memory that is
        left, also on devices that are lent."""
        free = self.machines.instances.memory_bytes - memory.total(self.instance)
        free = (free - memory.total(self.trainer) if self.shared else free) / self.crowd
        if self.config.orchestrator.elastic:
            held = [self._lent_without_pages, *([] if self._swaps else [self._trainer_alone])]
            free = min(free, self.machines.trainer.memory_bytes - max(map(memory.total, held)))
        rollout = self.config.rollout
        return memory.pages_within(self.model, rollout, self.config.model.dtype, rollout.memory_share * free)

    @property
    def needed_pages(self) -> int:
        """KV pages of one longest sample."""
        rollout = self.config.rollout
        return -(-(rollout.max_prompt_tokens + rollout.max_new_tokens) // rollout.page_size) + 1

    @property
    def slots(self) -> int:
        """Samples that the pages hold at once, if half of them are at full length and the others at half of it."""
        return max(int(self.config.rollout.pages / (0.75 * self.needed_pages)), 1)

    def slots_for(self, least: int, multiple: int) -> int:
        """Slots of an instance, `least` or more: those that are in flight, as far as pages and the page table of a
        TPU's kernel hold them; so many times `multiple`."""
        rollout, count = self.config.rollout, -(-max(self.demand, least) // multiple) * multiple
        while count > least:
            section = dataclasses.replace(rollout, slots=count)
            tried = dataclasses.replace(self, config=dataclasses.replace(self.config, rollout=section))
            section = dataclasses.replace(section, pages=rollout.pages or tried.pools[0])
            held = dataclasses.replace(tried, config=dataclasses.replace(self.config, rollout=section)).slots
            if rollout.attention in ("tpu", "tokamax") and not rollout.decode_rows:
                held = min(held, int(count * memory.TABLE_BYTES / memory.table_bytes(section, section.page_size)))
            if held >= count:
                break
            count = max(
                min(count - multiple, max(held, count // 2)) // multiple * multiple, least
            )  # fewer slots leave more pages
        return count

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
    def demand(self) -> int:
        """Samples that an instance has at once, of those that are outstanding."""
        section, rollout = self.config.orchestrator, self.config.rollout
        decisions = OrchestratorConfig.of(section, rollout, total_steps=self.config.steps).decisions
        return -(-(decisions.target_groups + decisions.over_issued) * section.group_size // self.instances)

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
    count, one = machines.trainer.devices, functools.partial(Budget, config=config, model=model, machines=machines)
    if config.cluster.launcher:
        mesh = memory.Mesh(*devices.trainer_mesh(count, config))
        return one(mesh=mesh, shared=False, crowd=1, instances=config.rollout.instances, aliased=False)
    plan = devices.plan(count, config)
    crowd = max(Counter(itertools.chain(*plan.instances)).values())
    aliased = plan.n_devices == 1 and machines.trainer.platform == "cpu"
    mesh, instances = memory.Mesh(*plan.trainer_mesh), len(plan.instances)
    return one(mesh=mesh, shared=plan.shared, crowd=crowd, instances=instances, aliased=aliased)


def problems(budget: Budget) -> list[str]:
    """One sentence for each reason why the plan does not fit, with the field that helps."""
    rollout, (trainer, instance), found = budget.config.rollout, budget.machines, []
    updating, lent = memory.total(budget.trainer), memory.total(budget.lent)
    if updating > trainer.memory_bytes:
        knob, advice = _trainer_help(budget)
        found.append(
            f"trainer.{knob}: an update needs {updating / GIB:.1f} GiB a device of {trainer}, "
            f"which has {trainer.memory_bytes / GIB:.1f}; {advice}"
        )
    if lent > trainer.memory_bytes:
        knob, advice = "trainer.lent_memory", "trainer.lent_memory=host moves the state to host memory meanwhile"
        if budget._swaps:
            knob, advice = "rollout.pages", "fewer pages need less"
        found.append(
            f"{knob}: while it is lent (orchestrator.elastic), a device of the trainer holds {lent / GIB:.1f} GiB, "
            f"and {trainer} has {trainer.memory_bytes / GIB:.1f}; {advice}"
        )
    needs = memory.total(budget.instance) + (updating if budget.shared else 0.0)
    page_bytes = memory.page_bytes(budget.model, rollout, budget.config.model.dtype)
    states = memory.states_bytes(budget.model, rollout, budget.config.model.dtype)
    least = needs + budget.crowd * ((budget.needed_pages + 1) * page_bytes + states)
    beside = ", the trainer's part included," if budget.shared else ""
    if least > instance.memory_bytes:
        fewer = rollout.residents > 1 and not budget.config.lora.on
        if budget.shared:
            advice = "placement=disjoint gives the instances devices of their own"
        elif fewer:
            advice = "fewer residents need less"
        else:
            narrower = "" if rollout.weights else ", as does rollout.weights=int8"
            advice = f"more than {rollout.tensor} devices an instance need less of each{narrower}"
        found.append(
            f"rollout.{'residents' if fewer else 'tensor'}: weights, calls and one longest sample{beside} need "
            f"{least / GIB:.1f} GiB a device of {instance}, which has {instance.memory_bytes / GIB:.1f}; {advice}"
        )
    elif needs + budget.pages_bytes > instance.memory_bytes:
        found.append(
            f"rollout.pages: {rollout.pages} pages take {budget.pages_bytes / GIB:.1f} GiB of a device of {instance}, "
            f"where weights and calls{beside} leave {(instance.memory_bytes - needs) / GIB:.1f}; 0 takes what fits"
        )
    return found


def describe(budget: Budget) -> str:
    """The lines of the plan that --dry_run prints."""
    model, rollout, t = budget.model, budget.config.rollout, budget.config.trainer
    lines = [f"model: {(model.matrix_params + model.gain_params) / 1e9:,.2f}e9 parameters"]
    if model.experts is not None:
        active = (model.active_params + model.gain_params) / 1e9
        lines[0] += f", of which a token meets {active:,.2f}e9 ({model.family})"
    of_all = f"{budget.crowd} instances of " if budget.crowd > 1 else ""
    note = f"{of_all}{rollout.pages} pages of {rollout.page_size} tokens"
    if rollout.window_pages:
        note += f", and {rollout.window_pages} of the {len(model.windows)} layers with a window"
    if model.linear_layers:
        each = model.state_bytes_on(1, memory.BYTES[budget.config.model.dtype]) / (1 << 20)
        note += f", and {memory.shapes.state_places(rollout)} recurrent states of {each:.1f} MiB"
    pages = PlanLine("KV pages", budget.pages_bytes, note)
    for role, machine, parts in (
        ("trainer", budget.machines.trainer, budget.trainer),
        ("instance", budget.machines.instances, [*budget.instance, pages]),
        ("trainer while it is lent", budget.machines.trainer, budget.lent),
    ):
        if parts:
            has = machine.memory_bytes / GIB
            lines.append(f"memory of a device of the {role}: {memory.total(parts) / GIB:.2f} of {has:.2f} GiB")
            lines += memory.table(parts)
    if budget.shared:
        lines.append("trainer and instances share devices: both sums together have to fit")
    lines.append(
        f"rollout.slots: {rollout.slots}; the pages hold {rollout.pages // budget.needed_pages} longest samples, or "
        f"{budget.slots} of mixed lengths"
    )
    if fewest := budget.micro_batches:
        lines.append(f"trainer.micro_batches: {t.micro_batches}; the fewest that fit, and leave a tenth, are {fewest}")
    return "\n".join(lines)


# ---------------------------------------------------------------- private


def _trainer_help(budget: Budget) -> tuple[str, str]:
    """(the field to change, what makes the update fit), by the gentlest change that does: a knob alone, else all up to
    one."""
    values = {name: value or budget.rows for name, value in TRAINER_KNOBS}
    names = [name for name, value in values.items() if getattr(budget.config.trainer, name) != value]
    for chosen in [*([name] for name in names), *(names[:count] for count in range(2, len(names) + 1))]:
        change = {name: values[name] for name in chosen}
        if not budget._trainer_fits(**change):
            continue
        if "micro_batches" in change:
            less = budget.with_trainer(**{k: v for k, v in change.items() if k != "micro_batches"})
            change["micro_batches"] = less.micro_batches or change["micro_batches"]
        return chosen[0], "it fits with " + ", ".join(f"trainer.{name}={value}" for name, value in change.items())
    return "fsdp", "no setting of one device is enough: give the trainer more devices"
