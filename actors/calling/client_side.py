"""The calling side of a process: its caller, the instances it knows, and its waiting calls."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Sequence, Set
from contextlib import AsyncExitStack, contextmanager
from typing import cast

import anyio

from dynbus.actors.declaring.durable import DEFAULTS, DurableOptions
from dynbus.bus.bus import Bus
from dynbus.bus.calling.caller import Caller
from dynbus.bus.clock import monotonic
from dynbus.bus.errors import Cancelled, Unavailable
from dynbus.bus.protocol.cancellation import OPERATOR, EndedCall
from dynbus.bus.protocol.names import ComponentName, EndpointName, InstanceName
from dynbus.bus.records.discovery import Discovery
from dynbus.bus.records.instance_view import Instance
from dynbus.bus.transport import ConnectionState

from .jobs import JobQueue
from .migration_line import Migrations
from .routing import Router, Routing, RoutingName, make_router
from .schema_check import SchemaCheck


class ClientSide:
    """One process as the caller of others: its calls, and the instances that it knows.

    Attributes:
        bus: the connections, which belong to somebody else.
        discovery: the instances of the own region.
        abroad: those of other regions, which are looked for once a call may leave its own.
        spills: whether calls may that do not say.
        migrations: has streams that move wait for their turn.
        schema_check: None where the classes of clients and instances are not compared.
    """

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.caller = Caller(bus)
        heard = (self.caller.is_heard, self.caller.silent_since)
        self.discovery = Discovery(bus, *heard)
        self.abroad = Discovery(bus, *heard, abroad=True)
        self.spills = bus.config.spill == "region"
        self.caller.on_heard_again(self.discovery.hear)
        self.caller.on_heard_again(self.abroad.hear)
        self.migrations = Migrations()
        self.schema_check = SchemaCheck() if bus.config.schema_check == "warn" else None
        self._connected = asyncio.Event()
        self._connected.set()
        self._closed = False
        self._jobs: dict[EndpointName, JobQueue] = {}
        # What no instance has yet: calls that wait for one, for the bus, or for another attempt.
        self._waits: dict[anyio.CancelScope, tuple[Set[str], str]] = {}

    async def begin_calling(self) -> None:
        """Take part in calls from now on."""
        self.bus.cancels.add(self._cancel_waits)
        self.bus.data.on_state(self._on_state)
        await self.caller.start()

    async def end_calling(self) -> None:
        """End every call; those that wait for the bus or an instance too."""
        self._closed = True
        async with AsyncExitStack() as then:
            then.callback(self.bus.cancels.remove, self._cancel_waits)
            then.push_async_callback(self.discovery.close)
            then.push_async_callback(self.abroad.close)
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

    @contextmanager
    def until_cancelled(self, namespaces: Set[str], request_id: str) -> Generator[None]:
        """Leave what waits in the block for a request when an operator cancels that in one of the
        namespaces.

        Raises:
            Cancelled: an operator has.
        """
        with anyio.CancelScope() as scope:
            self._waits[scope] = namespaces, request_id
            try:
                yield
            finally:
                del self._waits[scope]
        if scope.cancelled_caught:
            raise Cancelled(OPERATOR, request_id=request_id, started=False)

    @contextmanager
    def unless_cancelled(self, namespaces: Set[str], request_id: str) -> Generator[None]:
        """Wait in the block for what a request needs before any call of it is made; see
        `until_cancelled`. One that was cancelled a moment ago does not begin to wait.

        Args:
            namespaces: whose cancels are heard from now on.

        Raises:
            Cancelled: an operator has cancelled it, before or meanwhile.
        """
        for namespace in namespaces:
            self.bus.cancels.hear(namespace)
        self._check_cancelled(namespaces, request_id)
        with self.until_cancelled(namespaces, request_id):
            yield
        # It may have come in the turn in which the wait was over.
        self._check_cancelled(namespaces, request_id)

    def _check_cancelled(self, namespaces: Set[str], request_id: str) -> None:
        if any(self.bus.cancels.has(one, request_id) for one in namespaces):
            raise Cancelled(OPERATOR, request_id=request_id, started=False)

    def _cancel_waits(self, namespace: str, ids: Set[str]) -> list[EndedCall]:
        ended: list[EndedCall] = []
        for scope, (namespaces, request_id) in list(self._waits.items()):
            # One that two namespaces cancel at once is told of once.
            if namespace in namespaces and request_id in ids and not scope.cancel_called:
                scope.cancel()
                ended.append(EndedCall(request_id))
        return ended

    def router(self, routing: Routing | None) -> Router:
        """The router of a client: as it says, or else as the process does.

        Raises:
            ConfigError: `routing` is not usable.
        """
        if routing is None:
            routing = cast("RoutingName", self.bus.config.routing)
        return make_router(routing)

    def jobs_of(self, endpoint: EndpointName, options: DurableOptions | None = None) -> JobQueue:
        """The jobs of a durable handler.

        Args:
            options: of the handler, where they are known.
        """
        jobs = self._jobs.get(endpoint)
        if jobs is None or (options is not None and options != jobs.options):
            jobs = self._jobs[endpoint] = JobQueue(self.bus, endpoint, options or DEFAULTS)
        return jobs

    def knowing(self, instance: InstanceName) -> Discovery:
        """The discovery that knows an instance; that of the own region where none does."""
        return self.abroad if self.abroad.view.find(instance) is not None else self.discovery

    def known_instances(self, component: ComponentName) -> Sequence[Instance]:
        """The instances of a component that may be chosen now."""
        self.discovery.begin()
        return self.discovery.view.instances(*component, monotonic())

    def within_reach(self, component: ComponentName) -> list[Instance]:
        """The instances of a component that calls of this process may go to: those of other
        regions too where calls may leave their own."""
        instances = list(self.known_instances(component))
        if self.spills:
            self.abroad.begin()
            instances += self.abroad.view.instances(*component, monotonic())
        return instances

    def known_ids(self, component: ComponentName) -> list[str]:
        """Their ids."""
        return [instance.id for instance in self.known_instances(component)]

    def _on_state(self, state: ConnectionState) -> None:
        if state is ConnectionState.CONNECTED:
            self._connected.set()
        else:
            self._connected.clear()
