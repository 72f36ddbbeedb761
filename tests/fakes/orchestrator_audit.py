"""What a finished run of `orchestrator_world` kept and what it broke, from what the body saw alone."""

from __future__ import annotations

from dora_jax.types import SampleId


class Audit:
    def mixed(self) -> list[SampleId]:
        """C1: samples whose tokens come from more than one version."""
        return [id for id, versions in self.spans.items() if len(versions) > 1]

    def broken(self) -> list[SampleId]:
        """C2: samples of usable groups that were given up."""
        unusable = set(self.failed_ids) | self.refused_ids
        return [id for id in sorted(self.given_up) if id.group_id not in unusable]

    def lags(self) -> dict[int, int]:
        """C3: lag -> trained groups, against the version that each group's first token came from."""
        lags: dict[int, int] = {}
        for base, groups in self.trained:
            for group_id in groups:
                lag = base - min(self.spans[SampleId(group_id, i)][0] for i in range(self.config.group_size))
                lags[lag] = lags.get(lag, 0) + 1
        return lags

    def audit(self) -> None:
        """What holds in every mode at the end of a run."""
        assert self.stop is not None and self.stop.ok, self.stop
        ids = [group_id for _, groups in self.trained for group_id in groups]
        assert len(ids) == len(set(ids)), "a group is trained twice"
        assert [base for base, _ in self.trained] == list(range(self.first_version, self.config.total_steps))
        assert all(len(groups) == self.config.groups_per_step for _, groups in self.trained)
        for group_id in ids:
            for i in range(self.config.group_size):
                assert self.ended[SampleId(group_id, i)] == "done", f"group {group_id} is trained, but not whole"
        assert self.started == self.ends, "a started sample has no end, or more than one"
        state = self.brain.state
        ends = [set(ids), set(self.filtered_ids), set().union(*self.evaluated.values()), self.discarded]
        ended = set().union(*ends)
        assert sum(map(len, ends)) == len(ended), "a group ends twice"
        assert {id.group_id for id in self.started} <= ended, "a group has no end"
        assert self.begun_with or not state.redo, f"prompts {state.redo} were given up, and are not issued again"
        assert not state.groups and not state.queue.unfinished
        for host in state.fleet.instances.values():
            assert (host.used, host.pages_used, host.incoming, host.counts) == (0, 0, 0, {}), f"{host.id} leaks"
