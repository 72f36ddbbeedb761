"""Roles: where the trainer's chips are, and what it is worth to lend them. Values in, values out.

One policy covers the three ways in which trainer and rollouts share chips; they differ in what a switch costs:

    split       no instance is lendable: the chips are the trainer's, whatever it waits for
    colocated   the chips hold the memory of both sides, and a switch costs nothing: the instances stand still from a
                whole batch to its version
    elastic     a switch moves the trainer's state: while the trainer waits, its chips decode as instances of their own
                (`lendable`), if `worth_lending` says so

The cost model: in the time `idle_s` until the trainer has its next groups, more chips decode faster by lent_rate / rate.
The groups are then ready earlier by idle_s * (1 - rate / lent_rate), and the trainer begins later by one switch.
lending.py decides by it.
"""

from __future__ import annotations

from collections.abc import Callable

from dora_jax.types import InstanceId

# Chips that are held delay the training of what becomes ready meanwhile: more instances must be so much faster, at least.
LEAST_GAIN = 1.2

ASKED, LENT, RETURNING = "asked", "lent", "returning"


def worth_lending(idle_s: float, rate: float, lent_rate: float, switch_s: float) -> bool:
    """Whether the trainer begins earlier by lending its chips. Rates: tokens/s of all instances, without and with the lent
    ones; switch_s: to the rollouts and back."""
    return lent_rate >= LEAST_GAIN * rate and idle_s > switch_s and idle_s * (1 - rate / lent_rate) > switch_s


def fleet_rate(instances: int, slots: float, samples: float, step_s: Callable[[float], float]) -> float:
    """Tokens/s of so many equal instances, where so many samples want a slot. step_s: seconds of a decode step of a batch."""
    batch = min(slots, samples / instances)
    return instances * batch / step_s(batch)


class Roles:
    """Where the trainer's chips are. `switch_s` is expected of a switch to the rollouts and back; what switches have taken
    replaces it."""

    CONFIGURED = ("lendable",)

    def __init__(self, lendable: tuple[InstanceId, ...], switch_s: float):
        self.lendable = lendable
        self.lent: dict[InstanceId, str] = {}  # ASKED, LENT or RETURNING; the chips of the others are the trainer's
        self.asked_s: dict[InstanceId, float] = {}  # when the present switch was asked for
        self.trained = 0  # groups of the step in progress that the trainer is done with
        self.out_s = self.back_s = switch_s / 2
        self.lends_total = 0

    @property
    def switch_s(self) -> float:
        return self.out_s + self.back_s

    def ask(self, id: InstanceId, now_s: float) -> None:
        self.lent[id], self.asked_s[id] = ASKED, now_s
        self.lends_total += 1

    def give_back(self, id: InstanceId, now_s: float) -> None:
        self.lent[id], self.asked_s[id] = RETURNING, now_s

    def came_up(self, id: InstanceId, now_s: float) -> None:
        if self.lent.get(id) == ASKED:
            self.lent[id] = LENT
            self.out_s += (now_s - self.asked_s.pop(id) - self.out_s) / 4

    def came_home(self, id: InstanceId, now_s: float) -> None:
        """The instance is no more, whatever ended it."""
        if self.lent.pop(id, None) == RETURNING:
            self.back_s += (now_s - self.asked_s[id] - self.back_s) / 4
        self.asked_s.pop(id, None)

    def all_home(self) -> None:
        """The process that lent the chips is over."""
        self.lent.clear()
        self.asked_s.clear()
        self.trained = 0
