"""dora_jax: asynchronous reinforcement learning of language models, with several policy versions decoding at once.

            payload (tokens, log-probs, rewards, weights): one way
 1 prompts -> 2 rollout -> 3 reward -> 4 buffer -> 5 train -> 6 publish -+
                 ^                                                       | weights, version v+1
                 +-------------------------------------------------------+   (the only back edge)

            control (ids and counts only): a star
   stages -- events (facts) -->  orchestrator.step(*events)  -- commands -->  stages

 1, 3 tasks/     prompts, verifiers, reward workers        2 rollout/   one engine instance: paged KV keyed by version
 4    buffer/    scored groups -> packed batches           5 trainer/   objectives, the one jitted step, checkpoints
 6    publish.py immutable versions                        orchestrate/ the brain: pure, standard library only
 runtime/        the body: one loop, one world per kind of machine
 presets.py, budget.py, memory.py   what a machine chooses for a run, and what its devices then hold; aot.py compiles it

Reading order: this page, types.py, orchestrate/loop.py, runtime/coordinator.py, orchestrate/core.py; then the stages 1 to 6.
The algorithm is DORA (arXiv 2604.26256): each trajectory by exactly one version, none dropped, staleness bounded.
"""

from __future__ import annotations

from dora_jax.version import __version__

__all__ = ["__version__", "fit", "load_policy"]


def fit(config, workdir) -> int:
    """Runs a configuration to its end, resuming what `workdir` (a path, or gs://bucket/folder) holds; returns the exit
    code of dora_jax.train. config: a `dora_jax.config.Config`, or what a config file's get_config returns.

    Raises ConfigError for wrong input and RunError for a run that cannot go on. On the main thread Ctrl-C and SIGTERM
    stop the run, which then returns 42; any other thread may call it too. The process is the caller's and never ended.
    """
    from dora_jax import flags

    asked = flags.taken(config, workdir)
    from dora_jax.runtime.job import train  # JAX starts only after the configuration has passed

    return train(asked.config, asked.workdir)


def load_policy(workdir, step=None):
    """The trained policy of the run in `workdir`, as of `fit`: (ModelConfig, params, Tokenizer); `step` None means the
    newest that verifies. ConfigError says what is missing."""
    from dora_jax import flags

    folder = flags.local(workdir, "evaluate")
    from dora_jax.runtime.job import load_policy as load  # JAX starts only now

    return load(folder, step)
