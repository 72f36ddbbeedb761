"""Two remote instances whose gangs record what they receive."""

import queue
import threading

import numpy as np

from dora_jax.orchestrate import events as ev
from dora_jax.rollout.migrate import InFlightSample
from dora_jax.runtime.cluster import messages
from dora_jax.runtime.cluster.remote_rollout import RemoteInstance
from dora_jax.runtime.common.worker import InstanceReady
from dora_jax.runtime.transfer.transfer_manifest import KVOffer
from dora_jax.types import SampleId


class NoSupervisor:
    """Starts nothing; the test plays the gang and calls the hooks."""

    def close(self):
        pass


class Remotes(dict):
    """Remote instances by id."""

    def __init__(self):
        super().__init__()
        self.hooks = {}

    def supervisor(self, name, on_demand=False, **hooks):
        self.hooks[len(self)] = hooks
        return NoSupervisor()

    def tell(self, instance, hook, what):
        """`hook`: "up" or "down" with a gang, "on_message" with what one of its processes sent."""
        self.hooks[instance][hook](what)


class Publishing:
    """A publisher that nobody asks anything."""

    def up(self, gang):
        pass

    def down(self, gang):
        pass

    def recognise(self, gang):
        return False


class Posted:
    def __init__(self, epoch=1):
        self.epoch, self.posts, self.reason, self.hosts = epoch, [], "killed", 2
        self.dead = threading.Event()

    def spent(self):
        return {}

    def post(self, what):
        self.posts.append(what)

    tell_all = post

    def tell_each(self, what):
        self.posts += what


def new_pair():
    """Two stand-ins whose gangs are up: (remotes, gangs, outbox)."""
    outbox, remotes, notes = queue.SimpleQueue(), Remotes(), []
    for i in range(2):
        up = ev.InstanceUp(instance=i, slots=8, pages=96, page_size=8)
        remotes[i] = RemoteInstance(up, outbox, Publishing(), remotes.supervisor, notes.append)
    gangs = [rise(remotes, i, outbox) for i in range(2)]
    gangs[1].notes = notes
    return remotes, gangs, outbox


def rise(remotes, instance, outbox, epoch=1):
    gang = Posted(epoch)
    remotes.tell(instance, "up", gang)
    item = outbox.get_nowait()
    assert isinstance(item, InstanceReady)
    item.admit()
    return gang


def drained(outbox):
    items = []
    while not outbox.empty():
        items.append(outbox.get())
    return items


A = SampleId(3, 1)
MOVE = ev.Move(ids=(A,), src=0, dst=1, attempt=1)


REQUEST = InFlightSample(
    id=A,
    version=0,
    prompt_ids=np.zeros(6, np.int32),
    out_ids=np.zeros(2, np.int32),
    logprobs=np.zeros(2, np.float32),
    max_new_tokens=9,
)


def moving(number=1, host=0, hosts=1, manifest=None):
    offered = KVOffer(in_flight=REQUEST, kv_len=0, page_size=0, manifest=manifest)
    return messages.MoveStarted(offered=offered, number=number, host=host, hosts=hosts)
