"""Engines and readers for tests of what runs them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import msgspec

from dynbus import Reply
from dynbus.bus.errors import DynbusError
from dynbus.llm.embedding import Embedded, EmbedRequest
from dynbus.llm.engine import EngineLimits, EngineLoad, Step
from dynbus.llm.generation import Generated, GenerateRequest

LIMITS = EngineLimits(4, 64, 8, 64, 256, vocabulary=1000)


class CountingEngine:
    """An engine that computes: each step gives each request the next number, from 0 on.

    Attributes:
        threads: that have used it.
        allowed: steps that it may take; more wait for it.
        steps: that it took.
        broken: what its next step raises.
        poison: the token of a prompt with which a step raises.
    """

    computes = True
    limits = LIMITS

    def __init__(self, *, allowed: int = 1_000_000) -> None:
        self.threads: set[int] = set()
        self.allowed = threading.Semaphore(allowed)
        self.steps = 0
        self.broken: BaseException | None = None
        self.poison = -1
        self.failing: dict[str, str] = {}
        self.requests: dict[str, tuple[GenerateRequest, int]] = {}
        self.texts: dict[str, EmbedRequest] = {}

    @property
    def has_work(self) -> bool:
        self.threads.add(threading.get_ident())
        return bool(self.requests or self.texts)

    @property
    def load(self) -> EngineLoad:
        self.threads.add(threading.get_ident())
        return EngineLoad(len(self.requests), 0, len(self.requests))

    def add(self, request_id: str, request: GenerateRequest) -> None:
        self.threads.add(threading.get_ident())
        if not request.token_ids:
            raise ValueError("the prompt is empty")
        self.requests[request_id] = (request, 0)

    def add_embedding(self, request_id: str, request: EmbedRequest) -> None:
        if not request.token_ids:
            raise ValueError("the prompt is empty")
        self.texts[request_id] = request

    def cancel(self, request_id: str) -> None:
        self.threads.add(threading.get_ident())
        self.requests.pop(request_id, None)
        self.texts.pop(request_id, None)

    def step(self) -> Step:
        self.threads.add(threading.get_ident())
        self.allowed.acquire()
        self.steps += 1
        if self.broken is not None:
            raise self.broken
        if any(self.poison in request.token_ids for request, _ in self.requests.values()):
            raise RuntimeError(f"token {self.poison} is poison")
        outputs: list[tuple[str, Generated]] = []
        for request_id, (request, made) in list(self.requests.items()):
            is_last = made + 1 == request.max_tokens
            outputs += [
                (request_id, Generated([made], index, finish_reason="length" if is_last else None))
                for index in range(request.n)
            ]
            self.requests[request_id] = (request, made + 1)
            if is_last:
                del self.requests[request_id]
        failures, self.failing = list(self.failing.items()), {}
        for request_id, _ in failures:
            self.requests.pop(request_id, None)
            self.texts.pop(request_id, None)
        texts, self.texts = self.texts, {}
        embedded = [(name, Embedded([float(len(one.token_ids))])) for name, one in texts.items()]
        return Step(outputs, failures=failures, embedded=embedded)


class Reader:
    """One call's reader: takes items as long as it has credit.

    Attributes:
        credit: items that it still takes.
        error: with which the call ended.
    """

    def __init__(self, credit: int = 1_000_000) -> None:
        self.credit = credit
        self.items: list[Generated] = []
        self.error: DynbusError | None = None
        self.ended = False
        self._then: list[Callable[[], object]] = []
        self._end = asyncio.Event()
        self.reply: Reply[Generated] = Reply(self, msgspec.json.encode)

    @property
    def paused(self) -> bool:
        return self.credit <= 0 and not self.ended

    @property
    def token_ids(self) -> list[int]:
        return [token for item in self.items for token in item.token_ids]

    def push(self, item: bytes) -> bool:
        if self.ended:
            return False
        self.credit -= 1
        self.items.append(msgspec.json.decode(item, type=Generated))
        return not self.paused

    def grant(self, items: int) -> None:
        """Take so many more items."""
        self.credit += items
        self._wake()

    async def writable(self) -> None:
        raise NotImplementedError

    def when_writable(self, then: Callable[[], object]) -> None:
        self._then.append(then)
        if not self.paused:
            self._wake()

    def _wake(self) -> None:
        then, self._then = self._then, []
        for each in then:
            asyncio.get_running_loop().call_soon(each)

    async def closed(self) -> None:
        """Wait for the end of the call."""
        await asyncio.wait_for(self._end.wait(), 60)

    def end(self, result: bytes | None = None) -> None:
        self.ended = True
        self._end.set()
        self._wake()

    def fail(self, error: DynbusError) -> None:
        if not self.ended:
            self.error = error
            self.end()
