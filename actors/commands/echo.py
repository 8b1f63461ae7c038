"""The actor that `dynbus bench` calls."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from pydantic import BaseModel

from dynbus.actors.declaring.actor import Actor
from dynbus.actors.declaring.handlers import handler


class Token(BaseModel):
    """What a language model sends per step."""

    token_ids: list[int]
    text: str
    index: int


class Echo(Actor, namespace="dynbus-bench"):
    """Sends back what it gets, once or many times."""

    @handler
    async def echo(self, token: Token) -> Token:
        return token

    @handler
    async def count(self, limit: int) -> AsyncGenerator[Token, None]:
        for index in range(limit):
            yield Token(token_ids=[index], text="tok", index=index)
