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
from dynbus.bus.protocol.names import transfer_agent_subject
from dynbus.transfer import exchange
from dynbus.transfer.agent import TransferAgent, open_agent
from dynbus.transfer.binding import NixlAgent
from dynbus.transfer.config import TransferConfig
from dynbus.transfer.descriptors import AgentDescription, encode
from dynbus.transfer.errors import TransferError
from dynbus.transfer.layout import KvMemory, Region
from dynbus.transfer.leases import Ticket
from dynbus.transfer.links import nixl_name
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
        await self.bus.data.jetstream.ensure_stream(exchange.STREAM)
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


def moved(region: Region, by: int) -> Region:
    return Region(region.address + by, region.size)


@pytest.mark.parametrize(
    ("lie", "told"),
    [
        (lambda truth: {"regions": tuple(moved(one, 2**30) for one in truth.regions)}, "NotFound"),
        (lambda truth: {"regions": tuple(moved(one, 64) for one in truth.regions)}, "NotFound"),
        (lambda truth: {"regions": truth.regions[:1]}, "2 regions does not fit into 1"),
        (
            lambda truth: {"regions": tuple(Region(one.address, 16) for one in truth.regions)},
            "region 0 has 16 bytes",
        ),
        (
            lambda truth: {
                "regions": tuple(Region(one.address, one.size, 7) for one in truth.regions)
            },
            "NotFound",
        ),
        (
            lambda truth: {
                "regions": tuple(Region(one.address, one.size, 0, "VRAM") for one in truth.regions)
            },
            "NotFound",
        ),
        (lambda _: {"layout": small_layout(blocks=64, head_dim=2)}, "head_dim is 2 there"),
        (lambda _: {"layout": small_layout(blocks=64, dtype="int8")}, "dtype is int8 there"),
        (lambda _: {"metadata": b""}, "cannot be added"),
        (lambda _: {"metadata": bytes(500)}, "cannot be added"),
        (lambda truth: {"metadata": truth.metadata[:-9]}, "cannot be added"),
        (lambda _: {"epoch": "later"}, "has restarted"),
        (lambda _: {"agent": "ns.Honest.1"}, "describes ns.Honest.1"),
        (
            lambda truth: {
                "layout": msgspec.structs.replace(
                    truth.layout, blocks=2**31 - 1, strides=(16, 2**40, 2**41, 2**36)
                ),
                "regions": tuple(Region(one.address, 2**43) for one in truth.regions),
            },
            "NotFound",
        ),
    ],
)
async def test_a_lie_is_an_error_of_the_read(
    lie: Callable[[AgentDescription], dict[str, Any]], told: str
) -> None:
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
