"""A checkout of the launch scripts on a machine whose gcloud, kubectl, git and ray write down their arguments."""

import dataclasses
import os
import shlex
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOOLS = [
    "bash",
    "cat",
    "chmod",
    "cut",
    "date",
    "dirname",
    "env",
    "flock",
    "grep",
    "mkdir",
    "mv",
    "paste",
    "rm",
    "sed",
    "setsid",
    "sleep",
    "sort",
    "stat",
    "tail",
    "touch",
    "true",
    "uniq",
]

FAKE = """#!/bin/bash
# Writes down how it was called, in words that a shell reads back, and answers as the test wants it.
echo "${0##*/} ${*@Q}" >>"$FAKE/log"
[[ -f $FAKE/answer.sh ]] && source "$FAKE/answer.sh"
exit 0
"""
SETUP = """
source launch/lib.sh
VENV=.venv
PY=.venv/bin/python
install() { echo "install ${*@Q}" >>"$FAKE/log"; }
"""
STAND_IN = """#!/bin/bash
exec "$FAKE/bin/bash_" "$0" "$@"
"""


@dataclasses.dataclass
class Machine:
    """Scripts run in `root`; `answer` is a shell text that a fake runs with its own arguments."""

    folder: Path

    @property
    def root(self) -> Path:
        return self.folder / "dora"

    def answer(self, text: str) -> None:
        (self.folder / "answer.sh").write_text(text)

    def run(self, *args: str, **environment: str) -> subprocess.CompletedProcess:
        env = {"PATH": str(self.folder / "bin"), "FAKE": str(self.folder), "HOME": str(self.folder), **environment}
        return subprocess.run(
            ["bash", *args], cwd=self.root, env=env, capture_output=True, text=True, timeout=60, check=False
        )

    def called(self) -> list[list[str]]:
        """The commands so far, in their order, and none of them twice; but for questions to git."""
        log = self.folder / "log"
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        called = [[word.replace("bash_", "bash") for word in shlex.split(line)] for line in lines]
        return [words for words in called if words[:2] not in (["git", "status"], ["git", "cat-file"])]


def machine(folder: Path) -> Machine:
    """Secrets of a user lie in the checkout, so that no golden file names this machine's folders."""
    made = Machine(folder)
    shutil.copytree(ROOT / "launch", made.root / "launch")
    (made.root / "launch/setup.sh").write_text(SETUP)
    for name in ("preflight.sh", "local.sh"):
        (made.root / "launch" / name).write_text(STAND_IN)
    tools = folder / "bin"
    tools.mkdir()
    for tool in TOOLS:
        (tools / tool).symlink_to(shutil.which(tool))
    fakes = [tools / name for name in ("gcloud", "kubectl", "git", "bash_")]
    (made.root / ".venv/bin").mkdir(parents=True)
    for path in (*fakes, made.root / ".venv/bin/ray", made.root / ".venv/bin/python"):
        path.write_text(FAKE)
        path.chmod(0o755)
    for name, text in (("token", "sesame\n"), ("secrets", "# mine\nHF_TOKEN=open\n")):
        (made.root / name).write_text(text)
        os.chmod(made.root / name, 0o600)
    return made


GOLDENS = ROOT / "tests/goldens/launch"


CONFIG = "--config=configs/quickstart.py"


BUCKET = "--workdir=gs://runs/demo"


VM = ("--name=demo", "--zone=us-east5-a")


KUBE = (
    "--name=demo",
    "--image=example.org/dora:1",
    "--trainer=v5p:2x2x2",
    "--bucket=runs",
    "--token_file=token",
    CONFIG,
)


STAGED = """
case "$*" in
  *"preflight.sh inputs"*)
    mkdir -p "models/my model"
    printf '%s\\t%s\\t%s\\n' model.path "my model" "models/my model" \\
      task.path rows.jsonl /data/rows.jsonl task.heldout_path test data/test-0-of-2.parquet \\
      task.heldout_path test data/test-1-of-2.parquet ;;
esac
"""


CASES = {
    "tpu_vm_create": ("tpu_vm.sh", "create", *VM, "--type=v5p-8", "--spot"),
    "tpu_vm_one_host": (
        "tpu_vm.sh",
        "run",
        *VM,
        "--type=v6e-8",
        "--secrets=secrets",
        CONFIG,
        "--config.task.template={prompt} it's",
    ),
    "tpu_vm_four_hosts": (
        "tpu_vm.sh",
        "run",
        *VM,
        "--type=v5p-32",
        "--token_file=token",
        "--workdir=/mnt/runs/demo",
        CONFIG,
        "--config.rollout.tensor=4",
    ),
    "tpu_vm_sweep": ("tpu_vm.sh", "run", *VM, "--type=v5litepod-4", "--module=dora_jax.sweep", CONFIG, "--only=2"),
    "tpu_vm_staged": ("tpu_vm.sh", "run", *VM, "--type=v6e-4", "--spot", BUCKET, CONFIG),
    "tpu_vm_status": ("tpu_vm.sh", "status", *VM),
    "tpu_vm_attach": ("tpu_vm.sh", "attach", *VM),
    "tpu_vm_delete": ("tpu_vm.sh", "delete", *VM),
    "queued_spot": ("queued_resources.sh", *VM, "--type=v5p-8", "--spot", BUCKET, CONFIG),
    "queued_reserved": ("queued_resources.sh", *VM, "--type=v4-16", "--reserved", "--token_file=token", BUCKET, CONFIG),
    "gke": (
        "gke/apply.sh",
        *KUBE,
        "--rollout=v6e:2x4:8",
        "--instances=3",
        "--secrets=secrets",
        "--config.rollout.tensor=8",
    ),
    "gke_spot": ("gke/apply.sh", *KUBE, "--rollout=v5p:2x2x1", "--spot"),
    "gke_queue": ("gke/apply.sh", *KUBE, "--rollout=v5p:2x2x1", "--queue=team-a"),
    "gke_delete": ("gke/apply.sh", "--name=demo", "--delete"),
    "ray": ("ray/apply.sh", *KUBE, "--rollout=v6e:4x4", "--instances=2", '--config.task.template={prompt} "it\'s"'),
    "ray_queue": ("ray/apply.sh", *KUBE, "--rollout=v5p:2x2x1", "--queue=team-a"),
    "ray_cluster": ("ray/apply.sh", "--cluster", *KUBE, "--rollout=7x:2x2x1", "--reservation=mine"),
    "ray_delete": ("ray/apply.sh", "--name=demo", "--delete"),
}
