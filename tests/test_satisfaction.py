"""The bench in which a scripted user raises its own satisfaction, at its smallest."""

import pytest

from dora_jax.bench import learning


@pytest.mark.slow
def test_the_bench_trains_on_its_user_and_serves_it_without_training(tmp_path):
    first, _, *lines = learning.satisfaction(
        tmp_path / "base", tmp_path / "work", steps=1, groups=1, users=4, warm_steps=5
    )
    assert first.split()[1] == "sessions" and int(first.split()[0]) >= 8
    assert [line[:16].strip() for line in lines] == [*(f"quarter {i}" for i in (1, 2, 3, 4)), "all", "no training"]


def test_the_reward_is_what_the_user_wrote_next():
    messages = [{"role": "user", "content": "thanks"}]
    assert learning.thanked("", "", {"messages": [], "next": messages}) == 1.0
    assert learning.thanked("", "", {"messages": messages, "next": []}) == 0.0
