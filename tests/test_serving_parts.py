"""What the endpoint decides without a clock or a socket: where a text ends, which version serves a session."""

import pytest

from dora_jax.serving.chat import Detokenizer, StopText
from dora_jax.serving.request import Refused
from dora_jax.serving.versions import Versions


def test_a_stop_string_is_found_however_the_text_is_cut():
    text, stops = "one ENDtwo END three", ("END ", "END t")
    for size in range(1, 8):
        stop, shown, stopped = StopText(stops), "", False
        for i in range(0, len(text), size):
            if not stopped:
                new, stopped = stop.feed(text[i : i + size])
                shown += new
        assert (shown, stopped) == ("one ENDtwo ", True)
    assert StopText(stops, include=True).feed(text) == ("one ENDtwo END ", True)


def test_half_a_character_waits_for_its_rest():
    decode = lambda ids: bytes(ids).decode(errors="replace")
    tokens, parts = Detokenizer(decode, list("é".encode())), []
    for byte in "aé€b".encode():
        parts.append(tokens.add(byte))
    assert parts == ["a", "", "é", "", "", "€", "b"]
    assert tokens.add(0xE2) == "" and tokens.rest() == "\ufffd"


@pytest.mark.parametrize("number", ["9" * 5000, "9" * 19, "", "-1", "1.0", "x"])
def test_a_version_that_is_no_number_does_not_exist(number):
    versions = Versions(residents=2, idle_s=10.0)
    assert versions.asked("policy@41") == 41 and versions.asked("policy") is None
    with pytest.raises(Refused, match="does not exist. There are: policy") as refused:
        versions.asked(f"policy@{number}")
    assert refused.value.status == 404 and len(str(refused.value)) < 300


def test_a_session_keeps_its_version_until_it_is_idle():
    versions = Versions(residents=2, idle_s=10.0)
    versions.loaded(1)
    assert versions.choose("s", None, 0.0) == 1
    versions.offer(2)
    assert versions.plan(0.0) == (None, 2)
    versions.loaded(2)
    versions.offer(3)
    assert versions.choose("s", None, 5.0) == 1 and versions.choose(None, None, 5.0) == 2
    versions.begin(2)
    assert versions.plan(6.0) == (None, None), "both are needed"
    versions.end(2)
    assert versions.plan(16.0) == (1, 3)
    assert versions.choose(None, 3, 16.0) is None, "it is on its way"
    for session, asked in (("s", None), (None, 1)):
        with pytest.raises(Refused, match="retired") as refused:
            versions.choose(session, asked, 16.0)
        assert refused.value.status == 410
    with pytest.raises(Refused, match="no version 4 yet"):
        versions.choose(None, 4, 16.0)


def test_no_session_begins_at_an_old_version_while_the_newest_is_replaced():
    versions = Versions(residents=2, idle_s=10.0)
    versions.loaded(1)
    versions.choose("s", None, 0.0)
    versions.loaded(2)
    versions.offer(3)
    assert versions.plan(0.0) == (2, 3), "there is no room beside what the session needs"
    assert versions.choose("new", None, 0.0) is None and versions.choose("s", None, 0.0) == 1
    versions.loaded(3)
    assert versions.choose("new", None, 0.0) == 3
