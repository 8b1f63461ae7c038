"""An actor for clients that know nothing of dynbus; see client.py."""

from collections.abc import AsyncGenerator

from pydantic import BaseModel, Field

from dynbus import Actor, handler


class Text(BaseModel):
    text: str = Field(min_length=1)


class Length(BaseModel):
    characters: int


class Counter(Actor, namespace="plain"):
    @handler
    async def count(self, text: Text) -> Length:
        return Length(characters=len(text.text))

    @handler
    async def words(self, text: Text) -> AsyncGenerator[str, None]:
        for word in text.text.split():
            yield word
