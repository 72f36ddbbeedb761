# shellcheck shell=bash
# Sourced by the scripts of launch/, from the root of the repository: options, commands that a dry run only prints, and
# what a TPU slice is made of.

# die CODE SENTENCE: 2 where the caller asked for something impossible, 1 where a machine failed.
die() { echo "error: $2" >&2; exit "$1"; }

dry_run=  # 1: print every command that would run, and run none

# quoted WORD ...: one line that a shell reads back as these words.
quoted() {
  local word line=""
  for word; do
    [[ $word =~ ^[A-Za-z0-9_@%+=:,./-]+$ ]] || word=${word@Q}
    line+="$word "
  done
  echo "${line% }"
}

# run COMMAND ...
run() {
  if [[ $dry_run ]]; then quoted "$@"; else "$@"; fi
}

# check COMMAND ...: in a dry run too, for it asks this machine alone and changes nothing; what it says is then a remark.
check() {
  if [[ ! $dry_run ]]; then "$@"; return; fi
  quoted "$@"
  "$@" | sed 's/^/# /'
}

# options NAME ... -- ARGUMENT ...: --NAME=value becomes $NAME, --NAME alone 1; everything else is left in FLAGS, for
# the program that is launched.
options() {
  local _known=" dry_run " _argument _name
  while [[ $1 != -- ]]; do _known+="$1 "; shift; done
  shift
  FLAGS=()
  for _argument; do
    _name=${_argument%%=*}
    _name=${_name#--}
    if [[ $_argument != --* || $_known != *" $_name "* ]]; then
      FLAGS+=("$_argument")
    elif [[ $_argument == *=* ]]; then
      printf -v "$_name" %s "${_argument#*=}"
    else
      printf -v "$_name" 1
    fi
  done
}

# needs NAME ...: options without which nothing can be done.
needs() {
  local _name
  for _name; do [[ ${!_name} ]] || die 2 "--$_name is missing; the first lines of $0 say what it is."; done
}

# private_file NAME: the file of the option is there, and nobody else reads it. What it holds never shows in a command.
private_file() {
  local file=${!1:-}
  [[ -f $file ]] || die 2 "$1: ${file:-empty}: there is no such file."
  (( (8#$(stat -Lc %a "$file") & 8#077) == 0 )) || die 2 "$1: $file can be read by others; run chmod 600 $file."
}

module=dora_jax.train  # --module

# check_plan HOSTS TRAINER INSTANCE: refuses meshes that do not fit so many machines, and so many devices on each machine
# of the trainer and of an instance.
check_plan() {
  if [[ $module == dora_jax.train ]]; then
    check bash launch/preflight.sh plan "--hosts=$1" "--trainer_devices=$2" "--instance_devices=$3" "${FLAGS[@]}"
  else
    check env "DORA_MODULE=$module" "DORA_DEVICES=$(( $1 * $2 ))" bash launch/local.sh "${FLAGS[@]}" --dry_run
  fi
}

# vm_name NAME ZONE: refuses what Google Cloud does not take.
vm_name() {
  [[ $1 =~ ^[a-z]([-a-z0-9]{0,58}[a-z0-9])?$ ]] || die 2 "--name=$1 is not a DNS label of up to 60 characters."
  [[ $2 =~ ^[a-z]+-[a-z]+[0-9]+-[a-z]$ ]] || die 2 "--zone=$2 is not a zone such as us-east5-a."
}

# lasting_workdir MACHINE WORKDIR: refuses a workdir that goes with a machine of this kind.
lasting_workdir() {
  [[ $module == dora_jax.train ]] || die 2 "--module=$module keeps its runs on the machine, and $1 takes them with it."
  [[ $2 == gs://?*/?* ]] ||
    die 2 "--workdir=${2:-(none)}: $1 takes with it what it holds; name a folder of a bucket, gs://BUCKET/FOLDER."
}

# shipped: names what a machine will not get, for only what is committed is sent; a config file must be.
shipped() {
  local left config
  for config in "${FLAGS[@]}"; do
    [[ $config == --config=* ]] || continue
    config=${config#--config=} config=${config%%:*}
    [[ $config == *.py ]] || config=configs/$config.py  # by its name
    git cat-file -e "HEAD:./$config" 2>/dev/null ||
      die 2 "--config=$config is not in the commit that is checked out, and only that is sent: commit it."
  done
  left=$(git status --porcelain) || die 1 "git cannot say what is committed; its message is above."
  if [[ $left ]]; then echo "note: not committed, so left behind: $(cut -c4- <<<"$left" | paste -sd ' ')" >&2; fi
}

# vm_slice TYPE: sets chips, hosts and image of a Cloud TPU VM slice, and the type of slice that one machine of it would
# be. v4 and v5p are named by cores, two a chip.
# shellcheck disable=SC2034  # the callers use them
vm_slice() {
  local size=${1##*-}
  [[ $size =~ ^[1-9][0-9]*$ ]] || die 2 "--type=$1 is not a name and a number such as v5p-8."
  case ${1%-*} in
    v4) chips=$((size / 2)) image=tpu-ubuntu2204-base machine=v4-8 ;;
    v5p) chips=$((size / 2)) image=v2-alpha-tpuv5 machine=v5p-8 ;;
    v5litepod) chips=$size image=v2-alpha-tpuv5-lite machine=v5litepod-4 ;;
    v6e) chips=$size image=v2-alpha-tpuv6e machine=v6e-4 ;;
    tpu7x) die 2 "--type=$1 is not to be had as a Cloud TPU VM; use launch/gke or launch/ray." ;;
    *) die 2 "--type=$1 is none of: v4-N, v5p-N, v5litepod-N, v6e-N." ;;
  esac
  (( (size & (size - 1)) == 0 && size != 2 && (chips == size || chips >= 4) )) ||
    die 2 "--type=$1: there is no slice of that size."
  hosts=$(( (chips + 3) / 4 ))
  if [[ $1 =~ ^(v5litepod|v6e)-8$ ]]; then hosts=1; fi
}

# kube_slice ROLE: reads the option of that name, GENERATION:TOPOLOGY[:chips a host]; sets ROLE_accelerator and
# ROLE_topology as GKE calls them, ROLE_type as Ray does, ROLE_hosts, and of a host ROLE_chips and ROLE_devices.
kube_slice() {
  local generation topology chips total cores=1 accelerator type
  IFS=: read -r generation topology chips <<<"${!1}"
  [[ $topology =~ ^[1-9][0-9]*(x[1-9][0-9]*){1,2}$ && $chips =~ ^[1-9]?$ ]] ||
    die 2 "--$1=${!1} is not GENERATION:TOPOLOGY[:chips a host] such as v5p:2x2x2."
  total=$(( ${topology//x/ * } ))
  if [[ $generation == v[56]e ]]; then
    [[ $topology =~ ^(1x1|2x2|2x4|4x4|4x8|8x8|8x16|16x16)$ ]] || die 2 "--$1=${!1}: there is no $topology of $generation."
  elif [[ $generation =~ ^(v4|v5p|7x)$ ]]; then
    [[ $topology == *x*x* ]] || die 2 "--$1=${!1}: slices of $generation have three dimensions, such as 2x2x1."
  fi
  case $generation in
    v4) accelerator=tpu-v4-podslice type=v4-$((2 * total)) ;;
    v5e) accelerator=tpu-v5-lite-podslice type=v5litepod-$total ;;
    v5p) accelerator=tpu-v5p-slice type=v5p-$((2 * total)) ;;
    v6e) accelerator=tpu-v6e-slice type=v6e-$total ;;
    7x) accelerator=tpu7x type=v7x-$((2 * total)) cores=2 ;;  # each core is a device
    *) die 2 "--$1=${!1}: $generation is none of: v4, v5e, v5p, v6e, 7x." ;;
  esac
  chips=${chips:-$(( total < 4 ? total : 4 ))}
  (( total % chips == 0 )) || die 2 "--$1=${!1}: $total chips are no whole number of hosts of $chips."
  printf -v "$1_accelerator" %s "$accelerator"
  printf -v "$1_topology" %s "$topology"
  printf -v "$1_type" %s "$type"
  printf -v "$1_hosts" %s $(( total / chips ))
  printf -v "$1_chips" %s "$chips"
  printf -v "$1_devices" %s $(( chips * cores ))
}
