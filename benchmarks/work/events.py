"""`python -m benchmarks.work.events`: events to four groups a second, beside FastStream, on the
same nats-server.

One process has a subscriber for each of four groups, which holds up to 16 events of 1 KiB at a
time. First all events are published by 64 publishers side by side (those of FastStream by nats-py
alone), then the groups begin, at the oldest event. What counts is an event of one group: handled,
and acknowledged; of dynbus also confirmed by the server.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from typing import Any

import click
import msgspec
import uvloop

from dynbus import Actor, Runtime, Topic, subscribe

from .comparing import PEERS, Child, compare
from .peers import GROUPS, HELD, SUBMITTERS, Tally, payload


class Happened(msgspec.Struct):
    number: int
    at: float
    text: str


happened = Topic("happened", Happened, namespace="bench")


class Hearer(Actor, namespace="bench", abstract=True):
    tally: Tally


def hearer(group: str) -> type[Hearer]:
    """An actor that is one of a group."""

    class Member(Hearer, component=group):
        @subscribe(happened, group=group, from_="all", concurrency=HELD)
        async def hear(self, event: Happened) -> None:
            self.tally.begin(event.at)

    return Member


async def take(url: str, events: int) -> None:
    """Have the groups hear all events, until all are acknowledged."""
    Hearer.tally = tally = Tally(events * len(GROUPS))
    async with Runtime.connect(url) as runtime:
        for group in GROUPS:
            await runtime.start(hearer(group))
        print("ready", flush=True)
        stream = happened.config().stream
        js = runtime.bus.data.jetstream
        left = [1]
        while any(left):
            await asyncio.sleep(0.01)
            if len(tally.waits) == tally.jobs:
                infos = [await js.consumer_info(stream, group) for group in GROUPS]
                left = [one.pending + one.ack_pending for one in infos]
        tally.finish()
        tally.tell()


async def publish(url: str, events: int) -> None:
    """Publish all events."""
    async with Runtime.connect(url) as runtime:
        numbers = iter(range(events))

        async def publishes() -> None:
            for number in numbers:
                event = msgspec.json.decode(payload(number), type=Happened)
                await happened.publish(event, runtime=runtime)

        begun = time.time()
        await asyncio.gather(*(publishes() for _ in range(SUBMITTERS)))
        print(json.dumps({"seconds": time.time() - begun}), flush=True)


def measure(system: str, python: str, url: str, events: int) -> dict[str, Any]:
    """Figures of one system."""

    def command(role: str) -> list[str]:
        if system == "dynbus":
            return [
                sys.executable,
                "-m",
                "benchmarks.work.events",
                "--role",
                role,
                url,
                str(events),
            ]
        return [python, str(PEERS), f"{system}-events", url, str(events), role]

    if system != "dynbus":
        subprocess.run(command("make"), check=True, timeout=60)
    published = Child(command("put")).figures()
    taker = Child(command("take"))
    taker.line()
    taken = taker.figures()
    heard = events * len(GROUPS)
    return {
        "published_per_second": round(events / published["seconds"]),
        "heard_per_second": round(heard / taken["seconds"]),
        "cpu_us_per_event_heard": round(taken["cpu"] / heard * 1e6),
    }


@click.command(help=__doc__)
@click.option("--events", default=3000)
@click.option("--runs", default=3)
@click.option("--python-peers", default="", help="Python with faststream[nats].")
@click.option("--role", default="", hidden=True)
@click.argument("rest", nargs=-1)
def main(events: int, runs: int, python_peers: str, role: str, rest: tuple[str, ...]) -> None:
    if role:
        uvloop.run((take if role == "take" else publish)(rest[0], int(rest[1])))
        return
    compare(
        ["dynbus", *(("faststream",) if python_peers else ())],
        runs,
        lambda system, url: measure(system, python_peers, url, events),
    )


if __name__ == "__main__":
    main()
