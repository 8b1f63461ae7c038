"""Names are checked at every entry, and subjects are spelled in one place."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus.bus.errors import ConfigError
from dynbus.bus.protocol.names import (
    DEFAULT_REPLY_PREFIXES,
    EndpointName,
    ReplySubjects,
    check_token,
    control_subject,
    is_safe_reply,
    split_number,
    turn_taker,
)

tokens = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}", fullmatch=True)


@pytest.mark.parametrize("name", ["a", "0", "Shouter", "my-actor_2", "a" * 63])
def test_a_legal_name_is_returned(name: str) -> None:
    assert check_token("component", name) == name


@pytest.mark.parametrize(
    "name",
    ["", "_a", "-a", "a.b", "a b", "a*", ">", "a\n", "a\r\n", "é", "１", "a" * 64, 7, None, b"a"],
)
def test_an_illegal_name_is_refused_with_the_remedy(name: object) -> None:
    with pytest.raises(ConfigError, match="component .* use 1 to 63 letters"):
        check_token("component", name)


@given(tokens, tokens, tokens)
def test_an_endpoint_name_reads_what_it_writes(
    namespace: str, component: str, endpoint: str
) -> None:
    name = EndpointName.of(namespace, component, endpoint)

    assert EndpointName.parse(str(name)) == name


@pytest.mark.parametrize("text", ["", "a", "a.b", "a.b.c.d", "a..c", ".a.b", "a.b._c"])
def test_what_is_not_an_endpoint_name_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        EndpointName.parse(text)


def test_subjects_are_spelled_as_the_protocol_says() -> None:
    name = EndpointName("demo", "Shouter", "generate")

    assert str(name) == "demo.Shouter.generate"
    assert name.at("i1") == "demo.Shouter.generate.i1"
    assert name.hop("i1") == "demo.Shouter.generate@i1"
    assert control_subject("demo", "Shouter", "i1") == "demo.Shouter._ctl.i1"


def test_a_clients_reply_subjects_lie_below_its_principal_and_id() -> None:
    replies = ReplySubjects("-", "c1")

    assert replies.request(7) == "_R.-.c1.7"
    assert replies.frames == "_R.-.c1.f"
    assert replies.bounce("i1") == "_R.-.c1.b.i1"
    assert replies.control_frames == "_R.-.c1.ctl.f"
    assert replies.control_bounce("i1") == "_R.-.c1.ctl.b.i1"
    assert replies.data_wildcard == "_R.-.c1.*"
    assert replies.bounce_wildcard == "_R.-.c1.b.*"
    assert replies.server_api == "_R.-.c1.js"
    assert replies.control_server_api == "_R.-.c1.jscontrol"


@given(tokens, tokens, st.integers(0, 10**18 - 1))
def test_a_request_reply_gives_back_its_base_and_number(
    principal: str, client_id: str, number: int
) -> None:
    replies = ReplySubjects(principal, client_id)

    assert split_number(replies.request(number)) == (replies.base, number)


@pytest.mark.parametrize(
    "reply",
    ["", "_R.-.c1.f", "_R.-.c1", "_R.-.c1.", "_R.-.c1.-1", "_R.-.c1.١", "_R.-.c1." + "9" * 19],
)
def test_other_replies_have_no_request_number(reply: str) -> None:
    assert split_number(reply) is None


@given(st.text(max_size=40))
def test_splitting_any_text_never_raises(reply: str) -> None:
    found = split_number(reply)

    assert found is None or found[1] >= 0


@pytest.mark.parametrize(
    "reply", ["_R.-.c1.7", "_INBOX.abc.1", "_R_.x", "_GR_.x.y", "_INBOX." + "a" * 248]
)
def test_an_inbox_may_be_answered(reply: str) -> None:
    assert is_safe_reply(reply, DEFAULT_REPLY_PREFIXES)


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "$JS.API.STREAM.DELETE.X",
        "demo.Shouter.generate",
        "_INBOX",
        "_INBOX.",
        "_INBOX.*",
        "_INBOX.>",
        "_INBOX.a.>",
        "_INBOX.a b",
        "_INBOX.a\r\nPUB x 0",
        "_INBOX.a\x00",
        "_INBOX.é",
        "_INBOX..a",
        "_INBOX.a.",
        "_INBOX." + "a" * 249,
        " _INBOX.a",
    ],
)
def test_anything_else_may_not(reply: str) -> None:
    assert not is_safe_reply(reply, DEFAULT_REPLY_PREFIXES)


@pytest.mark.parametrize(
    ("reply", "taker"),
    [
        ("_R.alice.0123.f", "_R.alice"),
        ("_R.alice.4567.8", "_R.alice"),
        ("_R.-.0123.8", "_R.-.0123"),
        ("_INBOX.QzVw.8", "_INBOX.QzVw"),
        ("_INBOX.alice.QzVw.8", "_INBOX.alice.QzVw"),
        ("_INBOX.QzVw", "_INBOX"),
        ("_R_.QzVw.8", "_R_"),
        ("_GR_.QzVw.8.9", "_GR_"),
    ],
)
def test_a_principal_or_a_client_takes_turns_not_a_request(reply: str, taker: str) -> None:
    assert turn_taker(reply) == taker
