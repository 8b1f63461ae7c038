"""Handlers of batches, and their callers: both checkers refuse each line that says that it is
ignored."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from dynbus import Actor, Reply, Runtime, handler


class Lengths(Actor, namespace="demo"):
    @handler(batch=8)
    async def length(self, texts: list[str]) -> list[int]:
        return list(map(len, texts))


async def use(runtime: Runtime) -> None:
    lengths = runtime.client(Lengths)
    await lengths.length(["a"])  # type: ignore
    await lengths.length(1)  # type: ignore
    await lengths.length()  # type: ignore
    (await lengths.length("a")).append(1)  # type: ignore


async def takes_one(actor: Lengths, text: str) -> list[int]:
    return [len(text)]


async def gives_one(actor: Lengths, texts: list[str]) -> int:
    return len(texts)


async def takes_none(actor: Lengths) -> list[int]:
    return []


async def streams(actor: Lengths, texts: list[str]) -> AsyncGenerator[int, None]:
    yield len(texts)


async def replies(actor: Lengths, texts: list[str], reply: Reply[int]) -> None:
    reply.end()


def wrong_signatures() -> None:
    handler(batch=8)(takes_one)  # type: ignore
    handler(batch=8)(gives_one)  # type: ignore
    handler(batch=8)(takes_none)  # type: ignore
    handler(batch=8)(streams)  # type: ignore
    handler(batch=8)(replies)  # type: ignore


def wrong_options() -> None:
    handler(batch="8")  # type: ignore
    handler(batch_wait="5ms")  # type: ignore
    handler(batch=8, batch_wait=[1])  # type: ignore
    handler(batch=8, batch_key=1)  # type: ignore
    handler(batch=8, resume="replay")  # type: ignore
