"""A taskset of verifiers that has no end, for the tests: the words of dora_letters, over and over."""

import itertools

import verifiers.v1 as vf
from dora_letters import Chat, Letters, Talk


class Endless(vf.Taskset[Letters, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        for i in itertools.count():
            yield Letters(vf.TaskData(prompt="bcde"[i % 4]), self.config.task)


__all__ = ["Chat", "Endless", "Letters", "Talk"]
