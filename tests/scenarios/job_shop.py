"""A process that does jobs of durable handlers until it is killed, and notes what it does."""

from __future__ import annotations

import asyncio
import os
import random
import sys

import msgspec

from dynbus import Actor, Runtime, handler, step

LEDGER = "JOB_SHOP_LEDGER"


class Order(msgspec.Struct):
    number: int


class Shop(Actor, namespace="shop"):
    """A handler without and one with steps; each effect is a line of a file."""

    async def on_start(self) -> None:
        self.ledger = os.open(os.environ[LEDGER], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    @handler(durable=True, tries=50, backoff=0.05, ack_wait=1.0)
    async def pack(self, order: Order) -> int:
        await asyncio.sleep(random.uniform(0.0, 0.05))
        self._note(f"pack {order.number}")
        return order.number

    @handler(durable=True, tries=50, backoff=0.05, ack_wait=1.0)
    async def sell(self, order: Order) -> list[str]:
        return [await step(name, self.effect, name, order.number) for name in ("a", "b", "c")]

    async def effect(self, name: str, number: int) -> str:
        self._note(f"{name} {number}")
        await asyncio.sleep(random.uniform(0.0, 0.02))
        return f"{name} {number} by {os.getpid()}"

    def _note(self, line: str) -> None:
        # One write each: what a kill leaves is whole lines.
        os.write(self.ledger, f"{line}\n".encode())


async def main(url: str) -> None:
    async with Runtime.connect(url, wait=30.0) as runtime:
        await runtime.start(Shop)
        print("takes jobs", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
