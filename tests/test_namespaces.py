"""Hosts whose network is cut, slow or losing packets: the others go on, and nobody ever holds half a version."""

import multiprocessing
import time
from multiprocessing import connection

import pytest

from dora_jax.orchestrate.events import TimePassed
from dora_jax.runtime.transfer import slices, weight_distribution
from dora_jax.runtime.transfer import weight_messages as ex
from dora_jax.runtime.transfer.weight_distribution import WeightDistribution
from tests.fakes import namespaces, weight_peer
from tests.fakes.members import RUN

SIZE = 4 << 20
PATIENT_S = 60.0


class Controller:
    """Feeds the state machine from pipes: the control plane is another network than the one that fails."""

    def __init__(self, hosts):
        self.brain = WeightDistribution(now_s=time.monotonic())
        self.ends, self.outcomes, self.answers, self.on_command = {}, [], {}, lambda item: None
        for name in hosts.space:
            self.ends[name], theirs = multiprocessing.get_context("spawn").Pipe()
            arguments = theirs, SIZE, RUN.issue(name, 1), hosts.ip[name], hosts.space[name]
            process = multiprocessing.get_context("spawn").Process(target=weight_peer.run, args=arguments, daemon=True)
            process.start()
            theirs.close()
            shards = (slices.wanted(weight_peer.like(SIZE)),)
            self.tell(ex.WorldUp(world=name, epoch=1, shards=shards, trainer=name == "trainer"))
        for name in hosts.space:
            self.seen(name)  # it is there

    def tell(self, fact):
        for item in self.brain.step(fact):
            if isinstance(item, ex.Outcome):
                self.outcomes.append(item)
            else:
                self.on_command(item)
                self.send(item.world, item)

    def send(self, name, item):
        self.ends[name].send_bytes(weight_peer.CODEC.encode(item))

    def until(self, done, timeout_s=240.0):
        limit = time.monotonic() + timeout_s
        while not done():
            assert time.monotonic() < limit, self.outcomes
            for end in connection.wait(self.ends.values(), 0.1):
                item = weight_peer.CODEC.decode(end.recv_bytes())
                if isinstance(item, weight_peer.Seen):
                    self.answers[end] = item
                else:
                    self.tell(item)
            self.tell(TimePassed(now_s=time.monotonic()))

    def publish(self, version):
        self.send("trainer", weight_peer.Put(version=version))
        self.until(lambda: self.brain.holders(version))

    def outcome(self, world, version, timeout_s=240.0):
        """The next one of this world, and how long it took."""
        began = time.monotonic()
        self.until(lambda: any((o.world, o.version) == (world, version) for o in self.outcomes), timeout_s)
        found = next(o for o in self.outcomes if (o.world, o.version) == (world, version))
        self.outcomes.remove(found)
        return found, time.monotonic() - began

    def seen(self, name):
        self.send(name, weight_peer.Look())
        self.until(lambda: self.ends[name] in self.answers)
        return self.answers.pop(self.ends[name])


@pytest.mark.slow
@pytest.mark.alone  # how long a transfer may take is what the first one took
def test_a_cut_slow_or_lossy_link_concerns_one_replica_and_never_half_a_version(monkeypatch):
    if reason := namespaces.forbidden():
        pytest.skip(reason)
    with namespaces.Hosts("trainer", "r0", "r1") as hosts:
        monkeypatch.setattr(weight_distribution, "deadline_s", lambda size: PATIENT_S)
        run = Controller(hosts)
        run.publish(1)
        for name in ("r0", "r1"):
            run.tell(ex.Wanted(world=name, version=1))
        took_s = []
        for name in ("r0", "r1"):
            loaded, seconds = run.outcome(name, 1)
            assert isinstance(loaded, ex.Loaded)
            took_s.append(seconds)
        timeout_s = 3.0 + 5 * max(took_s)  # of this machine, busy as it is
        monkeypatch.setattr(weight_distribution, "deadline_s", lambda size: timeout_s)

        # The link between trainer and r0 is cut while r0 pulls.
        run.on_command = lambda item: isinstance(item, ex.Pull) and item.world == "r0" and hosts.cut("trainer", "r0")
        run.publish(2)
        run.tell(ex.Wanted(world="r0", version=2))
        run.until(lambda: run.brain.transfers["r0"][1] is ex.Staged)
        run.tell(ex.Wanted(world="r1", version=2))
        loaded, _ = run.outcome("r1", 2)
        assert isinstance(loaded, ex.Loaded) and run.brain.transfers["r0"][0] == "trainer"  # still at it
        assert run.seen("r0") == weight_peer.Seen(versions=(1,), whole=True)
        assert run.seen("r1") == weight_peer.Seen(versions=(1, 2), whole=True)

        # Its next attempt is from r1, to which it has a link.
        loaded, _ = run.outcome("r0", 2)
        assert isinstance(loaded, ex.Loaded) and run.seen("r0") == weight_peer.Seen(versions=(1, 2), whole=True)

        # Cut off from everybody it stays where it is; the other goes on.
        run.on_command = lambda item: None
        hosts.cut("r0", "r1")
        run.publish(3)
        for name in ("r0", "r1"):
            run.tell(ex.Wanted(world=name, version=3))
        assert isinstance(run.outcome("r1", 3)[0], ex.Loaded)
        refused, _ = run.outcome("r0", 3)
        assert isinstance(refused, ex.NotLoaded) and f"has not come within {timeout_s:.1f} s" in refused.reason
        assert run.seen("r0") == weight_peer.Seen(versions=(1, 2), whole=True)

        # A link that is slow and loses packets delivers, late; the other link does not notice.
        monkeypatch.setattr(weight_distribution, "deadline_s", lambda size: PATIENT_S)
        hosts.link("trainer", "r0", lost=0.02, delay_s=0.02)
        run.publish(4)
        for name in ("r0", "r1"):
            run.tell(ex.Wanted(world=name, version=4))
        for name in ("r1", "r0"):
            assert isinstance(run.outcome(name, 4)[0], ex.Loaded)
        assert run.seen("r0") == weight_peer.Seen(versions=(1, 2, 4), whole=True)
        assert run.seen("r1") == weight_peer.Seen(versions=(1, 2, 3, 4), whole=True)
        for end in run.ends.values():
            end.close()
