#!/usr/bin/env bash
# Sets the environment up and runs all tests, the quick ones first.
#   bash tests/run.sh [arguments of pytest]     e.g. bash tests/run.sh -k config -x
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/setup.sh
install tests tests/requirements.txt
install tests-nodeps tests/requirements-nodeps.txt --no-deps

NOTHING_SELECTED=5  # pytest's code; an error only when both parts say it
ran=0
for part in "not slow" "slow"; do
  code=0
  "$PY" -m pytest -m "$part" "$@" || code=$?
  (( code == 0 || code == NOTHING_SELECTED )) || exit "$code"
  (( code == 0 )) && ran=1
done
(( ran )) || die "$NOTHING_SELECTED" "no test was selected by: $*"
