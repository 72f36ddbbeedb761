"""The trainer's chips as the orchestrator's adversary lends them, and what must hold of them."""

from __future__ import annotations

from typing import Any

from dora_jax.orchestrate import events as ev

STILLBORN = 0.2  # of the incarnations that were asked for: they end before they come up


class Chips:
    def __init__(self, body: Any):
        self._body = body
        self.lent = self.drafted = 0

    def lend(self, command: ev.Lend) -> None:
        """The trainer has nothing to do, and its chips are its own."""
        body, i = self._body, command.instance
        assert i in body.config.lendable and i not in body.incarnations, f"{command}: its chips are lent"
        assert command.version <= body.published and command.version not in body.retired, f"{command}"
        assert len(body.batches[body.published]) < body.config.groups_per_step, f"{command}: the trainer works"
        self.lent += 1
        if body.moves <= body.calm_after and body.draw.random() < STILLBORN:
            body.born[i] += 1
            body.says["supervisor", i].append(ev.InstanceDown(instance=i, reason="killed", incarnation=body.born[i]))
        else:
            body.rise(i, versions=(command.version,))

    def train(self) -> None:
        """The trainer has its chips."""
        lent = [i for i in self._body.config.lendable if i in self._body.incarnations]
        assert not lent, f"the trainer begins while instances {lent} have its chips"

    def retire(self, version: int) -> None:
        """An instance on its way has its weights yet to load."""
        body = self._body
        for i in body.config.lendable:
            unannounced = i in body.incarnations and body.known(i) is None
            assert not unannounced or version not in body.incarnations[i].versions, (
                f"version {version} retires, but {i} loads it"
            )

    def decoded(self, rows: int) -> dict[str, Any]:
        """The fields of a report on decoding: a step takes a second for each of its rows, so that more instances decode
        faster, and half of that with drafts."""
        body = self._body
        if not body.config.lendable:
            return {}
        decoded: dict[str, Any] = {"sampled": rows, "busy_s": float(rows), "row_s": float(rows * rows)}
        if body.draw.random() < 0.3:
            self.drafted += 1
            held = body.draw.randrange(3 * rows)
            drafts = {"sampled": rows + held, "guesses": 3 * rows, "held": held}
            decoded["drafted"] = ev.Drafted(busy_s=rows / 2, row_s=rows * rows / 2, **drafts)
        return decoded
