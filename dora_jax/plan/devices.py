"""Which devices belong to the trainer and which to each rollout instance; and the settings JAX needs before it starts.

Consumes a number of devices and a `Config`; produces a `DevicePlan` of indices into `jax.devices()`.
Laws: the plan is a pure function, so a dry run prints what a run does; JAX is imported in `setup_platform` only;
what does not divide or does not fit is refused, never rounded to something that was not asked for.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.util
import math
import os
import sys
from pathlib import Path

from dora_jax.base import chips
from dora_jax.base.chips import Machine
from dora_jax.config import Config, ConfigError, RolloutSection

Indices = tuple[int, ...]
AXES = ("data", "fsdp", "tensor", "context", "expert")  # of the trainer's mesh, as `make_mesh` takes them
ACCELERATORS = ("accel[0-9]*", "vfio/[0-9]*", "nvidia*", "kfd", "dxg")  # device files of TPUs, then of GPUs
MALLOC_OPTIONS = {  # mallopt(3), numbers of <malloc.h>
    -8: 1,  # M_ARENA_MAX: one heap, since those of other threads cannot grow
    -4: 0,  # M_MMAP_MAX: large blocks come from the heap too, instead of a mapping that ends with them
    -1: -1,  # M_TRIM_THRESHOLD: the heap's free end stays
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DevicePlan:
    n_devices: int
    trainer: Indices
    trainer_mesh: tuple[int, int, int, int, int]  # data, fsdp, tensor, context, expert
    instances: tuple[Indices, ...]
    reward_model: Indices = ()
    lent: tuple[Indices, ...] = ()  # instances that the trainer's devices make up while the trainer waits

    @property
    def shared(self) -> bool:
        """Whether the trainer shares a device with an instance."""
        return bool(set(self.trainer) & {index for group in self.instances for index in group})

    def describe(self) -> str:
        data, fsdp, tensor, context, expert = self.trainer_mesh
        axes = f"data={data} fsdp={fsdp} tensor={tensor} context={context}" + (
            f" expert={expert}" if expert > 1 else ""
        )
        lines = [
            f"devices: {self.n_devices}, trainer and instances {'share' if self.shared else 'own'} theirs",
            f"  trainer     {_span(self.trainer)}  mesh {axes}",
        ]
        lines += [f"  instance {i}  {_span(group)}  tensor={len(group)}" for i, group in enumerate(self.instances)]
        lines += [f"  lent out    {_span(group)}  tensor={len(group)}" for group in self.lent]
        lines += [f"  reward model  {_span(self.reward_model)}"] if self.reward_model else []
        idle = set(range(self.n_devices)).difference(self.trainer, self.reward_model, *self.instances)
        if idle:
            lines.append(f"  idle        {_span(tuple(sorted(idle)))}")
        return "\n".join(lines)


def plan(n_devices: int, config: Config) -> DevicePlan:
    """ConfigError names the field that this many devices cannot satisfy.

    auto: the trainer takes up to half, the instances the rest, where single-device instances may share a device;
    one device is shared by all. disjoint: as auto, but no device is shared. shared: trainer and instances are on all
    devices. A reward model takes the last devices for itself before that, or the first of the trainer's.
    """
    if n_devices < 1:
        raise ConfigError(f"cpu_devices: {n_devices} devices are too few to run on")
    model = config.reward_model
    size = model.data * model.fsdp * model.tensor if model.path else 0
    own = size if model.placement == "own" else 0
    if own >= n_devices:
        raise ConfigError(
            f'reward_model.placement: "own" takes {own} of {n_devices} devices, which leaves none to the '
            f'trainer; "trainer" shares the trainer\'s'
        )
    planned = _plan(n_devices - own, config)
    if size > own and size > len(planned.trainer):
        raise ConfigError(
            f"reward_model.data: the mesh data * fsdp * tensor = {size} is larger than the trainer's "
            f"{len(planned.trainer)} devices, which it is to share"
        )
    first = n_devices - own if own else 0
    return dataclasses.replace(planned, n_devices=n_devices, reward_model=tuple(range(first, first + size)))


def _plan(n_devices: int, config: Config) -> DevicePlan:
    """Trainer and instances on these devices."""
    share_all = config.placement == "shared" or (config.placement == "auto" and n_devices == 1)
    size = n_devices if share_all else _trainer_devices(n_devices, config)
    mesh = trainer_mesh(size, config)
    used = math.prod(mesh)
    if used > n_devices:
        axis = AXES[mesh.index(max(mesh))]
        raise ConfigError(
            f"trainer.{axis}: the mesh {' * '.join(AXES)} = {' * '.join(map(str, mesh))} "
            f"needs {used} devices, there are {n_devices}"
        )
    rest = tuple(range(0 if share_all else used, n_devices))
    may_share = share_all or (config.placement == "auto" and config.rollout.tensor == 1)
    # Consecutive devices each; instances beyond the devices go round robin where they may.
    rollout = config.rollout
    groups = [rest[i : i + rollout.tensor] for i in range(0, len(rest) - rollout.tensor + 1, rollout.tensor)]
    count = rollout.instances or max(fewest_instances(rollout), len(groups))
    if not groups or (count > len(groups) and not may_share):
        raise ConfigError(
            f"rollout.instances: {count} instances of {rollout.tensor} devices do not fit the {len(rest)} devices "
            f"that the trainer leaves; ask for fewer instances or a smaller mesh, or set placement=shared"
        )
    if rollout.exact and used % rollout.tensor:
        raise ConfigError(
            f"rollout.exact: the trainer scores with the instances' own calls, and its {used} devices do not make up "
            f"instances of rollout.tensor = {rollout.tensor}"
        )
    own = tuple(range(used))
    lent = tuple(own[i : i + rollout.tensor] for i in range(0, used - rollout.tensor + 1, rollout.tensor))
    if config.orchestrator.elastic and config.orchestrator.colocated:
        raise ConfigError(
            "orchestrator.elastic: colocated instances have the trainer's devices: there are none to lend"
        )
    if config.orchestrator.elastic and not lent:
        raise ConfigError(
            f"orchestrator.elastic: the trainer has {used} devices, which are too few for an instance of "
            f"rollout.tensor = {rollout.tensor}"
        )
    return DevicePlan(
        n_devices=n_devices,
        trainer=own,
        trainer_mesh=mesh,
        instances=tuple(groups[i % len(groups)] for i in range(count)),
        lent=lent if config.orchestrator.elastic else (),
    )


def fewest_instances(rollout: RolloutSection) -> int:
    """How many rollout.instances = 0 makes at least: together they hold two versions side by side."""
    return 1 if rollout.residents > 1 else 2


def lendable(config: Config) -> tuple[int, ...]:
    """The instances that the trainer's devices make up while the trainer waits."""
    if not config.orchestrator.elastic:
        return ()
    if config.cluster.launcher:
        lent = config.cluster.trainer_hosts // config.cluster.hosts_per_instance
        return tuple(range(config.rollout.instances, config.rollout.instances + lent))
    import jax

    planned = plan(len(jax.devices()), config)
    return tuple(range(len(planned.instances), len(planned.instances) + len(planned.lent)))


