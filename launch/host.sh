#!/usr/bin/env bash
# What the other scripts run on the machines of a job.
#   bash launch/host.sh head                 the first machine of a Ray cluster
#   bash launch/host.sh join HOST [--block]  one more
#   bash launch/host.sh train FLAGS          the job itself, on the head or on a machine of its own
#   bash launch/host.sh stop                 ends Ray on this machine
# Reads   DORA_TOKEN_FILE    Ray's token; without one Ray listens on the loopback interface alone
#         DORA_SECRETS_FILE  NAME=VALUE lines that the job finds in its environment
#         DORA_ALONE         v5p-8, say: this machine, of a larger slice, is used as a slice of that type by itself
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export DORA_ACCELERATOR=${DORA_ACCELERATOR:-tpu}
source launch/setup.sh

# Where these are set, JAX joins the worlds of several slices to one; each role has a world of its own.
unset "${!MEGASCALE_@}"

export_secrets() {
  local line
  private_file DORA_SECRETS_FILE
  while IFS= read -r line; do
    if [[ $line =~ ^[A-Za-z_][A-Za-z0-9_]*= ]]; then export "${line?}"; fi
  done <"$DORA_SECRETS_FILE"
}

# Ray and libtpu take these before what the machine's metadata says of the whole slice.
stand_alone() {
  export TPU_NAME=$HOSTNAME TPU_WORKER_ID=0 TPU_ACCELERATOR_TYPE=$DORA_ALONE TPU_TOPOLOGY=2x2 TPU_SKIP_MDS_QUERY=1
  export TPU_PROCESS_BOUNDS=1,1,1 TPU_CHIPS_PER_PROCESS_BOUNDS=2,2,1
  if [[ $DORA_ALONE == v4-* || $DORA_ALONE == v5p-* ]]; then TPU_TOPOLOGY=2x2x1; fi
}

action=${1:-}
(( $# )) && shift
export PYTHONPATH=$PWD  # for the processes that Ray starts
if [[ ${DORA_SECRETS_FILE:-} ]]; then export_secrets; fi
if [[ ${DORA_ALONE:-} ]]; then stand_alone; fi
interface=(--node-ip-address=127.0.0.1)
if [[ ${DORA_TOKEN_FILE:-} ]]; then
  private_file DORA_TOKEN_FILE
  export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$DORA_TOKEN_FILE
  interface=()
fi
[[ $action == train ]] || install ray launch/ray/requirements.txt
case $action in
  head)
    exec "$VENV/bin/ray" start --head --port=6379 --include-dashboard=false --disable-usage-stats "${interface[@]}" ;;
  join)
    [[ ${DORA_TOKEN_FILE:-} ]] || die 2 "DORA_TOKEN_FILE is not set: machines meet with a token only."
    exec "$VENV/bin/ray" start --address="$1:6379" --disable-usage-stats "${@:2}" ;;
  train)
    export RAY_ADDRESS=auto  # the cluster that runs here, never a new one
    exec bash launch/local.sh "$@" ;;
  stop) exec "$VENV/bin/ray" stop ;;
  *) die 2 "${action:-nothing} is none of: head, join, train, stop." ;;
esac
