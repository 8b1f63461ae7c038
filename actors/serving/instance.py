"""One running actor: its object, its server and its lease."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import secrets
import socket
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, cast

from dynbus.actors.declaring.actor import Actor, address_of, check_startable
from dynbus.actors.declaring.arguments import build_arguments
from dynbus.bus.cleanup import finish
from dynbus.bus.clock import unix_time
from dynbus.bus.context import inside_instance
from dynbus.bus.errors import ConfigError, Draining, DynbusError, Unavailable
from dynbus.bus.protocol.wire import InstanceRecord
from dynbus.bus.records.leased_record import LeaseState
from dynbus.bus.records.leases import LeaseKeeper
from dynbus.bus.serving.server import InstanceServer
from dynbus.bus.serving.services import ServiceResponder
from dynbus.bus.transport import ConnectionState

from .endpoints import endpoints_of
from .lifecycle import InstanceState, Lifecycle

if TYPE_CHECKING:
    from dynbus.actors.runtime import Runtime

logger = logging.getLogger(__name__)

BARRIER_RETRY: Final = 0.5
STOP_TIMEOUT: Final = 30.0
"""Seconds that `on_stop` may take; also a start that is cancelled."""
HURRIED_TIMEOUT: Final = 0.5
"""The same once the instance was told to stop at once."""
CANCEL_TIMEOUT: Final = 1.0
"""Seconds that a cancelled `on_stop` may take to end."""

MAX_METADATA: Final = 32
MAX_METADATA_BYTES: Final = 4096
"""Of what an instance announces: it is in every renewal of its record."""

inside_on_stop: ContextVar[bool] = ContextVar("dynbus_inside_on_stop", default=False)
"""Whether this code runs within an `on_stop`, which must not wait for its own end."""


def new_instance_id() -> str:
    """A random instance id."""
    return secrets.token_hex(8)


class InstanceBroken(Exception):
    """Raised when an instance has reported that it is broken.

    Attributes:
        reason: as its actor gave it.
    """

    def __init__(self, instance: ActorInstance) -> None:
        self.reason = instance.broken
        super().__init__(f"{instance.name} is broken: {self.reason}")


class ActorInstance:
    """A started actor. Made by `Runtime.start`; `stop` ends it gracefully.

    Args:
        instance_id: a random one unless given.
        node: the name under which it is called; the class's component unless given.
        namespace: where it runs; the class's own unless given.
        id_is_random: nobody else can have the given id, so nobody is asked for it.

    Attributes:
        actor: the user's object.
        id: the instance id, unique on the bus.
        name: where it is on the bus.
        broken: why it cannot serve any longer, as `Actor.report_broken` said; empty while it can.
        stopped: set when it has ended, `on_stop` included.
    """

    def __init__(
        self,
        runtime: Runtime,
        actor: type[Actor],
        arguments: dict[str, Any],
        instance_id: str,
        *,
        id_is_random: bool = False,
        node: str = "",
        namespace: str = "",
    ) -> None:
        check_startable(actor, namespace=namespace)
        self.id = instance_id or new_instance_id()
        self.name = address_of(actor, node=node, namespace=namespace).instance(self.id)
        with inside_instance(self.name):
            self.actor = actor(**build_arguments(actor, arguments))
            self.actor.__dynbus_bind__(runtime, self.name)
            self.server = InstanceServer(runtime.bus, *self.name, endpoints_of(self.actor))
        self.lifecycle = Lifecycle()
        self.broken = ""
        self.stopped = asyncio.Event()
        self._runtime = runtime
        self._id_was_given = bool(instance_id) and not id_is_random
        self._keeper: LeaseKeeper | None = None
        self._services: ServiceResponder | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._resuming: asyncio.Task[None] | None = None
        self._take_over: asyncio.Task[None] | None = None
        self._end_listening: list[Callable[[], None]] = []
        self._starting: asyncio.Timeout | None = None
        self._start_ended = asyncio.Event()
        self._start_refused = False
        self._start_was_left = False
        self._hurried = asyncio.Event()

    def __repr__(self) -> str:
        return f"<ActorInstance [{self.lifecycle.state.value}] {self.server!r}>"

    @property
    def state(self) -> InstanceState:
        return self.lifecycle.state

    async def start(self) -> None:
        """Run `on_start`, subscribe, and announce once the server knows every subscription.

        Raises:
            Unavailable: `stop` was called meanwhile; nothing is left behind then.
            InstanceBroken: the actor has reported that it is broken; nor then.
            Exception: what `on_start` raised; nor then.
        """
        with inside_instance(self.name):
            await self._start()

    async def _start(self) -> None:
        self.lifecycle.to(InstanceState.STARTING)
        try:
            try:
                async with asyncio.timeout(None) as self._starting:
                    await self._open()
            finally:
                self._starting = None
            self._check_not_refused()
        except BaseException as error:
            try:
                await finish(self._withdraw())
            finally:
                self.lifecycle.to(InstanceState.STOPPED)
                self._start_ended.set()
            if isinstance(error, TimeoutError):
                self._check_not_refused()
            raise
        self.lifecycle.to(InstanceState.READY)
        self._start_ended.set()
        logger.info("%s is ready", self.name)

    async def stop(self, grace: float | None = None) -> None:
        """Unannounce, let calls finish within `grace` seconds, end the rest, run `on_stop`.

        A second call with another grace waits for the first, except from within an `on_stop`.
        One that is still starting is cancelled.
        """
        if self._stopping is not None and inside_on_stop.get():
            return
        if self._stopping is None:
            if self.lifecycle.state is InstanceState.STARTING:
                await self._cancel_start()
                return
            if self.lifecycle.state is not InstanceState.READY:
                return
            self.lifecycle.to(InstanceState.DRAINING)
            seconds = self._runtime.bus.config.drain_grace if grace is None else grace
            with inside_instance(self.name):
                self._stopping = asyncio.get_running_loop().create_task(self._stop(seconds))
        await asyncio.shield(self._stopping)

    def stop_now(self) -> None:
        """End what is still running in a drain, `on_stop` after `HURRIED_TIMEOUT` seconds."""
        self._hurried.set()
        self.server.draining = True
        self.server.end_all(lambda: Draining("the instance was stopped"))

    def withdraw_broken(self, reason: str) -> None:
        """Leave the bus now, since the actor cannot serve; see `Actor.report_broken`."""
        state = self.lifecycle.state
        if self.broken or state is InstanceState.STOPPED:
            return
        self.broken = reason or "it gave no reason"
        logger.error("%s; it is withdrawn", InstanceBroken(self))
        if state is InstanceState.STARTING:
            if self._starting is not None:
                self._starting.reschedule(asyncio.get_running_loop().time())
            return
        self.server.draining = True
        self.server.end_all(lambda: Draining(f"the instance is broken: {self.broken}"))
        if state is InstanceState.READY:
            self.lifecycle.to(InstanceState.DRAINING)
            self._stopping = asyncio.get_running_loop().create_task(self._withdraw_and_end())
            self._stopping.add_done_callback(self._log_stop)

    def _log_stop(self, stopping: asyncio.Task[None]) -> None:
        if not stopping.cancelled() and (error := stopping.exception()) is not None:
            logger.error("%r did not stop cleanly", self, exc_info=error)

    async def _open(self) -> None:
        """Make ready and announce."""
        keeper = self._keeper = await self._runtime.bus.lane.run(self._make_keeper())
        await self.actor.on_start()
        # It may have swallowed the cancellation.
        self._check_not_refused()
        keeper.describe(announced_metadata(self.actor))
        await self.server.start()
        self._end_listening.append(self._runtime.bus.data.on_state(self._on_state))
        self._services = ServiceResponder(self.server, self._service_metadata())
        await self._services.start()
        await self._runtime.bus.lane.run(keeper.announce())

    def _check_not_refused(self) -> None:
        if self.broken:
            raise InstanceBroken(self) from None
        if self._start_refused:
            raise Unavailable(f"{self.id} was stopped while it started", started=False) from None

    async def _cancel_start(self) -> None:
        """Cancel the start in progress and wait until it has ended, once for `STOP_TIMEOUT`."""
        if self._start_was_left:
            return
        self._start_refused = True
        if self._starting is not None:
            self._starting.reschedule(asyncio.get_running_loop().time())
        try:
            async with asyncio.timeout(STOP_TIMEOUT):
                await self._start_ended.wait()
        except TimeoutError:
            self._start_was_left = True
            logger.error("the start of %s did not end within %g s", self.id, STOP_TIMEOUT)

    async def _make_keeper(self) -> LeaseKeeper:
        """The keeper of the lease; to be called on the control lane."""
        bus = self._runtime.bus
        server = self.server
        record = InstanceRecord(
            namespace=self.name.namespace,
            component=self.name.component,
            instance_id=self.id,
            incarnation=bus.incarnation,
            endpoints={name: served.endpoint.kind for name, served in server.served.items()},
            started=unix_time(),
            address=f"{socket.gethostname()}:{os.getpid()}",
        )
        connection = bus.lane.connection
        keeper = LeaseKeeper(
            connection.jetstream,
            bus.lane.background,
            record,
            bus.config.lease_ttl,
            self._lease_changed,
            bus.count_instances,
            bus.config.replicas,
        )
        end = connection.on_state(keeper.connection_changed)
        self._end_listening.append(lambda: bus.lane.call(end))
        if self._id_was_given:
            # Two holders of one id would both run every request until one of them notices.
            await keeper.check_free()
        return keeper

    def _lease_changed(self, state: LeaseState) -> None:
        level = logging.DEBUG if state in (LeaseState.HELD, LeaseState.ENDED) else logging.WARNING
        logger.log(level, "the lease of %s is %s", self.id, state.value)
        if state is LeaseState.CONFLICT:
            self._runtime.bus.loop.call_soon_threadsafe(self._taken_over)

    def _taken_over(self) -> None:
        """Another process holds our id, since we were away for longer than our lease: two that
        serve under one id would run every request twice."""
        logger.error("%s is served by another process; this instance stops", self.id)
        self._take_over = asyncio.get_running_loop().create_task(stop_all([self], 0.0))

    async def _stop(self, grace: float) -> None:
        keeper = self._keeper
        if keeper is not None:
            self._runtime.bus.lane.call(lambda: keeper.change(draining=True))
        if self.server.load:
            logger.info(
                "%s: calls that run or wait: %d; they have %g s to finish",
                self.name,
                self.server.load,
                round(grace, 1),
            )
        try:
            await self.server.drain(grace)
        finally:
            # Whatever broke, a stopped instance must not stay announced.
            await self._withdraw_and_end()

    async def _withdraw_and_end(self) -> None:
        try:
            await self._withdraw()
        finally:
            await self._end()

    async def _end(self) -> None:
        try:
            await self._run_on_stop()
        finally:
            self.lifecycle.to(InstanceState.STOPPED)
            self._runtime.forget(self)
            self.stopped.set()
            logger.info("%s is stopped", self.name)

    async def _run_on_stop(self) -> None:
        """Run `on_stop` to its end, or for as long as `_stop_time`."""

        async def on_stop() -> None:
            inside_on_stop.set(True)
            await self.actor.on_stop()

        # A task of its own: one that swallows its cancellation is left behind, not waited for.
        task = asyncio.get_running_loop().create_task(on_stop())
        time_over = asyncio.get_running_loop().create_task(self._stop_time())
        try:
            await asyncio.wait({task, time_over}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                seconds = HURRIED_TIMEOUT if self._hurried.is_set() else STOP_TIMEOUT
                logger.error("on_stop of %s was cancelled after %g s", self.id, seconds)
                task.cancel()
                await asyncio.wait({task}, timeout=CANCEL_TIMEOUT)
        finally:
            task.cancel()
            time_over.cancel()
        if not task.done():
            logger.error("on_stop of %s goes on in spite of its cancellation", self.id)
        elif not task.cancelled():
            task.result()

    async def _stop_time(self) -> None:
        """Last for as long as `on_stop` may."""
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT):
                await self._hurried.wait()
                await asyncio.sleep(HURRIED_TIMEOUT)

    def _on_state(self, state: ConnectionState) -> None:
        keeper = self._keeper
        if keeper is None:
            return
        if self._resuming is not None:
            self._resuming.cancel()
            self._resuming = None
        if state is ConnectionState.CONNECTED:
            self._resuming = asyncio.get_running_loop().create_task(self._resume(keeper))
        else:
            # The lane may be back before requests can arrive; a record must not say otherwise.
            self._runtime.bus.lane.call(keeper.pause)

    async def _resume(self, keeper: LeaseKeeper) -> None:
        """Renew once the server knows the subscriptions again, however long that takes."""
        while True:
            try:
                await self._runtime.bus.data.barrier()
                break
            except DynbusError as error:
                logger.warning("%s does not hear requests yet: %s", self.id, error)
                await asyncio.sleep(BARRIER_RETRY)
        self._runtime.bus.lane.call(keeper.resume)

    async def _withdraw(self) -> None:
        for end in self._end_listening:
            end()
        if self._resuming is not None:
            self._resuming.cancel()
        if self._services is not None:
            self._services.stop()
        try:
            if self._keeper is not None:
                await self._runtime.bus.lane.run(self._keeper.end())
        finally:
            await self.server.stop()

    def _service_metadata(self) -> dict[str, str]:
        return {
            "dynbus.namespace": self.name.namespace,
            "dynbus.incarnation": self._runtime.bus.incarnation,
        }


async def stop_all(instances: Iterable[ActorInstance], grace: float | None = None) -> None:
    """Stop instances gracefully, all at once; what one of them raises is logged.

    Args:
        grace: seconds; None for the configured ones.
    """
    stopped = list(instances)
    ended = await asyncio.gather(*(one.stop(grace) for one in stopped), return_exceptions=True)
    for instance, error in zip(stopped, ended, strict=True):
        if isinstance(error, Exception):
            logger.error("%r did not stop cleanly", instance, exc_info=error)


def announced_metadata(actor: Actor) -> dict[str, str]:
    """What an actor's object says of itself in discovery.

    Raises:
        ConfigError: it is no mapping of strings to strings, or too large.
    """
    found: Any = actor.instance_metadata()
    label = f"{type(actor).__name__}.instance_metadata()"
    if not isinstance(found, Mapping):
        if inspect.iscoroutine(found):
            found.close()
        raise ConfigError(
            f"{label} returned {type(found).__name__}: write `def` and return a dict of strings"
        )
    pairs: dict[str, str] = {}
    size = 0
    for key, value in cast("Mapping[object, object]", found).items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise ConfigError(f"{label} has {key!r}={value!r}: keys and values must be strings")
        try:
            size += len(key.encode()) + len(value.encode())
        except UnicodeEncodeError as error:
            raise ConfigError(f"{label} has {key!r}={value!r}, which is no text: {error}") from None
        pairs[key] = value
    if len(pairs) > MAX_METADATA or size > MAX_METADATA_BYTES:
        raise ConfigError(
            f"{label} has {len(pairs)} keys and {size} bytes; at most {MAX_METADATA} and "
            f"{MAX_METADATA_BYTES} are announced"
        )
    return pairs
