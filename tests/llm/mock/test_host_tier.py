"""A mock with a host: conversations that go on keep their blocks, and others give way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from dynbus.kvrouter.events import BlockStored
from dynbus.llm.generation import GenerateRequest, Session
from dynbus.llm.mock.engine import MockConfig, MockEngine
from dynbus.llm.mock.host_tier import MockTier

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


def test_two_that_go_on_from_one_response_are_both_there_again() -> None:
    mock = engine()
    ask(mock, "first", prompt(0, 6), Session("chat", 600.0, "first"))
    branches = {
        name: [*prompt(0, 6)[:-1], *prompt(number, 6)]
        for number, name in enumerate(("left", "right"), 100)
    }
    for name, tokens in branches.items():
        ask(mock, name, tokens, Session("chat", 600.0, name, "first"))
    for number in range(1, 20):
        ask(mock, f"other-{number}", prompt(number, 12))

    cached = {name: ask(mock, f"{name}-next", tokens) for name, tokens in branches.items()}
    assert cached == dict.fromkeys(branches, 12 * BLOCK)


def test_a_tenant_does_not_have_the_room_of_another() -> None:
    mock = engine()
    ask(mock, "ada", prompt(0, 10), Session("chat", 600.0), "ada")
    for number in range(1, 20):
        session = Session(f"chat-{number}", 600.0)
        ask(mock, f"bob-{number}", prompt(number, 10), session, "bob")

    assert ask(mock, "next", prompt(0, 10), tenant="ada") == 10 * BLOCK


def lasting(folder: Path, block_size: int = BLOCK) -> MockTier:
    return MockTier(64, folder=folder, block_size=block_size)


def test_the_next_mock_goes_on_with_what_was_kept(tmp_path: Path) -> None:
    config = MockConfig(block_size=BLOCK, blocks=32, host_blocks=64)
    tier = lasting(tmp_path)
    before = MockEngine(config, tier=tier)
    ask(before, "conversation", prompt(0, 12), Session("chat", 600.0))
    ask(before, "other", prompt(1, 12))
    # As the end of its process would have it.
    tier.leave()
    for number in range(2, 20):
        ask(before, f"later-{number}", prompt(number, 12))

    after = MockEngine(config, tier=lasting(tmp_path))
    # Routers are told before any request comes.
    assert after.has_work
    told = after.step().events
    assert [type(event) for event in told] == [BlockStored]
    assert not after.has_work
    assert ask(after, "other", prompt(1, 12)) == 0
    assert ask(after, "next", prompt(0, 12)) == 12 * BLOCK
    assert len([*tmp_path.iterdir()]) == 1


def test_blocks_of_another_size_are_not_gone_on_with(tmp_path: Path) -> None:
    tier = lasting(tmp_path)
    config = MockConfig(block_size=BLOCK, blocks=32, host_blocks=64)
    ask(MockEngine(config, tier=tier), "conversation", prompt(0, 12), Session("chat", 600.0))
    tier.leave()

    assert len([*tmp_path.iterdir()]) == 1
    assert not lasting(tmp_path, 2 * BLOCK).take_events()
    assert len([*tmp_path.iterdir()]) == 2
    assert lasting(tmp_path).take_events()
