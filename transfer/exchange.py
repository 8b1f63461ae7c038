"""Descriptions of agents on the bus: how one is announced, with a lease, while its agent lives, and
found.

A description is a record with a lease, in its checked envelope. One that is too large for that is
an object, which the record names.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Final

import anyio

from dynbus import ConfigError, DynbusError, Unavailable
from dynbus.spi import (
    Background,
    Bus,
    Grant,
    JetStream,
    LeasedRecord,
    NoObject,
    NoStream,
    ObjectBucket,
    ObjectStore,
    StoredMessage,
    StreamConfig,
    StreamLimits,
    check_token,
    monotonic,
)
from dynbus.transfer.names import BUCKET, transfer_agent_subject, transfer_subject

from .descriptors import AgentDescription, decode, encode
from .errors import BadDescription, PeerRestarted, TransferFailed

logger = logging.getLogger(__name__)

MAX_RECORD_BYTES: Final = 48 * 1024
"""Of a description in the record itself."""
MARKER_TTL: Final = 60.0
RETRY_DELAY: Final = 0.25
ANSWER_TIMEOUT: Final = 2.0
STALE_FOR: Final = 1.0
"""Seconds for which a replica may still tell of an earlier life."""
_IN_OBJECT: Final = b"dynbusKV in object "

AGENTS_STREAM: Final = StreamConfig(
    name=f"KV_{BUCKET}",
    subjects=(f"$KV.{BUCKET}.>",),
    limits=StreamLimits(
        max_messages_per_subject=1,
        max_bytes=256 * 1024 * 1024,
        max_message_size=MAX_RECORD_BYTES + 1024,
    ),
    # Markers of what expired would let who writes here clear all by a roll-up.
    marker_ttl=0.0,
    description="dynbus: the memory that agents of transfers offer",
)
DESCRIPTIONS: Final = ObjectBucket(
    BUCKET,
    max_bytes=1024 * 1024 * 1024,
    description="dynbus: descriptions of agents that are too large for a record",
)


def check_agent_name(name: str) -> str:
    """Return a name that an agent can have: tokens with dots between them.

    Raises:
        ConfigError: it is none.
    """
    if len(name) > 200:
        raise ConfigError(f"the name of an agent has {len(name)} characters: at most 200")
    for token in name.split("."):
        check_token("part of the agent's name", token)
    return name


def check_life(agent: str, epoch: str) -> None:
    """Check the names of a life that somebody else has told, before they are used in a subject.

    Raises:
        ConfigError: they are none.
    """
    check_agent_name(agent)
    check_token("epoch", epoch)


@asynccontextmanager
async def announced(
    bus: Bus, background: Background, description: AgentDescription
) -> AsyncGenerator[None]:
    """Keep the description of an agent on the bus; what is there under its name gives way.

    Raises:
        Unavailable: JetStream does not answer.
        DynbusError: it refuses the record.
    """
    announcement = _Announcement(bus, description)
    await announcement.begin()
    try:
        work = background.start(announcement.keep, name=f"record of {description.agent}")
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True):
                await work.end()
    finally:
        with anyio.move_on_after(2 * ANSWER_TIMEOUT, shield=True):
            await announcement.withdraw()


class _Announcement:
    """The record of one agent. It is written on the lane, which nothing of the main loop delays."""

    def __init__(self, bus: Bus, description: AgentDescription) -> None:
        self._bus = bus
        self._lane = bus.lane
        self._description = description
        self._data = encode(description)
        self._is_large = len(self._data) > MAX_RECORD_BYTES
        self._is_announced = False
        self._now = anyio.Event()
        self._record = LeasedRecord(
            bus.lane.connection.jetstream,
            AGENTS_STREAM.name,
            transfer_agent_subject(description.agent),
            bus.config.lease_ttl,
            marker_ttl=MARKER_TTL,
            is_mine=self._is_mine,
            make=self._make_bucket,
            remake=self._remake_bucket,
        )

    async def begin(self) -> None:
        if self._is_large:
            store = ObjectStore(self._bus.data.jetstream, DESCRIPTIONS)
            await store.ensure()
            await self._sweep(store)
            await store.put(self._description.agent, self._data)
        if not await self._lane.run(self._record.write(self._record_data)):
            raise Unavailable(f"the record of agent {self._description.agent} cannot be written")
        self._is_announced = True

    async def keep(self) -> None:
        """Renew the record until cancelled, or until another agent has taken its name."""
        end_listening = self._bus.data.on_connected(self._on_connected)
        try:
            while True:
                with anyio.move_on_after(self._record.pause()):
                    await self._now.wait()
                    self._record.start_anew()
                self._now = anyio.Event()
                try:
                    if not await self._lane.run(self._record.write(self._record_data)):
                        logger.error(
                            "another agent has taken the name %s: peers read that one from now on",
                            self._description.agent,
                        )
                        return
                except DynbusError as error:
                    with suppress(Unavailable):
                        await self._lane.run(self._record.after_failure(error))
        finally:
            end_listening()

    async def withdraw(self) -> None:
        is_connected = self._lane.connection.is_connected
        with suppress(Unavailable):
            # Where the lane is closed it expires by itself.
            await self._lane.run(self._record.withdraw(is_connected=is_connected))
        if self._is_large and not self._record.is_taken:
            with suppress(DynbusError):
                store = ObjectStore(self._bus.data.jetstream, DESCRIPTIONS)
                await store.delete(self._description.agent, timeout=ANSWER_TIMEOUT)

    @property
    def _record_data(self) -> bytes:
        return _IN_OBJECT + self._description.epoch.encode() if self._is_large else self._data

    async def _sweep(self, store: ObjectStore) -> None:
        """Delete the descriptions of agents that were killed."""
        try:
            for info in await store.list_objects():
                subject = transfer_agent_subject(info.name)
                stored = await self._bus.data.jetstream.last(AGENTS_STREAM.name, subject)
                if stored is None or stored.is_marker:
                    await store.delete(info.name)
        except DynbusError as error:
            logger.debug("descriptions of agents that are gone were not swept: %s", error)

    def _is_mine(self, stored: StoredMessage) -> bool:
        if not self._is_announced:
            # A name is an address that only one process has: another life of it is gone.
            return True
        return stored.data == self._record_data

    def _on_connected(self) -> None:
        self._now.set()

    async def _make_bucket(self) -> None:
        await self._lane.connection.jetstream.ensure_stream(AGENTS_STREAM)

    async def _remake_bucket(self) -> None:
        # The disk that broke it may be full still.
        await self._lane.connection.jetstream.ensure_stream(AGENTS_STREAM._replace(in_memory=True))


async def look_up(bus: Bus, agent: str, epoch: str, *, seconds: float) -> AgentDescription:
    """The description of one life of an agent.

    Raises:
        PeerRestarted: another life has the name now.
        TransferFailed: no agent has it, or the bus does not answer in time.
        BadDescription: what is there is damaged, or is of another agent.
    """
    ends = monotonic() + seconds
    stale_until = monotonic() + min(STALE_FOR, seconds)
    while True:
        try:
            description = await _look(bus.data.jetstream, agent)
            problem: DynbusError
            if description is None:
                problem = TransferFailed(f"there is no agent {agent} on the bus")
            elif description.epoch == epoch:
                return description
            else:
                problem = PeerRestarted(
                    f"agent {agent} has restarted: what it held under epoch {epoch} is gone"
                )
            wait_until = stale_until
        except (Unavailable, NoObject) as error:
            problem = TransferFailed(f"agent {agent} could not be looked up: {error}")
            wait_until = ends
        if monotonic() + RETRY_DELAY > wait_until:
            raise problem
        await anyio.sleep(RETRY_DELAY)


async def _look(jetstream: JetStream, agent: str) -> AgentDescription | None:
    try:
        stored = await jetstream.last(
            AGENTS_STREAM.name, transfer_agent_subject(agent), timeout=ANSWER_TIMEOUT
        )
    except NoStream:
        return None
    if stored is None or stored.is_marker:
        return None
    data = stored.data
    if data.startswith(_IN_OBJECT):
        data = (await ObjectStore(jetstream, DESCRIPTIONS).get(agent, timeout=ANSWER_TIMEOUT)).data
    description = decode(data)
    if description.agent != agent:
        raise BadDescription(f"the record of agent {agent} describes {description.agent}")
    return description


def transfer_grants(agents: str) -> list[Grant]:
    """The uses that a process makes of the bus, for `dynbus auth`, that moves blocks between its
    memory and that of its peers.

    Args:
        agents: the names that its agents and their peers may have, with wildcards.
    """
    descriptions = DESCRIPTIONS.stream
    return [
        Grant(
            f"moves blocks as {agents}",
            (
                transfer_agent_subject(agents),
                *AGENTS_STREAM.to_look_up,
                *descriptions.subjects,
                *descriptions.to_follow,
                f"$JS.API.STREAM.PURGE.{descriptions.name}",
                transfer_subject(agents, "*"),
            ),
            (transfer_subject(agents, "*"),),
        )
    ]
