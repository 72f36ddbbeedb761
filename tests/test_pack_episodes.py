"""Packing of episodes against a plain reference: each sampled token has its loss once, whatever its branches."""

import collections
import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dora_jax.buffer import layout, pack
from dora_jax.trainer import advantage, loss
from dora_jax.trainer.advantage import Prepare, ZeroWeights
from dora_jax.types import Branch, ScoredGroup
from tests.fakes import trainer_cases as cases

LIMIT = 40  # tokens of a branch


def episode(rng, group_id, index, prompt):
    """(sample, {key of a sampled token: its context}): turns and observations, and now and then a rewriting of some."""
    out, mask, logprobs, cuts = [], [], [], []
    for turn in range(int(rng.integers(1, 4))):
        if turn:
            if out and rng.random() < 0.4:
                cuts.append((list(out), list(mask), list(logprobs)))
                keep = int(rng.integers(0, len(out)))
                out, logprobs = out[:keep], logprobs[:keep]
                mask = [False] * keep  # the branch that was cut holds them
            n = int(rng.integers(1, 4))
            out, mask, logprobs = out + rng.integers(0, 48, n).tolist(), mask + [False] * n, logprobs + [0.0] * n
        n = int(rng.integers(1, 5))
        out, mask = out + rng.integers(0, 48, n).tolist(), mask + [True] * n
        logprobs = logprobs + rng.normal(-4, 0.1, n).tolist()
    whole = [dict(out_ids=np.array(o, np.int32), mask=np.array(m, bool), logprobs=np.array(x, np.float32))
             for o, m, x in (*cuts, (out, mask, logprobs))]  # fmt: skip
    base = cases.sample(rng, group_id, index, prompt, version=3, length=len(out))
    branches = tuple(Branch(prompt_ids=prompt, version=3, **each) for each in whole[:-1])
    return dataclasses.replace(base, branches=branches, **whole[-1])


def groups_of(seed, n, size):
    rng = np.random.default_rng(seed)
    found = []
    for group_id in range(n):
        prompt = rng.integers(0, 48, int(rng.integers(2, 9))).astype(np.int32)
        samples = tuple(episode(rng, group_id, i, prompt) for i in range(size))
        rewards = rng.normal(size=size).astype(np.float32)
        found.append(ScoredGroup(group_id=group_id, version=3, samples=samples, rewards=rewards, parts={}))
    return found


def branches_of(sample):
    return [*sample.branches, sample]


def wanted(groups, aggregation):
    """Multiset of (context and token, log-prob, advantage, weight) of every sampled token, by the formulas."""
    rewards = np.concatenate([g.rewards for g in groups])
    advantages = advantage.estimate("grpo", rewards, np.repeat([g.group_id for g in groups], len(groups[0].samples)))
    samples = [s for g in groups for s in g.samples]
    lengths = [sum(int(b.mask.sum()) for b in branches_of(s)) for s in samples]
    of_group = collections.Counter()
    for s, n in zip(samples, lengths, strict=True):
        of_group[s.id.group_id] += n
    found = []
    for sample, n, adv in zip(samples, lengths, advantages, strict=True):
        weight = {
            "token_mean": 1 / sum(lengths),
            "seq_mean_token_mean": 1 / n / len(samples),
            "seq_mean_token_sum": 1 / len(samples),
            "seq_mean_token_sum_norm": 1 / (len(samples) * cases.MAX_NEW),
            "prompt_mean": 1 / of_group[sample.id.group_id] / len(groups),
        }[aggregation]
        for branch in branches_of(sample):
            text = [*map(int, branch.prompt_ids), *map(int, branch.out_ids)]
            for i in np.flatnonzero(branch.mask):
                end = len(branch.prompt_ids) + int(i) + 1
                found.append((tuple(text[:end]), float(branch.logprobs[i]), float(adv), weight))
    return sorted(found)


def packed(batch):
    found = []
    for row in range(len(batch.tokens)):
        for at in np.flatnonzero(batch.mask[row]):
            segment, prefix = batch.segment_ids[row, at], None
            if batch.prefix_ids is not None and batch.prefix_ids[row, at] != segment:
                prefix = batch.prefix_ids[row, at]
            before = np.flatnonzero(np.isin(batch.segment_ids[row, : at + 1], [segment, prefix or segment]))
            context = (*map(int, batch.tokens[row, before]), int(batch.targets[row, at]))
            assert batch.version[row, at] == 3
            found.append((context, *(float(x[row, at]) for x in (batch.behavior_logprobs, batch.advantages,
                                                                 batch.loss_weights))))  # fmt: skip
    unmasked = ~batch.mask
    assert not batch.loss_weights[unmasked].any() and not batch.advantages[unmasked].any()
    assert not batch.behavior_logprobs[unmasked].any()
    return sorted(found)


def shape_of(groups, **changes):
    samples = sum(len(branches_of(s)) for g in groups for s in g.samples)
    return layout.layout(pack_tokens=64, rows=0, micro_batches=1, samples=samples, max_tokens=LIMIT, **changes)


@given(st.integers(0, 10_000), st.integers(1, 3), st.integers(1, 4), st.booleans(), st.sampled_from(loss.AGGREGATIONS))
@settings(max_examples=60, deadline=None)
def test_each_sampled_token_has_its_loss_once_with_the_weight_of_its_episode(seed, n, size, share, aggregation):
    groups = groups_of(seed, n, size)
    objective = Prepare(cases.section(aggregation=aggregation), cases.MAX_NEW)
    got = packed(pack.pack(groups, shape_of(groups, share_prompts=share), objective))
    want = wanted(groups, aggregation)
    assert [x[0] for x in got] == [x[0] for x in want]
    np.testing.assert_allclose([x[1:] for x in got], [x[1:] for x in want], rtol=1e-5)


@given(st.integers(0, 10_000), st.sampled_from(["reinforce_pp", "opo", "reinforce_pp_baseline"]))
@settings(max_examples=20, deadline=None)
def test_what_was_observed_moves_no_advantage_and_no_length(seed, name):
    """The same turns with other and longer observations, and the branches of an episode joined into one."""
    rng = np.random.default_rng(seed)
    groups = groups_of(seed, 2, 3)
    objective = Prepare(cases.section(advantage=name, overlong_cache=4), 10)

    def described(groups):
        batch = pack.pack(groups, shape_of(groups), objective)
        return sorted(zip(batch.behavior_logprobs[batch.mask], batch.advantages[batch.mask], strict=True))

    def other(sample):
        out, mask, logprobs = [], [], []
        for branch in branches_of(sample):
            for token, sampled, x in zip(branch.out_ids, branch.mask, branch.logprobs, strict=True):
                if sampled:
                    out, mask, logprobs = [*out, token], [*mask, True], [*logprobs, x]
                elif rng.random() < 0.5:
                    out, mask, logprobs = [*out, 7], [*mask, False], [*logprobs, 0.0]
        return dataclasses.replace(sample, branches=(), out_ids=np.array(out, np.int32), mask=np.array(mask, bool),
                                   logprobs=np.array(logprobs, np.float32))  # fmt: skip

    changed = [dataclasses.replace(g, samples=tuple(map(other, g.samples))) for g in groups]
    np.testing.assert_allclose(described(groups), described(changed), rtol=1e-5, atol=1e-6)


def test_a_step_of_too_many_branches_names_what_to_raise():
    groups = groups_of(1, 3, 4)
    with pytest.raises(ValueError, match="raise trainer.rows or trainer.pack_tokens"):
        pack.pack(groups, dataclasses.replace(shape_of(groups), rows=1), ZeroWeights())
