"""The analytic instance against one that counts token by token."""

import math
import random

import pytest

from dora_jax.sim import instance as inst
from dora_jax.sim.instance import Job, SimInstance
from dora_jax.sim.workload import Turn
from dora_jax.types import SampleId


class Costs:
    """Costs a person can check: a tick takes 10 ms, 1 ms a sample, 10 us a token of context."""

    pages = 1000
    mixes = False
    decode_kv_s = 1e-5
    window, window_kv_s = 0, 0.0
    score_s = 0.0

    def decode_base_s(self, batch):
        return 0.01 + 0.001 * batch

    def prefill_s(self, tokens, past=0):
        return tokens * 1e-4


def make(costs=None, **changes):
    options = {"slots": 64, "page_size": 16, "speed": 1.0, "report_ticks": 10**9} | changes
    return SimInstance(0, 0, costs or Costs(), {}, **options)


def job(index, prompt, *lengths, environment_s=1.0, observed=0):
    last = len(lengths) - 1
    turns = [Turn(n, 0.0 if i == last else environment_s, 0 if i == last else observed) for i, n in enumerate(lengths)]
    return Job(SampleId(0, index), 0, prompt, turns)


def run(host, arrivals=(), until=math.inf):
    """{index: time of its end}; arrivals = [(time, job)]."""
    arrivals, ended = sorted(arrivals, key=lambda a: a[0]), {}
    while True:
        due = arrivals[0][0] if arrivals else math.inf
        now = min(due, host.next_time(), until)
        if now == math.inf or now >= until:
            return ended
        host.advance(now)
        while arrivals and arrivals[0][0] <= now:
            host.submit(arrivals.pop(0)[1], "start")
        for what, one in host.happen():
            if what == inst.STOPPED:
                ended[one.id.index] = now


def by_tokens(costs, arrivals):
    """The same, one tick at a time; a prefill runs when it has arrived, and the tick in progress is broken off."""
    arrivals = sorted((t, j.id.index, j.prompt, j.turns[0].tokens) for t, j in arrivals)
    now, batch, ended = 0.0, {}, {}
    while arrivals or batch:
        if not batch and arrivals[0][0] > now:
            now = arrivals[0][0]
        came = [a for a in arrivals if a[0] <= now]
        arrivals = arrivals[len(came) :]
        now += sum(costs.prefill_s(prompt) for _, _, prompt, _ in came)
        batch |= {index: [prompt, length] for _, index, prompt, length in came}
        if came and arrivals and arrivals[0][0] <= now:
            continue
        now += costs.decode_base_s(len(batch)) + costs.decode_kv_s * sum(context for context, _ in batch.values())
        for index, state in list(batch.items()):
            state[0], state[1] = state[0] + 1, state[1] - 1
            if state[1] == 0:
                ended[index] = now
                del batch[index]
    return ended


def test_one_batch_takes_what_its_ticks_take():
    rng = random.Random(1)
    jobs = [job(i, rng.randint(1, 300), rng.randint(1, 400)) for i in range(12)]
    expected = by_tokens(Costs(), [(0.0, j) for j in jobs])
    ended = run(make(), [(0.0, j) for j in jobs])
    assert ended.keys() == expected.keys()
    for index, time in expected.items():
        assert ended[index] == pytest.approx(time, rel=3e-3)  # half a tick's growth of the context


def test_arrivals_in_mid_decode_join_the_batch():
    rng = random.Random(2)
    arrivals = [(rng.uniform(0, 5), job(i, rng.randint(1, 50), rng.randint(50, 300))) for i in range(8)]
    expected = by_tokens(Costs(), arrivals)
    ended = run(make(), arrivals)
    for index, time in expected.items():
        assert ended[index] == pytest.approx(time, rel=0.02)  # an arrival waits for the tick in progress, or not


def test_tokens_are_conserved():
    jobs = [job(i, 20, 30 + 7 * i) for i in range(9)]
    host = make()
    run(host, [(0.3 * i, j) for i, j in enumerate(jobs)])
    assert host.sampled == pytest.approx(sum(j.turns[0].tokens for j in jobs))
    assert all(j.sampled == j.turns[0].tokens for j in jobs)
    assert host.counts == {} and host.free_tokens == host.capacity
    assert sum(host.spent.values()) == pytest.approx(host.time)


def test_versions_side_by_side_are_decoded_in_a_call_each():
    class Mixing(Costs):
        mixes = True

    def ended(version, costs=None):
        host, jobs = make(costs), [job(i, 10, 100) for i in range(4)]
        for i, one in enumerate(jobs):
            one.version = version(i)
            host.submit(one, "start")
        return run(host)[0]

    one, two = ended(lambda i: 0), ended(lambda i: i % 2)
    assert two - one == pytest.approx(100 * Costs().decode_base_s(0))  # what each of 100 more calls costs anyhow
    assert ended(lambda i: i % 2, Mixing()) == one  # adapters share the calls


def test_an_instance_that_is_held_stands_still():
    host = make()
    host.submit(job(0, 10, 100), "start")
    host.hold(3.0)
    assert run(host)[0] == pytest.approx(3.0 + run(make(), [(0.0, job(0, 10, 100))])[0])
    assert host.spent[inst.HELD] == pytest.approx(3.0)


