"""The judge of damaged workdirs finds what is planted, and every kind of damage changes what it says it changes."""

import copy
import dataclasses
import hashlib
import json
import random

import numpy as np
import pytest

from dora_jax.runtime.journal.event_log import EventLog
from dora_jax.runtime.journal.log_stores import FileLogStore
from dora_jax.trainer import manifest
from tests.soak.damage_kinds import SUBJECTS, frames
from tests.soak.damage_truth import EXACT, OLDER, WRONG, Allowed, Resumed, Truth, hashes, judge, other_versions, sha

NEWEST = Allowed(3, all_samples=True)


def weights(version, what="params"):
    return {"w": np.full(3, version, np.float32), "b": {"x": np.arange(4) + version + (what == "params")}}


def sample(number):
    return [sha(np.arange(number)), sha(np.zeros(number, np.float32))]


@pytest.fixture
def truth(tmp_path):
    """What is true of a run of three steps, two finished samples and a running one, over two segments of the journal."""
    rows = [
        dict(kind="version", version=v, params=hashes(weights(v)), opt_state=hashes(weights(v, "opt_state")))
        for v in range(4)
    ]
    rows += [dict(kind="trained", base=2, groups=part) for part in ([[7, "r", []]], [[8, "r", []]])]
    rows += [dict(kind="finished", id=[9, i], sample=sample(i + 1)) for i in range(2)]
    rows += [
        dict(kind="partial", id=[9, 2], start=0, tokens=[5, 6]),
        dict(kind="partial", id=[9, 2], start=2, tokens=[7]),
    ]
    for what, about, sizes in (
        ("published", 2, {"000001.log": 100}),
        ("done", [9, 0], {"000001.log": 100, "000002.log": 300}),
        ("published", 3, {"000001.log": 100, "000002.log": 400}),
        ("done", [9, 1], {"000001.log": 100, "000002.log": 500}),
    ):
        rows.append(dict(kind="fact", what=what, about=about, sizes=sizes))
    path = tmp_path / "truth.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Truth(path)


@pytest.fixture
def good():
    return Resumed(
        version=3,
        params=hashes(weights(3)),
        opt_state=hashes(weights(3, "opt_state")),
        remade={2: [[7, "r", []], [8, "r", []]]},
        samples={(9, 0): sample(1), (9, 1): sample(2)},
        tokens={(9, 2): [5, 6, 7]},
        stored={3: hashes(weights(3))},
        notes=["resuming at step 3"],
    )


def one_bit_off(tree):
    tree["w"].view(np.uint8)[0] ^= 1
    return tree


def test_the_true_state_is_exact(truth, good):
    assert judge(truth, good, good, NEWEST) == (EXACT, "")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (dict(params=hashes(one_bit_off(weights(3)))), "params of version 3 differ in 1 arrays"),
        (dict(opt_state=hashes(one_bit_off(weights(3, "opt_state")))), "opt_state of version 3 differ"),
        (dict(opt_state=hashes({"w": weights(3)["w"]})), "opt_state of version 3 differ"),
        (dict(stored={2: hashes(weights(3))}), "stored weights of version 3 differ"),
        (dict(remade={2: [[8, "r", []], [7, "r", []]]}), "made again of other groups"),
        (dict(samples={(9, 0): sample(2), (9, 1): sample(2)}), "finished sample (9, 0) has other tokens"),
        (dict(tokens={(9, 2): [5, 6, 8]}), "running sample (9, 2) has other tokens"),
        (dict(samples={(9, 0): sample(1)}), "lost without need"),
        (dict(tokens={(9, 2): [5, 6]}), "lost without need"),
        (dict(version=4), "version 4 never was"),
    ],
)
def test_what_is_not_of_the_history_is_wrong(truth, good, changes, why):
    verdict, reason = judge(truth, good, dataclasses.replace(good, **changes), NEWEST)
    assert verdict == WRONG and why in reason


