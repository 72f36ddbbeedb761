"""Where the trainer's state is while its devices are lent: never in two minds, whatever becomes of those that have
them."""

import contextlib
import threading

import pytest

from dora_jax.orchestrate import events as ev
from dora_jax.runtime.common.worker import Crashed
from dora_jax.runtime.instances.shared_devices import SharedDevices
from dora_jax.runtime.instances.supervised_worker import LocalInstance, RestartPolicy
from tests.fakes import faults
from tests.fakes.coordinator_adversary import UP, MovableState, kill
from tests.fakes.coordinator_world import SECTION, SlowEngine, Weights

LEND = ev.Lend(instance=1, version=0)


class Rig:
    """One lent instance, whose restarts wait for `made`."""

    def __init__(self, trainer):
        self.trainer, self.state, self.made = trainer, SharedDevices(trainer, trainer.free), threading.Event()
        self.reported, self.came = [], threading.Condition()
        spare = RestartPolicy(new_engine=self._new_engine, vocab_size=256, hung_s=0.0)
        common = Weights(), self, 0.0, spare, {}, lambda sentence: None
        self.instance = LocalInstance(ev.InstanceUp(instance=1, **UP), SlowEngine(SECTION), *common, self.state)

    def _new_engine(self):
        assert self.made.wait(20)
        return SlowEngine(SECTION)

    def put(self, item):
        with self.came:
            self.reported.append(item)
            if admit := getattr(item, "admit", None):
                admit()
            self.came.notify_all()

    def kinds(self):
        return [type(item).__name__ for item in self.reported]

    def hears(self, kind, n=1):
        with self.came:
            assert self.came.wait_for(lambda: sum(type(item).__name__ == kind for item in self.reported) == n, 20), (
                self.reported
            )


def test_the_state_is_in_host_memory_from_lend_to_return():
    rig = Rig(MovableState())
    seen = {name: [] for name in ("chips.lent", "chips.returned")}
    with contextlib.ExitStack() as points:
        for name, passes in seen.items():
            points.enter_context(faults.wrap(name, lambda p=passes: p.append((rig.trainer.here, rig.kinds()))))
        for n in (1, 2):
            rig.instance.send(LEND)
            rig.hears("InstanceReady", n)
            assert not rig.trainer.here
            rig.instance.send(ev.Return(instance=1))
            rig.hears("InstanceDown", n)
            assert rig.trainer.here and rig.trainer.moves == n
        rig.instance.stop()
    for n, ((lent, before), (returned, behind)) in enumerate(zip(*seen.values(), strict=True)):
        assert not lent and before.count("InstanceReady") == n, "the devices are lent, and the instance is not up"
        assert returned and behind.count("InstanceDown") == n, "the devices are back, and the instance is not down"


def test_the_trainer_waits_for_its_state_where_the_instance_that_has_its_devices_dies():
    rig = Rig(MovableState())
    rig.instance.send(LEND)
    rig.hears("InstanceReady")
    kill(rig.instance)
    rig.hears("InstanceDown")
    begins = threading.Thread(target=rig.state.reload)
    begins.start()
    begins.join(0.05)
    assert begins.is_alive() and not rig.trainer.here, "the dead engine may hold memory"
    rig.made.set()
    begins.join(20)
    assert rig.trainer.here
    rig.instance.stop()


def test_the_state_comes_back_with_the_last_of_several_instances():
    trainer = MovableState()
    state = SharedDevices(trainer)
    state.acquire(3), state.acquire(4)
    state.release(3)
    assert not trainer.here
    state.release(4), state.release(4)
    assert trainer.here and trainer.moves == 1


class Full(MovableState):
    """The host, or the device, has no memory left."""

    def __init__(self, full):
        super().__init__()
        self.full = full

    def to_host(self):
        super().to_host() if self.full != "host" else self._raise()

    def to_devices(self):
        super().to_devices() if self.full != "device" else self._raise()

    def _raise(self):
        raise MemoryError("out of memory")

    def free(self, engine):
        assert not engine.versions


@pytest.mark.parametrize("full", ["host", "device"])
def test_a_state_that_cannot_move_stays_where_it_is_and_one_that_cannot_come_back_ends_the_run(full):
    rig = Rig(Full(full))
    rig.instance.send(LEND)
    if full == "device":
        rig.hears("InstanceReady")
        rig.instance.send(ev.Return(instance=1))
        rig.hears("Crashed")
        with pytest.raises(MemoryError):
            rig.state.reload()
    rig.hears("InstanceDown")
    assert rig.trainer.here == (full == "host")
    assert any(isinstance(item, Crashed) for item in rig.reported) == (full == "device")
    rig.instance.stop()
