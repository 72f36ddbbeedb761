"""A taskset of verifiers for the tests: a word that has to be in a file, wherever a harness' program writes it."""

import verifiers.v1 as vf


class File(vf.Task[vf.TaskData]):
    @vf.reward
    async def written(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
        found = await runtime.run(["cat", "answer.txt"], {})
        return float(found.stdout.strip() == self.data.prompt.split()[1])


class Files(vf.Taskset[File, vf.TasksetConfig]):
    def load(self):
        for word in ("bee", "cab", "dab", "ebb"):
            yield File(vf.TaskData(prompt=f"write {word} to answer.txt"), self.config.task)


__all__ = ["File", "Files"]
