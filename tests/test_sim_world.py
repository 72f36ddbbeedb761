"""Every mode in virtual time: nothing lost or done twice, bounds kept, one configuration gives one run."""

import collections
import dataclasses
import json
import runpy

import pytest

from dora_jax.config import ConfigError
from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate.modes import MODES
from dora_jax.sim import config, run, table
from dora_jax.sim.meter import Trace
from dora_jax.sim.network import Speeds, publication
from tests.fakes.sim_runs import row, simulate
from tests.fakes.trace_rules import faults

PUBLISHED = {"step_min": 1.0, "rollout_only": 0.5, "tokens_per_s": 100.0, "fitted": 0.0, "misfit": 0.0}


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_runs_and_keeps_what_it_promises(mode):
    result, audit = simulate(mode)
    assert max(collections.Counter(audit.trained).values()) == 1
    assert max(audit.ended.values()) == 1
    if mode not in ("evict", "rollpacker"):  # there a prompt that was given up starts again
        assert max(audit.started.values()) == 1
    bound = {"sync": 0, "rollpacker": 0, "one_step": 1, "partial": 99}.get(mode, 2)
    assert max(audit.lags) <= bound
    assert result.steps == 4 and result.tokens > 8 * 4 * 50
    assert sum(result.trainer.values()) == pytest.approx(1.0)
    assert sum(result.rollout.values()) == pytest.approx(1.0)
    assert sum(result.lags.values()) == pytest.approx(1.0)


@pytest.mark.parametrize("mode", ["sync", "partial", "dora"])
def test_colocated_roles_take_turns(mode):
    result, _ = simulate(mode, hardware__rollout_chips=0)
    assert result.rollout["paused"] == pytest.approx(result.trainer["train"], rel=1e-6)
    assert result.rollout["paused"] > 0.05


def test_the_same_configuration_gives_the_same_run():
    assert simulate("dora")[1].log == simulate("dora")[1].log
    assert simulate("dora")[1].log != simulate("dora", workload__seed=1)[1].log


def test_every_mode_faces_the_same_work():
    def lengths(mode):
        _, audit = simulate(mode)
        return {e.id: e.tokens for e, _ in audit.log if isinstance(e, ev.SampleDone)}

    sync, dora = lengths("sync"), lengths("dora")
    both = sync.keys() & dora.keys()
    assert len(both) > 100 and all(sync[id] == dora[id] for id in both)


@pytest.mark.parametrize("mode", MODES)
def test_lost_instances_and_failed_moves_lose_no_sample(mode):
    faults = {"fault__mtbf_s": 60.0, "fault__repair_s": 10.0, "fault__failed_moves": 0.5}
    result, audit = simulate(mode, **faults)
    assert audit.lost > 3 and audit.resumed > 0
    assert max(audit.ended.values()) == 1 and max(collections.Counter(audit.trained).values()) == 1
    assert result.rollout["down"] > 0
    assert sum(result.rollout.values()) == pytest.approx(1.0)  # what the lost had spent is in it, their absence too
    assert all(0 <= share <= 1 for share in result.rollout.values())
    trained = set(audit.trained)
    assert all(audit.ended[id] == 1 for id in audit.started if id.group_id in trained)


def test_filtered_and_failed_groups_are_replaced():
    result, audit = simulate("dora", workload__filtered_share=0.4, workload__failed_share=0.1)
    ends = collections.Counter(type(e).__name__ for e, _ in audit.log)
    assert ends["GroupFailed"] > 0 and result.steps == 4
    assert any(isinstance(e, ev.GroupScored) and not e.trainable for e, _ in audit.log)


TURNS = {"workload__turns": 3.0, "workload__environment_s": 5.0, "workload__observation_tokens": 20}


@pytest.mark.parametrize("hold_slots", [False, True])
def test_samples_wait_for_their_environments(hold_slots):
    result, audit = simulate("dora", orchestrator__hold_slots=hold_slots, **TURNS)
    plain, _ = simulate("dora")
    assert result.tokens > plain.tokens  # observations are part of the sequences
    kinds = collections.Counter(type(e).__name__ for e, _ in audit.log)
    assert (result.waiting == 0) == hold_slots == (kinds["SampleWaiting"] == 0)
    assert (result.rollout["wait"] > 0) == hold_slots  # of instances that have nothing but samples that wait
    assert result.reprefilled_tokens == 0 and max(audit.lags) <= 2


