"""Weights that travel prove themselves: a bit that flips in storage, on the wire or in memory is found, fetched again
where that can help, and else refused; no engine serves it."""

import dataclasses
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts

from dora_jax import publish
from dora_jax.base.box_digest import LeafBox, added, combined, sums_of
from dora_jax.base.digest import digest
from dora_jax.config import CheckpointSection, Config, ConfigError, RunError
from dora_jax.models import decoder, sharding
from dora_jax.orchestrate.modes import OrchestratorConfig
from dora_jax.publish import DeviceWeights
from dora_jax.runtime.assembly import checkpoint_weights
from dora_jax.runtime.journal import resume
from dora_jax.runtime.journal.event_log import EventLog
from dora_jax.runtime.journal.log_stores import FileLogStore
from dora_jax.runtime.journal.object_storage import StoreError
from dora_jax.runtime.journal.records import CODEC, FORMAT, Head, Published, Saved
from dora_jax.runtime.journal.recovery import recover
from dora_jax.runtime.transfer import device_transfer, slices, weight_storage
from dora_jax.runtime.transfer import weight_messages as ex
from dora_jax.runtime.transfer.transfer_manifest import WireError
from dora_jax.runtime.transfer.weight_distribution import STORAGE, WIRE
from dora_jax.runtime.transfer.weight_storage import StoredWeights
from dora_jax.trainer import checkpoint
from tests.fakes import trainer_cases as cases
from tests.fakes.journal_world import History
from tests.fakes.orchestrator_shape import Shape
from tests.fakes.publication_world import Net, weights
from tests.fakes.wire_peer import key, new_wire, takes, whole

ONE = sharding.make_mesh(jax.devices()[:1], 1, 1, 1)
CONFIG = OrchestratorConfig(groups_per_step=2, group_size=2, total_steps=6)
HERE = jax.sharding.SingleDeviceSharding(jax.devices()[0])


def flip(array, byte=2, bit=0x40):
    """One bit of an array in host memory, read-only or not."""
    flipped = np.array(array)
    flipped.reshape(-1).view(np.uint8)[byte] ^= bit
    return flipped


# ------------------------------------------------------------- digests


def test_sums_over_any_boxes_that_make_up_the_leaves_combine_to_the_digest():
    draw = np.random.default_rng(0)
    tree = {
        "cube": draw.normal(size=(7, 9, 5)).astype(np.float32),
        "half": jnp.asarray(draw.normal(size=(70, 3)), jnp.bfloat16),
        "long": draw.integers(0, 9, 40_000).astype(np.int8),
        "scalar": np.float32(3),
        "wide": draw.normal(size=(3, 40_000)).astype(np.float32),
    }
    leaves, want = [np.asarray(x) for x in jax.tree.leaves(tree)], digest(tree)
    for _ in range(20):
        boxes = []
        for number, x in enumerate(leaves):
            cuts = [sorted({0, n, *draw.integers(0, n + 1, draw.integers(0, 3)).tolist()}) for n in x.shape]
            for cell in itertools.product(*(itertools.pairwise(cut) for cut in cuts)):
                part = x[tuple(slice(*edge) for edge in cell)]
                boxes.append(LeafBox(part, number, tuple(low for low, _ in cell), x.shape))
        sums = list(zip(boxes, sums_of(boxes), strict=True))
        assert combined(added(s for box, s in sums if box.number == i) for i in range(len(leaves))) == want


# ------------------------------------------------------------- storage


TREE = {"a": np.arange(16, dtype=np.float32).reshape(4, 4) + 1, "zero": np.zeros(6, np.float32)}
LIKE = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=HERE), TREE)


@pytest.fixture
def stored(tmp_path):
    store = StoredWeights(tmp_path)
    store.put(3, slices.offered(jax.device_put(TREE, HERE)))
    store.seal(3)
    return store


def test_objects_that_no_run_wrote_are_passed_over(tmp_path, stored):
    for name in ("vx", "extra", "v03/a", "v7.whole.part", "v9/a"):
        path = tmp_path / "weights" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"?")
    later = StoredWeights(tmp_path)
    later.look()
    assert later.versions == (3,)
    later.keep_only([3])
    assert not (tmp_path / "weights" / "v9").exists() and (tmp_path / "weights" / "vx").exists()


