"""What a trainer remembers of its steps for the next controller."""

import pytest

from dora_jax.runtime.cluster import messages
from dora_jax.runtime.cluster.step_cache import StepCache
from tests.fakes.cluster import scored_group


def test_a_trainer_recalls_the_steps_that_are_asked_for_again_and_no_others():
    memory = remembering()
    memory.new_controller()
    assert memory.at(4) == 0 and memory.rewind(2, 4) and memory.at(4) == 2
    again = []
    for base in (2, 3):
        assert not memory.new(base, step_of(base))
        again.append(memory.recall(base))
    assert [(made.digest, made.recalled) for made in again] == [(2, True), (3, True)] and memory.at(4) == 4
    memory.new_controller()
    assert not memory.rewind(7, 4)
    with pytest.raises(RuntimeError, match="from version 1 is asked for again, and is not remembered"):
        memory.new(1, step_of(1))
    with pytest.raises(RuntimeError, match="other groups"):
        memory.new(0, step_of(1))


def step_of(base):
    return [scored_group(2 * base), scored_group(2 * base + 1)]


def remembering():
    """A cache that holds four steps, at version 4."""
    memory = StepCache()
    memory.digests[0] = 100
    for base in range(4):
        assert memory.new(base, step_of(base)) == step_of(base) and memory.begun and memory.recall(base) is None
        memory.made(base, messages.StepFinished(digest=base, metrics={}))
    return memory


@pytest.mark.parametrize("parts", [[[0], [1]], [[0, 1]], [[], [0], [1]]])
@pytest.mark.parametrize("learned", [0, 1, 2])
def test_a_trainer_in_the_middle_of_a_step_learns_from_the_groups_that_are_new_alone(learned, parts):
    """`parts`: how the next controller shares the step out, of which so many groups were learned from."""
    memory, groups = remembering(), step_of(4)
    memory.new(4, groups[:learned])
    memory.new_controller()
    assert memory.rewind(4, 4) and memory.at(4) == 4
    new = [group.group_id for part in parts for group in memory.new(4, [groups[i] for i in part])]
    assert new == [group.group_id for group in groups[learned:]] and memory.recall(4) is None


@pytest.mark.parametrize("asked", [[], [8], [8, 10], [9, 8]])
def test_a_step_in_the_middle_ends_a_trainer_that_is_asked_for_another_one(asked):
    memory = remembering()
    memory.new(4, step_of(4))
    memory.new_controller()
    assert memory.rewind(4, 4) and memory.at(4) == 4
    with pytest.raises(RuntimeError, match="the step from version 4 is asked for again with other groups"):
        memory.new(4, [scored_group(group_id) for group_id in asked])
        memory.recall(4)
