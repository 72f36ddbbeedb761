"""The endpoint:  python -m dora_jax.serve --model=FOLDER | --workdir=runs/a [--step=40] [--port=8000]

OpenAI's completions, chat completions and responses, Anthropic's messages, and token ids in and out, of a Hugging Face
folder or of a run's checkpoints. A run may go on meanwhile: its next checkpoints are loaded beside the old ones,
rollout.residents at once, and a session (the X-Session-ID header) is answered by one version throughout.
"""

from __future__ import annotations

from dora_jax.base import exits

if __name__ == "__main__":
    exits.listen()  # before the imports, which take a second

import os
from pathlib import Path

from absl import flags as absl_flags

from dora_jax.cli import flags
from dora_jax.config import Config, ConfigError


def define_flags() -> None:
    absl_flags.DEFINE_string("model", "", "a Hugging Face folder to serve, in place of --workdir")
    absl_flags.DEFINE_integer("step", None, "checkpoint to serve; default: the newest, then those that follow")
    absl_flags.DEFINE_string("host", "127.0.0.1", "address to listen at; others than loopback want DORA_SERVE_TOKEN")
    absl_flags.DEFINE_integer("port", 8000, "0: any that is free", lower_bound=0, upper_bound=65535)
    absl_flags.DEFINE_string("name", "policy", "what requests call the model; NAME@41 is its version 41")
    absl_flags.DEFINE_float(
        "session_idle_s", 600.0, "a session without a request for so long no longer keeps its version", lower_bound=0.0
    )
    absl_flags.DEFINE_float(
        "keepalive_s",
        10.0,
        "a client that waits hears something so often, against time-outs on its way",
        lower_bound=0.1,
    )


def main(config: Config, workdir: Path) -> int:
    values = absl_flags.FLAGS
    if values.model and values.step is not None:
        raise ConfigError("step: a checkpoint of a run, so it goes with --workdir; --model is served as it is")
    from dora_jax.serving.server import TOKEN_VARIABLE, Options, serve  # JAX starts only now

    options = Options(
        host=values.host,
        port=values.port,
        name=values.name,
        session_idle_s=values.session_idle_s,
        keepalive_s=values.keepalive_s,
        step=values.step,
        token=os.environ.get(TOKEN_VARIABLE, ""),
    )
    return serve(config, options, None if values.model else workdir)


if __name__ == "__main__":
    define_flags()
    flags.run(main, purpose="serve")
