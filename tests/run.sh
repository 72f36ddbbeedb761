#!/usr/bin/env bash
# Sets the environment up and runs all tests but the nightly ones, the quick first, one process a core (at most 4), and at the end,
# one at a time, those that need the machine for themselves.
#   bash tests/run.sh [arguments of pytest]     e.g. bash tests/run.sh -k config -x; -n 0: all in one process
#   DORA_NIGHTLY=1 bash tests/run.sh    those too that take minutes and show at length what shorter ones show
#   DORA_LIGHT=1 PYTHON=python3.12 DORA_VENV=.venv-3.12 bash tests/run.sh    on another Python, without what is large
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/setup.sh
install tests tests/requirements.txt
[[ ${DORA_LIGHT:-} ]] || install tests-heavy tests/requirements-heavy.txt
install tests-nodeps tests/requirements-nodeps.txt --no-deps

DORA_TEST_CACHE=$(mktemp -d)  # the parts share what they compile
trap 'rm -rf "$DORA_TEST_CACHE"' EXIT
export DORA_TEST_CACHE

skip=" and not nightly"
[[ -z ${DORA_NIGHTLY:-} ]] || skip=

NOTHING_SELECTED=5  # pytest's code; an error only when every part says it
ran=0

part() {
  local code=0
  "$PY" -m pytest "$@" || code=$?
  (( code == 0 || code == NOTHING_SELECTED )) || exit "$code"
  (( code == NOTHING_SELECTED )) || ran=1
}

part -m "not slow" -n auto --dist loadfile "$@"
part -m "slow and not alone$skip" -n auto --dist load --maxschedchunk=1 "$@"
part -m "slow and alone$skip" "$@"
(( ran )) || die "$NOTHING_SELECTED" "no test was selected by: $*"
