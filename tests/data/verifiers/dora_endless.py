"""A taskset of verifiers that has no end, for the tests: a letter over and over, scored by the length of the answer."""

import itertools

import verifiers.v1 as vf


class Letter(vf.Task[vf.TaskData]):
    @vf.reward
    async def length(self, trace: vf.Trace) -> float:
        return float(sum(len(m.content or "") for m in trace.branches[-1].messages if m.role == "assistant"))


class Endless(vf.Taskset[Letter, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        for i in itertools.count():
            yield Letter(vf.TaskData(prompt="bcde"[i % 4]), self.config.task)


__all__ = ["Endless", "Letter"]
