# shellcheck shell=bash disable=SC2034
# Sourced by launch/gke/apply.sh and launch/ray/apply.sh after lib.sh: a job of one trainer slice and several rollout
# slices, which may be of another TPU type, on Kubernetes.

name="" image="" trainer="" rollout="" bucket="" token_file="" secrets="" spot="" reservation="" queue="" delete="" cluster=""
instances=1 account=default
trainer_accelerator="" trainer_topology="" trainer_hosts="" trainer_chips="" trainer_devices="" trainer_type=""
rollout_accelerator="" rollout_topology="" rollout_hosts="" rollout_chips="" rollout_devices="" rollout_type=""

# job ARGUMENT ...: reads the options and completes FLAGS, the flags of the program.
job() {
  options name image trainer rollout instances bucket token_file secrets spot reservation queue account module -- "$@"
  local flag
  for flag in "${FLAGS[@]}"; do [[ $flag != --replicas* ]] || die 2 "$flag: renamed to --instances."; done
  needs name image trainer rollout instances bucket token_file
  [[ $name =~ ^[a-z]([-a-z0-9]{0,26}[a-z0-9])?$ ]] || die 2 "--name=$name is not a DNS label of up to 28 characters."
  [[ $instances =~ ^[1-9][0-9]*$ ]] || die 2 "--instances=$instances is not a number of rollout slices."
  [[ $bucket =~ ^[a-z0-9][-a-z0-9_.]{1,61}[a-z0-9]$ ]] || die 2 "--bucket=$bucket is not the name of a bucket."
  private_file token_file
  if [[ ${secrets} ]]; then private_file secrets; fi
  [[ $queue =~ ^([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)?$ ]] || die 2 "--queue=$queue is not the name of a LocalQueue of Kueue."
  queue=${queue:+", kueue.x-k8s.io/queue-name: '$queue'"}
  kube_slice trainer
  kube_slice rollout
  folder=.cache/launch/$name
  workdir=gs://$bucket/$name
  if [[ ${module:-} == dora_jax.sweep ]]; then workdir=/runs/$name; fi  # its runs are folders
  FLAGS+=(--config.cluster.launcher=ray "--config.cluster.trainer_hosts=$trainer_hosts"
          "--config.cluster.trainer_slice=$trainer_type" "--config.cluster.hosts_per_instance=$rollout_hosts"
          "--config.cluster.instance_slice=$rollout_type" "--config.rollout.instances=$instances" "--workdir=$workdir")
  capacity=${spot:+", cloud.google.com/gke-spot: 'true'"}
  if [[ ${reservation} ]]; then capacity+=", cloud.google.com/reservation-name: $reservation"; fi
}

# refuse_misfit: the meshes against the slices, before anything is allocated.
refuse_misfit() {
  check_plan $(( trainer_hosts + instances * rollout_hosts )) "$trainer_devices" "$rollout_devices"
}

# put_secrets: as Kubernetes secrets, from files; their values are in no command and no manifest.
put_secrets() {
  put_secret token "--from-file=auth_token=$token_file"
  if [[ ${secrets} ]]; then put_secret env "--from-env-file=$secrets"; fi
}

put_secret() {
  run kubectl delete secret "$name-$1" --ignore-not-found
  run kubectl create secret generic "$name-$1" "$2"
}

# filled TEMPLATE NAME=VALUE ...: the template's text, @NAME@ by @NAME@; names that do not match are an error.
filled() {
  local text pair
  text=$(<"$1")
  for pair in "${@:2}"; do
    [[ $text == *"@${pair%%=*}@"* ]] || die 1 "$1 has no @${pair%%=*}@."
    text=${text//"@${pair%%=*}@"/"${pair#*=}"}
  done
  [[ ! $text =~ @[a-z_]+@ ]] || die 1 "$1: nobody gives ${BASH_REMATCH[0]}."
  echo "$text"
}

# manifest FILE TEXT: hands it to the cluster; a dry run shows it.
manifest() {
  mkdir -p "$folder"
  echo "$2" >"$folder/$1"
  if [[ $dry_run ]]; then echo "    ${2//$'\n'/$'\n'    }"; fi
  run kubectl apply -f "$folder/$1"
}

# as_yaml WORD: one YAML string, whatever is in it.
as_yaml() {
  [[ $1 != *$'\n'* ]] || die 2 "a flag of more than one line: $1"
  echo "'${1//\'/\'\'}'"
}

# as_yaml_list WORD ...: on one line.
as_yaml_list() {
  local word list=""
  for word; do list+=", $(as_yaml "$word")"; done
  echo "[${list#, }]"
}
