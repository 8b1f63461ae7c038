"""A pipeline of three stages. Each streams, and each calls the one before it.

    client ──> Numberer.number ──> Shouter.shout ──> Splitter.split

The first line reaches the client before the last word is split. A client that leaves early
stops all three stages; its deadline and metadata reach all three as well. No handler has a
word about that.
"""

from collections.abc import AsyncGenerator

from pydantic import BaseModel

from dynbus import Actor, context, depends, handler


class Text(BaseModel):
    text: str


class Word(BaseModel):
    text: str


class Line(BaseModel):
    number: int
    text: str


class Splitter(Actor, namespace="pipeline"):
    def __init__(self, separator: str = " ") -> None:
        self.separator = separator

    @handler
    async def split(self, text: Text) -> AsyncGenerator[Word, None]:
        print(f"split for tenant {context().metadata.get('tenant', 'nobody')}", flush=True)
        for word in text.text.split(self.separator):
            yield Word(text=word)


class Shouter(Actor, namespace="pipeline"):
    splitter = depends(Splitter)

    @handler
    async def shout(self, text: Text) -> AsyncGenerator[Word, None]:
        async for word in self.splitter.split(text):
            yield Word(text=word.text.upper())


class Numberer(Actor, namespace="pipeline"):
    shouter = depends(Shouter)

    @handler
    async def number(self, text: Text) -> AsyncGenerator[Line, None]:
        number = 0
        async for word in self.shouter.shout(text):
            number += 1
            yield Line(number=number, text=word.text)
