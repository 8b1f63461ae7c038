"""A process that does jobs which wait, in one of two versions of their handlers."""

from __future__ import annotations

import asyncio
import os
import sys
from datetime import timedelta

import msgspec

from dynbus import Actor, DeadlineExceeded, Runtime, handler, signal, sleep_until, step

from .job_shop import note, open_ledger

VERSION = "WAIT_SHOP_VERSION"


class Wait(msgspec.Struct):
    number: int
    seconds: float


class Contracts(Actor, namespace="waits"):
    """Handlers with a step before they wait and one after it; version 2 has another behind."""

    async def on_start(self) -> None:
        self.ledger = open_ledger()

    @handler(durable=True, tries=50, backoff=0.05, ack_wait=1.0)
    async def rest(self, wait: Wait) -> list[str]:
        before = await step("before", self.effect, "before", wait.number)
        await sleep_until(timedelta(seconds=wait.seconds))
        return [before, *await self.after(wait.number)]

    @handler(durable=True, tries=50, backoff=0.05, ack_wait=1.0)
    async def approve(self, wait: Wait) -> list[str]:
        before = await step("before", self.effect, "before", wait.number)
        try:
            who = await signal("approved", str, timeout=wait.seconds)
        except DeadlineExceeded:
            who = "nobody"
        return [before, who, *await self.after(wait.number)]

    async def after(self, number: int) -> list[str]:
        done = [await step("after", self.effect, "after", number)]
        if os.environ[VERSION] == "2":
            done.append(await step("added", self.effect, "added", number))
        return done

    async def effect(self, name: str, number: int) -> str:
        note(self.ledger, "step", name, number)
        return f"{name} of version {os.environ[VERSION]}"


async def main(url: str) -> None:
    async with Runtime.connect(url, wait=30.0) as runtime:
        await runtime.start(Contracts)
        print("takes jobs", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
