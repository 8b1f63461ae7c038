"""A process with an instance of scheduled handlers, whose own time of day is wrong and jumps."""

from __future__ import annotations

import asyncio
import os
import sys
import time

from dynbus import Actor, Runtime, context, cron, every

LEDGER = "SCHEDULE_SHOP_LEDGER"
SCHEDULES = ("skipping", "made_up", "by_cron")
JUMP_EVERY = 3.0
"""Seconds after which the time of day of a process jumps, forward and back in turn."""


class Clerk(Actor, namespace="schedules"):
    """Notes each firing that it begins, by its key."""

    async def on_start(self) -> None:
        self.ledger = os.open(os.environ[LEDGER], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(self, name: str) -> None:
        # One write each: what a kill leaves is whole lines.
        os.write(self.ledger, f"{name} {context().idempotency_key}\n".encode())

    @every("1s")
    async def skipping(self) -> None:
        self.note("skipping")

    @every("1s", missed="catch_up")
    async def made_up(self) -> None:
        self.note("made_up")

    @cron("*/2 * * * * *", missed="catch_up")
    async def by_cron(self) -> None:
        self.note("by_cron")


def set_wrong(seconds: float) -> None:
    """Have the time of day of this process be `seconds` ahead, then behind, and so on."""
    right = time.time

    def wrong() -> float:
        is_ahead = int(time.monotonic() / JUMP_EVERY) % 2
        return right() + (seconds if is_ahead else -seconds)

    time.time = wrong


async def main(url: str, seconds: str) -> None:
    set_wrong(float(seconds))
    async with Runtime.connect(url, wait=30.0) as runtime:
        await runtime.start(Clerk)
        print("runs schedules", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
