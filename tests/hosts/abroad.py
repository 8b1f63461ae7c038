"""A program that says something to all regions, and counts how often each of two keeps it."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import Sequence

from tests.conditions import eventually

from dynbus import Runtime, Unavailable
from dynbus.bus.lane import new_event_loop
from dynbus.bus.protocol.names import ABROAD_STREAM_NAME, InstanceName, abroad_subject

MANY = 50


class Speaker:
    """Says things to all regions as an instance does, each under a name of its own."""

    def __init__(self, runtime: Runtime, regions: Sequence[Runtime]) -> None:
        self._connection = runtime.bus.data
        self._regions = regions
        self._of = secrets.token_hex(4)

    def _subject(self, name: str) -> str:
        instance = InstanceName("hosts", "Counter", f"{self._of}-{name}")
        return abroad_subject(self._connection.region, instance)

    async def say(self, name: str) -> None:
        self._connection.publish(self._subject(name), b"{}")
        await self._connection.barrier()

    async def kept(self, name: str) -> list[int]:
        """The place of something in what each region has kept; 0 where it is not there yet, or
        nobody can say."""
        places: list[int] = []
        for region in self._regions:
            try:
                last = await region.bus.data.jetstream.last(
                    ABROAD_STREAM_NAME, self._subject(name), timeout=2.0
                )
            except Unavailable:
                last = None
            places.append(0 if last is None else last.sequence)
        return places

    async def say_and_wait(self, name: str, *, again: bool = False) -> list[int]:
        """Say something; its place in what each region has kept, once it has."""
        await self.say(name)

        async def is_kept() -> bool:
            if again:
                await self.say(name)
            return all(await self.kept(name))

        await eventually(is_kept, what=f"all regions keep {name!r}")
        return await self.kept(name)


async def count(speaker: Speaker) -> list[int]:
    """The number of messages that each region has kept of `MANY`."""
    # What is said while a region chooses who keeps it, or a leaf node is on its way, is lost.
    await speaker.say_and_wait("first", again=True)
    begun = await speaker.say_and_wait("begin")
    for number in range(MANY):
        await speaker.say(f"n{number}")
    await speaker.say_and_wait("last")
    # What came by another way than the last has come when this is kept.
    ended = await speaker.say_and_wait("end")
    return [end - begin - 2 for begin, end in zip(begun, ended, strict=True)]


async def main(own: str, other: str) -> None:
    async with Runtime.connect(own) as here, Runtime.connect(other) as there:
        print("kept", *await count(Speaker(here, [here, there])), flush=True)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(main(*sys.argv[1:]))
