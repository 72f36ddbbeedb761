"""The scripts that start jobs on TPUs: what a dry run prints, that a real one runs just that, what is refused.
Where an answer is meant to change:
    DORA_REWRITE=1 python -m pytest tests/test_launch_tpu.py        and read the diff.
"""

import itertools
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.launch import BUCKET, CASES, CONFIG, GOLDENS, KUBE, ROOT, STAGED, VM, machine


@pytest.fixture
def here(tmp_path):
    return machine(tmp_path)


def launch(here, script, *args):
    return here.run(f"launch/{script}", *args)


@pytest.mark.parametrize("name", CASES)
def test_a_dry_run_prints_what_it_always_did_and_runs_its_checks_alone(here, name):
    here.answer(STAGED if name == "tpu_vm_staged" else "")
    done = launch(here, *CASES[name], "--dry_run")
    assert (done.returncode, done.stderr) == (0, "")
    assert all(words[:2] in (["bash", "launch/preflight.sh"], ["bash", "launch/local.sh"]) for words in here.called())
    golden = GOLDENS / f"{name}.txt"
    if os.environ.get("DORA_REWRITE"):
        golden.write_text(done.stdout)
    assert done.stdout == golden.read_text(), f"{golden.name}: if this is meant, run with DORA_REWRITE=1"
    assert "sesame" not in done.stdout and "open" not in done.stdout.split()


def commands(text):
    """The commands of a dry run: its lines without manifests and remarks."""
    lines = [line for line in text.splitlines() if line and not line.startswith((" ", "#"))]
    return [shlex.split(line, comments=True) for line in lines]


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("queued")])
def test_a_real_run_runs_what_the_dry_run_prints(here, name):
    vm_slices = {"v5p-32": 4, "v6e-8": 1, "v5litepod-4": 1}
    hosts = next((number for type, number in vm_slices.items() if f"--type={type}" in CASES[name]), 1)
    answer = f"""
        case "$*" in
          *"preflight.sh host"*) for _ in {" ".join(map(str, range(hosts)))}; do echo "versions: jax=1"; done ;;
          *"tpu-vm describe"*) echo HEAD ;;
        esac"""
    here.answer(answer + (STAGED if name == "tpu_vm_staged" else ""))
    done = launch(here, *CASES[name])
    assert done.returncode == 0, done.stderr
    called = [words for words in here.called()]
    printed = [words for words in commands(launch(here, *CASES[name], "--dry_run").stdout) if words[0] != "mkdir"]
    printed = [words[words.index("bash") :] if words[0] == "env" else words for words in printed]
    assert called == printed


@pytest.mark.parametrize(
    "output, fit",
    [(["jax=1"] * 4, True), (["jax=1"] * 3, False), (["jax=1", "jax=1", "jax=2", "jax=1"], False), ([], False)],
)
def test_workers_of_different_versions_start_nothing(here, output, fit):
    lines = "; ".join(f'echo "versions: {version}"' for version in output) or "exit 1"
    here.answer(f'[[ "$*" != *"preflight.sh host"* ]] || {{ {lines}; }}')
    done = launch(here, *CASES["tpu_vm_four_hosts"])
    assert (done.returncode == 0) == fit
    assert any("job.sh start" in words[-1] for words in here.called()) == fit
    assert fit or done.stderr.startswith("error: ")


def test_attaching_ends_as_the_job_does_and_a_second_job_is_refused(here):
    here.answer('[[ "$*" != *"job.sh attach"* ]] || exit 42')
    assert launch(here, *CASES["tpu_vm_attach"]).returncode == 42
    here.called()
    here.answer("""[[ "$*" != *"job.sh status"* ]] || echo 'job: running since noon'""")
    done = launch(here, *CASES["tpu_vm_one_host"])
    assert (done.returncode, done.stderr) == (2, "error: a job runs on demo; attach to it, or stop it first.\n")
    assert not [words for words in here.called() if "scp" in words]


