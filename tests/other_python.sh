#!/usr/bin/env bash
# The first fast test of each file on the other supported Python, in an environment of its own (.venv-3.12, say) without
# what is in requirements-heavy.txt. A machine that lacks this Python, or cannot fetch its packages, is no failure.
#   bash tests/other_python.sh [arguments of pytest]     e.g. bash tests/other_python.sh --first=0: all fast tests
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/setup.sh

other=${SUPPORTED/"$(python_version "$PY")"}
other=${other// }
for python in "python$other" "${HOME:-}/.pyenv/versions/$other".*/bin/python; do  # pyenv's shim runs what is selected alone
  [[ $(python_version "$python") != "$other" ]] || break
done
if [[ $(python_version "$python") != "$other" ]]; then
  echo "tests: there is no Python $other here, so they ran on one Python only" >&2
  exit 0
fi
venv=.venv-$other
DORA_VENV=$venv PYTHON=$python DORA_ACCELERATOR=cpu bash -euc \
  'source launch/setup.sh; install tests tests/requirements.txt' ||
  { echo "tests: the packages for Python $other are not to be had, so they ran on one Python only" >&2; exit 0; }
exec "$venv/bin/python" -m pytest -m "not slow" -n auto --dist loadfile --first=1 "$@"
