"""Stage 1: randomness by identity, and the identity of a prompt. Standard library only.

Laws: the same words give the same draw in every process, Python version and machine; nothing here keeps a state.
"""

from __future__ import annotations

import hashlib
import json

Question = str | list[dict[str, str]]  # text, or messages with role and content


def uid_of(question: Question) -> str:
    """Hash of the content, blind to white space: prompts that differ in layout only never cross the split."""
    if not isinstance(question, str) and [m["role"] for m in question] == ["user"]:
        question = question[0]["content"]  # what the chat template makes of a text
    content = question if isinstance(question, str) else json.dumps([[m["role"], m["content"]] for m in question])
    return hashlib.blake2b(" ".join(content.split()).encode(), digest_size=16).hexdigest()


def identity_hash(*identity: str | int) -> int:
    """64 bits decided by an identity alone: the randomness of draws, shuffles and slips."""
    words = "/".join(map(str, identity)).encode()
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "big")


def share_hash(*identity: str | int) -> float:
    """Uniform in [0, 1), decided by an identity alone."""
    return identity_hash(*identity) / 2**64


def shorten(text: str, width: int = 80) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."
