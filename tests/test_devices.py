"""The device plan: which devices own what, for every number of devices, and what is refused."""

import dataclasses
import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_jax.config import Config, ConfigError
from dora_jax.plan import devices


def config(placement="auto", instances=2, rollout_tensor=1, rows=0, micro_batches=1, **mesh):
    base = Config()
    return dataclasses.replace(
        base,
        placement=placement,
        rollout=dataclasses.replace(base.rollout, instances=instances, tensor=rollout_tensor),
        trainer=dataclasses.replace(base.trainer, rows=rows, micro_batches=micro_batches, **mesh),
    )


def owners(plan):
    assert plan.trainer_mesh[3:] == (1, 1)  # context and expert, where the config does not say otherwise
    return plan.trainer, plan.trainer_mesh[:3], plan.instances


@pytest.mark.parametrize(
    "n_devices, asked, expected",
    [
        (1, config(), ((0,), (1, 1, 1), ((0,), (0,)))),
        (2, config(), ((0,), (1, 1, 1), ((1,), (1,)))),  # both instances share the second device
        (3, config(), ((0,), (1, 1, 1), ((1,), (2,)))),
        (4, config(), ((0, 1), (1, 2, 1), ((2,), (3,)))),
        (6, config(), ((0, 1), (1, 2, 1), ((2,), (3,)))),  # fsdp stays a power of two
        (8, config(), ((0, 1, 2, 3), (1, 4, 1), ((4,), (5,)))),
        (8, config(instances=0), ((0, 1, 2, 3), (1, 4, 1), ((4,), (5,), (6,), (7,)))),
        (2, config(instances=0), ((0,), (1, 1, 1), ((1,), (1,)))),
        (8, config(instances=2, rollout_tensor=2), ((0, 1, 2, 3), (1, 4, 1), ((4, 5), (6, 7)))),
        (
            6,
            config(instances=2, rollout_tensor=2),
            ((0, 1), (1, 2, 1), ((2, 3), (4, 5))),
        ),  # what cannot share goes first
        (4, config(data=2, fsdp=1), ((0, 1), (2, 1, 1), ((2,), (3,)))),
        (8, config(tensor=2), ((0, 1, 2, 3), (1, 2, 2), ((4,), (5,)))),
        (4, config(fsdp=3), ((0, 1, 2), (1, 3, 1), ((3,), (3,)))),
        (4, config("disjoint", instances=3), ((0,), (1, 1, 1), ((1,), (2,), (3,)))),
        (4, config("shared"), ((0, 1, 2, 3), (1, 4, 1), ((0,), (1,)))),
        (4, config("shared", rollout_tensor=2, fsdp=2), ((0, 1), (1, 2, 1), ((0, 1), (2, 3)))),
        (2, config("shared", instances=4), ((0, 1), (1, 2, 1), ((0,), (1,), (0,), (1,)))),
    ],
)
def test_who_owns_what(n_devices, asked, expected):
    assert owners(devices.plan(n_devices, asked)) == expected


def judged(asked, reward_placement="own", **mesh):
    """The same config with a reward model."""
    section = dataclasses.replace(asked.reward_model, path="judge", placement=reward_placement, **mesh)
    return dataclasses.replace(asked, reward_model=section)


@pytest.mark.parametrize(
    "n_devices, asked, expected",
    [
        (3, judged(config()), ((0,), (1, 1, 1), ((1,), (1,)), (2,))),  # the last; the others as if there were two
        (8, judged(config(), data=2, tensor=2), ((0, 1), (1, 2, 1), ((2,), (3,)), (4, 5, 6, 7))),
        (2, judged(config()), ((0,), (1, 1, 1), ((0,), (0,)), (1,))),
        (4, judged(config(), "trainer", fsdp=2), ((0, 1), (1, 2, 1), ((2,), (3,)), (0, 1))),
        (1, judged(config(), "trainer"), ((0,), (1, 1, 1), ((0,), (0,)), (0,))),
        (4, config(), ((0, 1), (1, 2, 1), ((2,), (3,)), ())),
    ],
)
def test_where_a_reward_model_is_placed(n_devices, asked, expected):
    plan = devices.plan(n_devices, asked)
    assert (*owners(plan), plan.reward_model) == expected
    assert ("reward model" in plan.describe()) == bool(plan.reward_model) and plan.n_devices == n_devices


@pytest.mark.parametrize(
    "n_devices, asked, field",
    [
        (1, judged(config()), "reward_model.placement"),
        (4, judged(config(), tensor=4), "reward_model.placement"),
        (4, judged(config(), "trainer", tensor=4), "reward_model.data"),
        (1, config("disjoint"), "rollout.instances"),
        (2, config("disjoint"), "rollout.instances"),
        (1, config(rollout_tensor=2), "rollout.instances"),
        (4, config(instances=3, rollout_tensor=2), "rollout.instances"),
        (4, config(fsdp=4), "rollout.instances"),
        (2, config(data=4, fsdp=1), "trainer.data"),
        (3, config("shared", tensor=2), "trainer.fsdp"),
        (1, config("shared", fsdp=2), "trainer.fsdp"),
        (4, config(rows=5), "trainer.rows"),
        (4, config(rows=6, micro_batches=2), "trainer.rows"),
        (0, config(), "cpu_devices"),
    ],
)
def test_what_does_not_fit_is_refused_by_field(n_devices, asked, field):
    with pytest.raises(ConfigError) as caught:
        devices.plan(n_devices, asked)
    (problem,) = caught.value.problems
    assert problem.startswith(field), problem


