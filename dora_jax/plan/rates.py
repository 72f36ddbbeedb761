"""What a run does in a second, by arithmetic: tokens of an instance, a step of the trainer, which of the two waits, and
what would change it. No JAX.

Consumes a memory plan and `RoleTimes`, a chip's from its table or a machine's as measured; produces `Rates` and the
lines that --dry_run prints of them.
Laws: lengths are assumed, half of their limits unless they are given, and printed; the roles take their work as fast as
they can, so that empty slots of a schedule count nowhere (`dora_jax.simulate` counts them).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from dora_jax.base.chips import CORES_IN_NAME, DEVICES_A_CHIP, parse
from dora_jax.costs import LAYER_OVERHEAD_S, CostOptions, Costs, Hardware, ModelSizes, Roofline, sizes_of
from dora_jax.costs.update import Expected, expected
from dora_jax.models.lora_config import adapter_params
from dora_jax.plan import budget, memory, presets
from dora_jax.plan.budget import Budget
from dora_jax.rollout.shapes import shapes_of

NOTICE = 0.05  # a role that waits a smaller share of a step, or a change that saves one, is not worth a word
SHOWN = 3  # changes
WRITTEN = 2  # tokens: a step's own KV is read and written where it is scattered into its page


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoleTimes:
    """What the rates of a configuration are made of."""

    costs: Costs  # of an instance
    update_s: Callable[[int], float]  # of an update with so many micro-batches that hold tokens
    host_s: float = 0.0  # of a step: what the controller does, and the roles beside their programs


class Rates(NamedTuple):
    """What both roles do with the samples of a step, each as if it never waited."""

    prompt: float  # tokens of a prompt in the mean,
    answer: float  # and of an answer
    instances: int
    rows: float  # samples that an instance decodes at once
    unused: float  # steps of a row after its sample has stopped, before another takes its place
    decode_s: float  # one token of all of them, while instances on one device take turns
    prefill_s: float  # of a sample: its share of the group's prompt
    samples: int  # of a step
    micro_batches: int  # of an update, those that hold tokens
    trainer_s: float  # all updates of a step
    host_s: float  # see RoleTimes; 0: not measured
    apart: bool  # the roles work at the same time

    @property
    def tokens_per_s(self) -> float:
        """Tokens that an instance samples, prefill included."""
        return self.answer / ((self.answer + self.unused) * self.decode_s / self.rows + self.prefill_s)

    @property
    def rollout_s(self) -> float:
        """Seconds in which all instances sample what a step takes."""
        return self.samples * self.answer / (self.instances * self.tokens_per_s)

    @property
    def step_s(self) -> float:
        return (max if self.apart else sum)((self.rollout_s, self.trainer_s, self.host_s))

    @property
    def balance(self) -> str:
        """Who waits for whom."""
        trainer, rollout = self.trainer_s / self.step_s, self.rollout_s / self.step_s
        if not self.apart:
            return f"they take turns, and the trainer has {trainer:.0%} of a step"
        if trainer < 1 - NOTICE:
            return f"the trainer waits {1 - trainer:.0%} of a step for samples"
        if rollout < 1 - NOTICE:
            return f"the instances wait {1 - rollout:.0%} of a step for the trainer"
        return "neither waits"


def of(planned: Budget, times: RoleTimes, prompt: float = 0.0, answer: float = 0.0, trained: float = 1.0) -> Rates:
    """Rates with prompts and answers of so many tokens in the mean; 0: half of the limit. trained: the share of the
    samples that an update takes, which trainer.skip_zero_advantage makes smaller."""
    config, rollout, t = planned.config, planned.config.rollout, planned.config.trainer
    section = config.orchestrator
    prompt, answer = prompt or rollout.max_prompt_tokens / 2, answer or rollout.max_new_tokens / 2
    # A sample that decodes holds its prompt and half of its answer in the mean
    context, costs, width = prompt + answer / 2, times.costs, rollout.decode_rows or rollout.slots
    rows = min(rollout.slots, planned.demand, rollout.pages * rollout.page_size / context)
    moved = context + WRITTEN, min(context, costs.window) + WRITTEN * (costs.window > 0)
    moved_s = moved[0] * costs.decode_kv_s + moved[1] * costs.window_kv_s
    shape, samples = memory.batch_layout(config, planned.mesh), section.groups_per_step * section.group_size
    shared = section.group_size if t.share_prompts == "on" else 1
    updated = trained * -(-section.groups_per_step // t.updates) * section.group_size  # samples
    positions = updated * (prompt / shared + answer)
    held = min(math.ceil(positions / shape.tokens * t.micro_batches / shape.rows), t.micro_batches)
    return Rates(
        prompt=prompt,
        answer=answer,
        instances=planned.instances,
        rows=rows,
        unused=(rollout.decode_steps - 1) / 2 + rollout.decode_steps * (rollout.late_results == "on"),
        decode_s=planned.crowd * (math.ceil(rows / width) * costs.decode_base_s(width) + rows * moved_s),
        prefill_s=planned.crowd * costs.prefill_s(round(prompt)) / section.group_size,
        samples=samples,
        micro_batches=held,
        trainer_s=t.updates * times.update_s(held),
        host_s=times.host_s,
        apart=not (planned.shared or section.colocated or section.synchronous),
    )


def of_chips(planned: Budget) -> RoleTimes | None:
    """By the hardware table; None where a role runs on nothing that it has."""
    config, model, (trainer, instance) = planned.config, planned.model, planned.machines
    rollout = config.rollout
    if not trainer.chip or not instance.chip:
        return None
    chips = max(rollout.tensor // DEVICES_A_CHIP.get(instance.chip, 1), 1)
    dtype, whole = config.model.dtype, dataclasses.replace(rollout, tensor=1)
    sizes = sizes_of(ModelSizes(), chips, model)
    size = memory.BYTES[dtype]
    narrow = model.n_layers * model.layer_params() * (size - memory.BYTES.get(memory.weights_type(config), 1))
    sizes = dataclasses.replace(
        sizes,
        weight_bytes_per_param=size - narrow / sizes.params,
        kv_bytes_per_token=memory.token_bytes(model, whole, dtype),
        adapter_bytes=size * adapter_params(model, config.lora) if config.lora.on else 0.0,
    )
    hardware = Hardware(
        chip=instance.chip,
        tensor=1 if rollout.expert > 1 else chips,
        expert=chips if rollout.expert > 1 else 1,
        residents=rollout.residents if config.lora.on else 1,
        slots=rollout.slots,
        hbm_share=1.0,
        page_size=rollout.page_size,
    )
    options = CostOptions(decode_overhead_s=LAYER_OVERHEAD_S * model.n_layers)
    return RoleTimes(
        costs=Roofline(sizes, hardware, options), update_s=lambda micro_batches: update(planned, micro_batches).seconds
    )


def update(planned: Budget, micro_batches: int) -> Expected:
    """An update of the trainer's chip with so many full micro-batches."""
    shape, t = memory.batch_layout(planned.config, planned.mesh), planned.config.trainer
    rows = shape.rows // t.micro_batches * micro_batches
    section = dataclasses.replace(t, micro_batches=micro_batches)
    chip = planned.machines.trainer.chip
    return expected(planned.model, section, planned.mesh, chip, rows, shape.tokens, planned.config.lora)


