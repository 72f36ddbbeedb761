"""Stage 3: environments of SkyRL-Gym (`skyrl-gym`, which is installed apart) as environments of a run.

    environment.name = "dora_jax.tasks.environments.skyrl_gym.SkyrlGym"
    environment.params = {"env": "gsm8k_multi_turn", "extras": {"max_turns": 3}}

What they are asked blocks: these are plain functions, which run in threads of the worker.
"""

from __future__ import annotations

from typing import Any

from dora_jax.tasks.environment import EnvironmentError, EpisodePrompt, Message


class SkyrlGym:
    """env: the id under which it is registered, "module:id" imports the module first. extras: beside the row's answer,
    which is reward_spec.ground_truth. config: env_config."""

    terms = ("reward",)
    replays = False  # nothing says which of them do

    def __init__(self, env: str, extras: dict[str, Any] | None = None, config: Any = None):
        import skyrl_gym

        self._make, self._env, self._extras, self._config = skyrl_gym.make, env, extras or {}, config
        self._gym: Any = None

    def reset(self, prompt: EpisodePrompt) -> list[Message]:
        extras = {"reward_spec": {"ground_truth": prompt.answer}, "extra_info": {}, **self._extras}
        given = [{"role": "user", "content": prompt.text}]
        self._gym = self._make(self._env, env_config=self._config, extras=extras)
        messages, _ = self._gym.init(list(given))
        if list(messages[:1]) != given:
            raise EnvironmentError(
                f"{self._env} writes the prompt anew; the task's template is where a prompt is worded"
            )
        return list(messages[1:])

    def step(self, message: Message) -> tuple[list[Message], bool, dict[str, float]]:
        result = self._gym.step(message["content"])
        return list(result["observations"]), bool(result["done"]), {"reward": float(result["reward"])}

    def close(self) -> None:
        if self._gym is not None:
            self._gym.close()
