"""One process of a gang: `python -m dora_jax.runtime.cluster.process_main`, started by a launcher, which sends it
everything else.

    Hello -> Begin -> [world, model, compile] -> Ready -> calls and posts, until the controller is gone

Consumes the environment's ticket; the stages that it runs are those of one machine. Laws: whatever goes wrong
ends this process, after one sentence to the controller; where the controller is killed it goes on, and ends if no other
one comes; it never waits in an exit barrier for a member that is gone.
"""

from __future__ import annotations

import signal

if __name__ == "__main__":  # Ctrl-C reaches every process of a terminal; the controller is the one that it is meant for
    signal.signal(signal.SIGINT, signal.SIG_IGN)

import contextlib
import json
import os
import resource
import socket
import sys
import threading
import traceback
from collections.abc import Callable, MutableMapping
from typing import TYPE_CHECKING

from dora_jax.runtime.cluster.launch_process import Ticket

if TYPE_CHECKING:
    from dora_jax.config import Config
    from dora_jax.runtime.cluster.connection import ControllerConnection
    from dora_jax.runtime.cluster.messages import Begin

LAST_WORDS_S = 5.0
HEARTBEAT_S = 60  # of jax.distributed, which aborts in C++ where a busy machine delays it: the controller comes first
SHUTDOWN_S = 5
MULTISLICE = "MEGASCALE_"


def serve(ticket: Ticket, leave: Callable[[], None] = lambda: None) -> None:
    """Never returns; `leave` is the last thing that this process does."""
    from dora_jax.config import ConfigError
    from dora_jax.runtime.cluster import messages
    from dora_jax.runtime.cluster.connection import ControllerConnection, join, turns_of
    from dora_jax.runtime.common.credentials import Credential

    def end(code: int) -> None:
        leave()
        os._exit(code)

    with contextlib.suppress(ValueError):  # on a system whose own bound is lower
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # gloo holds whatever connects to it
    own = Credential(ticket.credential)
    link = ControllerConnection(ticket.controller, own, lambda: end(0))
    pass_on_notice(link)
    try:
        # libtpu writes a sentence there where it was loaded and found no TPU
        worker = int(place) if (place := os.environ.get("TPU_WORKER_ID", "")).isdigit() else -1
        with socket.socket() as free:  # its port is for the world
            free.bind((link.own_ip, 0))
            coordinator = f"{link.own_ip}:{free.getsockname()[1]}"
            listener, arrivals, status = join(link, worker, coordinator)
        begin = link.inbox.get()
        # opens the role of this process; it is compiled on return
        from dora_jax.plan import validate
        from dora_jax.runtime.journal import staged_inputs

        config = validate.from_config_dict(begin.config)
        elsewhere = {  # copies of what is in a bucket, on the controller's machine
            field: staged_inputs.url_of(path)
            for field, path in validate.named_paths(config).items()
            if not (os.path.exists(path) or field.startswith("task."))
        }
        config = staged_inputs.staged(config, {field: url for field, url in elsewhere.items() if url})
        link.wait_for_another(begin.workdir, begin.rank, config.cluster.reattach_s)
        _enter_world(begin, config)
        from dora_jax.runtime.cluster.rollout_role import open_rollout
        from dora_jax.runtime.cluster.worker_roles import TrainerRole

        open_role = TrainerRole if begin.instance is None else open_rollout
        role = open_role(begin, config, link, status, turns_of(begin, own, arrivals))
        listener.close()
        link.send(messages.Ready(wanted=role.wanted))
        role.run(link.inbox)
        link.part()
        threading.Event().wait()  # it has handed over: the controller ends it
    except BaseException as error:  # the controller says it, and starts another gang
        traceback.print_exc()
        sys.stderr.flush()
        link.send(
            messages.ProcessFailed(error=f"{type(error).__name__}: {error}", final=isinstance(error, ConfigError))
        )
        link.records.flush(LAST_WORDS_S)
    end(1)


def pass_on_notice(link: ControllerConnection) -> None:
    """Tells the controller of a SIGTERM (the machine is about to go), whatever the main thread does; it decides."""
    from dora_jax.runtime.cluster.messages import PreemptionNotice

    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    # The handler as well: an event loop that the main thread runs, as of a library that writes a checkpoint, has the
    # wake-up descriptor meanwhile.
    signal.signal(signal.SIGTERM, lambda number, frame: sender.send(bytes([number])))
    signal.set_wakeup_fd(sender.fileno())

    def wait() -> None:
        while number := receiver.recv(1):
            if number == bytes([signal.SIGTERM]):
                link.send(PreemptionNotice(reason="SIGTERM"))

    threading.Thread(target=wait, name="notice", daemon=True).start()


def _enter_world(begin: Begin, config: Config) -> None:
    """Joins the jax.distributed world of the gang; a gang of one process needs none."""
    import jax
    from absl import flags

    from dora_jax.plan import devices

    if begin.instance is not None:
        leave_multislice(os.environ)
    devices.setup_platform(config)
    if begin.hosts == 1:
        return
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM for itself
    # Orbax would wait for the others inside a computation, from a thread of its own: between two steps, or in one.
    flags.FLAGS(["host", "--experimental_orbax_use_distributed_barrier"], known_only=True)
    if config.cpu_devices:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        begin.coordinator,
        begin.hosts,
        begin.rank,
        heartbeat_timeout_seconds=HEARTBEAT_S,
        shutdown_timeout_seconds=SHUTDOWN_S,
        coordinator_bind_address=begin.coordinator,
    )  # else on every interface: it asks nobody for a token


def leave_multislice(environ: MutableMapping[str, str]) -> None:
    """A machine of a multislice job names all of its slices, and JAX would join a rollout's world to the trainer's."""
    for name in [name for name in environ if name.startswith(MULTISLICE)]:
        del environ[name]


if __name__ == "__main__":
    serve(Ticket(**json.loads(os.environ.pop("DORA_TICKET"))))
