"""A caller process of a host: calls `Counter` in every way until SIGTERM, and writes it down."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import msgspec
from tests.conditions import stalled_seconds

from dynbus import DynbusError, Runtime, call_options
from dynbus.bus.lane import new_event_loop
from dynbus.bus.nats.connection import NatsConnection

from .records import STREAMS, Gap, Kind, Record
from .workload import Count, Counter

LONG = 1.0
"""Seconds without anything that are written down."""
TIMEOUT = 5.0
"""Seconds that a call has which answers once."""
BETWEEN = 0.1
PAUSE = 0.03
"""Seconds before each item."""


class Watch:
    """The times in which nothing of one call came."""

    def __init__(self) -> None:
        self.gaps: list[Gap] = []
        self.begun = self._latest = time.monotonic()
        self._busy = stalled_seconds() or 0.0

    def came(self) -> float:
        """Something came; returns when."""
        now, busy = time.monotonic(), stalled_seconds() or 0.0
        if now - self._latest >= LONG:
            self.gaps.append(Gap(self._latest, now, busy - self._busy))
        self._latest, self._busy = now, busy
        return now


class Caller:
    """Calls one after the other, on as many lines as there are kinds and callers of each."""

    def __init__(self, runtime: Runtime, name: str, journal: Path, items: int) -> None:
        self._counter = runtime.client(Counter)
        self._name = name
        self._journal = journal
        self._items = items
        self._number = 0
        self.leaving = asyncio.Event()

    async def line(self, kind: Kind) -> None:
        """Call in one way, again and again, until it is time to leave."""
        while not self.leaving.is_set():
            self._number += 1
            record = await self._call(kind, f"{self._name}-{kind}-{self._number}")
            with self._journal.open("ab") as journal:
                journal.write(msgspec.json.encode(record) + b"\n")
            if kind not in STREAMS or record.error:
                await asyncio.sleep(BETWEEN)

    async def _call(self, kind: Kind, tag: str) -> Record:
        wanted = self._items if kind in STREAMS else 1
        timeout = 0.0 if kind in STREAMS else TIMEOUT
        watch, items, wrong, error = Watch(), 0, "", ""
        is_typed = True
        try:
            if kind in STREAMS:
                async with aclosing(self._stream(kind, Count(tag, wanted, PAUSE))) as numbers:
                    async for number in numbers:
                        watch.came()
                        if number != items:
                            wrong = wrong or f"item {items} is {number}"
                        items += 1
            else:
                with call_options(timeout=timeout):
                    call = Count(tag, wanted, 0.05)
                    answer = self._counter.once if kind == "once" else self._counter.repeatable
                    items = await answer(call)
        except DynbusError as failed:
            error = f"{type(failed).__name__}: {failed}"
        except Exception as failed:  # noqa: BLE001 - that is what is looked for
            error, is_typed = repr(failed), False
        return Record(
            kind,
            tag,
            begun=watch.begun,
            ended=watch.came(),
            wanted=wanted,
            items=items,
            timeout=timeout,
            wrong=wrong,
            error=error,
            is_typed=is_typed,
            gaps=watch.gaps,
            replay=wanted * PAUSE if kind == "replayed" else 0.0,
        )

    def _stream(self, kind: Kind, request: Count) -> AsyncGenerator[int, None]:
        streams = {
            "resumed": self._counter.resumed,
            "replayed": self._counter.replayed,
            "plain": self._counter.plain,
        }
        return streams[kind](request)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("journal", type=Path)
    parser.add_argument("name")
    parser.add_argument("--items", type=int, default=100, help="of each stream")
    for kind, lines in (("resumed", 6), ("replayed", 2), ("plain", 2), ("repeatable", 2)):
        parser.add_argument(f"--{kind}", type=int, default=lines)
    parser.add_argument("--once", type=int, default=2)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    async with Runtime.connect(options.url, name=options.name) as runtime:
        caller = Caller(runtime, options.name, options.journal, options.items)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, caller.leaving.set)
        await runtime.client(Counter).repeatable(Count("first", 1, 0.0))
        connection = runtime.bus.data
        assert isinstance(connection, NatsConnection)
        print(f"calling through {connection.server_name}", flush=True)
        async with asyncio.TaskGroup() as group:
            kinds: tuple[Kind, ...] = ("resumed", "replayed", "plain", "repeatable", "once")
            for kind in kinds:
                for _ in range(getattr(options, kind)):
                    group.create_task(caller.line(kind))


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(main())
