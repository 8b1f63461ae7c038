"""Handlers of batches, and their callers: this must pass mypy --strict and pyright strict."""

from __future__ import annotations

from typing import assert_type

from pydantic import BaseModel

from dynbus import Actor, Context, InvalidRequest, Runtime, depends, handler


class Text(BaseModel):
    text: str
    language: str = "en"


class Vector(BaseModel):
    numbers: list[float]


class Embedder(Actor, namespace="demo"):
    @handler(batch=32, batch_wait="5ms")
    async def embed(self, texts: list[Text]) -> list[Vector]:
        return [Vector(numbers=[float(len(one.text))]) for one in texts]

    @handler(batch=32, batch_wait=0.005, batch_key="language", concurrency=2, timeout=5.0)
    async def some(self, texts: list[Text]) -> list[Vector | Exception]:
        return [InvalidRequest("it is empty") for _ in texts]

    @handler(batch=8, batch_key=lambda text: text.language, batch_size_of=len)
    async def lengths(self, texts: list[str], context: Context | None = None) -> list[int]:
        return list(map(len, texts))


class Caller(Actor, namespace="demo"):
    embedder = depends(Embedder)

    @handler
    async def ask(self, text: Text) -> Vector:
        return await self.embedder.embed(text)


async def use(runtime: Runtime) -> None:
    embedder = runtime.client(Embedder)
    assert_type(await embedder.embed(Text(text="a")), Vector)
    assert_type(await embedder.some(Text(text="a")), Vector)
    assert_type(await embedder.lengths("a"), int)
