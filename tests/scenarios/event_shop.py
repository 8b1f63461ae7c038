"""A process with members of the groups of a topic, which note what they hear until it is killed."""

from __future__ import annotations

import asyncio
import os
import random
import sys

import msgspec

from dynbus import Actor, Runtime, Topic, subscribe

LEDGER = "EVENT_SHOP_LEDGER"
GROUPS = ("billing", "search", "audit", "mail")
ORDERED = "audit"


class Sold(msgspec.Struct):
    number: int
    customer: str


sold = Topic("order.sold", Sold, namespace="shop", retain="1h")


class Hearer(Actor, namespace="shop", abstract=True):
    async def on_start(self) -> None:
        self.ledger = os.open(os.environ[LEDGER], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(self, group: str, event: Sold) -> None:
        # One write each: what a kill leaves is whole lines.
        os.write(self.ledger, f"{group} {event.customer} {event.number}\n".encode())


def member(group: str) -> type[Hearer]:
    """An actor that is one of a group."""

    class Member(Hearer, component=group):
        @subscribe(
            sold,
            group=group,
            ordered=group == ORDERED,
            from_="all",
            tries=100,
            backoff=0.05,
            ack_wait=1.0,
        )
        async def hear(self, event: Sold) -> None:
            self.note(group, event)
            await asyncio.sleep(random.uniform(0.0, 0.02))

    return Member


async def main(url: str) -> None:
    async with Runtime.connect(url, wait=30.0) as runtime:
        for group in GROUPS:
            await runtime.start(member(group))
        print("hears events", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
