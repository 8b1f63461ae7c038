"""Calls that go on while things go wrong, and what becomes of each."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from inspect import Parameter
from typing import Any, Final, Protocol, cast

import anyio
import msgspec

from dynbus.actors.calling.clients import EndpointClient, with_options
from dynbus.actors.calling.options import call_options
from dynbus.actors.calling.retry_policy import MOVES_SPENT
from dynbus.actors.calling.stream import Stream
from dynbus.actors.declaring.handlers import HandlerSpec
from dynbus.actors.runtime import Runtime
from dynbus.bus.background import task_group
from dynbus.bus.clock import monotonic
from dynbus.bus.errors import ConfigError, DynbusError, StreamLost, describe_exception
from dynbus.bus.protocol.names import EndpointName

from .checker import Checker, of_items
from .echo import Echo, EchoRequest, token

HANG: Final = 10.0
"""Seconds beyond its deadline after which a call is given up as one that does not end."""
WAIT: Final = 20.0
"""Seconds that a call waits for an instance where there is none."""
RETRIES: Final = 20
"""The number of retries of a call that may be repeated: chaos hits the same call again and
again.
"""
PACE: Final = 0.02
"""Seconds between two calls of one caller, where the calls do not last."""


@dataclass(frozen=True)
class Asked:
    """One call that is about to be made.

    Attributes:
        name: how a violation names it.
        make: makes it; an awaitable, or what is iterated over.
        encode: the bytes of an item or a result, to compare them.
        expected: see `CallCheck`.
        pause: seconds between two items.
        timeout: seconds for the whole call.
        may_fail: whether an error with a type is no violation.
        replays: whether it computes its items again when it moves.
        may_run_out: whether it may end when it has moved as often as its handler lets it: faults
            may hit one stream more often.
    """

    name: str
    make: Callable[[], Awaitable[Any] | AsyncIterator[Any]]
    encode: Callable[[Any], bytes]
    expected: Callable[[int], bytes | None] | None
    pause: float
    timeout: float
    may_fail: bool
    replays: bool = False
    may_run_out: bool = False


class Source(Protocol):
    """A source of calls."""

    def next_call(self) -> Asked:
        """The next one."""
        ...


class Echoes:
    """Calls of the built-in graph: streams of both kinds, and now and then a call for one result.

    Args:
        items: the fewest and the most items of a stream.
        pauses: seconds between two items, the shortest and the longest.
    """

    def __init__(
        self, runtime: Runtime, seed: int, *, items: tuple[int, int], pauses: tuple[float, float]
    ) -> None:
        self._chance = random.Random(seed)
        client = runtime.client(Echo)
        self._echo = with_options(client, wait=WAIT)
        self._once = with_options(client, wait=WAIT, retries=RETRIES)
        self._items = items
        self._pauses = pauses
        self._count = 0

    def next_call(self) -> Asked:
        chance, (fewest, most), (low, high) = self._chance, self._items, self._pauses
        self._count += 1
        count = fewest + int(chance.random() * (most - fewest + 1))
        pause = low + (high - low) * chance.random()
        request = EchoRequest(f"prompt {self._count} {chance.random()}", count, pause)
        drawn = chance.random()
        make: Callable[[], Awaitable[Any] | AsyncIterator[Any]]
        if drawn < 0.1:
            kind, count = "once", 1
            make = partial(self._once.once, request)
        elif drawn < 0.55:
            kind = "replayed"
            make = partial(self._echo.replayed, request)
        else:
            kind = "resumed"
            make = partial(self._echo.resumed, request)

        def expected(index: int) -> bytes | None:
            return token(request.prompt, index).encode() if index < count else None

        return Asked(
            *(f"{kind} {self._count}", make, str.encode, expected, pause),
            timeout=count * pause + 60.0,
            may_fail=False,
            replays=kind == "replayed",
        )


class Repeated:
    """One call of a user's endpoint, made again and again with the same request."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked

    def next_call(self) -> Asked:
        return self._asked


async def repeated(
    name: EndpointName,
    request: bytes | None,
    runtime: Runtime,
    spec: HandlerSpec | None,
    client: Any,
    *,
    timeout: float,
    strict: bool,
) -> tuple[Repeated, str]:
    """The calls of one endpoint of a graph, and what is known of them.

    It is called twice first, while nothing is wrong. Where both give the same, every later call
    must too.

    Args:
        request: JSON; None for none.
        spec: of its handler; None where it has no class.
        client: a typed client of that class, or an untyped one of the endpoint.
        strict: whether an error with a type is a violation in any case.

    Raises:
        ConfigError: the request does not fit, or the call fails while nothing is wrong.
    """
    make, encode = _caller(name, request, spec, client)
    known: list[list[bytes]] = []
    slowest = 0.0
    for _ in range(2):
        try:
            with anyio.fail_after(timeout):
                items, pause = await _reference(make, encode)
        except DynbusError as error:
            raise ConfigError(
                f"--call {name} fails while nothing is wrong: {error}; call it with what it can "
                "answer"
            ) from None
        except TimeoutError:
            raise ConfigError(
                f"--call {name} did not end within {timeout:g} s while nothing was wrong; ask for "
                "less, or raise --timeout"
            ) from None
        known.append(items)
        slowest = max(slowest, pause)
    same = known[0] == known[1]
    may_fail = not strict and not _goes_on(spec)
    replays = spec is not None and spec.resume == "replay"
    asked = Asked(
        *(str(name), make, encode, of_items(known[0]) if same else None, slowest),
        timeout=timeout,
        may_fail=may_fail,
        replays=replays,
        may_run_out=not strict,
    )
    count = len(known[0])
    answers = f"{count} item{'' if count == 1 else 's'}" if same else "other items each time"
    if replays and not same:
        answers += ', which resume="replay" cannot go on with'
    failing = "may fail in an error with a type" if may_fail else "may not fail"
    return Repeated(asked), f"{name}: {answers}; {failing}"


