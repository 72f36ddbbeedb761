"""In how many files a feature is named outside its own: what a reader has to meet who does not want it.

Identifiers and words of strings count, docstrings and comments do not; nor do plan/ (rules between fields), bench/, the
glossary of report/legend.py and the table of former names. Ten files are the aim. Where a figure is above it, the
orchestrator's or the engine's own state has the feature: its facts and commands, its ledger, snapshot and views, a
compiled call and its rows. Of drafts 9 are files of the engine and 7 of the orchestrator; of lending 7 of the
orchestrator, 5 of the simulator and its costs, 4 of those that launch what is lent; of quarantine 4 of the orchestrator,
4 of instances, which end the incarnation, and 3 of what people look at; of LoRA 4 of the trainer and 3 of
the engine. Their figures may only fall.
"""

import ast
import functools
import io
import re
import tokenize
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "dora_jax"
NOT_COUNTED = ("plan/", "bench/", "report/legend.py", "base/old_paths.py")
OTHER = {  # files in which a word means something else: a reward by that name, an instance's measured speed
    "exact": ("tasks/code.py", "tasks/rewards.py"),
    "emulated timing": ("orchestrate/fleet.py", "orchestrate/snapshot.py"),
}
FEATURES = {  # name -> (what names it, its own files, files that name it beside)
    "drafts": (r"[Dd]raft|DRAFT", ["rollout/drafts.py", "sim/drafts.py", "runtime/draft_sources.py"], 25),
    "lending": (
        r"^(lends?|lent|lending|lendable|reclaim|Lend|Return)$|_lent$|^_?lent_|Lent[A-Z]|lends_|_lending|switch_s",
        ["orchestrate/lending.py", "runtime/instances/shared_devices.py", "runtime/cluster/lent_gang.py",
         "runtime/cluster/lent_role.py"],
        20,
    ),
    "LoRA": (r"(?<!kv_)(?<!q_)[Ll]o[Rr][Aa]", ["models/lora.py", "models/lora_config.py", "models/peft.py"], 20),
    "live sessions": (r"[Ll]ive_?[Ss]ession|SessionPrompts|serving\.train|of_users", ["runtime/live_sessions.py"], 7),
    "quarantine": (
        r"[Uu]nhealthy|Quarantine|quarantine(?!_path|\.)",
        ["orchestrate/quarantine.py", "runtime/training/agreement.py"],
        14,
    ),
    "exact": (r"^exact$|rollout\.exact|exact_|EngineReplay", ["trainer/score.py"], 9),
    "emulated timing": (r"^pace$|Paced|emulated_timing", ["runtime/observe/emulated_timing.py"], 4),
}  # fmt: skip


# From Python 3.12 on the texts of an f-string are tokens of their own.
TEXT = {tokenize.NAME, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}


@functools.cache
def words():
    """File -> its identifiers and the words of its strings."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name, text = str(path.relative_to(PACKAGE)), path.read_text()
        if name.startswith(NOT_COUNTED):
            continue
        documented = set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
                documented.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
        found[name] = set()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.start[0] not in documented and token.type in TEXT:
                found[name].update(re.findall(r"[A-Za-z_][\w.]*", token.string))
    return found


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_is_named_in_few_files(feature):
    pattern, own, most = FEATURES[feature]
    assert not [name for name in own if not (PACKAGE / name).exists()]
    passed = (*own, *OTHER.get(feature, ()))
    naming = [
        name for name, known in words().items() if name not in passed and any(re.search(pattern, w) for w in known)
    ]
    assert len(naming) == most, f"{len(naming)} files beside its own name {feature}: {', '.join(naming)}"
