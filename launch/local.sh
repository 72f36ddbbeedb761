#!/usr/bin/env bash
# Runs the main job on this machine; makes the environment first if it is missing or out of date.
#   bash launch/local.sh --config=configs/quickstart.py [--workdir=DIR] [--config.field=value ...] [--dry_run]
# Paths are relative to the root of the repository. The environment's own settings: see launch/setup.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/setup.sh
exec "$PY" -m dora_jax.train "$@"