def describe(planned: Budget) -> list[str]:
    """The lines that --dry_run prints; none where no role's chip is in the table."""
    times = of_chips(planned)
    if times is None:
        return []
    here, t = of(planned, times), planned.config.trainer
    takes = f"{here.instances} instances sample" if here.instances > 1 else "1 instance samples"
    lines = [
        (
            f"an instance: {here.tokens_per_s:,.0f} tokens/s of {here.rows:.0f} samples at once, "
            f"{1e3 * here.decode_s:.3g} ms a token of each; prefill takes "
            f"{here.prefill_s * here.tokens_per_s / here.answer:.0%}"
        ),
        (
            f"a step of the trainer: {here.trainer_s:.3g} s{f' in {t.updates} updates' * (t.updates > 1)}, "
            f"{here.micro_batches} of {t.micro_batches} micro-batches hold tokens; "
            f"{update(planned, here.micro_batches)}"
        ),
        (
            f"balance, if prompts have {here.prompt:.0f} and answers {here.answer:.0f} tokens in the mean: "
            f"{takes} the {here.samples} answers of a step in {here.rollout_s:.3g} s, the trainer takes "
            f"{here.trainer_s:.3g} s: {here.balance}; {here.step_s:.3g} s a step"
        ),
    ]
    better: dict[float, str] = {}  # of what comes to the same, the fewest fields
    for step_s, text in sorted(changes(planned, here.step_s * (1 - NOTICE)), key=lambda one: len(one[1])):
        better.setdefault(float(f"{step_s:.3g}"), text)
    advice = [f"{text} ({step_s:g} s a step)" for step_s, text in sorted(better.items())[:SHOWN]]
    trainer, rollout = math.prod(planned.mesh), here.instances * planned.config.rollout.tensor
    if here.apart and planned.machines.trainer.chip == planned.machines.instances.chip:
        work, all_work = trainer * here.trainer_s, trainer * here.trainer_s + rollout * here.rollout_s
        even = (trainer + rollout) * work / all_work
        advice.append(f"neither would wait if the trainer had {even:.1f} of the {trainer + rollout} devices")
    return [*lines, f"to change: {'; '.join(advice) or 'nothing that is tried here makes a step shorter'}"]