def test_unequal_instances_share_the_work():
    result, _ = simulate("dora", hardware__speeds=(1.0, 0.25))
    even, _ = simulate("dora")
    assert even.step_s < result.step_s < 4 * even.step_s


def test_partial_prefills_again_what_goes_on_under_new_weights():
    result, audit = simulate("partial")
    assert result.reprefilled_tokens > 0 and audit.resumed > 0


def test_a_choice_of_the_mode_can_be_replaced():
    streamed, _ = simulate("dora_paper", orchestrator__decisions={"admit_on": "stream"})
    plain, _ = simulate("dora_paper")
    assert streamed.step_s != plain.step_s


@pytest.mark.parametrize("seconds", [0.0, 1e-30])
def test_decode_steps_and_prefills_that_cost_nothing_come_to_their_end(tmp_path, seconds):
    """Where the clock cannot tell what is left from nothing, too."""
    names = ["prefill_fixed_s", "prefill_s_per_token", "decode_kv_s", "train_s_per_token", "load_s"]
    names += ["move_fixed_s", "move_s_per_token", "score_s"]
    costs = dict.fromkeys(names, seconds) | {"decode": [[64, seconds]], "train_fixed_s": 7.0, "pages": 512}
    (tmp_path / "costs.json").write_text(json.dumps(costs))
    result, audit = simulate("dora", cost__path=str(tmp_path / "costs.json"))
    assert result.step_s == pytest.approx(7.0, rel=0.2) and len(audit.trained) == 40


def test_an_orchestrator_that_says_nothing_stalls():
    class Silent:
        def commit(self, event):
            pass

        def decide(self):
            return ()

    config = row("dora").config
    decisions = run.orchestrator_config(config, "dora").decisions
    with pytest.raises(RuntimeError, match="stalled after .* only the clock goes on"):
        run.run(Silent(), run.SimWorld(config, decisions, until=3))


def test_a_group_larger_than_the_load_is_refused():
    with pytest.raises(ConfigError, match="could never progress"):
        simulate("dora", orchestrator__inflight=0.01)


def test_the_trace_opens_and_joins_samples_to_batches(tmp_path):
    trace, path = Trace("dora"), tmp_path / "trace.json"
    result = run.simulate(row("dora"), trace=trace)
    trace.save(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    assert not faults(events)
    assert {e["tid"] for e in slices if e["pid"] == 2} == {2, 3, 4, 5}
    assert [e["name"] for e in slices if e["pid"] == 1][:3] == ["v1", "v2", "v3"]
    arrows = {phase: {e["id"]: e for e in events if e["ph"] == phase} for phase in "sf"}
    assert arrows["s"].keys() == arrows["f"].keys() and len(arrows["s"]) >= 8 * 5
    for id, end in arrows["f"].items():
        assert arrows["s"][id]["ts"] < end["ts"] and end["bp"] == "e"
    assert result.steps == 4


def test_the_table_shows_every_row_and_the_published_misfit():
    line = row("dora")
    line = config.Row(label="ours", mode="dora", config=line.config, published=PUBLISHED)
    text = table.render([(line, run.simulate(line))])
    assert text.count("ours") == 4 and "not fitted here" in text and "wait: rule" in text


def test_a_publication_takes_its_stages_and_doubles_its_sources():
    speeds = Speeds(copy=100, home=50, out=10, into=10, join=float("inf"), place=20)
    one, four = (publication(100, speeds, count) for count in (1, 4))
    assert (one.copy_s, one.home_s, one.pause_s) == (1, 2, 5)
    assert one.first_s == one.last_s == four.first_s == 13
    assert four.last_s == 33  # the trainer and the first feed the next two, and these the last
    wide = publication(100, dataclasses.replace(speeds, out=40), 4)
    assert wide.last_s == 13, "a trainer of four times as many hosts feeds all four at once"


def test_a_slow_environment_and_a_quick_one_are_trained_in_the_shares_asked_for():
    """The small twin of configs/sim/environments.py."""
    tree = runpy.run_path("configs/sim/environments.py")["get_config"]("small")
    lines = [(row, run.simulate(row)) for row in config.rows(config.from_config_dict(tree))]
    (_, waits), (_, holds) = lines
    for result in (waits, holds):
        assert abs(result.tasks["slow"] - 0.5) <= 0.02 and max(result.lags) <= 2
    assert waits.waiting > 0 == holds.waiting
    assert waits.step_s < holds.step_s and waits.rollout_only < holds.rollout_only
    assert "slow: asked" in table.render(lines)
