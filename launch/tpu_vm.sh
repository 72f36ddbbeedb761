#!/usr/bin/env bash
# One TPU slice of Cloud TPU VMs: makes it, runs the job on all of its workers, takes it down.
#   bash launch/tpu_vm.sh create --name=NAME --zone=ZONE --type=v5p-8 [--spot | --reserved]
#   bash launch/tpu_vm.sh run    --name=NAME --zone=ZONE --type=v5p-8 [--secrets=FILE] FLAGS OF THE JOB
#   bash launch/tpu_vm.sh status | logs | attach | stop  --name=NAME --zone=ZONE   of the job that run has started
#   bash launch/tpu_vm.sh delete --name=NAME --zone=ZONE
#   bash launch/tpu_vm.sh check  as run: what it refuses, before a machine is paid for
# run sends the commit that is checked out and returns when the job has been started; the job needs no connection.
# attach prints what the job does until it ends; its exit code is the job's: 42 is run again. stop ends it as Ctrl-C does.
# A model or data that the configuration reads on this machine, and the commit has not, are copied to
# --stage=gs://BUCKET/FOLDER (by itself WORKDIR.inputs, where the workdir is in a bucket), which the flags then name; code
# that the commit has not is refused.
# A slice of one machine runs the whole job in one process. Of several, one trains and each other is a rollout instance,
# as a Ray cluster; that wants --token_file=FILE (a secret of your making) and a --workdir that all of them see, a
# bucket's at best. --module=dora_jax.sweep runs another program.
# With --spot the workdir is in a bucket: what only a spot machine holds goes with it.
# Every action takes --dry_run: it prints the commands and runs none but its checks of the configuration on this machine.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/lib.sh

name="" zone="" type="" spot="" reserved="" secrets="" token_file="" workdir="" stage="" chips="" hosts="" image="" machine=""
action=${1:-}
options name zone type spot reserved secrets token_file workdir stage module -- "${@:2}"
needs name zone
vm_name "$name" "$zone"
slice=("$name" "--zone=$zone")
tpu() { run gcloud compute tpus tpu-vm "$@"; }
# A machine that is taken away says nothing more: 90 s without an answer end the connection.
on() { tpu ssh "${slice[@]}" "--worker=$1" --ssh-flag=-oServerAliveInterval=30 "--command=$2"; }

create() {
  needs type
  vm_slice "$type"
  tpu create "${slice[@]}" "--accelerator-type=$type" "--version=$image" ${spot:+--spot} ${reserved:+--reserved}
}

# job ACTION: launch/job.sh on the machine that has the job.
job() { on 0 "[ -f dora/launch/job.sh ] || { echo job: none; exit 1; }; bash dora/launch/job.sh $1"; }

# stage_inputs: what the configuration reads on this machine is in `inputs` as SOURCE URL ..., and the flags name the URLs.
inputs=()
stage_inputs() {
  local asked=(bash launch/preflight.sh inputs "${FLAGS[@]}") found field name source
  [[ $module == dora_jax.train ]] || return 0
  [[ ! $dry_run ]] || quoted "${asked[@]}"
  found=$("${asked[@]}") || exit $?
  stage=${stage:-${workdir:+${workdir%/}.inputs}}
  while IFS=$'\t' read -r field name source; do
    [[ $field ]] || continue
    [[ $stage == *://?*/?* ]] ||
      die 2 "$field: $source is on this machine only; --stage=gs://BUCKET/FOLDER copies it to where the workers read it."
    inputs+=("$source" "$stage/$field/${source##*/}")
    [[ ${FLAGS[-1]} == "--config.$field=$stage/$field/$name" ]] || FLAGS+=("--config.$field=$stage/$field/$name")
  done <<<"$found"
}

# The inputs are in the bucket; every worker has the code and passes its checks, and all of them the same versions.
prepare() {
  local archive=.cache/launch/$name.tar.gz checks found i
  if [[ $dry_run ]]; then
    job status
  elif [[ $(job status) == *"job: running"* ]]; then
    die 2 "a job runs on $name; attach to it, or stop it first."
  fi
  checks="mkdir -p dora && tar -xzf dora.tar.gz -C dora && cd dora"
  # reasoning-gym's pycosat is built on the machine.
  checks+=" && { command -v gcc || sudo DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 install -qy gcc libc6-dev; } >/dev/null"
  for (( i = 0; i < ${#inputs[@]}; i += 2 )); do
    if [[ -d ${inputs[i]} ]]; then
      run gcloud storage rsync --recursive "${inputs[i]}" "${inputs[i+1]}"
    else
      run gcloud storage cp "${inputs[i]}" "${inputs[i+1]}"
    fi
  done
  run mkdir -p .cache/launch
  run git archive --format=tar.gz "--output=$archive" HEAD
  tpu scp "$archive" "$name:dora.tar.gz" "--zone=$zone" --worker=all
  [[ ! ${token_file} ]] || tpu scp --scp-flag=-p "$token_file" "$name:dora_token" "--zone=$zone" --worker=all
  [[ ! ${secrets} ]] || tpu scp --scp-flag=-p "$secrets" "$name:dora_secrets" "--zone=$zone" --worker=all
  checks+=" && DORA_ACCELERATOR=tpu $(
    quoted bash launch/preflight.sh host "--chips=$((chips / hosts))" ${workdir:+"--workdir=$workdir"})"
  if [[ $dry_run ]]; then on all "$checks"; return; fi
  found=$(on all "$checks") || die 1 "a worker of $name is not fit; its message is above."
  echo "$found"
  [[ $(grep -o 'versions: .*' <<<"$found" | sort | uniq -c) =~ ^\ *$hosts\ [^$'\n']*$ ]] ||
    die 1 "the $hosts workers of $name have not the same versions."
}

start() {
  local head others=1 host
  host="cd dora &&${token_file:+ DORA_TOKEN_FILE=~/dora_token}${secrets:+ DORA_SECRETS_FILE=~/dora_secrets}"
  [[ $module == dora_jax.train ]] || host+=" DORA_MODULE=$module"
  (( hosts == 1 )) || host+=" DORA_ALONE=$machine"
  if (( hosts > 1 )); then
    on all "$host bash launch/host.sh stop"
    on 0 "$host bash launch/host.sh head"
    head=$(tpu describe "${slice[@]}" "--format=value(networkEndpoints[0].ipAddress)")
    if [[ $dry_run ]]; then echo "$head  # HEAD"; head=HEAD; fi
    if (( hosts > 2 )); then others+=-$((hosts - 1)); fi
    on "$others" "$host bash launch/host.sh join $head"
  fi
  on 0 "$host bash launch/job.sh start $(quoted "${FLAGS[@]}")"
  echo "# follow it: bash launch/tpu_vm.sh attach $(quoted "--name=$name" "--zone=$zone"); or status, logs, stop"
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
  stage_inputs
}

case $action in
  create) create ;;
  delete) tpu delete "${slice[@]}" --quiet ;;
  check) check_job ;;
  run)
    check_job
    prepare
    start ;;
  status)
    tpu describe "${slice[@]}" "--format=value(state)"
    job status ;;
  logs | attach | stop) job "$action" ;;
  *) die 2 "${action:-nothing} is none of: create, check, run, status, logs, attach, stop, delete." ;;
esac