@given(
    n_devices=st.integers(1, 17),
    placement=st.sampled_from(["auto", "disjoint", "shared"]),
    instances=st.integers(0, 5),
    rollout_tensor=st.integers(1, 3),
    data=st.integers(1, 3),
    fsdp=st.sampled_from([-1, -1, 1, 2, 3]),
    tensor=st.integers(1, 3),
    context=st.integers(1, 2),
)
def test_laws_of_every_plan(n_devices, placement, instances, rollout_tensor, data, fsdp, tensor, context):
    asked = config(placement, instances, rollout_tensor, data=data, fsdp=fsdp, tensor=tensor, context=context)
    try:
        plan = devices.plan(n_devices, asked)
    except ConfigError:
        return
    used = set(plan.trainer).union(*plan.instances)
    assert used <= set(range(n_devices))
    assert math.prod(plan.trainer_mesh) == len(plan.trainer) == len(set(plan.trainer))
    assert (plan.trainer_mesh[0], *plan.trainer_mesh[2:]) == (data, tensor, context, 1) and fsdp in (
        -1,
        plan.trainer_mesh[1],
    )
    assert len(plan.instances) == instances or (instances == 0 and len(plan.instances) >= 2)
    assert all(len(set(group)) == rollout_tensor for group in plan.instances)
    assert plan == devices.plan(n_devices, asked)
    if placement == "disjoint":
        assert sum(map(len, plan.instances)) + len(plan.trainer) == len(used)
    if placement == "auto" and n_devices > 1:
        assert not plan.shared
    assert all(f"instance {i}" in plan.describe() for i in range(len(plan.instances)))


@pytest.mark.parametrize(
    "ours, jaxs, used", [("a", "b", "a"), ("", "b", "b"), ("", None, str(Path.home() / ".cache/dora_jax"))]
)
def test_the_compilation_cache_is_where_the_user_says(monkeypatch, ours, jaxs, used):
    import jax

    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    old = {name: getattr(jax.config, name) for name in names}
    monkeypatch.setenv("DORA_COMPILE_CACHE", ours)
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "7")
    try:
        jax.config.update("jax_compilation_cache_dir", jaxs)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 7.0)
        devices.setup_platform(Config())
        assert [getattr(jax.config, name) for name in names] == [used, 7.0]
    finally:
        for name, value in old.items():
            jax.config.update(name, value)


@pytest.mark.parametrize(
    "named, files, kept", [(None, ("null",), 0), (None, ("none",), 1), ("cpu", ("null",), 1), ("tpu", ("none",), 0)]
)
def test_a_process_that_computes_on_cpus_keeps_the_memory_that_it_frees(monkeypatch, named, files, kept):
    """Also where no field asks for CPU devices: files are those that an accelerator would have in /dev."""
    import jax

    old = {name: getattr(jax.config, name) for name in ("jax_platforms", "jax_compilation_cache_dir")}
    calls: list[int] = []
    monkeypatch.setattr(devices, "ACCELERATORS", files)
    monkeypatch.setattr(devices, "keep_freed_memory", lambda: calls.append(1))
    try:
        jax.config.update("jax_platforms", named)
        devices.setup_platform(Config())
    finally:
        for name, value in old.items():
            jax.config.update(name, value)
    assert len(calls) == kept


def test_description_names_idle_devices():
    assert devices.plan(8, config()).describe().splitlines() == [
        "devices: 8, trainer and instances own theirs",
        "  trainer     0-3  mesh data=1 fsdp=4 tensor=1 context=1",
        "  instance 0  4  tensor=1",
        "  instance 1  5  tensor=1",
        "  idle        6,7",
    ]


def test_number_of_devices_known_before_jax(monkeypatch):
    monkeypatch.delenv("DORA_DEVICES", raising=False)
    assert devices.known_devices(Config()) is None
    monkeypatch.setenv("DORA_DEVICES", "4")
    assert devices.known_devices(Config()) == 4
    assert devices.known_devices(dataclasses.replace(Config(), cpu_devices=2)) == 2
    monkeypatch.setenv("DORA_DEVICES", "many")
    with pytest.raises(ConfigError, match="DORA_DEVICES: 'many'"):
        devices.known_devices(Config())


@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="libtpu is not installed: the extra aot")
@pytest.mark.skipif(any(Path("/dev").glob("accel[0-9]*")), reason="this machine has TPU chips")
def test_a_machine_without_chips_does_not_load_libtpu(tmp_path):
    """It would look for chips, and say on stderr that it found none."""
    code = """if True:
        from dora_jax.config import Config
        from dora_jax.plan import devices
        devices.setup_platform(Config())
        import jax
        print(jax.devices()[0].platform, "libtpu.so" in open("/proc/self/maps").read())
        """
    env = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert (done.stdout, done.stderr) == ("cpu False\n", "")


def test_platform_set_up_makes_the_devices_and_keeps_every_compilation(tmp_path, monkeypatch):
    monkeypatch.setenv("DORA_COMPILE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES", raising=False)
    code = """if True:
        import dataclasses
        from dora_jax import config, devices
        devices.setup_platform(dataclasses.replace(config.Config(), cpu_devices=3))
        import jax
        jax.jit(lambda x: x + 1)(1.0)
        print(len(jax.devices()), jax.devices()[0].platform)
        """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "3 cpu\n"
    assert any(file.name.startswith("jit") for file in (tmp_path / "cache").iterdir())
