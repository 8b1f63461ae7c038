"""What is left of a request for tokens whose stream was broken off."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dynbus.actors.declaring.resume import ResumeParts
from dynbus.bus.errors import StreamLost
from dynbus.kvrouter.routing.token_rule import can_resume, resume

ASKED: dict[str, Any] = {"token_ids": [1, 2, 3], "max_tokens": 10}


def test_the_rest_is_asked_for_by_the_prompt_and_the_tokens_that_came() -> None:
    asked = {**ASKED, "min_tokens": 4, "sampling": {"seed": 7}, "stop": ["x"], "own": {"a": 1}}

    rest = resume(asked, [{"token_ids": [4], "cached_tokens": 2}, {"token_ids": [5, 6]}])

    assert rest == {
        **asked,
        "token_ids": [1, 2, 3, 4, 5, 6],
        "max_tokens": 7,
        "min_tokens": 1,
        "generated": 3,
        "n": 1,
        "index": 0,
    }


def test_tokens_of_a_request_that_was_continued_already_add_up() -> None:
    rest = resume({**ASKED, "generated": 2, "min_tokens": 1}, [{"token_ids": [4, 5]}])

    assert isinstance(rest, dict)
    assert (rest["generated"], rest["max_tokens"], rest["min_tokens"]) == (4, 8, 0)


def test_a_request_of_which_nothing_came_is_sent_as_it_was() -> None:
    rest = resume({**ASKED, "n": 3}, [])

    assert rest == {**ASKED, "n": 3}


ENDED: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
    ({}, [{"token_ids": [4], "finish_reason": "stop"}]),
    ({}, [{"token_ids": [4]}, {"token_ids": [], "finish_reason": "length"}]),
    ({"max_tokens": 2}, [{"token_ids": [4]}, {"token_ids": [5]}]),
    ({"stop_token_ids": [5]}, [{"token_ids": [4, 5]}]),
    ({"stop_conditions": {"max_tokens": 1}}, [{"token_ids": [4]}]),
    (
        {"n": 2},
        [
            {"token_ids": [4], "index": 1, "finish_reason": "stop"},
            {"token_ids": [4], "finish_reason": "stop"},
        ],
    ),
]


@pytest.mark.parametrize(("asked", "items"), ENDED)
def test_nothing_is_asked_for_where_nothing_is_left(
    asked: dict[str, Any], items: list[dict[str, Any]]
) -> None:
    assert resume({**ASKED, **asked}, items) is None


def test_a_stop_token_before_min_tokens_ends_nothing() -> None:
    rest = resume({**ASKED, "stop_token_ids": [5], "min_tokens": 2}, [{"token_ids": [4, 5]}])

    assert isinstance(rest, dict)
    assert rest["min_tokens"] == 0


def test_the_models_end_and_a_full_context_end_a_continuation() -> None:
    items = [{"token_ids": [4, 5]}]

    assert resume(ASKED, items, eos_token_ids=[5]) is None
    assert resume({**ASKED, "ignore_eos": True}, items, eos_token_ids=[5]) is not None
    assert resume({"token_ids": [1, 2]}, items, context_length=4) is None
    assert resume({"token_ids": [1, 2]}, items, context_length=5) is not None


def test_the_limits_that_dynamos_requests_have_are_lowered_too() -> None:
    conditions = {"max_tokens": 10, "min_tokens": 3, "stop": None}

    rest = resume({"token_ids": [1], "stop_conditions": conditions}, [{"token_ids": [2, 3]}])

    assert isinstance(rest, dict)
    assert rest["stop_conditions"] == {"max_tokens": 8, "min_tokens": 1, "stop": None}


def test_of_several_continuations_those_go_on_that_are_not_finished() -> None:
    asked = {**ASKED, "n": 3, "index": 1}
    items = [
        {"token_ids": [4], "index": 1},
        {"token_ids": [5], "index": 2, "finish_reason": "stop"},
        {"token_ids": [6], "index": 1},
    ]

    split = resume(asked, items)
    last = resume(asked, [*items, {"token_ids": [7], "index": 3, "finish_reason": "stop"}])

    assert isinstance(split, ResumeParts)
    assert [(one["index"], one["n"], one["token_ids"]) for one in split.requests] == [
        (1, 1, [1, 2, 3, 4, 6]),
        (3, 1, [1, 2, 3]),
    ]
    assert last == split.requests[0]


@pytest.mark.parametrize("request_", [None, "text", {"messages": []}, {"token_ids": "1 2"}, [1]])
def test_what_is_no_request_for_tokens_is_not_continued(request_: Any) -> None:
    with pytest.raises(StreamLost, match="no list token_ids"):
        resume(request_, [{"token_ids": [4]}])


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ({"token_ids": [4], "index": 1}, "index 1"),
        ("text", "'text' has no token_ids"),
        ({"text": "4"}, "has no token_ids"),
        ({"token_ids": "text"}, "has no token_ids"),
    ],
)
def test_an_item_that_is_none_of_the_request_is_refused(item: Any, said: str) -> None:
    with pytest.raises(StreamLost, match=said):
        resume(ASKED, [item])


@pytest.mark.parametrize(
    ("asked", "can"),
    [
        ({"token_ids": [1, 2]}, True),
        ({"model": "m", "n": 1, "token_ids": []}, True),
        ({"token_ids": [1], "n": None}, True),
        ({"token_ids": [1], "n": 2}, True),
        ({"token_ids": "AAA="}, False),
        ({"messages": []}, False),
        ([1], False),
        ("text", False),
        (None, False),
    ],
)
def test_whether_a_stream_can_go_on_is_told_by_its_request(asked: Any, can: bool) -> None:
    assert can_resume(asked) is can
    assert can_resume(msgspec.Raw(msgspec.json.encode(asked))) is can


def test_what_is_no_json_cannot_go_on() -> None:
    assert not can_resume(msgspec.Raw(b'{"token_ids":[1'))
