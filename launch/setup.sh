# shellcheck shell=bash
# Sourced by launch/local.sh and tests/run.sh, from the root of the repository: makes a virtual environment and
# installs the pinned requirements into it. Does nothing when nothing has changed.
#
# Reads   PYTHON             the interpreter to use; default: the newest supported one that runs, else one that uv fetches
#         DORA_ACCELERATOR   cpu, tpu or cuda: which jax wheel; default: what the environment has, else cpu
#         DORA_VENV          where the environment is; default .venv
# Sets    PY                 the environment's python
# Stops with one line: code 2 where the caller asked for something impossible, 1 where the machine failed.

source launch/lib.sh

SUPPORTED="3.12 3.11"  # newest first
VENV=${DORA_VENV:-.venv}
STAMPS=$VENV/.dora  # one file a requirement file: what was last installed from it

# Prints major.minor of an interpreter that can make environments; fails where it cannot (a pyenv shim of a version
# that is not selected exists and does not run; a distribution may split venv off).
python_version() { "$1" -c 'import sys, venv, ensurepip; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

supported() { [[ " $SUPPORTED " == *" $1 "* ]]; }

find_python() {
  local candidate version
  if [[ -n ${PYTHON:-} ]]; then
    version=$(python_version "$PYTHON") || die 2 "PYTHON=$PYTHON does not run, or cannot make virtual environments."
    supported "$version" || die 2 "PYTHON=$PYTHON is Python $version; this project runs on one of: $SUPPORTED."
    echo "$PYTHON"
    return
  fi
  for candidate in ${SUPPORTED//3./python3.} python3 python; do
    if version=$(python_version "$candidate") && supported "$version"; then
      echo "$candidate"
      return
    fi
  done
  fetch_python
}

# Where the machine has none, as Ubuntu 22.04 and the images of TPU VMs: uv brings one, under .cache and nowhere else.
fetch_python() {
  local uv=uv version=${SUPPORTED%% *} none="no Python with the venv module found among $SUPPORTED"
  echo "setup: $none; uv brings $version" >&2
  if ! command -v uv >/dev/null; then
    uv=.cache/uv/bin/uv
    [[ -x $uv ]] || python3 -m pip install --quiet --target=.cache/uv -r launch/requirements-uv.txt >&2 ||
      die 2 "$none, nor pip to fetch uv with; install one or set PYTHON=/path/to/python."
  fi
  export UV_PYTHON_INSTALL_DIR=$PWD/.cache/python
  "$uv" python install --no-bin "$version" >&2 ||
    die 1 "$none, and uv could not fetch $version (its message is above); install one or set PYTHON=/path/to/python."
  "$uv" python find --managed-python "$version" || die 1 "uv does not find the Python $version that it has installed."
}

make_venv() {
  local python have
  have=$("$VENV/bin/python" -c 'import sys, pip; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || have=none
  if [[ $have != none && -z ${PYTHON:-} ]]; then
    supported "$have" || die 2 "$VENV holds Python $have; remove it: this project runs on one of: $SUPPORTED."
    return
  fi
  python=$(find_python) || exit $?
  [[ $have == "$(python_version "$python")" ]] && return
  [[ $have == none ]] || die 2 "$VENV holds Python $have, not that of PYTHON=$PYTHON; remove it or set DORA_VENV."
  echo "setup: making $VENV with $python" >&2
  "$python" -m venv --clear "$VENV" || die 1 "$python could not make $VENV."
}

choose_accelerator() {
  local have=""
  [[ -f $STAMPS/accelerator ]] && have=$(<"$STAMPS/accelerator")
  ACCELERATOR=${DORA_ACCELERATOR:-${have:-cpu}}
  case $ACCELERATOR in
    cpu) JAX_WHEEL=() ;;
    tpu) JAX_WHEEL=("jax[tpu]") ;;
    cuda) JAX_WHEEL=("jax[cuda12]") ;;  # CUDA 12 runs on every driver that CUDA 13 runs on, and on older ones
    *) die 2 "DORA_ACCELERATOR=$ACCELERATOR is none of: cpu, tpu, cuda." ;;
  esac
  [[ -z $have || $have == "$ACCELERATOR" ]] ||
    die 2 "$VENV was made for $have, not DORA_ACCELERATOR=$ACCELERATOR; remove it or set DORA_VENV."
}

# install NAME FILE [WHEEL ...]: pip, unless FILE and the wheels are what the stamp NAME says was installed.
install() {
  local name=$1 file=$2 want
  shift 2
  want="$(cksum <"$file") $*"
  [[ -f $STAMPS/$name && $(<"$STAMPS/$name") == "$want" ]] && return
  echo "setup: installing $file${*:+ and $*} into $VENV" >&2
  rm -f "$STAMPS/$name"  # an interrupted installation is repeated
  "$PY" -m pip install --quiet --disable-pip-version-check -r "$file" "$@" || {
    command -v gcc >/dev/null || local lacks=" No gcc is here, and reasoning-gym's pycosat is built with one."
    die 1 "pip could not install $file into $VENV; its message is above.${lacks:-}"
  }
  mkdir -p "$STAMPS"
  echo "$want" >"$STAMPS/$name"
}

choose_accelerator
make_venv
PY=$VENV/bin/python
install requirements requirements.txt ${JAX_WHEEL[@]+"${JAX_WHEEL[@]}"}
echo "$ACCELERATOR" >"$STAMPS/accelerator"
# Some reasoning-gym datasets draw in hash order, and a resumed run must meet its prompts again.
export PYTHONHASHSEED=${PYTHONHASHSEED:-0}
