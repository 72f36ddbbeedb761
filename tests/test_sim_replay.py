"""A recorded run replays to the same commands, and its work can be given to other modes."""

import json

import pytest

from dora_jax.config import ConfigError
from dora_jax.costs import recording
from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate.core import each
from dora_jax.sim import config, replay, run

SMALL = {
    "steps": 4, "warmup_steps": 1, "report_tokens": 64, "hardware.chips": 16, "hardware.rollout_chips": 8,
    "hardware.tensor": 2, "hardware.slots": 24, "workload.mean_tokens": 200.0, "workload.max_new_tokens": 2000,
    "workload.max_prompt_tokens": 256, "orchestrator.groups_per_step": 6, "orchestrator.group_size": 4,
    "orchestrator.rebalance_period_s": 5.0, "workload.filtered_share": 0.2, "fault.mtbf_s": 200.0,
}  # fmt: skip


def row(mode="dora", **changes):
    return config.Row(label=mode, mode=mode, config=config.replace(config.SimConfig(), SMALL | changes), published={})


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """(path, result, {sample: tokens}) of one journaled run."""
    path, lengths = tmp_path_factory.mktemp("journal") / "run.jsonl", {}
    journal = recording.Recording(path, run.orchestrator_config(row().config, "dora"), {"evaluate_start": False})

    def watch(event, commands):
        if isinstance(event, ev.SampleDone):
            lengths[event.id] = event.tokens

    result = run.simulate(row(), observers=(journal, each(watch)))
    journal.close()
    return path, result, lengths


def test_a_journal_replays_to_the_same_commands(recorded):
    path, result, _ = recorded
    again = replay.replay(path)
    assert again.mode == "dora" and again.steps == 3  # the last publication ends the simulation before it is reported
    assert again.events == len(path.read_text().splitlines()) - 1 > 500
    assert set(again.lags) <= {0, 1, 2} and 0 < again.rollout_only < 1
    assert again.step_s == pytest.approx(result.step_s, rel=0.5)
    assert "replay to the same commands" in replay.render(again)


def test_a_changed_journal_is_noticed_where_it_changed(recorded, tmp_path):
    lines = recorded[0].read_text().splitlines()
    at = next(i for i, text in enumerate(lines) if '"StepPublished"' in text)
    done = next(i for i in range(at, len(lines)) if '"GroupScored"' in lines[i] and '"trainable": true' in lines[i])
    line = json.loads(lines[done]) | {"trainable": False}
    path = tmp_path / "changed.jsonl"
    path.write_text("\n".join([*lines[:done], json.dumps(line), *lines[done + 1 :]]))
    with pytest.raises(replay.Differs, match="line [0-9]+: the replay's commands differ"):
        replay.replay(path)


def test_a_file_that_is_no_journal_is_refused(tmp_path):
    path = tmp_path / "text.jsonl"
    path.write_text("hello\n")
    with pytest.raises(ConfigError, match="line 1 is no line of a recording"):
        replay.replay(path)


def test_another_mode_runs_on_recorded_work(recorded):
    path, _, lengths = recorded
    work = {"workload.distribution": "journal", "workload.path": str(path), "workload.filtered_share": 0.0}
    seen, filtered = {}, set()

    def watch(event, commands):
        if isinstance(event, ev.SampleDone):
            seen[event.id] = event.tokens
        elif isinstance(event, ev.GroupScored) and not event.trainable:
            filtered.add(event.group_id)

    run.simulate(row("sync", **work), observers=(each(watch),))
    both = seen.keys() & lengths.keys()
    assert len(both) > 50 and all(seen[id] == lengths[id] for id in both)
    assert filtered and filtered <= recording.recorded_work(path)[1]


def test_a_group_that_is_made_anew_is_of_its_last_incarnation(tmp_path):
    """Mode `evict` issues an evicted group again under the same ids."""
    evicts = row("evict", **{"orchestrator.max_versions": 1, "orchestrator.inflight": 2.0})
    journal = recording.Recording(tmp_path / "run.jsonl", run.orchestrator_config(evicts.config, "evict"),
                             {"evaluate_start": False})  # fmt: skip
    result = run.simulate(evicts, observers=(journal,))
    journal.close()
    assert result.cancelled_tokens and set(replay.replay(tmp_path / "run.jsonl").lags) == {0}
