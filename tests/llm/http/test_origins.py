"""A browser is told which pages of other origins may ask, and which may read an answer."""

from __future__ import annotations

from collections.abc import Coroutine, MutableMapping
from typing import Any

import pytest

from dynbus.llm.http.application import EXPOSED, Origins, is_preflight

A, B = "https://a.example", "https://b.example"


def told(origins: list[str], **headers: str) -> tuple[int, dict[str, str]]:
    """What a preflight is answered."""
    given = {"origin": A, "access-control-request-method": "POST"}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    answer = Origins(origins, EXPOSED).preflight(given | named)
    return answer.status, {name.decode(): value.decode() for name, value in answer.headers}


def sent(origins: list[str], **headers: str) -> dict[str, str]:
    """The headers of an answer that has one of its own."""
    messages: list[MutableMapping[str, Any]] = []

    async def keep(message: MutableMapping[str, Any]) -> None:
        messages.append(message)

    def done(work: Coroutine[Any, Any, None]) -> None:
        with pytest.raises(StopIteration):
            work.send(None)

    send = Origins(origins, EXPOSED).sending(headers, keep)
    done(send({"type": "http.response.start", "status": 200, "headers": [(b"x-own", b"1")]}))
    done(send({"type": "http.response.body", "body": b"x"}))
    start, body = messages
    assert body == {"type": "http.response.body", "body": b"x"}
    return {name.decode(): value.decode() for name, value in start["headers"]}


@pytest.mark.parametrize(("origins", "allowed"), [([A, B], A), (["*"], "*")])
def test_a_page_may_ask_where_its_origin_is_named(origins: list[str], allowed: str) -> None:
    status, headers = told(origins, access_control_request_headers="x-tenant, content-type")

    assert status == 200
    assert headers["access-control-allow-origin"] == allowed
    assert headers["access-control-allow-methods"] == "GET, POST, DELETE"
    assert headers["access-control-allow-headers"] == "x-tenant, content-type"


@pytest.mark.parametrize(
    "headers",
    [{"origin": B}, {"origin": "null"}, {"access_control_request_method": "PUT"}],
)
def test_other_pages_and_methods_are_refused(headers: dict[str, str]) -> None:
    status, answered = told([A], **headers)

    assert status == 400
    assert answered.get("access-control-allow-origin") in (None, A)
    assert "Origin" in answered["vary"]


def test_an_answer_says_who_may_read_it_and_what() -> None:
    assert sent([A, B], origin=B) == {
        "x-own": "1",
        "vary": "Origin",
        "access-control-allow-origin": B,
        "access-control-expose-headers": ", ".join(EXPOSED),
    }
    assert sent([A], origin=B) == sent([A]) == {"x-own": "1", "vary": "Origin"}
    assert sent(["*"], origin=B)["access-control-allow-origin"] == "*"
    assert sent(["*"]) == {"x-own": "1"}


def test_only_a_browser_that_asks_beforehand_sends_a_preflight() -> None:
    asked = {"origin": A, "access-control-request-method": "POST"}

    assert is_preflight("OPTIONS", asked)
    assert not is_preflight("POST", asked)
    assert not is_preflight("OPTIONS", {"origin": A})
