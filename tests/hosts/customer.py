"""A process of a host that submits jobs and publishes events until SIGTERM, and notes their ends.

When it ends it has waited for all jobs, and says what is left of them at the servers.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import count
from typing import Any, Literal, TypeVar

import msgspec
from pydantic_core import to_jsonable_python
from tests.conditions import PATIENCE, eventually
from tests.scenarios.event_shop import Sold, sold
from tests.scenarios.job_shop import CUSTOMERS, Order, Shop

from dynbus import EndpointName, JobHandle, Overloaded, Runtime, Unavailable
from dynbus.bus.lane import new_event_loop
from dynbus.bus.protocol.names import job_log_stream, work_stream
from dynbus.bus.work_queue import DeadLetters

T = TypeVar("T")
Kind = Literal["pack", "sell", "ship"]
KINDS: Sequence[Kind] = ("pack", "sell", "ship")
LINES: dict[Kind, int] = {"pack": 8, "sell": 6, "ship": 6}
"""Of `ship` each line is a customer."""
PUBLISHERS = 4


class Done(msgspec.Struct, frozen=True):
    """A job whose result has come, or an event that was published.

    Attributes:
        what: the handler, or "event".
        when: by the monotonic clock, which all hosts of a lab share.
        customer: of an event.
    """

    what: str
    number: int
    when: float
    result: Any = None
    customer: str = ""


class Left(msgspec.Struct, frozen=True):
    """What the servers have of a queue when all its jobs have ended.

    Attributes:
        ends: the results that are recorded, each as often as it is.
    """

    what: str
    ends: list[Any]
    dead_letters: int


class Customer:
    """Submits and publishes on several lines, each one thing after the other."""

    def __init__(self, runtime: Runtime, journal: str) -> None:
        self.leaving = asyncio.Event()
        self._runtime = runtime
        self._client = runtime.client(Shop)
        self._journal = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(self, line: Done | Left) -> None:
        os.write(self._journal, msgspec.json.encode(line) + b"\n")

    async def submit(self, kind: Kind, order: Order) -> JobHandle[Any]:
        method = getattr(self._client, kind)
        key = f"{kind}-{order.number}"
        return await _persistently(partial(method.submit, order, idempotency_key=key))

    async def jobs(self, kind: Kind, numbers: Callable[[], int], at_once: int) -> None:
        """Submit `at_once` jobs, wait for them, and begin again."""
        while not self.leaving.is_set():
            submitted: list[tuple[int, JobHandle[Any]]] = []
            for _ in range(at_once):
                number = numbers()
                order = Order(number, number % CUSTOMERS)
                submitted.append((number, await self.submit(kind, order)))
            for number, job in submitted:
                result = to_jsonable_python(await job.result())
                self.note(Done(kind, number, time.monotonic(), result))

    async def events(self, customer: str, numbers: Callable[[], int]) -> None:
        while not self.leaving.is_set():
            event = Sold(numbers(), customer)
            await _persistently(partial(sold.publish, event, key=customer, runtime=self._runtime))
            self.note(Done("event", event.number, time.monotonic(), customer=customer))
            await asyncio.sleep(0.05)

    async def look(self, kind: Kind) -> None:
        """Wait until the queue is empty, and note what is kept of its jobs."""
        queue = EndpointName.of("shop", "Shop", kind)
        jetstream = self._runtime.bus.data.jetstream

        async def is_empty() -> bool:
            return not (await jetstream.stream_info(work_stream(queue))).messages

        await eventually(is_empty, what=f"the queue of {kind} is empty")
        stored = await jetstream.read(job_log_stream(queue), timeout=PATIENCE)
        ends = [msgspec.json.decode(one.data) for one in stored if one.subject.endswith(".end")]
        letters = await DeadLetters(jetstream, queue.namespace).find()
        self.note(Left(kind, ends, len(letters)))


async def _persistently(what: Callable[[], Awaitable[T]]) -> T:
    """Carry something out under its own key, however often the servers are away meanwhile."""
    while True:
        try:
            return await what()
        except Overloaded as error:
            await asyncio.sleep(error.retry_after)
        except Unavailable:
            await asyncio.sleep(0.1)


async def main(url: str, journal: str) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    async with Runtime.connect(url, wait=30.0) as runtime:
        customer = Customer(runtime, journal)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, customer.leaving.set)
        print("ready", flush=True)
        async with asyncio.TaskGroup() as group:
            for kind in ("pack", "sell"):
                numbers = count().__next__
                for _ in range(LINES[kind]):
                    group.create_task(customer.jobs(kind, numbers, 1))
            for of in range(LINES["ship"]):
                group.create_task(customer.jobs("ship", count(of, CUSTOMERS).__next__, 2))
            for of in range(PUBLISHERS):
                group.create_task(customer.events(f"c{of}", count().__next__))
        for kind in KINDS:
            await customer.look(kind)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(main(*sys.argv[1:]))
