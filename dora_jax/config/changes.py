"""What another value of a field means to a run that goes on in its workdir, as the field's declaration has it:

    free        the run learns the same, and nobody is asked
    learns      another thing is learned from here on: --accept_changes
    afresh      so it is, and what is in flight is of no use: the run goes on from its newest checkpoint
    a sentence  it cannot change, and why

Consumes the settings of two starts; produces what differs, and a sentence for what may not. Laws: settings are JSON, as
the journal holds them, with secrets blanked; a field that one of the two starts did not have is no difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dora_jax import config as configs
from dora_jax.base import config_tree
from dora_jax.base.config_tree import AFRESH, FREE, LEARNS
from dora_jax.config import VALUE_ADVANTAGES, Config

Json = Any  # what `json.loads` gives
Settings = dict[str, Json]  # field -> its value
Changes = dict[str, tuple[Json, Json]]  # field -> its value before and now
LONGEST = 60  # characters of a value in a sentence


def settings(tree: Settings) -> Settings:
    """The fields of a JSON tree of sections by dotted name; those that it does not have are left out."""
    values = {}
    for name in configs.fields():
        value: Json = tree
        for part in name.split("."):
            value = value.get(part, config_tree) if isinstance(value, Mapping) else config_tree
        if value is not config_tree:  # which stands for nothing
            values[name] = value
    return values


def between(before: Settings, now: Settings) -> Changes:
    """What differs between the settings of two starts."""
    return {name: (before[name], now[name]) for name in now if name in before and before[name] != now[name]}


def learned(changed: Iterable[str], only_afresh: bool = False) -> list[str]:
    """The fields, of these, that are not free; only_afresh: that take effect from the newest checkpoint on."""
    declared = config_tree.declared(Config)
    return [name for name in changed if declared[name].change in ((AFRESH,) if only_afresh else (LEARNS, AFRESH))]


def problems(changed: Changes, accepted: bool) -> list[str]:
    """Why a run does not go on with these changes, as what follows "it belongs to another config". accepted: those that
    change what is learned are."""
    declared = config_tree.declared(Config)
    stays = {name: why for name in changed if (why := declared[name].change) not in (FREE, LEARNS, AFRESH)}
    if len({value in VALUE_ADVANTAGES for value in changed.get("trainer.advantage", ())}) > 1:
        stays["trainer.advantage"] = f"checkpoints hold a value model only where it is {' or '.join(VALUE_ADVANTAGES)}"
    if stays:
        return [f": {name} cannot change there ({why}); choose another --workdir" for name, why in stays.items()]
    names, again = ", ".join(learned(changed)), ", ".join(learned(changed, only_afresh=True))
    if accepted or not names:
        return []
    how = f", for {again} from its newest checkpoint" if again else ""
    why = f", which differs in {names}: that changes what is learned; with --accept_changes the run goes on{how}, or "
    return [f"{why}choose another --workdir"]


def sentence(changed: Changes) -> str:
    """The changes for the console: "rollout.slots 64 -> 32, ..."."""
    return ", ".join(f"{name} {_shown(before)} -> {_shown(now)}" for name, (before, now) in changed.items())


def _shown(value: Json) -> str:
    text = str(value) if value != "" else "''"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
