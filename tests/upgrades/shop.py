"""An actor and its callers, run by either of two versions: only what both have is used here."""

from __future__ import annotations

import asyncio
import os
import signal as signals
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

import dynbus
from dynbus import (
    Actor,
    DynbusError,
    JobHandle,
    Overloaded,
    Runtime,
    Topic,
    call_options,
    context,
    handler,
    signal,
    step,
    subscribe,
)

NAMESPACE = "upgrade"
ITEMS = 300
STREAMS = 8
PAUSE = 0.01
PATIENCE = 60.0


class Order(msgspec.Struct):
    number: int
    text: str = ""


class Numbers(msgspec.Struct):
    """Some numbers, with so many seconds before each."""

    count: int
    start: int = 0
    pause: float = 0.0


closed = Topic("closed", Order, namespace=NAMESPACE, retain="1h")


class Shop(Actor, namespace=NAMESPACE):
    """Serves, and notes in a file what must not be done twice.

    Args:
        notes: that file.
    """

    def __init__(self, notes: str) -> None:
        self._notes = notes

    def note(self, text: str) -> None:
        # One write: several processes share the file.
        file = os.open(self._notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(file, f"{text}\n".encode())
        finally:
            os.close(file)

    @handler
    async def echo(self, order: Order) -> Order:
        return order

    @handler
    async def fail(self, how: str) -> int:
        if how == "busy":
            raise Overloaded("no room", retry_after=7.0)
        raise LookupError(how)

    @handler(timeout=0.3)
    async def dawdle(self) -> int:
        await asyncio.sleep(PATIENCE)
        return 1

    @handler
    async def who(self) -> dict[str, Any]:
        called = context()
        return {
            "id": called.id,
            "metadata": dict(called.metadata),
            "has deadline": called.time_left() is not None,
        }

    @handler(resume="rest")
    async def numbers(self, numbers: Numbers) -> AsyncGenerator[int, None]:
        for number in range(numbers.start, numbers.count):
            await asyncio.sleep(numbers.pause)
            yield number

    @staticmethod
    def rest(numbers: Numbers, items: Sequence[int]) -> Numbers | None:
        start = numbers.start + len(items)
        return Numbers(numbers.count, start, numbers.pause) if start < numbers.count else None

    @handler
    async def endless(self, name: str) -> AsyncGenerator[int, None]:
        try:
            while True:
                yield 1
                await asyncio.sleep(PAUSE)
        finally:
            self.note(f"ended {name}")

    @handler(durable=True, tries=3, backoff=0.1)
    async def order(self, order: Order) -> list[str]:
        charged = await step("charge", self.charge, order.number)
        go = await signal("go", str)
        if order.text == "fails" and context().attempt == 1:
            raise LookupError("no parcel")
        return [charged, go, await step("send", self.send, order.number)]

    async def charge(self, number: int) -> str:
        self.note(f"charged {number}")
        return f"receipt {number}"

    async def send(self, number: int) -> str:
        self.note(f"sent {number}")
        return f"parcel {number}"

    @subscribe(closed, group="billing")
    async def bill(self, order: Order) -> None:
        self.note(f"billed {order.number}")

    @subscribe(closed)
    async def hear(self, order: Order) -> None:
        self.note(f"heard {order.number}")


async def serve(runtime: Runtime, *notes: str) -> None:
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signals.SIGTERM, ended.set)
    await runtime.start(Shop, notes=notes[0])
    print("serves", flush=True)
    await ended.wait()


async def outcome(call: Awaitable[Any]) -> Any:
    """The result of a call, or its error as its caller sees it; without what is of one process."""
    try:
        return msgspec.to_builtins(await call, enc_hook=dict)
    except DynbusError as error:
        return [error.code, error.message, error.retryable, getattr(error, "retry_after", None)]


async def calls(runtime: Runtime, *_: str) -> None:
    """Call in each of the ways, and print what came of it as JSON."""
    shop = runtime.client(Shop)
    endpoint = runtime.namespace(NAMESPACE).component("Shop").endpoint("echo")
    untyped = await endpoint.client()
    await untyped.wait_for_instances(PATIENCE)
    with call_options(request_id="one-request", timeout=PATIENCE, metadata={"tenant": "ada"}):
        who = await outcome(shop.who())
    stream = shop.endless("a stream")
    async with aclosing(stream):
        endless = [await anext(stream) for _ in range(3)]
    several = await shop.broadcast.echo(Order(3))
    print(
        msgspec.json.encode(
            {
                "small": await outcome(shop.echo(Order(1, "ä"))),
                "large": len((await shop.echo(Order(2, "x" * 3_000_000))).text),
                "error": await outcome(shop.fail("no card")),
                "busy": await outcome(shop.fail("busy")),
                "late": (await outcome(shop.dawdle()))[0],
                "who": who,
                "numbers": [one async for one in shop.numbers(Numbers(1000))],
                "endless": endless,
                "untyped": await outcome(untyped.generate({"number": 4})),
                "wrong": (await outcome(untyped.generate({"number": "four"})))[0],
                "several": [msgspec.to_builtins(one) for one in several.values()],
            }
        ).decode()
    )


async def streams(runtime: Runtime, *_: str) -> None:
    """Read streams at once, and print what each had."""
    shop = runtime.client(Shop)
    begun = asyncio.Event()

    async def read() -> list[int]:
        items: list[int] = []
        async for item in shop.numbers(Numbers(ITEMS, pause=PAUSE)):
            items.append(item)
            begun.set()
        return items

    reads = [asyncio.create_task(read()) for _ in range(STREAMS)]
    await begun.wait()
    print("reads", flush=True)
    print(msgspec.json.encode(await asyncio.gather(*reads)).decode())


def job(runtime: Runtime, number: str) -> JobHandle[list[str]]:
    return runtime.job(f"{NAMESPACE}.Shop.order.order-{number}", Shop.order)


async def submit(runtime: Runtime, number: str, text: str = "") -> None:
    order = Order(int(number), text)
    await runtime.client(Shop).order.submit(order, idempotency_key=f"order-{number}")


async def allow(runtime: Runtime, number: str) -> None:
    await job(runtime, number).signal("go", "allowed")


async def cancel(runtime: Runtime, number: str) -> None:
    print(msgspec.json.encode(await job(runtime, number).cancel()).decode())


async def result(runtime: Runtime, number: str) -> None:
    handle = job(runtime, number)
    came = await outcome(handle.result(PATIENCE))
    state = await handle.state()
    failed = [one.tries for one in state.failures]
    print(msgspec.json.encode([came, state.status, state.tries, failed]).decode())


async def publish(runtime: Runtime, *numbers: str) -> None:
    for number in numbers:
        await closed.publish(Order(int(number)), key=number, runtime=runtime)


ROLES: Mapping[str, Callable[..., Awaitable[None]]] = {
    one.__name__: one for one in (serve, calls, streams, submit, allow, cancel, result, publish)
}


async def main(role: str, url: str, *arguments: str) -> None:
    print(f"with {dynbus.__file__}", flush=True)
    async with Runtime.connect(url, name=role, drain_grace=0.2) as runtime:
        await ROLES[role](runtime, *arguments)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