def changes(planned: Budget, below_s: float) -> Iterator[tuple[float, str]]:
    """(seconds of a step, what to set) of the changes that fit the devices and bring a step below so many seconds."""
    config = planned.config
    t, rollout, cluster = config.trainer, config.rollout, config.cluster
    tried: list[dict[str, object]] = [{"trainer.remat": remat} for remat in ("dots", "none") if remat != t.remat]
    tried += [{"rollout.slots": 2 * rollout.slots}, {"orchestrator.inflight": 2 * config.orchestrator.inflight}]
    tried += [tried[-1] | tried[-2]]
    if cluster.launcher:
        chip, count = parse(cluster.trainer_slice) if cluster.trainer_slice else ("", 0)
        larger = {"cluster.trainer_slice": f"{chip}-{2 * count * CORES_IN_NAME.get(chip, 1)}"}
        tried += [{"rollout.instances": rollout.instances + 1}]
        tried += [larger | {"cluster.trainer_hosts": 2 * cluster.trainer_hosts}] if count else []
    elif not planned.shared:
        fsdp = planned.mesh.fsdp
        tried += [{"trainer.fsdp": n, "rollout.instances": 0} for n in (2 * fsdp, fsdp // 2) if n]
    for fields in tried:
        sections: dict[str, dict[str, object]] = {}
        for name, value in fields.items():
            section, _, field = name.partition(".")
            sections.setdefault(section, {})[field] = value
        replaced = {name: dataclasses.replace(getattr(config, name), **values) for name, values in sections.items()}
        changed = dataclasses.replace(config, **replaced)
        try:
            shapes_of(changed.rollout)
            other = presets.plan(changed, presets.machines(changed), planned.model).memory
        except ValueError:  # the devices do not divide so, or the page table is too large
            continue
        if other and budget.problems(other) and other.micro_batches:
            fields["trainer.micro_batches"] = other.micro_batches
            other = other.with_trainer(micro_batches=other.micro_batches)
        if other is None or budget.problems(other) or (times := of_chips(other)) is None:
            continue
        if (step_s := of(other, times).step_s) < below_s:
            yield step_s, " ".join(f"{name}={value}" for name, value in fields.items())