def test_what_lies_on_this_machine_alone_is_refused_without_a_bucket_to_stage_it_in(here):
    here.answer(STAGED)
    for dry in ((), ("--dry_run",)):
        done = launch(here, *CASES["tpu_vm_one_host"], *dry)
        assert (done.returncode, done.stderr) == (
            2,
            (
                "error: model.path: models/my model is on this machine only; --stage=gs://BUCKET/FOLDER copies it to "
                "where the workers read it.\n"
            ),
        )
        assert not [words for words in here.called() if words[0] == "gcloud"]
    assert launch(here, *CASES["tpu_vm_one_host"], "--stage=gs://runs/mine", "--dry_run").returncode == 0


def test_a_misfit_is_refused_before_anything_is_allocated(here):
    here.answer('[[ "$*" != *"preflight.sh"*plan* ]] || exit 2')
    for name, dry in itertools.product(("tpu_vm_one_host", "queued_spot", "gke", "ray"), ((), ("--dry_run",))):
        assert launch(here, *CASES[name], *dry).returncode == 2
        assert [words[1:3] for words in here.called()] == [["launch/preflight.sh", "plan"]]


def test_what_is_not_committed_is_named_and_a_config_that_is_not_is_refused(here):
    here.answer("""
        [[ "$*" != "status --porcelain" ]] || printf '%s\\n' ' M dora_jax/sft.py' '?? my_rewards.py'
        [[ "$*" != "cat-file -e HEAD:./mine.py" ]] || exit 128""")
    done = launch(here, *CASES["tpu_vm_one_host"], "--dry_run")
    assert (done.returncode, done.stderr) == (0, "note: not committed, so left behind: dora_jax/sft.py my_rewards.py\n")
    here.called()
    done = launch(here, "tpu_vm.sh", "run", *VM, "--type=v6e-8", "--config=mine.py:8", "--dry_run")
    assert (done.returncode, done.stdout, done.stderr, here.called()) == (
        2,
        "",
        "error: --config=mine.py is not in the commit that is checked out, and only that is sent: commit it.\n",
        [],
    )


def queue(here, states, codes=(0,), *args, jobs=()):
    """Runs queued_resources.sh against these states of the request and of the job, one an asking, and these ends of the
    job."""
    (here.folder / "states").write_text("".join(f"{state}\n" for state in states))
    (here.folder / "codes").write_text("".join(f"{code}\n" for code in codes))
    here.answer(r"""
        next() { value=$(head -n 1 "$FAKE/$1"); sed -i 1d "$FAKE/$1"; }
        head() { sed -n 1p "$3"; }
        case "$*" in
          *"queued-resources describe"*)
            next states
            [[ $value != NONE ]] || { echo "ERROR: (gcloud) NOT_FOUND: it does not exist" >&2; exit 1; }
            [[ $value != BROKEN ]] || { echo "ERROR: (gcloud) you are nobody" >&2; exit 1; }
            echo "WARNING: old" >&2
            echo "$value" ;;
          *"preflight.sh host"*) echo "versions: jax=1" ;;
          *"job.sh status"*)
            [[ ! -s $FAKE/jobs ]] || { next jobs; echo "job: $value"; } ;;
          *"job.sh attach"*) next codes; exit "$value" ;;
        esac""")
    (here.folder / "jobs").write_text("".join(f"{job}\n" for job in jobs))
    done = launch(here, "queued_resources.sh", *VM, "--type=v5p-8", "--spot", "--poll_s=0", *args, BUCKET, CONFIG)
    short = {"create": "create", "delete": "delete", "job.sh start": "start", "job.sh attach": "attach"}
    called = [" ".join(words) for words in here.called()]
    return done, [short[key] for line in called for key in short if "gcloud" in line and key in line]


@pytest.mark.parametrize(
    "states, codes, expected",
    [
        (
            ["NONE", "WAITING_FOR_RESOURCES", "ACCEPTED", "PROVISIONING", "ACTIVE"],
            [0],
            ["create", "start", "attach", "delete"],
        ),
        (
            ["SUSPENDED", "NONE", "WAITING_FOR_RESOURCES", "ACTIVE"],
            [0],
            ["delete", "create", "start", "attach", "delete"],
        ),
        (["FAILED", "NONE", "ACTIVE"], [0], ["delete", "create", "start", "attach", "delete"]),
        (
            ["ACTIVE", "SUSPENDING", "SUSPENDED", "NONE", "ACTIVE"],
            [255, 0],
            ["start", "attach", "delete", "create", "start", "attach", "delete"],
        ),
        (["ACTIVE", "ACTIVE"], [42, 0], ["start", "attach", "start", "attach", "delete"]),
        (
            ["ACTIVE", "SUSPENDED", "SUSPENDED", "NONE", "ACTIVE"],
            [1, 0],
            ["start", "attach", "delete", "create", "start", "attach", "delete"],
        ),
    ],
)
def test_a_slice_that_is_taken_away_is_asked_for_again(here, states, codes, expected):
    done, called = queue(here, states, codes)
    assert (done.returncode, called) == (0, expected), done.stderr


