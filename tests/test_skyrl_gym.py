"""An environment of SkyRL-Gym as it is published, installed apart, plays an episode through the worker processes."""

import subprocess
import sys

import pytest

from dora_jax.config import ConfigError, EnvironmentSection
from dora_jax.tasks.environments import EnvironmentPool
from dora_jax.tasks.environments.bridge import Bridge
from dora_jax.types import EpisodeEnded
from tests.fakes.episode_player import Letters, Player

SKYRL = "skyrl-gym==0.4.0"
SECTION = EnvironmentSection(
    name="dora_jax.tasks.environments.skyrl_gym.SkyrlGym",
    params={"env": "gsm8k_multi_turn", "extras": {"max_turns": 3}},
    observation="<{content}>",
    step_timeout_s=30.0,
)


@pytest.fixture
def pool():
    made = EnvironmentPool(SECTION, Bridge(Letters(), SECTION.observation), seed=0)
    yield made
    made.close()


def test_without_the_package_a_sentence_says_what_is_missing(pool):
    try:
        import skyrl_gym  # noqa: F401
    except ImportError:
        with pytest.raises(ConfigError, match="environment.name: .*SkyrlGym: No module named 'skyrl_gym'"):
            pool.wait_ready()


@pytest.mark.slow
def test_an_episode_of_a_published_environment(tmp_path, monkeypatch):
    install = [sys.executable, "-m", "pip", "install", "-q", "--target", str(tmp_path), SKYRL]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{SKYRL} cannot be installed: {done.stderr.strip().splitlines()[-1:]}")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    made = EnvironmentPool(SECTION, Bridge(Letters(), SECTION.observation), seed=0)
    try:
        assert made.wait_ready() == ("reward",)
        player = Player(made)
        assert "step-by-step reasoning" in player.observed(player.ask("three and four"))
        assert "final numeric answer" in player.observed(player.ask("#### 8"))
        ended = player.ask("#### 7")
        assert isinstance(ended, EpisodeEnded) and ended.terms["reward"] == pytest.approx(1.0 + 0.2 / 3)
    finally:
        made.close()
