#!/usr/bin/env bash
# One TPU slice of Cloud TPU VMs: makes it, runs the job on all of its workers, takes it down.
#   bash launch/tpu_vm.sh create --name=NAME --zone=ZONE --type=v5p-8 [--spot | --reserved]
#   bash launch/tpu_vm.sh run    --name=NAME --zone=ZONE --type=v5p-8 [--secrets=FILE] FLAGS OF THE JOB
#   bash launch/tpu_vm.sh delete --name=NAME --zone=ZONE
#   bash launch/tpu_vm.sh check  as run: what it refuses, before a machine is paid for
# run sends the commit that is checked out. A slice of one machine runs the whole job in one process. Of several, one
# trains and each other is a rollout instance, as a Ray cluster; that wants --token_file=FILE (a secret of your making)
# and a --workdir that all of them see, a bucket's at best. --module=dora_jax.sweep runs another program.
# With --spot the workdir is in a bucket: what only a spot machine holds goes with it.
# Every action takes --dry_run: it prints the commands and runs none but its checks of the configuration on this machine.
# The exit code is that of the job: 42 is run again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/lib.sh

name="" zone="" type="" spot="" reserved="" secrets="" token_file="" workdir="" chips="" hosts="" image="" machine=""
action=${1:-}
options name zone type spot reserved secrets token_file workdir module -- "${@:2}"
needs name zone
vm_name "$name" "$zone"
slice=("$name" "--zone=$zone")
tpu() { run gcloud compute tpus tpu-vm "$@"; }
on() { tpu ssh "${slice[@]}" "--worker=$1" "--command=$2"; }

create() {
  needs type
  vm_slice "$type"
  tpu create "${slice[@]}" "--accelerator-type=$type" "--version=$image" ${spot:+--spot} ${reserved:+--reserved}
}

# Every worker has the code and passes its checks, and all of them the same versions.
prepare() {
  local archive=.cache/launch/$name.tar.gz checks found
  run mkdir -p .cache/launch
  run git archive --format=tar.gz "--output=$archive" HEAD
  tpu scp "$archive" "$name:dora.tar.gz" "--zone=$zone" --worker=all
  [[ ! ${token_file} ]] || tpu scp --scp-flag=-p "$token_file" "$name:dora_token" "--zone=$zone" --worker=all
  [[ ! ${secrets} ]] || tpu scp --scp-flag=-p "$secrets" "$name:dora_secrets" "--zone=$zone" --worker=all
  checks="mkdir -p dora && tar -xzf dora.tar.gz -C dora && cd dora && DORA_ACCELERATOR=tpu $(
    quoted bash launch/preflight.sh host "--chips=$((chips / hosts))" ${workdir:+"--workdir=$workdir"})"
  if [[ $dry_run ]]; then on all "$checks"; return; fi
  found=$(on all "$checks") || die 1 "a worker of $name is not fit; its message is above."
  echo "$found"
  [[ $(grep -o 'versions: .*' <<<"$found" | sort | uniq -c) =~ ^\ *$hosts\ [^$'\n']*$ ]] ||
    die 1 "the $hosts workers of $name have not the same versions."
}

start() {
  local head others=1 code=0 host
  host="cd dora &&${token_file:+ DORA_TOKEN_FILE=~/dora_token}${secrets:+ DORA_SECRETS_FILE=~/dora_secrets}"
  [[ $module == dora_jax.train ]] || host+=" DORA_MODULE=$module"
  (( hosts == 1 )) || host+=" DORA_ALONE=$machine"
  host+=" bash launch/host.sh"
  if (( hosts > 1 )); then
    on all "$host stop"
    on 0 "$host head"
    head=$(tpu describe "${slice[@]}" "--format=value(networkEndpoints[0].ipAddress)")
    if [[ $dry_run ]]; then echo "$head  # HEAD"; head=HEAD; fi
    if (( hosts > 2 )); then others+=-$((hosts - 1)); fi
    on "$others" "$host join $head"
  fi
  on 0 "$host train $(quoted "${FLAGS[@]}")" || code=$?
  (( hosts == 1 )) || on all "$host stop"
  return "$code"
}

# Completes FLAGS, the flags of the program, and refuses what could not end well.
check_job() {
  needs type
  vm_slice "$type"
  if [[ ${spot} ]]; then lasting_workdir "a spot machine" "$workdir"; fi
  [[ ! ${secrets} ]] || private_file secrets
  if (( hosts > 1 )); then
    needs token_file workdir
    private_file token_file
    FLAGS+=(--config.cluster.launcher=ray "--config.rollout.instances=$((hosts - 1))"
            "--config.cluster.trainer_slice=$machine" "--config.cluster.instance_slice=$machine")
  fi
  FLAGS+=(${workdir:+"--workdir=$workdir"})
  shipped
  check_plan "$hosts" $((chips / hosts)) $((chips / hosts))
}

case $action in
  create) create ;;
  delete) tpu delete "${slice[@]}" --quiet ;;
  check) check_job ;;
  run)
    check_job
    prepare
    start ;;
  *) die 2 "${action:-nothing} is none of: create, check, run, delete." ;;
esac
