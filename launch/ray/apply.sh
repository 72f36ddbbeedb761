#!/usr/bin/env bash
# The job on Kubernetes by KubeRay: a RayJob with one TPU slice for the trainer and --instances of them for rollouts, of
# the same TPU type or another.
#   bash launch/ray/apply.sh --name=NAME --image=IMAGE --trainer=v5p:2x2x2 --rollout=v6e:2x2 [--instances=2]
#        --bucket=BUCKET --token_file=FILE [--secrets=FILE] [--spot | --reservation=NAME] [--account=ACCOUNT] [--queue=QUEUE] FLAGS
#   bash launch/ray/apply.sh --cluster ...    a RayCluster alone; `bash launch/host.sh train FLAGS` on its head is a job
#   bash launch/ray/apply.sh --name=NAME --delete
# Needs KubeRay 1.6 or later, its TPU webhook (both come with GKE's Ray add-on) and the Cloud Storage FUSE driver; IMAGE
# is made by launch/Dockerfile. The workdir is gs://BUCKET/NAME, which ACCOUNT may write; models and data are read at
# /runs, where BUCKET is seen. A slice is GENERATION:TOPOLOGY[:chips a host]. --queue is a LocalQueue of Kueue, which
# admits the whole.
# --dry_run prints the manifest and the commands and runs none.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source launch/lib.sh
source launch/kube.sh

options name delete cluster -- "$@"
if [[ $delete ]]; then
  needs name
  run kubectl delete rayjob,raycluster -l "dora-run=$name"
  run kubectl delete secret "$name-token" "$name-env" --ignore-not-found
  exit
fi

job "${FLAGS[@]}" "--name=$name"
refuse_misfit
machines=$(filled launch/ray/machines.yaml "name=$name" "image=$image" "bucket=$bucket" "account=$account" \
  "workdir=$workdir" "capacity=$capacity" "instances=$instances" \
  "trainer_accelerator=$trainer_accelerator" "trainer_topology=$trainer_topology" "trainer_hosts=$trainer_hosts" \
  "trainer_chips=$trainer_chips" "rollout_accelerator=$rollout_accelerator" "rollout_topology=$rollout_topology" \
  "rollout_hosts=$rollout_hosts" "rollout_chips=$rollout_chips")
entrypoint=$(as_yaml "$(quoted env "DORA_MODULE=$module" bash /dora/launch/host.sh train "${FLAGS[@]}")")
put_secrets
if [[ $cluster ]]; then
  text=$(filled launch/ray/cluster.yaml "name=$name" "queue=$queue" "machines=${machines//$'\n'/$'\n'  }")
  manifest cluster.yaml "$text"
else
  text=$(filled launch/ray/job.yaml "name=$name" "queue=$queue" "machines=${machines//$'\n'/$'\n'    }" "entrypoint=$entrypoint")
  manifest job.yaml "$text"
fi
