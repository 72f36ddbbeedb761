#!/usr/bin/env bash
# Runs the main job on this machine; makes the environment first if it is missing or out of date.
#   bash launch/local.sh --config=configs/quickstart.py [--workdir=DIR] [--config.field=value ...] [--dry_run]
# Paths are relative to the root of the repository. The environment's own settings: see launch/setup.sh; DORA_MODULE is
# another program to run, such as dora_jax.sweep.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/setup.sh
exec "$PY" -m "${DORA_MODULE:-dora_jax.train}" "$@"
