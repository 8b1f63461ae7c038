"""Kept responses: chains of them, pages of their items, and which go when there is no room."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus.llm.openai.errors import BadRequest
from dynbus.llm.responses.stored import (
    KEPT,
    MOST_BEFORE,
    Earlier,
    Kept,
    Pending,
    StoredResponse,
    earlier_of,
    input_page,
    is_response_id,
    page_fields,
    response_of,
    to_drop,
)


def said(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": text}


def made(number: int, earlier: Earlier, created_at: int = 1000) -> StoredResponse:
    """The response to the question of a number, as it is stored and read."""
    answer = said("assistant", f"answer {number}")
    response = {"id": f"resp_{number}", "created_at": created_at, "output": [answer]}
    pending = Pending([said("user", f"question {number}")], earlier)
    stored = pending.with_response(json.dumps(response).encode())
    return msgspec.json.decode(msgspec.json.encode(stored), type=StoredResponse)


def chain_of(stored: dict[str, StoredResponse], name: str) -> list[StoredResponse]:
    return [*(stored[one] for one in stored[name].before), stored[name]]


@given(st.integers(1, 60), st.integers(0, KEPT // 20))
def test_a_conversation_is_whole_however_long_it_is(turns: int, pause: int) -> None:
    stored: dict[str, StoredResponse] = {}
    expected: list[Any] = []
    earlier, now = Earlier(), 1000
    for turn in range(turns):
        assert [*earlier.items] == expected
        assert len(earlier.before) < MOST_BEFORE
        # What it names is there as long as it is.
        assert all(now - stored[one].answer.created_at < KEPT for one in earlier.before)
        stored[f"resp_{turn}"] = made(turn, earlier, now)
        expected += [said("user", f"question {turn}"), said("assistant", f"answer {turn}")]
        now += pause
        earlier = earlier_of(chain_of(stored, f"resp_{turn}"), now)


def test_a_conversation_is_known_by_its_first_response_also_where_that_is_copied_from() -> None:
    stored: dict[str, StoredResponse] = {}
    earlier = Earlier()
    copied = 0
    for turn in range(3 * MOST_BEFORE):
        stored[f"resp_{turn}"] = made(turn, earlier)
        earlier = earlier_of(chain_of(stored, f"resp_{turn}"), 1000)
        assert earlier.first == "resp_0"
        copied += bool(earlier.copied)
    assert copied == 3


def test_two_responses_go_on_from_one_and_share_what_is_before() -> None:
    first = made(0, Earlier())
    after = earlier_of([first], 1000)
    one, other = made(1, after), made(2, after)

    assert one.before == other.before == ["resp_0"]
    assert one.earlier == other.earlier == []
    assert [item["content"] for item in earlier_of([first, other], 1000).items] == [
        "question 0",
        "answer 0",
        "question 2",
        "answer 2",
    ]


@pytest.mark.parametrize("name", ["", "resp_", "resp_a b", "resp_a.b", "resp_*", "x", "resp_é"])
def test_what_is_no_id_of_a_response_is_asked_nobody_for(name: str) -> None:
    assert not is_response_id(name)


def test_an_item_says_whose_it_is() -> None:
    assert response_of("msg_0a1b_0") == "resp_0a1b"
    assert response_of("rs_0a1b_12") == "resp_0a1b"
    assert response_of("msg_other") == ""


def test_the_items_of_a_request_come_in_pages() -> None:
    stored = StoredResponse(
        msgspec.Raw(b'{"id": "resp_a", "created_at": 1, "output": []}'),
        [said("user", str(number)) for number in range(5)],
    )
    first = input_page(stored, **page_fields(b"limit=2&order=asc"))
    second = input_page(
        stored, **page_fields(f"limit=9&order=asc&after={first['last_id']}".encode())
    )
    newest = input_page(stored, **page_fields(b""))

    assert [one["content"] for one in first["data"]] == ["0", "1"]
    assert first["has_more"]
    assert [one["content"] for one in second["data"]] == ["2", "3", "4"]
    assert not second["has_more"]
    assert [one["content"] for one in newest["data"]] == ["4", "3", "2", "1", "0"]


@pytest.mark.parametrize(
    "query", [b"limit=0", b"limit=x", b"limit=101", b"order=up", b"after=in_1"]
)
def test_a_page_that_cannot_be_is_refused(query: bytes) -> None:
    stored = StoredResponse(msgspec.Raw(b'{"id": "resp_a", "created_at": 1, "output": []}'), [])
    with pytest.raises(BadRequest) as refused:
        input_page(stored, **page_fields(query))

    assert refused.value.param == query.decode().partition("=")[0]


sizes = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 100)), max_size=40)


@given(sizes, st.integers(0, 2000))
def test_room_is_made_by_the_oldest_of_who_has_the_most(
    stored: list[tuple[str, int]], most: int
) -> None:
    kept = [Kept(str(at), tenant, size, at) for at, (tenant, size) in enumerate(stored)]
    dropped = set(to_drop(kept, most))
    left = [one for one in kept if one.name not in dropped]

    assert sum(one.size for one in left) <= most
    for tenant in "abc":
        own = [one for one in kept if one.tenant == tenant]
        gone = [one for one in own if one.name in dropped]
        assert gone == own[: len(gone)]
        if gone:
            # It had at least an equal share of what there is room for, before its last one went.
            had = sum(one.size for one in own[len(gone) - 1 :])
            assert had >= (most / 3) or not left
