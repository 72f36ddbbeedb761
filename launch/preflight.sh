#!/usr/bin/env bash
# What would make a job fail minutes later, reported before it starts: launch/preflight.py in the scripts' environment.
#   bash launch/preflight.sh plan --hosts=4 --trainer_devices=4 --instance_devices=4 --config=... [flags of train]
#   bash launch/preflight.sh inputs --config=... [flags of train]
#   bash launch/preflight.sh host --workdir=DIR [--chips=4] [--dry_run]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/setup.sh
exec env PYTHONPATH=. "$PY" launch/preflight.py "$@"