def describe(config: Config) -> str:
    """Which devices, or processes, trainer and instances get."""
    cluster = config.cluster
    if not cluster.launcher:
        return plan(known_devices(config) or 1, config).describe()
    each = f"{cluster.devices_per_host} virtual CPU devices" if cluster.devices_per_host else "its host's devices"
    more = len(lendable(config))
    return (
        f"cluster of {cluster.launcher}: the controller, a trainer of {cluster.trainer_hosts} and "
        f"{config.rollout.instances} instances of {cluster.hosts_per_instance} processes; each has {each}"
    ) + f"; while the trainer waits, its processes are instances too: {more} more" * bool(more)


def trainer_mesh(size: int, config: Config) -> tuple[int, int, int, int, int]:
    """Return the axes data, fsdp, tensor, context and expert of the mesh of a trainer with this many devices."""
    t = config.trainer
    unit = t.data * t.tensor * t.context * t.expert
    if t.fsdp <= 0 and size % unit:
        raise ConfigError(
            f"trainer.fsdp: {size} devices are not divisible by data * tensor * context * expert = {unit}"
        )
    fsdp = t.fsdp if t.fsdp > 0 else size // unit
    if t.rows % (t.micro_batches * t.data * fsdp * t.expert):
        raise ConfigError(
            f"trainer.rows: {t.rows} is not divisible by micro_batches * data * fsdp * expert = "
            f"{t.micro_batches} * {t.data} * {fsdp} * {t.expert}"
        )
    return t.data, fsdp, t.tensor, t.context, t.expert


def known_devices(config: Config) -> int | None:
    """How many devices there will be, as far as that is known without starting JAX."""
    if config.cpu_devices:
        return config.cpu_devices
    named = chips.machine(config.slice).devices if config.slice else None
    stated = os.environ.get("DORA_DEVICES", "")
    if stated and not stated.isdecimal():
        raise ConfigError(f"DORA_DEVICES: {stated!r} is not a number of devices")
    if stated and named and named != int(stated):
        raise ConfigError(f"slice: {config.slice} has {named} devices, and there are {stated}")
    return int(stated) if stated else named


