#!/usr/bin/env bash
# The job on GKE without a Ray operator: one JobSet a role (controller, trainer, rollout), which meet as a Ray cluster.
#   bash launch/gke/apply.sh --name=NAME --image=IMAGE --trainer=v5p:2x2x2 --rollout=v6e:2x2 [--instances=2]
#        --bucket=BUCKET --token_file=FILE [--secrets=FILE] [--spot | --reservation=NAME] [--account=ACCOUNT] [--queue=QUEUE] FLAGS
#   bash launch/gke/apply.sh --name=NAME --delete
# Needs JobSet 0.8 or later and the Cloud Storage FUSE driver; IMAGE is made by launch/Dockerfile. The workdir is
# gs://BUCKET/NAME, which ACCOUNT may write; models and data are read at /runs, where BUCKET is seen. A slice is
# GENERATION:TOPOLOGY[:chips a host]; --instances counts rollout slices, each an instance of its own.
# The controller is run again after every exit code but 0, 1 and 2; a slice that is lost is waited for while the others
# go on. --queue is a LocalQueue of Kueue, which admits each JobSet. --dry_run prints the manifests and the commands and runs none.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source launch/lib.sh
source launch/kube.sh

options name delete -- "$@"
if [[ $delete ]]; then
  needs name
  run kubectl delete jobset -l "dora-run=$name"
  run kubectl delete secret "$name-token" "$name-env" --ignore-not-found
  exit
fi

# workers ROLE SLICES: the JobSet of a role.
workers() {
  local accelerator=$1_accelerator topology=$1_topology hosts=$1_hosts chips=$1_chips text
  text=$(filled launch/gke/workers.yaml "role=$1" "slices=$2" "accelerator=${!accelerator}" "topology=${!topology}" \
    "hosts=${!hosts}" "chips=${!chips}" "capacity=$capacity" "workdir=$workdir" "${common[@]}")
  manifest "$1.yaml" "$text"
}

job "$@"
refuse_misfit
common=("name=$name" "image=$image" "bucket=$bucket" "account=$account" "queue=$queue")
flags=$(as_yaml_list "${FLAGS[@]}")
controller=$(filled launch/gke/controller.yaml "${common[@]}" "module=$module" "flags=$flags")
put_secrets
manifest controller.yaml "$controller"
workers trainer 1
workers rollout "$instances"
