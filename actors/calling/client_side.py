"""What a process calls others with."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from dynbus.bus.bus import Bus
from dynbus.bus.calling.caller import Caller
from dynbus.bus.clock import monotonic
from dynbus.bus.errors import Unavailable
from dynbus.bus.protocol.names import ComponentName
from dynbus.bus.records.discovery import Discovery
from dynbus.bus.transport import ConnectionState

from .schema_check import SchemaCheck


class ClientSide:
    """One process as the caller of others: its calls, and the instances that it knows.

    Attributes:
        bus: the connections, which belong to somebody else.
        schema_check: None where the classes of clients and instances are not compared.
    """

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.caller = Caller(bus)
        self.discovery = Discovery(bus, self.caller.is_heard)
        check = bus.config.schema_check
        self.schema_check = (
            None if check == "off" else SchemaCheck(self.caller, refuses=check == "refuse")
        )
        self._connected = asyncio.Event()
        self._connected.set()
        self._closed = False

    async def begin_calling(self) -> None:
        """Take part in calls from now on."""
        self.bus.data.on_state(self._on_state)
        await self.caller.start()

    async def end_calling(self) -> None:
        """End every call; those that wait for the bus or an instance too."""
        self._closed = True
        async with AsyncExitStack() as then:
            then.push_async_callback(self.discovery.close)
            then.push_async_callback(self.caller.close)

    @property
    def is_connected(self) -> bool:
        return self._connected.is_set()

    async def wait_connected(self, timeout: float | None) -> None:
        """Wait until the bus can be reached.

        Raises:
            Unavailable: it cannot within `timeout` seconds, or the runtime is closed.
        """
        self.bus.check()
        if self._closed:
            raise Unavailable("the runtime is closed", started=False)
        limit = self.bus.config.connect_timeout
        try:
            async with asyncio.timeout(limit if timeout is None else min(timeout, limit)):
                await self._connected.wait()
        except TimeoutError:
            raise Unavailable("the bus cannot be reached", started=False) from None

    def known_ids(self, component: ComponentName) -> list[str]:
        """The ids of a component's instances that are known now."""
        self.discovery.begin()
        found = self.discovery.view.instances(*component, monotonic())
        return [instance.id for instance in found]

    def _on_state(self, state: ConnectionState) -> None:
        if state is ConnectionState.CONNECTED:
            self._connected.set()
        else:
            self._connected.clear()
