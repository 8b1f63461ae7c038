"""The answer of a model while it comes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final, Self

import msgspec

from dynbus import InvalidResponse
from dynbus.llm.openai.merging import MergedAnswer
from dynbus.llm.openai.typed import Chat, ChatChunk
from dynbus.llm.pipeline.serving import Completion
from dynbus.llm.pipeline.waiting import WaitingChunks

_decode: Final = msgspec.json.Decoder(ChatChunk).decode


class Asked:
    """A request that was sent, and what comes of it."""

    def __init__(self, completion: Completion, waiting: WaitingChunks) -> None:
        self._completion = completion
        self._waiting = waiting

    async def take(self) -> bytes | None:
        """The next chunk; None after the last. A reader that is cancelled meanwhile leaves it.

        Raises:
            DynbusError: how the answer failed.
        """
        try:
            return await self._waiting.take(self._completion)
        except BaseException:
            self.leave()
            raise

    async def whole(self) -> bytes:
        """The only chunk: an answer that is not streamed.

        Raises:
            DynbusError: how the answer failed.
        """
        answer = await self.take()
        if answer is None:
            raise InvalidResponse("the engine gave no answer")
        return answer

    def leave(self) -> None:
        """Have the engine stop, unless it has."""
        self._completion.cancel()


class ModelStream:
    """An answer, chunk by chunk: `async for chunk in model.stream(...)`.

    One that is left before its end is closed by `aclose`, the end of an `async with`, or when
    nobody has it any more; the engine stops then.

    Raises:
        DynbusError: how the answer failed, where it is iterated over.
    """

    def __init__(self, ask: Callable[[], Awaitable[Asked]], model: str) -> None:
        self._ask = ask
        self._model = model
        self._asked: Asked | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._merged = MergedAnswer()
        self._is_over = False

    def __repr__(self) -> str:
        state = "over" if self._is_over else "open" if self._asked else "not asked yet"
        return f"<ModelStream of {self._model} [{state}]>"

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ChatChunk:
        if self._is_over:
            raise StopAsyncIteration
        try:
            if self._asked is None:
                self._loop = asyncio.get_running_loop()
                self._asked = await self._ask()
            data = await self._asked.take()
        except BaseException:
            self._is_over = True
            raise
        if data is None:
            self._is_over = True
            raise StopAsyncIteration
        self._merged.add(data)
        return _decode(data)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if self._asked is None or self._is_over or self._loop is None:
            return
        # A collector may run in any thread. Where the loop is closed, nothing is left to end.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._asked.leave)

    async def aclose(self) -> None:
        """Leave it; nothing more comes."""
        self._leave()

    async def answer(self) -> Chat:
        """All that its chunks come to, those that were read before too, once the last has come."""
        async for _ in self:
            pass
        return msgspec.json.decode(self._merged.encode(), type=Chat)

    def _leave(self) -> None:
        if self._asked is not None and not self._is_over:
            self._asked.leave()
        self._is_over = True