def found() -> Machine:
    """The devices of this process, as JAX tells of them; starts it. Memory is 0 where the platform does not tell it."""
    import jax

    first, count = jax.devices()[0], len(jax.devices())
    chip, per_chip = chips.DEVICE_KINDS.get(first.device_kind, ("", 1))
    reported = (first.memory_stats() or {}).get("bytes_limit", 0) if first.process_index == jax.process_index() else 0
    known = chips.CHIPS[chip].hbm_bytes / per_chip if chip else 0
    return Machine(
        platform=first.platform,
        chip=chip,
        devices=count,
        host_devices=jax.local_device_count(),
        memory_bytes=reported or known,
        bfloat16=first.platform == "cpu" and multiplies_bfloat16(),
    )


def multiplies_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the cores of this machine have instructions for it; no where the system does not tell."""
    flags = cpuinfo.read_text().split() if cpuinfo.exists() else []
    return "avx512_bf16" in flags or "amx_bf16" in flags


def check_slice(field: str, name: str) -> None:
    """ConfigError where the devices of this process are not of the slice that the field names, CPUs where it names
    none.

    A configuration is resolved for that slice, by a controller that has no devices at all.
    """
    wanted, here = chips.machine(name) if name else Machine(), found()
    if wanted.platform != here.platform or (here.chip and wanted.chip != here.chip):
        raise ConfigError(
            f"{field}: {name or 'empty, which is a CPU'}, but this process has {here.devices} devices of "
            f"{here}; name their slice"
        )


def setup_platform(config: Config) -> None:
    """Call before the first use of a device: virtual CPU devices, a C library that keeps the memory that programs on
    CPUs free, and a compilation cache that keeps everything.

    Where libtpu is installed to compile for slices (the extra `aot`) and there is no accelerator, the CPU is chosen:
    JAX would load libtpu and let it look for chips, which costs seconds and prints errors. JAX_PLATFORMS goes first.
    The cache is $DORA_COMPILE_CACHE, else JAX's own setting (JAX_COMPILATION_CACHE_DIR), else ~/.cache/dora_jax.
    """
    import jax

    named = "cpu" if config.cpu_devices else jax.config.jax_platforms
    accelerated = any(file for pattern in ACCELERATORS for file in Path("/dev").glob(pattern))
    if named == "cpu" or not (named or accelerated):
        keep_freed_memory()
    if config.cpu_devices:
        jax.config.update("jax_platforms", "cpu")
        try:
            jax.config.update("jax_num_cpu_devices", config.cpu_devices)
        except RuntimeError as error:  # of a script, whose process has computed before
            if len(jax.devices()) != config.cpu_devices:
                raise ConfigError(
                    f"cpu_devices: JAX runs in this process already, with {len(jax.devices())} devices, and cannot be "
                    f"given {config.cpu_devices} now"
                ) from error
    elif not (named or accelerated) and importlib.util.find_spec("libtpu"):
        jax.config.update("jax_platforms", "cpu")
    wanted = os.environ.get("DORA_COMPILE_CACHE") or getattr(jax.config, "jax_compilation_cache_dir")  # noqa: B009 (checkers do not know it)
    jax.config.update("jax_compilation_cache_dir", wanted or str(Path.home() / ".cache" / "dora_jax"))
    for name, everything in (
        ("jax_persistent_cache_min_compile_time_secs", 0),
        ("jax_persistent_cache_min_entry_size_bytes", -1),
    ):
        if name.upper() not in os.environ:
            jax.config.update(name, everything)


def keep_freed_memory() -> None:
    """Makes glibc keep the memory that XLA's CPU programs free: the next call takes as much, and to be given new pages
    costs an update of a model of 135M parameters a quarter of its time. Nothing happens where the C library is another.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt:
        for option, value in MALLOC_OPTIONS.items():
            mallopt(option, value)


# ---------------------------------------------------------------- private


def _trainer_devices(n_devices: int, config: Config) -> int:
    """How many devices the trainer takes where the instances get the rest: at most half, if its mesh allows."""
    t, rollout = config.trainer, config.rollout
    if t.fsdp > 0:
        return t.fsdp * (t.data * t.tensor * t.context * t.expert)
    half = max(1, n_devices // 2)
    if config.placement == "disjoint" or rollout.tensor > 1:  # instances that cannot share are served first
        half = min(half, n_devices - (rollout.instances or fewest_instances(rollout)) * rollout.tensor)
    unit = t.data * t.tensor * t.context * t.expert
    fsdp = 1
    while 2 * fsdp * unit <= half:  # a power of two: what sizes of models divide by
        fsdp *= 2
    return fsdp * unit


def _span(indices: Indices) -> str:
    if len(indices) > 2 and indices == tuple(range(indices[0], indices[-1] + 1)):
        return f"{indices[0]}-{indices[-1]}"
    return ",".join(map(str, indices))
