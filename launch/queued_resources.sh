#!/usr/bin/env bash
# A TPU slice from the queue: asks for it, waits, runs the job by launch/tpu_vm.sh, asks again when it is taken away.
# Ctrl-C ends this script and not the job, which status, logs, attach and stop of launch/tpu_vm.sh reach.
#   bash launch/queued_resources.sh --name=NAME --zone=ZONE --type=v5p-8 [--spot | --reserved] [--attempts=100]
#        --workdir=gs://BUCKET/FOLDER [--secrets=FILE] [--token_file=FILE] [--stage=gs://...] FLAGS OF THE JOB
# The workdir is in a bucket, for the slice is deleted when the job has ended, and whenever it was taken away. What
# `launch/tpu_vm.sh check` refuses is refused before the slice is asked for. Request and slice are both called NAME. Run
# again, it goes on where it was. A job that ends with 0 gives the slice back; one that ends with 1 or 2 leaves it, to be
# looked at. --dry_run prints the commands and runs none but that check.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/lib.sh

name="" zone="" type="" spot="" reserved="" image="" workdir="" poll_s=30 attempts=100
options name zone type spot reserved attempts poll_s workdir module -- "$@"
needs name zone type
vm_slice "$type"
lasting_workdir "a slice of the queue" "$workdir"
FLAGS+=("--workdir=$workdir")
request=("$name" "--zone=$zone")
queue() { run gcloud compute tpus queued-resources "$@"; }
vm() {
  bash launch/tpu_vm.sh "$1" "--name=$name" "--zone=$zone" "--type=$type" "${FLAGS[@]}" ${dry_run:+--dry_run}
}

create() {
  queue create "${request[@]}" "--node-id=$name" "--accelerator-type=$type" "--runtime-version=$image" \
    ${spot:+--spot} ${reserved:+--reserved}
}
delete() { queue delete "${request[@]}" --force --quiet; }
describe() { queue describe "${request[@]}" "--format=value(state.state)"; }

# NONE where there is no such request.
state() {
  local said
  if said=$(describe 2>&1); then
    tail -n 1 <<<"$said"
  elif [[ $said == *NOT_FOUND* ]]; then
    echo NONE
  else
    die 1 "$said"
  fi
}

vm check
if [[ $dry_run ]]; then
  describe
  echo "# not found:"
  create
  echo "# WAITING_FOR_RESOURCES, PROVISIONING, CREATING and all others: describe again after $poll_s s"
  echo "# SUSPENDED or FAILED, which no request comes back from:"
  delete
  create
  echo "# ACTIVE:"
  vm status
  echo "# no job runs there, and none has ended with 0:"
  vm run
  echo "# then:"
  vm attach
  echo "# the job has ended with 0:"
  delete
  exit
fi

last="" tried=0
while (( tried < attempts )); do
  now=$(state)
  [[ $now == "$last" ]] || echo "$(date +%H:%M:%S)  $name: $now" >&2
  last=$now
  case $now in
    NONE)
      create
      tried=$((tried + 1)) ;;
    SUSPENDED | FAILED) delete ;;
    ACTIVE)
      code=0
      # One that ran on without this script, or has ended meanwhile, is not started again.
      [[ $(vm status) =~ "job: "(running|"ended with 0,") ]] || vm run || code=$?
      (( code )) || vm attach || code=$?
      echo "$name: the job has ended with $code" >&2
      if (( code == 0 )); then delete; exit 0; fi
      if (( code == 2 )) || { (( code == 1 )) && [[ $(state) == ACTIVE ]]; }; then
        die "$code" "the job cannot go on; $name is still there, and paid for: queued-resources delete ends it."
      fi
      last=""
      sleep "$poll_s" ;;
    *) sleep "$poll_s" ;;
  esac
done
die 1 "$name was taken away $attempts times."