def _goes_on(spec: HandlerSpec | None) -> bool:
    """True if a call survives the loss of its instance by what its handler declares."""
    if spec is None:
        return False
    return spec.resume is not None if spec.streaming else spec.idempotent


def _caller(
    name: EndpointName, request: bytes | None, spec: HandlerSpec | None, client: Any
) -> tuple[Callable[[], Awaitable[Any] | AsyncIterator[Any]], Callable[[Any], bytes]]:
    try:
        if spec is None:
            assert isinstance(client, EndpointClient)
            value = None if request is None else msgspec.json.decode(request)
            return (lambda: client.generate(value).raw()), bytes
        method, codec = getattr(client, spec.function.__name__), spec.request_codec
        if codec is None:
            if request is not None:
                raise ConfigError("it takes no request: leave =JSON out")
            return method, spec.result_codec.encode
        if request is None:
            if spec.default is Parameter.empty:
                raise ConfigError(f"it needs a request: write --call {name}=JSON")
            return method, spec.result_codec.encode
        decoded = codec.decode(request)
    except (ValueError, DynbusError) as error:  # a DecodeError is a ValueError
        raise ConfigError(f"--call {name}: {error}") from None
    return (lambda: method(decoded)), spec.result_codec.encode


async def _reference(
    make: Callable[[], Awaitable[Any] | AsyncIterator[Any]], encode: Callable[[Any], bytes]
) -> tuple[list[bytes], float]:
    """The items of a call, and the longest time without one."""
    items: list[bytes] = []
    longest, last = 0.0, monotonic()
    async for item in _items(make()):
        now = monotonic()
        longest, last = max(longest, now - last), now
        items.append(encode(item))
    return items, longest


async def _items(call: Awaitable[Any] | AsyncIterator[Any]) -> AsyncIterator[Any]:
    """The items of a stream, or the one result of a call."""
    result: Any = None
    stream = _as_stream(call)
    if stream is None:
        # Of an untyped call it shows then whether it is a stream.
        result = await cast("Awaitable[Any]", call)
        stream = _as_stream(result)
    if stream is None:
        yield result
        return
    try:
        async for item in stream:
            yield item
        # What comes after the end shows here.
        async for item in stream:
            yield item
    finally:
        await stream.aclose()


def _as_stream(value: object) -> Stream[Any] | None:
    answer: Any = value
    return answer if isinstance(value, Stream) else None


class Load:
    """Callers that call until they are told to end.

    Args:
        sources: taken in turn by the callers.
    """

    def __init__(self, checker: Checker, sources: list[Source]) -> None:
        self._checker = checker
        self._sources = sources
        self.ending = asyncio.Event()

    async def run(self, callers: int) -> None:
        """Call; returns when each caller has made its last call after `ending` was set."""
        async with task_group() as tasks:
            for number in range(callers):
                tasks.start_soon(self._keep_calling, self._sources[number % len(self._sources)])

    async def _keep_calling(self, source: Source) -> None:
        while not self.ending.is_set():
            began = monotonic()
            await self.call(source.next_call())
            with anyio.move_on_after(max(0.0, PACE - (monotonic() - began))):
                await self.ending.wait()

    async def call(self, asked: Asked) -> None:
        """Make one call and check it to its end."""
        check = self._checker.begin(
            asked.name,
            now=monotonic(),
            expected=asked.expected,
            pause=asked.pause,
            timeout=asked.timeout,
            replays=asked.replays,
        )
        try:
            with anyio.move_on_after(asked.timeout + HANG) as bound:
                async for item in _items(_timed(asked)):
                    check.item(asked.encode(item), monotonic())
                check.end(monotonic())
            if bound.cancelled_caught:
                check.hang(monotonic())
        except DynbusError as error:
            ran_out = isinstance(error, StreamLost) and error.message.endswith(MOVES_SPENT)
            allowed = asked.may_fail or (asked.may_run_out and ran_out)
            check.fail(monotonic(), error.code, str(error), allowed=allowed)
        except Exception as error:  # noqa: BLE001 - that it has no type is the finding
            check.crash(monotonic(), describe_exception(error))


def _timed(asked: Asked) -> Awaitable[Any] | AsyncIterator[Any]:
    """The call with its deadline."""
    with call_options(timeout=asked.timeout):
        return asked.make()
