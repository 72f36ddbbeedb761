"""Small simulated runs and an observer that counts."""

import collections

from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate.core import each
from dora_jax.sim import config, run

SMALL = {
    "steps": 5, "warmup_steps": 1, "report_tokens": 64, "hardware.chips": 16, "hardware.rollout_chips": 8,
    "hardware.tensor": 2, "hardware.slots": 24, "workload.mean_tokens": 300.0, "workload.max_new_tokens": 3000,
    "workload.max_prompt_tokens": 256, "orchestrator.groups_per_step": 8, "orchestrator.group_size": 4,
    "orchestrator.rebalance_period_s": 5.0, "cost.train_fixed_s": 10.0,
}  # fmt: skip


def row(mode, **changes):
    settings = config.replace(config.SimConfig(), SMALL | {k.replace("__", "."): v for k, v in changes.items()})
    return config.Row(label=mode, mode=mode, config=settings, published={})


class Audit:
    """Observer: what was started, what ended, what was trained at which lag, and when each was reported."""

    def __init__(self):
        self.started, self.ended, self.version = collections.Counter(), collections.Counter(), {}
        self.moved = self.resumed = self.lost = 0
        self.trained, self.lags, self.log = [], [], []

    def __call__(self, event, commands):
        self.log.append((event, commands))
        match event:
            case ev.SampleDone(id=id):
                self.ended[id] += 1
            case ev.SampleMoved():
                self.moved += 1
            case ev.SampleResumed():
                self.resumed += 1
            case ev.InstanceDown():
                self.lost += 1
        for command in commands:
            if isinstance(command, ev.Start):
                self.started.update(command.ids)
                self.version |= {id.group_id: command.version for id in command.ids}
            elif isinstance(command, ev.Train):
                self.trained += command.group_ids
                self.lags += [command.base_version - self.version[g] for g in command.group_ids]


def simulate(mode, **changes):
    audit = Audit()
    return run.simulate(row(mode, **changes), observers=(each(audit),)), audit
