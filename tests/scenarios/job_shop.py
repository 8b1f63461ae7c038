"""A process that does jobs of durable handlers until it is killed, and notes what it does."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from typing import NamedTuple

import msgspec
from examples.billing.actors import Billing, Charge, Receipt

from dynbus import Actor, Runtime, handler, step

LEDGER = "JOB_SHOP_LEDGER"
DATABASE = "JOB_SHOP_DATABASE"
STEPS = ("a", "b", "c", "d", "e")
CUSTOMERS = 24


class Order(msgspec.Struct):
    number: int
    customer: int = 0


class Note(NamedTuple):
    """A line of the ledger.

    Attributes:
        when: seconds on the clock that all processes of a machine share.
        what: "begun" and "worked" of a job, "step" and "stored" of a step.
        name: of the handler, or of the step.
    """

    when: float
    what: str
    name: str
    number: int
    pid: int

    @classmethod
    def read(cls, line: str) -> Note:
        """What `__str__` has written."""
        when, what, name, number, pid = line.split()
        return cls(float(when), what, name, int(number), int(pid))

    def __str__(self) -> str:
        return f"{self.when:.6f} {self.what} {self.name} {self.number} {self.pid}"


def note(ledger: int, what: str, name: str, number: int) -> None:
    """Write a line, in one write: what a kill leaves is whole lines."""
    os.write(ledger, f"{Note(time.monotonic(), what, name, number, os.getpid())}\n".encode())


class Shop(Actor, namespace="shop"):
    """Handlers without steps, with steps, and in the order of each customer."""

    async def on_start(self) -> None:
        self.ledger = open_ledger()

    @handler(durable=True, tries=50, backoff=0.05, ack_wait=1.0)
    async def pack(self, order: Order) -> str:
        note(self.ledger, "begun", "pack", order.number)
        await asyncio.sleep(random.uniform(0.0, 0.05))
        note(self.ledger, "worked", "pack", order.number)
        return f"{order.number} by {os.getpid()} at {time.monotonic()}"

    @handler(durable=True, tries=50, backoff=0.05, ack_wait=1.0)
    async def sell(self, order: Order) -> list[str]:
        note(self.ledger, "begun", "sell", order.number)
        done: list[str] = []
        for name in STEPS:
            done.append(await step(name, self.effect, name, order.number))
            note(self.ledger, "stored", name, order.number)
        return done

    async def effect(self, name: str, number: int) -> str:
        note(self.ledger, "step", name, number)
        await asyncio.sleep(random.uniform(0.0, 0.02))
        return f"{name} {number} by {os.getpid()} at {time.monotonic()}"

    @handler(durable=True, tries=50, backoff=0.05, ack_wait=5.0, ordered_by="customer")
    async def ship(self, order: Order) -> str:
        note(self.ledger, "begun", "ship", order.number)
        await asyncio.sleep(random.uniform(0.0, 0.02))
        note(self.ledger, "worked", "ship", order.number)
        return f"{order.number} by {os.getpid()} at {time.monotonic()}"


class NotedBilling(Billing, namespace="billing", component="Billing"):
    """The example's actor, of which it is noted when it begins and has done."""

    async def on_start(self) -> None:
        await super().on_start()
        self.ledger = open_ledger()

    def book(self, key: str, charge: Charge) -> Receipt:
        number = int(key.rpartition("-")[2])
        note(self.ledger, "begun", "charge", number)
        receipt = super().book(key, charge)
        note(self.ledger, "worked", "charge", number)
        return receipt


def open_ledger() -> int:
    return os.open(os.environ[LEDGER], os.O_WRONLY | os.O_APPEND | os.O_CREAT)


async def main(url: str) -> None:
    async with Runtime.connect(url, wait=30.0) as runtime:
        await runtime.start(Shop)
        if DATABASE in os.environ:
            await runtime.start(NotedBilling, database=os.environ[DATABASE])
        print("takes jobs", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