@pytest.mark.parametrize(
    "jobs, codes, expected",
    [
        (
            ["none", "none", "running since noon"],
            [255, 0],
            ["start", "attach", "attach", "delete"],
        ),  # a connection that breaks
        (["running since noon"], [0], ["attach", "delete"]),  # this script was ended, and is run again
        (["ended with 0, at noon"], [0], ["attach", "delete"]),
        (["ended with 42, at noon"], [0], ["start", "attach", "delete"]),
        (["lost: it was killed"], [0], ["start", "attach", "delete"]),
    ],
)
def test_a_job_that_goes_on_alone_is_not_started_again(here, jobs, codes, expected):
    done, called = queue(here, ["ACTIVE"] * len(codes), codes, jobs=jobs)
    assert (done.returncode, called) == (0, expected), done.stderr


def test_what_waiting_cannot_mend_ends_the_queue(here):
    for code in (1, 2):
        done, called = queue(here, ["ACTIVE", "ACTIVE"], [code])
        assert (done.returncode, called) == (code, ["start", "attach"]) and "still there" in done.stderr
    done, called = queue(here, ["BROKEN"])
    assert (done.returncode, called) == (1, []) and "you are nobody" in done.stderr
    done, called = queue(here, ["NONE", "FAILED", "NONE", "FAILED"], [], "--attempts=2")
    assert (done.returncode, called) == (1, ["create", "delete", "create"]) and "2 times" in done.stderr


