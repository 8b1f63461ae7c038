"""A peer that lies about its memory costs its readers an error, and nothing else."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import anyio.to_thread
import msgspec
import numpy as np
import pytest
from tests.conditions import PATIENCE
from tests.transfer.kv_blocks import arrays_of, filled, small_layout

from dynbus.bus.bus import Bus
from dynbus.bus.clock import monotonic
from dynbus.bus.config import BusConfig
from dynbus.bus.memory.bus import MemoryBus
from dynbus.transfer import exchange
from dynbus.transfer.agent import TransferAgent, open_agent
from dynbus.transfer.binding import NixlAgent
from dynbus.transfer.config import TransferConfig
from dynbus.transfer.descriptors import AgentDescription, encode
from dynbus.transfer.errors import TransferError
from dynbus.transfer.layout import KvMemory, Region
from dynbus.transfer.leases import Ticket
from dynbus.transfer.links import nixl_name
from dynbus.transfer.names import transfer_agent_subject
from dynbus.transfer.reach import host_name

pytestmark = pytest.mark.anyio

LAYOUT = small_layout(blocks=64)
NAME = "ns.Liar.1"


class Liar(NamedTuple):
    """Who can be told what to say of itself.

    Attributes:
        truth: what an honest agent would say.
    """

    bus: Bus
    reader: TransferAgent
    truth: AgentDescription

    async def says(self, **changed: Any) -> None:
        """Let its record be the truth but for these fields, in an envelope that is whole."""
        fields = {**msgspec.structs.asdict(self.truth), **changed}
        # What checks a description when it is made would refuse most of it.
        told = msgspec.structs.replace(self.truth)
        for name, value in fields.items():
            msgspec.structs.force_setattr(told, name, value)
        await self.bus.data.jetstream.ensure_stream(exchange.AGENTS_STREAM)
        await self.bus.data.jetstream.publish(transfer_agent_subject(NAME), encode(told))

    async def is_read(self, blocks: tuple[int, ...] = (1, 2)) -> None:
        """Let the reader read blocks of it."""
        ticket = Ticket(NAME, self.truth.epoch, 1, blocks, len(blocks) * 4, PATIENCE)
        transfer = self.reader.start(
            "read",
            ticket,
            blocks,
            range(len(blocks)),
            tokens=len(blocks) * LAYOUT.block_size,
            deadline=monotonic() + PATIENCE,
        )
        try:
            await transfer.result()
        finally:
            await transfer.quiet()


@asynccontextmanager
async def lying() -> AsyncGenerator[Liar]:
    server = MemoryBus()
    bus = await Bus.over(BusConfig(), await server.connect(), await server.connect())
    memory, epoch = filled(LAYOUT, 2), secrets.token_hex(8)
    home = await anyio.to_thread.run_sync(registered, nixl_name(NAME, epoch), memory)
    try:
        config = TransferConfig(quiet_seconds=1.0)
        async with open_agent(bus, "ns.Reader.1", KvMemory.allocate(LAYOUT), config) as reader:
            truth = AgentDescription(
                NAME, epoch, LAYOUT, memory.regions, home.metadata(), host_name()
            )
            yield Liar(bus, reader, truth)
    finally:
        home.close()
        await bus.close()


def registered(name: str, memory: KvMemory) -> NixlAgent:
    home = NixlAgent(name, wakes_every=0.01, ucx={})
    home.register(memory.regions)
    return home


Lie = Callable[[AgentDescription], dict[str, Any]]


def of_regions(lie: Callable[[Region], Region]) -> Lie:
    return lambda truth: {"regions": tuple(lie(one) for one in truth.regions)}


def says(**told: Any) -> Lie:
    return lambda _: told


def has_fewer_regions(truth: AgentDescription) -> dict[str, Any]:
    return {"regions": truth.regions[:1]}


def cuts_its_metadata(truth: AgentDescription) -> dict[str, Any]:
    return {"metadata": truth.metadata[:-9]}


def has_terabytes(truth: AgentDescription) -> dict[str, Any]:
    return {
        "layout": msgspec.structs.replace(
            truth.layout, blocks=2**31 - 1, strides=(16, 2**40, 2**41, 2**36)
        ),
        "regions": tuple(Region(one.address, 2**43) for one in truth.regions),
    }


@pytest.mark.parametrize(
    ("lie", "told"),
    [
        (of_regions(lambda one: Region(one.address + 2**30, one.size)), "NotFound"),
        (of_regions(lambda one: Region(one.address + 64, one.size)), "NotFound"),
        (has_fewer_regions, "2 regions does not fit into 1"),
        (of_regions(lambda one: Region(one.address, 16)), "region 0 has 16 bytes"),
        (of_regions(lambda one: Region(one.address, one.size, 7)), "NotFound"),
        (of_regions(lambda one: Region(one.address, one.size, 0, "VRAM")), "NotFound"),
        (says(layout=small_layout(blocks=64, head_dim=2)), "head_dim is 2 there"),
        (says(layout=small_layout(blocks=64, dtype="int8")), "dtype is int8 there"),
        (says(metadata=b""), "cannot be added"),
        (says(metadata=bytes(500)), "cannot be added"),
        (cuts_its_metadata, "cannot be added"),
        (says(epoch="later"), "has restarted"),
        (says(agent="ns.Honest.1"), "describes ns.Honest.1"),
        (has_terabytes, "NotFound"),
    ],
)
async def test_a_lie_is_an_error_of_the_read(lie: Lie, told: str) -> None:
    async with lying() as liar:
        await liar.says(**lie(liar.truth))

        with pytest.raises(TransferError, match=told):
            await liar.is_read()

        seen = liar.reader.statistics
        assert not seen.open_handles
        assert not seen.quarantined_blocks
        assert not any(np.any(array) for array in arrays_of(liar.reader.memory))


async def test_the_truth_is_read() -> None:
    async with lying() as liar:
        await liar.says()

        await liar.is_read()

        assert any(np.any(array) for array in arrays_of(liar.reader.memory))


async def test_blocks_that_a_peer_does_not_have_are_refused_whatever_its_ticket_says() -> None:
    async with lying() as liar:
        await liar.says()

        with pytest.raises(TransferError, match="64"):
            await liar.is_read((1, 64))
