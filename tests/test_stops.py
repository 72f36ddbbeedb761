"""Stop strings: found at the token that completes them, however the tokens arrive."""

import random

import pytest

from dora_jax.rollout.seq import StopStrings

LETTERS = "abcde"


def decode(ids):
    """Two letters a token, but one token that is silent and one that is half a character."""
    return "".join({8: "", 9: "\ufffd"}.get(i, LETTERS[i % 5] + LETTERS[i // 5]) for i in ids)


def whole(strings, tokens):
    """The first prefix whose text contains a stop string, found the slow way."""
    return next((n for n in range(1, len(tokens) + 1) if any(s in decode(tokens[:n]) for s in strings)), None)


@pytest.mark.parametrize("strings", [("ab",), ("bbba", "dc"), ("eaeaea",), ("cbcbcbcb", "\ufffd")])
def test_where_it_ends_does_not_depend_on_the_calls(strings):
    rng = random.Random(0)
    found = 0
    for _ in range(200):
        tokens = [rng.randrange(10) for _ in range(rng.choice((3, 12, 40)))]
        for size in (1, 3, 8, 100):
            stops, old, ended = StopStrings(strings, decode), [], False
            while not ended and len(old) < len(tokens):
                count, ended = stops.end(old, tokens[len(old) : len(old) + size])
                old = tokens[: len(old) + count]
            assert (len(old) if ended else None) == whole(strings, tokens)
            found += ended
    assert found >= 12


def test_without_strings_nothing_is_decoded():
    assert StopStrings((), None).end([1], [2, 3]) == (2, False)
    with pytest.raises(ValueError, match="given no `decode`"):
        StopStrings(("x",), None)