def chunk(folder, name="a"):
    (path,) = [path for path in (folder / "weights" / "v3" / name).rglob("*") if path.is_file() and path.suffix == ""]
    return path


def damaged(path, how):
    data = bytearray(path.read_bytes())
    match how:
        case "flip":
            data[11] ^= 0x40
        case "cut":
            del data[-3:]
        case "empty":
            data.clear()
    path.write_bytes(data)
    if how == "gone":
        path.unlink()


@pytest.mark.parametrize("how", ["flip", "cut", "empty", "gone"])
@pytest.mark.parametrize("name", ["a", "zero"])
def test_damage_in_storage_is_refused_by_version_and_array(tmp_path, stored, how, name):
    damaged(chunk(tmp_path, name), how)
    with pytest.raises(StoreError, match=f"version 3 in storage is damaged: {name} was read 2 times: "):
        stored.get(3, LIKE)


def test_a_bit_that_flipped_on_its_way_from_storage_is_right_the_second_time(tmp_path, stored, monkeypatch):
    path, opened = chunk(tmp_path), []  # the array is opened twice a read
    good = path.read_bytes()
    damaged(path, "flip")

    def open(*args, then=weight_storage.ts.open, **options):
        if len(opened) == 2:
            path.write_bytes(good)
        opened.append(1)
        return then(*args, **options)

    monkeypatch.setattr(weight_storage.ts, "open", open)
    shape = {"a": LIKE["a"]}
    assert stored.get(3, shape)["a"].at(((0, 0), (4, 4))).tolist() == TREE["a"].tolist() and len(opened) == 4


def test_versions_that_were_stored_without_checksums_are_read(tmp_path):
    for name, x in TREE.items():  # as an earlier release wrote them: chunks of zeros are left out
        metadata = {"shape": x.shape, "data_type": "float32"}
        kvstore = {"driver": "file", "path": f"{tmp_path}/weights/v3/{name}/"}
        ts.open({"driver": "zarr3", "kvstore": kvstore, "metadata": metadata}, create=True).result()[...] = x
    got = StoredWeights(tmp_path).get(3, LIKE)
    for name, x in TREE.items():
        assert got[name].at(((0,) * x.ndim, x.shape)).tolist() == x.tolist()


# ---------------------------------------------------------------- wire


@pytest.mark.parametrize("heals", [True, False])
def test_a_shard_that_arrives_damaged_is_read_again_then_refused(monkeypatch, heals):
    sender, receiver = new_wire(), new_wire()
    named, k, dialled = {"v": np.ones(9, np.float32), "w": np.arange(12, dtype=np.float32)}, key(), []
    offer, good = sender.give(k, whole(named)), named["w"].copy()
    named["w"][:] = flip(good)  # what is sent from now on

    def dial(*args, then=device_transfer.dial):
        dialled.append(args)
        if heals and len(dialled) == 2:
            named["w"][:] = good
        return then(*args)

    monkeypatch.setattr(device_transfer, "dial", dial)
    if heals:
        takes(receiver, offer, named, k)
    else:
        message = r"w\[0:12\] of float32\[12\] from .* has another checksum than was offered, 2 times"
        with pytest.raises(WireError, match=message):
            receiver.take(offer, tuple(whole(named)), k, 10)
    assert len(dialled) == 2


# ------------------------------------------------------- end to end


def corrupt(tree, version):
    """The weights of a version with one bit flipped, in memory or in storage."""
    leaf = tree["w"]
    boxes = {box: flip(np.full(2, version, np.float32)) for box in leaf.boxes}
    return {"w": dataclasses.replace(leaf, boxes=boxes)}


def served(net, name):
    return [host.weights.versions for host in net.worlds[name].hosts]


def test_a_version_whose_bytes_are_others_is_never_committed():
    net = Net(replicas=1, paths=(STORAGE,))
    net.publish(5, store=True, wire=False)
    net.stored[5] = corrupt(net.stored[5], 5)
    net.want("r0", 5), net.run()
    (refused,) = net.outcomes
    assert isinstance(refused, ex.NotLoaded) and served(net, "r0") == [(), ()]
    assert "from storage: the digest of what arrived is" in refused.reason and "published with" in refused.reason
    net.publish(6, store=True, wire=False)
    net.want("r0", 6), net.run()
    assert net.outcomes[-1] == ex.Loaded(world="r0", version=6)


