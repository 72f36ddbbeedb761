"""Secrets are blanked before a configuration is written or shown: by the names of its fields, and where they stand in
URLs. Standard library only. Law: a number is a count and stays where its name is plural (max_new_tokens) or a rate
(experts_per_token)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

BLANK = "<redacted>"

_WORDS = frozenset(
    [
        "auth",
        "authorization",
        "bearer",
        "cookie",
        "credential",
        "jwt",
        "key",
        "oauth",
        "passphrase",
        "passwd",
        "password",
        "pwd",
        "secret",
        "token",
    ]
)
_JOINED = re.compile(
    r"(access|api|auth|bearer|client|encryption|id|private|refresh|secret|session|signing)"
    r"(key|token|secret|password)s?"
)  # apikey, accesstoken
_USER = re.compile(r"(?<=://)[^/\s?#@]+@(?=[^/\s])")  # me:secret@ of a URL
_QUERY = re.compile(
    r"([?&;][\w.-]*(?:token|key|secret|passw(?:or)?d|pwd|auth|sig|signature|credential)=)[^&;\s#]+", re.IGNORECASE
)


def redact(tree: Any, name: str = "") -> Any:
    """The same tree without its secrets; `name`: of the field that holds it."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()  # wandbApiKey, X-Auth-Token
    counts = isinstance(tree, int | float)
    secret = any(
        word in _WORDS or (not counts and word.removesuffix("s") in _WORDS) or _JOINED.fullmatch(word)
        for word in re.split(r"[^a-z]+", spaced)
    )
    if tree and secret and not (counts and "_per_" in spaced):  # which is a rate: experts_per_token
        return BLANK
    if isinstance(tree, Mapping):
        return {key: redact(value, str(key)) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(redact(value) for value in tree)
    if isinstance(tree, str) and "://" in tree:
        return _QUERY.sub(rf"\1{BLANK}", _USER.sub(f"{BLANK}@", tree))
    return tree
