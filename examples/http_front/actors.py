"""A model that an HTTP front end calls: a stream of tokens, and a unary count of them."""

import asyncio
from collections.abc import AsyncGenerator

from pydantic import BaseModel, Field

from dynbus import Actor, Overloaded, context, handler


class Prompt(BaseModel):
    text: str = Field(min_length=1)
    max_tokens: int = Field(default=16, ge=1)


class Token(BaseModel):
    text: str
    tenant: str


class Model(Actor, namespace="http"):
    def __init__(self, pause: float = 0.05, max_tokens: int = 1000) -> None:
        self.pause = pause
        self.max_tokens = max_tokens

    @handler
    async def generate(self, prompt: Prompt) -> AsyncGenerator[Token, None]:
        """The words of the prompt again and again, one every `pause` seconds."""
        if prompt.max_tokens > self.max_tokens:
            raise Overloaded(f"{prompt.max_tokens} tokens are too many now", retry_after=2.5)
        words = prompt.text.split()
        tenant = context().metadata.get("tenant", "nobody")
        given = 0
        try:
            while given < prompt.max_tokens and not context().is_stopped():
                await asyncio.sleep(self.pause)
                if words[given % len(words)] == "fail":
                    raise ValueError("this word has no token")
                yield Token(text=words[given % len(words)], tenant=tenant)
                given += 1
        finally:
            print(f"{tenant}: {given} of {prompt.max_tokens} tokens", flush=True)

    @handler
    async def count(self, prompt: Prompt) -> int:
        await asyncio.sleep(self.pause)
        return len(prompt.text.split())
