#!/usr/bin/env bash
# The job of a machine, detached: it outlives the connection that started it. launch/tpu_vm.sh runs this there.
#   bash launch/job.sh start FLAGS   launch/host.sh train FLAGS in the background; refused while another one runs
#   bash launch/job.sh status        one line: running, ended with its exit code, lost (killed with the machine), or none
#   bash launch/job.sh logs          the last 200 lines of what it printed
#   bash launch/job.sh attach        the same, and what follows, until it ends; exit code: the job's; of a lost one 42
#   bash launch/job.sh stop          SIGTERM, as Ctrl-C would; returns when the job has ended
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/lib.sh

JOB=.cache/job  # log, pid, code; and lock, which its processes hold as long as they live

state() {
  if [[ ! -e $JOB/lock ]]; then
    echo "none"
  elif ! flock -n "$JOB/lock" true; then
    echo "running since $(date -r "$JOB/lock" "+%F %T")"
  elif [[ -s $JOB/code ]]; then
    echo "ended with $(<"$JOB/code"), $(date -r "$JOB/code" "+%F %T")"
  else
    echo "lost: it was killed, or the machine was; start it again"
  fi
}

ended() { flock -w "$1" "$JOB/lock" true; }

action=${1:-}
(( $# )) && shift
case $action in
  start)
    mkdir -p "$JOB"
    exec 9>>"$JOB/lock"
    flock -w 1 9 || die 2 "a job runs on this machine, $(state); attach to it, or stop it first."
    rm -f "$JOB/code" "$JOB/pid"
    touch "$JOB/lock"
    setsid bash launch/job.sh carry "$@" >"$JOB/log" 2>&1 </dev/null &
    for _ in {1..200}; do [[ ! -s $JOB/pid ]] || break; sleep 0.05; done
    echo "job: $(state)" ;;
  carry)  # start's own: the job, and its exit code in a file
    code=0
    bash launch/host.sh train "$@" 9>&- &
    echo $! >"$JOB/pid"
    wait $! || code=$?
    echo "$code" >"$JOB/code" ;;
  status)
    echo "job: $(state)" ;;
  logs)
    [[ -f $JOB/log ]] || die 1 "no job was started on this machine."
    tail -n 200 "$JOB/log" ;;
  attach)
    case $(state) in
      none) die 1 "no job was started on this machine." ;;
      running*)
        tail -n 200 -f --pid="$(<"$JOB/pid")" "$JOB/log"
        ended 60 || die 1 "the job has ended, but not the shell that writes its exit code down." ;;
      *) tail -n 200 "$JOB/log" ;;
    esac
    echo "job: $(state)" >&2
    [[ -s $JOB/code ]] || exit 42
    exit "$(<"$JOB/code")" ;;
  stop)
    if [[ $(state) == running* ]]; then
      kill -TERM "$(<"$JOB/pid")" || true  # it may just have ended
      ended 60 || die 1 "the job still runs 60 s after SIGTERM: process $(<"$JOB/pid")."
    fi
    echo "job: $(state)" ;;
  *) die 2 "${action:-nothing} is none of: start, status, logs, attach, stop." ;;
esac
