"""The actor of `dynbus bench` sends back what it gets."""

from __future__ import annotations

from dynbus.actors.commands.echo import Echo, Token
from dynbus.testing import TestKit, run

TOKEN = Token(token_ids=[7], text="tok", index=0)


def test_a_token_comes_back_as_it_was() -> None:
    async def story() -> Token:
        async with TestKit() as kit:
            await kit.start(Echo)
            return await kit.client(Echo).echo(TOKEN)

    assert run(story()) == TOKEN


def test_a_stream_has_as_many_tokens_as_were_asked_for() -> None:
    async def story() -> list[Token]:
        async with TestKit() as kit:
            await kit.start(Echo)
            return [token async for token in kit.client(Echo).count(3)]

    assert [token.index for token in run(story())] == [0, 1, 2]