def test_a_late_joiner_takes_no_damaged_copy_and_gets_the_version_from_another_source():
    """The copy that a replica was sent flips in its memory; the next one is offered it first."""
    net = Net(replicas=2, paths=(WIRE, STORAGE))
    net.publish(5)
    net.want("r0", 5), net.run()
    for host in net.worlds["r0"].hosts:
        host.weights.put(5, corrupt(weights(5), 5))
    net.tell(ex.Wanted(world="r1", version=5))
    sources = []
    while net.messages:
        message = net.messages.pop(0)
        if isinstance(message, tuple) and message[2] == 0 and isinstance(message[3], ex.Offer):
            sources.append(message[3].world)
        name, _, number, command = message if isinstance(message, tuple) else ("", 0, 0, None)
        if name == "r0":  # it looks at no number of its own
            fact = net.worlds[name].hosts[number].execute(command)
            net.messages += [fact] if fact is not None else []
        else:
            deliver(net, message)
    assert sources == ["r0", "trainer"] and net.outcomes[-1] == ex.Loaded(world="r1", version=5)


def deliver(net, message):
    """Deliver a message as `Net.deliver` does, without its look at all numbers."""
    if not isinstance(message, tuple):
        net.tell(message)
    elif (fact := net.worlds[message[0]].hosts[message[2]].execute(message[3])) is not None:
        net.messages.append(ex.CODEC.decode(ex.CODEC.encode(fact)))


def test_two_processes_that_hold_the_same_box_must_have_the_same_bytes():
    net = Net(replicas=1)
    net.publish(5)
    net.want("r0", 5)
    while net.messages:
        message = net.messages.pop(0)
        if isinstance(message, ex.Staged) and message.host == 1:
            message = dataclasses.replace(message, sums=((1, 2),))
        deliver(net, message)
    assert "w[0:2] of float32[2] did not arrive alike in two processes" in net.outcomes[-1].reason


# ------------------------------------------------------ in one process


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("apart", [False, True])
def test_a_copy_that_flips_in_memory_reaches_no_engine(dtype, apart, monkeypatch):
    """On the trainer's device, and on the way over the host to another one."""
    store = DeviceWeights(dtype)
    params = jax.device_put(cases.params(), sharding.param_specs(cases.MODEL, ONE))
    taken = store.put(4, params)
    assert taken == digest(publish.offered_copy(dtype)(params))
    on = sharding.make_mesh(jax.devices()[int(apart) :][:1], 1, 1, 1)
    specs = sharding.param_specs(cases.MODEL, on, "serving")
    store.get(4, specs)
    store.put(5, params)
    if apart:
        monkeypatch.setattr(publish, "sliced", lambda copy, then=publish.sliced: then(corrupt_embedding(copy)))
        store.put(6, params)
    else:
        kept = store.get(5, None)
        kept["embed"] = corrupt_embedding(kept)["embed"]  # the store gives what it keeps
    with pytest.raises(RunError, match=f"version {6 if apart else 5} is not what was published: the digest"):
        store.get(6 if apart else 5, specs)


def corrupt_embedding(copy):
    return copy | {"embed": jax.device_put(flip(np.asarray(copy["embed"])), copy["embed"].sharding)}


def test_an_engine_elsewhere_gets_what_another_has_in_the_serving_layout_and_it_is_checked(monkeypatch):
    store, taken = DeviceWeights(), []
    store.put(0, jax.device_put(cases.params(), sharding.param_specs(cases.MODEL, ONE)))
    store.get(0, sharding.param_specs(cases.MODEL, ONE, "serving"))  # its layers lie one by one now
    other = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    monkeypatch.setattr(
        publish, "host_digest", lambda *args, then=publish.host_digest: taken.append(then(*args)) or taken[0]
    )
    got = store.get(0, other)
    want = decoder.serving_layout(cases.params())
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert taken == [digest(cases.params())]