def test_a_faster_instance_takes_less_time():
    slow, fast = (run(make(speed=s), [(0.0, job(0, 10, 100))])[0] for s in (1.0, 2.0))
    assert slow == pytest.approx(2 * fast)


def test_a_paused_instance_stands_still():
    host = make()
    host.submit(job(0, 10, 100), "start")
    free = run(make(), [(0.0, job(0, 10, 100))])[0]
    run(host, until=0.5)
    host.advance(0.5)
    host.paused = True
    assert host.next_time() == math.inf
    host.advance(7.5)
    host.paused = False
    assert run(host)[0] == pytest.approx(free + 7.0)
    assert host.spent[inst.PAUSED] == 7.0


def test_a_sample_that_moves_goes_on_where_it_was():
    src, dst, moved = make(), make(), job(0, 10, 100)
    src.submit(moved, "start")
    run(src, until=0.6)
    src.advance(0.6)
    assert src.take(moved.id) is moved and not src.decoding
    assert 0 < moved.sampled < 100 and moved.cached == moved.tokens
    dst.time = 0.6
    dst.receive(moved)
    assert run(dst)[0] == pytest.approx(run(make(), [(0.0, job(0, 10, 100))])[0], abs=0.02)  # a broken-off tick


def test_when_pages_run_out_the_last_to_join_goes_back():
    host = make(page_size=1)  # 1,000 tokens
    ended = run(host, [(0.0, job(0, 10, 700)), (1.0, job(1, 10, 700))])
    assert host.preempted >= 1
    assert ended.keys() == {0, 1} and ended[0] < ended[1]


def test_a_sample_larger_than_all_pages_raises():
    with pytest.raises(RuntimeError, match="alone needs more than 1000 tokens"):
        run(make(page_size=1), [(0.0, job(0, 10, 2000))])


def test_one_sample_too_many_raises():
    host = make(slots=1)
    run(host, [(0.0, job(0, 10, 100))], until=0.5)
    host.advance(0.5)
    late = job(1, 10, 100)
    late.cached = 10
    with pytest.raises(RuntimeError, match="one is too many|is one too many"):
        host.receive(late)


def test_turns_keep_their_pages_while_their_environment_works():
    host, one = make(), job(0, 10, 20, 30, environment_s=5.0, observed=7)
    host.submit(one, "start")
    while host.next_time() < math.inf:
        host.advance(host.next_time())
        for what, stopped in host.happen():
            if what == inst.STOPPED and stopped.turn == 0:
                host.wait_for_environment(stopped)
                assert host.free_tokens == host.capacity - 30
    assert host.activity == inst.WAIT
    host.advance(host.time + 5.0)
    host.answered(one)
    host.advance(host.next_time())
    host.happen()
    assert host.free_tokens == host.capacity - 37
    run(host)
    assert (one.sampled, one.observed) == (50, 7) and host.free_tokens == host.capacity


def test_a_report_comes_every_so_many_ticks():
    host, reports = make(report_ticks=25), 0
    host.submit(job(0, 10, 100), "start")
    while host.next_time() < math.inf:
        host.advance(host.next_time())
        reports += sum(what == inst.REPORT for what, _ in host.happen())
    assert reports == 4


def test_layers_with_a_window_read_what_it_holds():
    """Token by token: each sample's context, in some layers up to 100 tokens of it."""

    class Windowed(Costs):
        window, window_kv_s, decode_kv_s = 100, 3e-5, 1e-5

    rng = random.Random(3)
    lengths = [(rng.randint(1, 200), rng.randint(1, 300)) for _ in range(12)]
    costs, now, batch, ended = Windowed(), 0.0, {i: [prompt, n] for i, (prompt, n) in enumerate(lengths)}, {}
    now += sum(costs.prefill_s(prompt) for prompt, _ in lengths)
    while batch:
        contexts = [context for context, _ in batch.values()]
        now += costs.decode_base_s(len(batch)) + costs.decode_kv_s * sum(contexts)
        now += costs.window_kv_s * sum(min(context, 100) for context in contexts)
        for index, state in list(batch.items()):
            state[0], state[1] = state[0] + 1, state[1] - 1
            if not state[1]:
                ended[index] = now
                del batch[index]
    host = make(costs)
    found = run(host, [(0.0, job(i, prompt, n)) for i, (prompt, n) in enumerate(lengths)])
    assert found == pytest.approx(ended, rel=3e-3)
    without = run(make(), [(0.0, job(i, prompt, n)) for i, (prompt, n) in enumerate(lengths)])
    assert max(found.values()) > 1.1 * max(without.values())


def test_a_sample_that_leaves_early_takes_its_window_along():
    class Windowed(Costs):
        window, window_kv_s = 100, 3e-5

    host, jobs = make(Windowed()), [job(0, 150, 50), job(1, 10, 400), job(2, 10, 100)]
    for one in jobs:
        host.submit(one, "start")
    for _ in range(3):  # all enter, the first one ends
        host.advance(host.next_time())
        host.happen()
    host.take(SampleId(0, 1))
    left = host.take(SampleId(0, 2))
    began, rest = host.time, job(3, left.tokens, 100 - left.response)
    host.submit(left, "resume")
    alone = run(make(Windowed()), [(0.0, rest)])
    assert 10 < left.tokens < 100 and run(host)[2] - began == pytest.approx(alone[3])