def test_an_older_state_is_right_only_where_nothing_better_was_left_and_with_a_sentence(truth, good):
    older = dataclasses.replace(
        good, version=2, params=hashes(weights(2)), opt_state=hashes(weights(2, "opt_state")), remade={}, samples={},
        tokens={}, stored={}, notes=["record 4 is torn"],
    )  # fmt: skip
    assert judge(truth, good, older, Allowed(2, all_samples=False))[0] == OLDER
    assert "though 3 could be had" in judge(truth, good, older, NEWEST)[1]
    silent = dataclasses.replace(older, notes=["resuming at step 2"])
    assert "no sentence" in judge(truth, good, silent, Allowed(2, all_samples=False))[1]
    assert judge(truth, good, silent, Allowed(2, all_samples=False, silent=True))[0] == OLDER
    lost = dataclasses.replace(good, samples={}, tokens={}, notes=["record 4 is torn"])
    wanted = Allowed(2, all_samples=False, samples=frozenset({(9, 0)}))
    assert "recorded before the damage" in judge(truth, good, lost, wanted)[1]


def test_a_run_to_its_end_that_makes_another_version_or_not_the_last_is_found(truth):
    again = copy.deepcopy(truth)
    del again.params[0], again.opt_state[0]  # it went on from a checkpoint
    assert other_versions(truth, again) == ""
    again.opt_state[2] = hashes(one_bit_off(weights(2, "opt_state")))
    assert "versions [2] have other weights or optimizer states" in other_versions(truth, again)
    del again.params[3], again.params[2]
    assert other_versions(truth, again) == "version 3 was not made"


def test_where_a_fact_stands_in_the_journal(truth):
    assert truth.newest == 3
    assert truth.published_behind("000002.log", 399) == [3] and not truth.published_behind("000002.log", 400)
    assert truth.published_behind("000001.log", 0) == [2]


@pytest.fixture
def workdir(tmp_path):
    """What a run leaves behind, with little in it."""
    root = tmp_path / "true"
    for step in (1, 2, 3):
        for item in ("params", "opt_state", "rl_state", "metrics"):
            (root / "checkpoints" / str(step) / item).mkdir(parents=True)
            (root / "checkpoints" / str(step) / item / "x").write_bytes(f"{step} {item}".encode() * 9)
        manifest.write(root / "checkpoints" / str(step))
    for run in range(2):
        journal = EventLog(FileLogStore(root / "journal"))
        journal.rotate([b"head %d" % run, b"payload"])
        for fact in range(4):
            journal.append(b"fact %d of run %d" % (fact, run))
            journal.commit()
        journal.close()
    for name in ("metrics", "samples", "timeline"):
        (root / f"{name}.jsonl").write_text("".join(f'{{"step": {step}, "x": {step}.5}}\n' for step in (1, 2, 3)))
    for name in ("config", "overrides", "instances"):
        (root / f"{name}.json").write_text(json.dumps({"a": 1, "b": name}))
    return root


def state_of(root):
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in root.rglob("*")
    }


@pytest.mark.parametrize("subject", SUBJECTS)
def test_damage_is_done_and_the_same_draw_does_the_same(subject, workdir, truth, good, tmp_path):
    import shutil

    before, kinds = state_of(workdir), set()
    for number in range(40):
        copies = []
        for name in ("a", "b"):
            shutil.copytree(workdir, tmp_path / name)
            damage = SUBJECTS[subject][1](tmp_path / name, truth, good, random.Random(number))
            copies.append((damage, state_of(tmp_path / name)))
            shutil.rmtree(tmp_path / name)
        assert copies[0] == copies[1]
        kinds.add(damage.what)
        unchanged = copies[0][1] == before
        assert not unchanged or "exchanged" in damage.what or "once more" in damage.what or "is '" in damage.what
    assert len(kinds) > 12


def test_frames_of_a_segment(workdir):
    content = (workdir / "journal" / "000001.log").read_bytes()
    parts = [part for part in frames(content) if not part.startswith(b"DORA")]
    assert b"".join(frames(content)) == content and len(parts) == 6 and parts[-1].endswith(b"fact 3 of run 0")
