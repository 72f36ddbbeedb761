"""What would make a job fail minutes later, reported before it starts; run by launch/preflight.sh.

    plan    before anything is allocated: do the meshes of the configuration fit the chips
    inputs  before anything is sent: which files the configuration reads that the commit has not
    host    on a machine of the job: chips, disk of the workdir, clock, a stale libtpu lock, versions

Consumes flags; prints a line a finding: for inputs FIELD, NAME and SOURCE with tabs between them, for host at last one
line `versions:` that is the same on machines that may work together. Laws: JAX is not started, for that would take the
chips; nothing is repaired but a lock file that no process holds. Exit code: 0 all is well, 1 this machine is not fit,
2 wrong input.
"""

from __future__ import annotations

import email.utils
import fcntl
import glob
import hashlib
import importlib.util
import math
import os
import platform
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from absl import app
from absl import flags as absl_flags

LOCK = Path("/tmp/libtpu_lockfile")  # libtpu holds it with lockf; another user's, left behind, blocks all
MAX_SKEW_S = 5.0  # between this clock and that of the workdir's storage
ANSWER_S = 60.0  # a bucket has answered by then
GOOGLE_STORAGE = "https://storage.googleapis.com"
PACKAGES = ("jax", "jaxlib", "libtpu", "flax", "ray")


class Unfit(Exception):
    """One sentence on what is wrong with this machine, and what to do."""


def plan(hosts: int, trainer_devices: int, instance_devices: int, args: Sequence[str]) -> str:
    """ConfigError where the meshes do not take the devices that each host of the trainer and of an instance has."""
    from dora_jax.cli import flags
    from dora_jax.config import ConfigError
    from dora_jax.plan import devices

    os.environ["DORA_DEVICES"] = str(hosts * trainer_devices)
    config = flags.parse(["dora_jax.train", *args, "--dry_run"], flag_values=absl_flags.FlagValues()).config
    cluster, instances = config.cluster, config.rollout.instances
    if not cluster.launcher:
        if hosts > 1:
            raise ConfigError(f"cluster.launcher: empty, so the run is of one machine, not of {hosts}")
        return devices.plan(trainer_devices, config).describe()
    wanted = cluster.trainer_hosts + instances * cluster.hosts_per_instance
    if wanted != hosts:
        raise ConfigError(
            f"cluster.trainer_hosts: {cluster.trainer_hosts}, and {instances} instances of "
            f"{cluster.hosts_per_instance}, are {wanted} machines, not {hosts}"
        )
    mesh = devices.trainer_mesh(cluster.trainer_hosts * trainer_devices, config)
    if math.prod(mesh) != cluster.trainer_hosts * trainer_devices:
        raise ConfigError(
            f"trainer.fsdp: the mesh data * fsdp * tensor * context * expert = {' * '.join(map(str, mesh))} is "
            f"not the trainer's {cluster.trainer_hosts} * {trainer_devices} devices"
        )
    if config.rollout.tensor != cluster.hosts_per_instance * instance_devices:
        raise ConfigError(
            f"rollout.tensor: {config.rollout.tensor} is not an instance's "
            f"{cluster.hosts_per_instance} * {instance_devices} devices"
        )
    return (
        f"{hosts} machines; trainer: {cluster.trainer_hosts} of {trainer_devices} devices, data * fsdp * tensor * "
        f"context * expert = {' * '.join(map(str, mesh))}; "
        f"{instances} instances: {cluster.hosts_per_instance} of {instance_devices}"
    )


