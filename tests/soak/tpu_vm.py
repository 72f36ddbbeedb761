"""A TPU VM from nothing, rehearsed: launch/tpu_vm.sh and a gcloud whose machine is a root file system (Linux, root).

    debootstrap --variant=minbase --components=main,universe --include=python3,python3-pip,sudo,ca-certificates \
        jammy ROOT http://archive.ubuntu.com/ubuntu
    python -m tests.soak.tpu_vm --root=ROOT --python=PREFIX [--workdir=DIR]

--root is copied, so that each rehearsal begins with a fresh machine. Its Python may be none that is supported: pip and
uv are real there, but for uv's download of an interpreter, in whose place PREFIX lies (such as ~/.pyenv/versions/3.12.1).
Chips are empty files, so the job computes on the CPU; the bucket is a folder, and its URL file:///bucket. A model that
git ignores and rows outside of the clone are on this machine alone. Prints every command with its output; the first
unexpected exit code ends it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.soak import walk

CHIPS = 8
GCLOUD = r"""#!/bin/bash
# The machine is a folder that commands run in, the bucket another, which the machine has at /bucket.
set -eu
home=/root
at() {
  case $1 in
    file:///bucket/*) mkdir -p "$BUCKET/$(dirname "${1#file:///bucket/}")"; echo "$BUCKET/${1#file:///bucket/}" ;;
    *) echo "$1" ;;
  esac
}
case "$1 $2" in
  "storage rsync") mkdir -p "$(at "$5")"; cp -r "$(at "$4")/." "$(at "$5")"; exit ;;
  "storage cp") cp "$(at "$3")" "$(at "$4")"; exit ;;
esac
case $4 in
  create) echo "created" ;;
  describe) echo READY ;;
  scp) cp "$5" "$MACHINE$home/${6#*:}" ;;
  ssh)
    for word; do [[ $word != --command=* ]] || command=${word#--command=}; done
    exec chroot "$MACHINE" env -i HOME=$home PATH=/usr/local/bin:/usr/bin:/bin PIP_CERT="${PIP_CERT-}" \
      bash -c "cd; $command" ;;
  delete) echo "deleted" ;;
esac
"""
JOB = (
    "--config=configs/rows.py --config.model.path=runs/quickstart_tiny_base --config.task.path={rows} --config.steps=3 "
    "--config.cpu_devices=1 --config.orchestrator.groups_per_step=2 --config.orchestrator.group_size=4 "
    "--config.trainer.micro_batches=1 --config.trainer.pack_tokens=128 --config.rollout.max_prompt_tokens=32 "
    "--config.rollout.max_new_tokens=32 --config.task.heldout=8 --config.eval.prompts=8 --workdir=runs/mine"
)


@contextlib.contextmanager
def machine(root: Path, python: Path, bucket: Path, place: Path) -> Iterator[None]:
    """A copy of the root file system with chips, a network and what uv would download."""
    subprocess.run(["cp", "-a", root, place], check=True)
    for name in ("resolv.conf", "pip.conf", "ssl/certs/ca-certificates.crt"):
        if (Path("/etc") / name).exists():
            shutil.copy(Path("/etc") / name, place / "etc" / name)
    for chip in range(CHIPS):
        (place / f"dev/accel{chip}").touch()
    version = subprocess.run([python / "bin/python3", "-V"], capture_output=True, text=True, check=True).stdout.split()[
        1
    ]
    fetched = Path("root/dora/.cache/python") / f"cpython-{version}-linux-x86_64-gnu"
    shutil.copytree(python, place / fetched, symlinks=True)
    built = place / python.resolve().relative_to("/")  # where its library is looked for
    built.parent.mkdir(parents=True, exist_ok=True)
    built.symlink_to(Path("/") / fetched)
    (place / "bucket").mkdir()
    mounts = [("/proc", place / "proc"), (str(bucket), place / "bucket")]
    for source, target in mounts:
        subprocess.run(["mount", "--bind", source, target], check=True)
    try:
        yield
    finally:
        for _, target in mounts:
            subprocess.run(["umount", "--lazy", target], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True, type=Path)
    parser.add_argument("--python", required=True, type=Path)
    parser.add_argument("--workdir", type=Path, default=None)
    args = parser.parse_args()
    folder = args.workdir or Path(tempfile.mkdtemp(prefix="tpu_vm-"))
    clone = walk.clone(folder)
    (folder / "bucket").mkdir()
    (folder / "bin/gcloud").write_text(GCLOUD)
    (folder / "bin/gcloud").chmod(0o755)
    rows = folder / "sums.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{i} + 1 =", "answer": str(i + 1)}) + "\n" for i in range(64)))
    env = walk.environment(folder) | {"MACHINE": str(folder / "machine"), "BUCKET": str(folder / "bucket")}
    env |= {"PYTHONPATH": str(clone)}
    job = JOB.format(rows=rows)

    def step(command: str, expected: int = 0, says: str = "") -> str:
        began = time.monotonic()
        print(f"$ {command}", flush=True)
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=clone,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        print(done.stdout + f"[exit code {done.returncode}, {time.monotonic() - began:.1f} s]\n", flush=True)
        if done.returncode != expected or not re.search(says, done.stdout):
            sys.exit(f"expected exit code {expected}, and {says or 'anything'}")
        return done.stdout

    vm = "--name=dora --zone=us-east5-a"
    with machine(args.root, args.python, folder / "bucket", folder / "machine"):
        tool = f"chroot {folder / 'machine'}"
        step(f"{tool} cat /etc/os-release | head -1; {tool} python3 --version; {tool} ls /root")
        step(
            "python -m dora_jax.sft --config=configs/quickstart.py:tiny --workdir=runs/base > /dev/null; git status --porcelain"
        )
        step(f"bash launch/tpu_vm.sh create {vm} --type=v6e-8")
        step(f"bash launch/tpu_vm.sh status {vm}", 1, "job: none")
        run = f"bash launch/tpu_vm.sh run {vm} --type=v6e-8 {job}"
        step(run, 2, "is on this machine only; --stage=gs://BUCKET/FOLDER")
        step(f"{run} --stage=file:///bucket/runs/inputs --dry_run")
        step(f"{run} --stage=file:///bucket/runs/inputs", 0, "job: running since")
        step(f"bash launch/tpu_vm.sh status {vm}", 0, "job: running since")
        step(f"{run} --stage=file:///bucket/runs/inputs", 2, "a job runs on dora; attach to it, or stop it first")
        step(f"bash launch/tpu_vm.sh attach {vm}", 0, "ended with 0")
        step(f"bash launch/tpu_vm.sh logs {vm} | tail -3")
        step(f"{run} --config.steps=400 --stage=file:///bucket/runs/inputs", 0, "job: running since")
        while "step " not in step(f"sleep 10; bash launch/tpu_vm.sh logs {vm} | tail -2").lower():
            pass
        step(f"bash launch/tpu_vm.sh stop {vm}", 0, "ended with 42")
        step(f"bash launch/tpu_vm.sh attach {vm} | tail -2", 0)
        step(f"bash launch/tpu_vm.sh delete {vm}")


if __name__ == "__main__":
    main()