def test_a_copy_in_the_type_of_the_masters_has_their_digest_which_is_not_taken_twice(monkeypatch):
    monkeypatch.setattr(publish, "digest_of", None)
    params = jax.device_put(cases.params(), HERE)
    assert DeviceWeights("float32").put(0, params, digest=17) == 17
    with pytest.raises(TypeError):
        DeviceWeights("bfloat16").put(0, params, digest=17)


# ------------------------------------------------------- after a restart


class Sink(dict):
    """The weight store, the checkpoints and the console of a run that begins again. copied: what a copy comes out
    as."""

    def __init__(self, copied=lambda made, known: known):
        self._copied = copied

    def put(self, version, params, digest=0, copy=0):
        return self._copied(digest, copy)

    def steps(self):
        return []

    unsealed = steps

    def __getattr__(self, name):
        return lambda *args: None


def resumed(copied):
    history = History(CONFIG, Shape(), every=10)
    assert history.live(kill_fact=118) is None
    found = recover(EventLog(history.disk), CONFIG, [0], lambda version: True, print)
    digests = {0: 0} | {step.base + 1: step.published.digest for step in found.steps}
    assert all(step.published.copy for step in found.steps), "it is in the journal"
    trainer = types.SimpleNamespace(params=0)
    trainer.step = lambda base: setattr(trainer, "params", base + 1)
    store = EventLog(history.disk)
    begun = resume.begin(
        store, Sink(), trainer, Sink(copied), lambda groups, base: base, digests.__getitem__, CONFIG, Sink()
    )
    return found, begun


def test_a_version_that_is_published_again_has_the_copy_that_it_had():
    found, begun = resumed(lambda made, known: known)
    live = [step for step in found.steps if step.base + 1 in found.outstanding.versions]
    assert live and all(begun.payloads.digests[step.base + 1] == step.published for step in live)
    with pytest.raises(RunError, match="is not published: the copy of its weights .* and equal weights gave"):
        resumed(lambda made, known: known ^ 4 if known else 0)


def test_another_dtype_makes_another_copy_and_the_run_goes_on():
    found, begun = resumed(lambda made, known: made)  # float32, where bfloat16 was
    newest = begun.payloads.digests[found.base]
    assert newest.copy == newest.digest and begun.epoch == found.epoch


# ---------------------------------------------------- checkpoints and the journal


def a_checkpoint(folder, params):
    store = checkpoint.Checkpoints(folder / "checkpoints", CheckpointSection())
    store.save(5, params, {"count": jnp.zeros(())}, {"step": 5}, {"loss": 1.0})
    store.close()


def a_journal(folder, published, saved):
    head = Head(
        format=FORMAT,
        epoch=0,
        config={},
        orchestrator={},
        digests={} if published is None else {"5": Published(epoch=0, digest=published)},
        payload_records=0,
        saved={} if saved is None else {"5": Saved(version=5, params=saved, opt_state=0, rl_state=0)},
        settings={},
    )
    journal = EventLog(FileLogStore(folder / "journal"))
    journal.rotate([CODEC.encode(head)])
    journal.close()


@pytest.mark.parametrize("by", ["published", "saved"])
def test_params_that_changed_under_a_manifest_that_was_made_anew_are_not_evaluated(tmp_path, by):
    params = {"embed": jnp.arange(6.0), "layers": {"q_proj": jnp.ones((2, 3))}}
    a_checkpoint(tmp_path, params)
    a_journal(tmp_path, *((digest(params), None) if by == "published" else (1, digest(params))))
    directory = tmp_path / "checkpoints"
    jax.tree.map(np.testing.assert_array_equal, checkpoint_weights.read(Config(), directory, 5), params)
    other = params | {"embed": jnp.asarray(flip(params["embed"]))}
    (directory / "5").rename(tmp_path / "aside")
    a_checkpoint(tmp_path, other)  # whole, with a manifest of its own: only the digest can tell
    assert checkpoint.verify(directory, 5, full=True) is None
    with pytest.raises(
        ConfigError, match=r"step: checkpoint 5 cannot be trusted: its params have the digest .* journal"
    ):
        checkpoint_weights.read(Config(), directory, 5)
    (tmp_path / "journal").rename(tmp_path / "no journal")
    checkpoint_weights.read(Config(), directory, 5)  # by its manifest alone