def inputs(args: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """(field, name, source) of each file or folder here that the configuration reads and the commit lacks, or has
    otherwise; of a split in shards, each under the split's name. ConfigError for code that the commit lacks, which
    nothing else brings to a machine."""
    from dora_jax.cli import flags
    from dora_jax.config import ConfigError
    from dora_jax.plan import validate

    def git(*words: str) -> list[str]:
        done = subprocess.run(["git", *words], capture_output=True, text=True, check=False)
        if done.returncode:
            raise ConfigError(f"git {words[0]}: {' '.join(done.stderr.split())}")
        return done.stdout.split("\0")

    asked = flags.parse(["dora_jax.train", *args, "--dry_run"], flag_values=absl_flags.FlagValues())
    if (parent := asked.parent) and not parent.folder.exists():
        raise ConfigError(
            f"model.path: {parent} is on this machine only, and no folder of a model yet: python -m dora_jax.export_hf "
            f"--workdir={parent.run} --step={parent.step} --out={parent.folder}{' --merged' * parent.merged}"
        )
    config = asked.config
    here, committed = Path.cwd(), set(git("ls-tree", "-r", "-z", "--name-only", "HEAD"))
    named = [("config", module.__name__) for module in [*sys.modules.values()]]
    named += [("task.rewards", name.rpartition(".")[0]) for name in config.task.rewards]
    named += [("monitor.sinks", name.rpartition(".")[0]) for name in config.monitor.sinks]
    named += [("environment.name", config.environment.name.rpartition(".")[0])]
    named += [
        (f"trainer.{field}", getattr(config.trainer, field).rpartition(".")[0])
        for field in ("advantage", "policy_loss", "correction")
    ]
    for field, name in named:
        try:
            spec = importlib.util.find_spec(name) if name else None
        except (ImportError, ValueError):  # the run says what is wrong with it
            continue
        file = Path(spec.origin).resolve() if spec and spec.origin else here
        if file.suffix != ".py" or not file.is_relative_to(here) or "site-packages" in file.parts:
            continue
        if (path := str(file.relative_to(here))) not in committed:
            raise ConfigError(
                f"{field}: {path} is not in the commit that is checked out, and only that is sent: commit it"
            )
    for field, named in validate.named_paths(config).items():
        path = Path(named)
        if not named or "://" in named:
            continue
        shards = sorted(path.parent.glob(f"{glob.escape(path.name)}*")) if field.startswith("task.") else []
        for source in [path] if path.exists() else shards:
            place = source.resolve()
            if place.is_relative_to(here):
                inside = str(place.relative_to(here))
                sent = any(each == inside or each.startswith(f"{inside}/") for each in committed)
                if sent and git("status", "--porcelain", "--ignored", "-z", "--", inside) == [""]:
                    continue
            yield field, path.name, str(source)


def host(workdir: str, chips: int, dry_run: bool) -> Iterator[str]:
    """A line a check; Unfit at the first that fails."""
    yield check_chips(chips)
    yield check_lock(LOCK, dry_run)
    if dry_run:
        yield f"{workdir}: not written to (dry run)"
    else:
        yield check_bucket(workdir) if "://" in workdir else check_folder(Path(workdir))
    yield versions()


def check_chips(expected: int, devices: Path = Path("/dev")) -> str:
    """0: any number. One device file a chip: accel<n>, or vfio/<n> from v5e on."""
    found = len([*devices.glob("accel[0-9]*"), *devices.glob("vfio/[0-9]*")])
    if expected and found != expected:
        raise Unfit(f"this host has {found} TPU chips, not the {expected} that the slice should give it")
    return f"{found} TPU chips"


def check_lock(lock: Path, dry_run: bool = False, locks: Path = Path("/proc/locks")) -> str:
    """Removes a lock file that no process holds; a held one means that another program has the chips."""
    if not lock.exists():
        return f"{lock}: not there"
    if holder := _holder(lock, locks):
        raise Unfit(f"{lock}: process {holder} has the TPU; end it first")
    if dry_run:
        return f"{lock}: stale, would be removed"
    try:
        lock.unlink()
    except PermissionError as error:
        raise Unfit(f"{lock}: stale, but another user's; run sudo rm {lock}") from error
    return f"{lock}: stale, removed"


def check_folder(workdir: Path) -> str:
    """Writes, renames and reads back as checkpoints do; the file's time is that of the storage's clock."""
    probe = workdir / f".preflight-{platform.node()}-{os.getpid()}"
    partial = probe.with_suffix(".partial")
    try:
        partial.mkdir(parents=True)
        (partial / "file").write_bytes(b"dora")
        written_s = time.time()
        partial.rename(probe)
        if (probe / "file").read_bytes() != b"dora":
            raise Unfit(f"{workdir}: what was written is not what is read")
        skew_s = (probe / "file").stat().st_mtime - written_s
        (probe / "file").unlink()
        probe.rmdir()
    except OSError as error:
        raise Unfit(f"{workdir}: {error}") from error
    if abs(skew_s) > MAX_SKEW_S:
        raise Unfit(f"{workdir}: this host's clock differs from its storage's by {skew_s:+.0f} s; mend the clock first")
    return f"{workdir}: written, renamed and read; clocks differ by less than {MAX_SKEW_S:.0f} s"


def check_bucket(url: str) -> str:
    """Puts, reads back and deletes an object as checkpoints do; Google's bucket also tells the time."""
    import tensorstore

    name = f".preflight-{platform.node()}-{os.getpid()}"
    try:
        store = tensorstore.KvStore.open(url.rstrip("/") + "/").result(timeout=ANSWER_S)
        store.write(name, b"dora").result(timeout=ANSWER_S)
        if store.read(name).result(timeout=ANSWER_S).value != b"dora":
            raise Unfit(f"{url}: what was written is not what is read")
        store.write(name, None).result(timeout=ANSWER_S)
        skew_s = bucket_time_s() - time.time() if url.startswith("gs://") else 0.0
    except (ValueError, OSError) as error:
        raise Unfit(f"{url}: {' '.join(str(error).split())}") from error
    if abs(skew_s) > MAX_SKEW_S:
        raise Unfit(f"{url}: this host's clock differs from its storage's by {skew_s:+.0f} s; mend the clock first")
    clock = f"; clocks differ by less than {MAX_SKEW_S:.0f} s" if url.startswith("gs://") else ""
    return f"{url}: written, read and deleted{clock}"


def bucket_time_s() -> float:
    """What every answer of Google's storage begins with."""
    try:
        answer = urllib.request.urlopen(GOOGLE_STORAGE, timeout=ANSWER_S)
    except urllib.error.HTTPError as error:  # it asks for an account, and says the time all the same
        answer = error
    return email.utils.parsedate_to_datetime(answer.headers["Date"]).timestamp()


def versions() -> str:
    """One line, the same on machines that run the same code on the same libraries."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "none"
    code = hashlib.sha256()
    for path in sorted(Path("dora_jax").rglob("*.py")):
        code.update(f"{path}\n".encode() + path.read_bytes())
    found["code"] = code.hexdigest()[:12]
    return "versions: " + " ".join(f"{name}={version}" for name, version in found.items())


# ---------------------------------------------------------------- private


def _holder(lock: Path, locks: Path) -> int | None:
    """The process that holds a lock on the file; every user's are listed, where one may look into one's own only."""
    inode = lock.stat().st_ino
    for line in locks.read_text().splitlines():
        if match := re.search(rf" (\d+) [0-9a-f]+:[0-9a-f]+:{inode} ", line):
            return int(match[1])
    try:  # once more by asking: /proc/locks shows only what this container may see
        with lock.open("r+") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return -1
    except PermissionError:
        pass  # another user's file, and nobody's lock
    return None


def main(argv: Sequence[str]) -> None:
    values = absl_flags.FLAGS
    if len(argv) > 1 and argv[1] == "plan":
        print(plan(values.hosts, values.trainer_devices, values.instance_devices, argv[2:]))
    elif len(argv) > 1 and argv[1] == "inputs":
        for found in inputs(argv[2:]):
            print(*found, sep="\t")
    elif argv[1:] == ["host"]:
        for line in host(values.workdir or ".", values.chips, values.dry_run):
            print(line, flush=True)
    else:
        raise ValueError(
            f"{' '.join(argv[1:]) or 'nothing'}: the first argument is plan, inputs or host, with flags only"
        )


def _parse(argv: Sequence[str]) -> list[str]:
    if "plan" in argv[1:2]:
        absl_flags.DEFINE_integer("hosts", 1, "machines that there will be", lower_bound=1)
        absl_flags.DEFINE_integer("trainer_devices", 1, "of a machine of the trainer", lower_bound=1)
        absl_flags.DEFINE_integer("instance_devices", 0, "of a machine of an instance", lower_bound=0)
    elif "inputs" not in argv[1:2]:
        absl_flags.DEFINE_integer("chips", 0, "TPU chips of this machine; 0: any number", lower_bound=0)
        absl_flags.DEFINE_string("workdir", "", "the folder or bucket that the job will write to")
        absl_flags.DEFINE_boolean("dry_run", False, "change nothing")
    absl_flags.FLAGS.set_gnu_getopt(True)
    return absl_flags.FLAGS(list(argv), known_only=True)


if __name__ == "__main__":
    try:
        app.run(main, flags_parser=_parse)
    except (ValueError, absl_flags.Error) as error:  # a ConfigError is a ValueError: a line a problem
        for problem in str(error).splitlines():
            print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
    except Unfit as error:
        print(f"error: {platform.node()}: {error}", file=sys.stderr)
        sys.exit(1)
