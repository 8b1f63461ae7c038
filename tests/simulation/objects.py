"""The story of objects that are replaced while they are read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext, suppress

import anyio

from dynbus import Unavailable
from dynbus.bus.records.objects import NoObject, ObjectBucket, ObjectStore
from dynbus.bus.transport import Message
from dynbus.testing import Simulation

from .rest import rest

CHUNK = 16
NAME = "the object"


def _data(version: int) -> bytes:
    """The bytes of a version, of another length than the one before."""
    return f"{version:04}".encode() * (1 + 5 * version % 23)


async def objects(simulation: Simulation) -> None:
    """An object is read as one of those that it was, and none that was replaced before; who is
    cancelled while it puts one leaves no damage, and at last nothing beside it."""
    stores: list[ObjectStore] = []
    for _ in range(3):
        jetstream = (await simulation.kit.runtime()).bus.data.jetstream
        stores.append(ObjectStore(jetstream, ObjectBucket("simulated"), chunk_size=CHUNK))
    writer, *readers = stores
    begun, confirmed, done = 0, -1, asyncio.Event()

    async def write() -> None:
        nonlocal begun, confirmed
        chance = simulation.random
        for version in range(1, 30):
            begun = version
            patience = chance.random() / 10 if chance.random() < 0.15 else 30.0
            with suppress(Unavailable), anyio.move_on_after(patience) as scope:
                # What is cancelled there may be stored, and may not.
                is_cut = chance.random() < 0.3
                with _at_the_record(simulation, scope.cancel) if is_cut else nullcontext():
                    await writer.put(NAME, _data(version), timeout=4.0)
                    confirmed = version
            simulation.counts["put cancelled"] += scope.cancelled_caught
            await asyncio.sleep(0.3 * simulation.random.random())
        done.set()

    async def read(store: ObjectStore) -> None:
        while not done.is_set():
            least = confirmed
            with suppress(Unavailable):
                try:
                    found = (await store.get(NAME, timeout=4.0)).data
                except NoObject:
                    assert least < 0, f"version {least} is gone"
                else:
                    version = int(found[:4])
                    assert found == _data(version), f"{found!r} is no version"
                    assert least <= version <= begun, f"version {version} after {least}"
            await asyncio.sleep(0.1 * simulation.random.random())

    await ensured(writer)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(write)
        for reader in readers:
            tasks.start_soon(read, reader)
    await rest(simulation)
    await writer.drop_abandoned(older_than=0.0)
    found = await writer.get(NAME)
    assert found.data == _data(int(found.data[:4]))
    info = await simulation.kit.caller.bus.data.jetstream.stream_info("OBJ_simulated")
    assert info.messages == found.info.chunks + 1, f"{info} for {found.info}"


@contextmanager
def _at_the_record(simulation: Simulation, then: Callable[[], object]) -> Generator[None]:
    """Call `then` when a record of an object reaches the server."""

    def see(message: Message) -> None:
        if message.subject.startswith("$O.simulated.M."):
            then()

    observers = simulation.kit.bus.observers
    observers.append(see)
    try:
        yield
    finally:
        observers.remove(see)


async def ensured(store: ObjectStore) -> None:
    """Have the bucket made, also where the server is away."""
    while True:
        with suppress(Unavailable):
            return await store.ensure()
        await asyncio.sleep(0.5)
