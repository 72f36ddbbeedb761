"""Members of one run: the credentials of any role and incarnation, and of other runs."""

import functools

from dora_jax.runtime.common.credentials import CONTROLLER, Authority, Credential
from dora_jax.runtime.common.listener import Listener, dial

RUN, ANOTHER_RUN = Authority(), Authority()


@functools.cache
def credential(role=CONTROLLER, incarnation=1, authority=RUN):
    return Credential(authority.issue(role, incarnation))


def anyone(peer):
    return True


def new_listener(welcome, role=CONTROLLER, own=None):
    """It admits every member of the run."""
    return Listener("127.0.0.1", own or credential(role), anyone, welcome)


def dialled(listener, role="rollout 0", expects=anyone, authority=RUN):
    return dial(listener.address, credential(role, 1, authority), expects)
