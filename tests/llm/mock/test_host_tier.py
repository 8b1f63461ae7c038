"""A mock with a host: conversations that go on keep their blocks, and others give way."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from dynbus.llm.generation import GenerateRequest, Session
from dynbus.llm.mock.engine import MockConfig, MockEngine

BLOCK = 16


def engine() -> MockEngine:
    return MockEngine(MockConfig(block_size=BLOCK, blocks=32, host_blocks=64))


def ask(
    engine: MockEngine,
    name: str,
    prompt: Sequence[int],
    session: Session | None = None,
    tenant: str | None = None,
) -> int:
    """Ask for two tokens; how many of the prompt were cached."""
    engine.add(name, GenerateRequest([*prompt], 2, session=session, cache_salt=tenant))
    cached = 0
    while engine.has_work:
        for _, item in engine.step().outputs:
            cached = max(cached, item.cached_tokens or 0)
    return cached


def prompt(number: int, blocks: int) -> list[int]:
    return [number + 1000] * (blocks * BLOCK) + [number]


@pytest.mark.parametrize(
    ("session", "cached"),
    [(None, 0), (Session("chat", 600.0), 12 * BLOCK), (Session("chat", 0.0), 0)],
)
def test_a_conversation_is_there_again_after_many_others(
    session: Session | None, cached: int
) -> None:
    mock = engine()
    assert ask(mock, "first", prompt(0, 12), session) == 0
    for number in range(1, 20):
        ask(mock, f"other-{number}", prompt(number, 12))

    assert ask(mock, "next", prompt(0, 12), session) == cached


def test_a_conversation_whose_client_left_is_kept_as_far_as_it_was_computed() -> None:
    mock = engine()
    mock.add("first", GenerateRequest(prompt(0, 12), 100, session=Session("chat", 600.0)))
    mock.step()
    mock.cancel("first")
    for number in range(1, 20):
        ask(mock, f"other-{number}", prompt(number, 12))

    assert ask(mock, "next", prompt(0, 12)) == 12 * BLOCK


def test_a_tenant_does_not_have_the_room_of_another() -> None:
    mock = engine()
    ask(mock, "ada", prompt(0, 10), Session("chat", 600.0), "ada")
    for number in range(1, 20):
        session = Session(f"chat-{number}", 600.0)
        ask(mock, f"bob-{number}", prompt(number, 10), session, "bob")

    assert ask(mock, "next", prompt(0, 10), tenant="ada") == 10 * BLOCK