@pytest.mark.parametrize(
    "args, why",
    [
        (("tpu_vm.sh", "run", "--zone=z"), "--name is missing; the first lines of launch/tpu_vm.sh say what it is."),
        (("tpu_vm.sh", "start", *VM), "start is none of: create, check, run, status, logs, attach, stop, delete."),
        (
            ("tpu_vm.sh", "create", "--name=Demo_1", "--zone=us-east5-a", "--type=v5p-8", "--dry_run"),
            "--name=Demo_1 is not a DNS label of up to 60 characters.",
        ),
        (("tpu_vm.sh", "delete", "--name=demo", "--zone=Ohio"), "--zone=Ohio is not a zone such as us-east5-a."),
        (("tpu_vm.sh", "create", *VM, "--type=v5p-12"), "--type=v5p-12: there is no slice of that size."),
        (("tpu_vm.sh", "create", *VM, "--type=v4-4"), "--type=v4-4: there is no slice of that size."),
        (
            ("tpu_vm.sh", "run", *VM, "--type=v5p-8", "--spot", "--workdir=/mnt/runs", CONFIG),
            (
                "--workdir=/mnt/runs: a spot machine takes with it what it holds; name a folder of a bucket, "
                "gs://BUCKET/FOLDER."
            ),
        ),
        (
            ("queued_resources.sh", *VM, "--type=v5p-8", "--spot", CONFIG, "--dry_run"),
            (
                "--workdir=(none): a slice of the queue takes with it what it holds; name a folder of a bucket, "
                "gs://BUCKET/FOLDER."
            ),
        ),
        (
            ("queued_resources.sh", *VM, "--type=v5p-8", "--module=dora_jax.sweep", CONFIG),
            "--module=dora_jax.sweep keeps its runs on the machine, and a slice of the queue takes them with it.",
        ),
        (("tpu_vm.sh", "run", *VM, "--type=v9-8"), "--type=v9-8 is none of: v4-N, v5p-N, v5litepod-N, v6e-N."),
        (
            ("tpu_vm.sh", "run", *VM, "--type=tpu7x-8"),
            "--type=tpu7x-8 is not to be had as a Cloud TPU VM; use launch/gke or launch/ray.",
        ),
        (
            ("tpu_vm.sh", "run", *VM, "--type=v5p-32"),
            "--token_file is missing; the first lines of launch/tpu_vm.sh say what it is.",
        ),
        (
            ("tpu_vm.sh", "run", *VM, "--type=v5p-32", "--token_file=open", "--workdir=w"),
            "token_file: open can be read by others; run chmod 600 open.",
        ),
        (("tpu_vm.sh", "run", *VM, "--type=v5p-8", "--secrets=none"), "secrets: none: there is no such file."),
        (
            ("gke/apply.sh", *KUBE, "--rollout=v5p-8"),
            "--rollout=v5p-8 is not GENERATION:TOPOLOGY[:chips a host] such as v5p:2x2x2.",
        ),
        (("gke/apply.sh", *KUBE, "--rollout=v6e:2x3"), "--rollout=v6e:2x3: there is no 2x3 of v6e."),
        (
            ("gke/apply.sh", *KUBE, "--rollout=v5p:2x2"),
            "--rollout=v5p:2x2: slices of v5p have three dimensions, such as 2x2x1.",
        ),
        (("gke/apply.sh", *KUBE, "--rollout=v3:2x2"), "--rollout=v3:2x2: v3 is none of: v4, v5e, v5p, v6e, 7x."),
        (
            ("gke/apply.sh", *KUBE, "--rollout=v6e:2x4:3"),
            "--rollout=v6e:2x4:3: 8 chips are no whole number of hosts of 3.",
        ),
        (
            ("ray/apply.sh", *KUBE, "--rollout=v6e:2x2", "--instances=0"),
            "--instances=0 is not a number of rollout slices.",
        ),
        (
            ("gke/apply.sh", *KUBE, "--rollout=v6e:2x2", "--bucket=gs://runs", "--dry_run"),
            "--bucket=gs://runs is not the name of a bucket.",
        ),
        (
            ("gke/apply.sh", *KUBE, "--rollout=v6e:2x2", "--queue=Team_A"),
            "--queue=Team_A is not the name of a LocalQueue of Kueue.",
        ),
        (
            ("ray/apply.sh", *KUBE[1:], "--rollout=v6e:2x2", "--name=a_b"),
            "--name=a_b is not a DNS label of up to 28 characters.",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(here, args, why):
    (here.root / "open").write_text("token")
    done = launch(here, *args)
    assert (done.returncode, done.stderr, here.called()) == (2, f"error: {why}\n", [])


# ---------------------------------------------------------------- on a host


def test_a_host_joins_with_a_token_and_without_the_variables_of_several_slices(here):
    here.answer('env | grep -E "^(MEGASCALE|RAY|DORA|HF|PYTHONPATH)" >>"$FAKE/env"')
    done = here.run(
        "launch/host.sh",
        "join",
        "10.0.0.2",
        "--block",
        DORA_TOKEN_FILE="token",
        DORA_SECRETS_FILE="secrets",
        MEGASCALE_NUM_SLICES="4",
        MEGASCALE_COORDINATOR_ADDRESS="head:8080",
    )
    assert done.returncode == 0, done.stderr
    assert here.called() == [
        ["install", "ray", "launch/ray/requirements.txt"],
        ["ray", "start", "--address=10.0.0.2:6379", "--disable-usage-stats", "--block"],
    ]
    environment = dict(line.split("=", 1) for line in (here.folder / "env").read_text().splitlines())
    assert environment == {
        "DORA_TOKEN_FILE": "token",
        "DORA_SECRETS_FILE": "secrets",
        "DORA_ACCELERATOR": "tpu",
        "HF_TOKEN": "open",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": "token",
        "PYTHONPATH": str(here.root),
    }


@pytest.mark.parametrize("type, topology", [("v5p-8", "2x2x1"), ("v6e-4", "2x2")])
def test_a_machine_of_a_larger_slice_can_be_one_by_itself(here, type, topology):
    here.answer('env | grep "^TPU_" >"$FAKE/env"')
    here.run("launch/host.sh", "head", DORA_TOKEN_FILE="token", DORA_ALONE=type, TPU_WORKER_ID="3")
    environment = dict(line.split("=", 1) for line in (here.folder / "env").read_text().splitlines())
    assert environment.pop("TPU_NAME")  # this machine's name: no two are taken for one slice
    assert environment == {
        "TPU_WORKER_ID": "0",
        "TPU_ACCELERATOR_TYPE": type,
        "TPU_TOPOLOGY": topology,
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_PROCESS_BOUNDS": "1,1,1",
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "2,2,1",
    }


def test_without_a_token_ray_is_reached_from_its_own_machine_only(here):
    here.run("launch/host.sh", "head")
    assert "--node-ip-address=127.0.0.1" in here.called()[-1]
    assert here.run("launch/host.sh", "join", "10.0.0.2").returncode == 2
    os.chmod(here.root / "token", 0o640)
    assert here.run("launch/host.sh", "head", DORA_TOKEN_FILE="token").returncode == 2
    assert all(words[0] == "install" for words in here.called())


def test_a_job_on_a_host_is_the_local_one(here):
    done = here.run("launch/host.sh", "train", "--config=c.py", "two  words")
    assert done.returncode == 0 and here.called() == [["bash", "launch/local.sh", "--config=c.py", "two  words"]]
    assert here.run("launch/host.sh", "dance").returncode == 2


# ---------------------------------------------------------------- a job that runs by itself


def job(here, action, *args):
    done = here.run("launch/job.sh", action, *args)
    return done.returncode, done.stdout + done.stderr


def test_a_job_outlives_who_started_it_and_ends_as_it_is_asked(here):
    assert job(here, "status") == (0, "job: none\n")
    assert job(here, "attach") == job(here, "logs") == (1, "error: no job was started on this machine.\n")
    here.answer("""
        trap 'echo asked to stop; exit 42' TERM
        echo "step 1 of ${*: -1}"
        sleep 60 & wait $!""")
    code, output = job(here, "start", "--config=c.py", "two  words")
    assert code == 0 and output.startswith("job: running since ")
    assert job(here, "status")[1] == output
    code, output = job(here, "start", "--config=c.py")
    assert code == 2 and "a job runs on this machine, running since" in output
    while "step 1 of two  words\n" not in job(here, "logs")[1]:
        pass
    code, output = job(here, "stop")
    assert code == 0 and output.startswith("job: ended with 42, ")
    code, output = job(here, "attach")
    assert code == 42 and output.startswith("step 1 of two  words\nasked to stop\njob: ended with 42, ")
    assert job(here, "stop")[0] == 0


@pytest.mark.parametrize("code", [0, 1])
def test_attaching_follows_a_job_to_its_end(here, code):
    here.answer(f"echo one; sleep 0.3; echo two; exit {code}")
    job(here, "start")
    ended, output = job(here, "attach")
    assert ended == code and output.startswith(f"one\ntwo\njob: ended with {code}, ")


def test_a_job_that_a_machine_took_with_it_is_lost_and_may_be_started_again(here):
    here.answer("echo $PPID $$ >pids.new; sleep 60 & echo $! >>pids.new; mv pids.new pids; wait")
    job(here, "start")
    while not (here.root / "pids").exists():
        pass
    for pid in (here.root / "pids").read_text().split():  # the shell that would write the exit code down goes first
        os.kill(int(pid), signal.SIGKILL)
    while "lost" not in job(here, "status")[1]:
        pass
    assert job(here, "attach")[0] == 42
    here.answer("exit 0")
    assert job(here, "start")[0] == job(here, "attach")[0] == 0


# ---------------------------------------------------------------- the scripts themselves


@pytest.mark.slow
def test_shellcheck_finds_nothing():
    tool = shutil.which("shellcheck", path=f"{Path(sys.prefix) / 'bin'}:{os.environ['PATH']}")
    if not tool:
        pytest.skip("shellcheck, of tests/requirements.txt, is not installed")
    scripts = [*sorted((ROOT / "launch").rglob("*.sh")), *(ROOT / "tests").glob("*.sh"), ROOT / ".ci/run"]
    done = subprocess.run([tool, "-x", *scripts], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
