"""One instance on the bus: its endpoints, its lease, its life until it is drained, and the
object behind it.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import math
import os
import secrets
import socket
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from enum import Enum
from functools import partial
from typing import Any, Final, Protocol, cast

import anyio

from dynbus.bus.background import Background, Work, task_group
from dynbus.bus.bus import Bus, enter_bus
from dynbus.bus.clock import unix_time
from dynbus.bus.context import current_instance, inside_instance
from dynbus.bus.errors import ConfigError, DynbusError, Unavailable
from dynbus.bus.protocol.endpoint import Endpoint
from dynbus.bus.protocol.names import EndpointName, InstanceName, abroad_subject
from dynbus.bus.protocol.wire import InstanceRecord
from dynbus.bus.records.instance_records import LeaseKeeper
from dynbus.bus.records.instance_view import EXPIRY_GRACE
from dynbus.bus.records.leased_record import LeaseState
from dynbus.bus.serving.server import InstanceServer
from dynbus.bus.serving.services import ServiceResponder
from dynbus.bus.transport import ConnectionState

from .endpoints import make_endpoint

logger = logging.getLogger(__name__)

BARRIER_RETRY: Final = 0.5
STOP_TIMEOUT: Final = 30.0
"""Seconds that `on_stop` may take; also an `on_start` that is cancelled."""
HURRIED_TIMEOUT: Final = 0.5
"""The same once the instance was told to stop at once."""
CANCEL_TIMEOUT: Final = 1.0
"""Seconds that a cancelled `on_stop` may take to end."""

MAX_METADATA: Final = 32
MAX_METADATA_BYTES: Final = 4096
"""Of what an instance announces: it is in every renewal of its record."""
MAX_SCHEMAS_BYTES: Final = 16 * 1024
"""Names and hashes of some hundred endpoints."""

inside_on_stop: ContextVar[bool] = ContextVar("dynbus_inside_on_stop", default=False)
"""True if this code runs within an `on_stop`, which must not wait for its own end."""


class InstanceState(Enum):
    """The state of an instance."""

    NEW = "new"
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"


def new_instance_id() -> str:
    """A random instance id."""
    return secrets.token_hex(8)


class InstanceBroken(Exception):
    """Raised when an instance has reported that it is broken.

    Attributes:
        hung: how it hangs; empty where it does not.
    """

    def __init__(self, instance: ServedInstance) -> None:
        super().__init__(f"{instance.name} is broken: {instance.broken}")
        self.hung = instance.hung


class Served(Protocol):
    """The interface that an instance asks of the object behind its endpoints."""

    async def on_start(self) -> None:
        """Runs before the instance is announced; an exception here stops it."""

    def instance_metadata(self) -> Mapping[str, str]:
        """The metadata that is announced of the instance; asked after `on_start`, and by
        `renew_metadata`."""
        ...

    async def on_stop(self) -> None:
        """Runs after the drain, when no call is left."""


class Beside(Protocol):
    """Work of an instance beside its calls, such as taking jobs of a queue."""

    async def start(self, background: Background) -> None:
        """Begin; runs before the instance is announced, and an exception here stops it."""

    async def drain(self, grace: float) -> None:
        """Begin nothing new, and end what runs within `grace` seconds."""

    async def stop(self) -> None:
        """End what still runs."""


class ServedInstance:
    """One instance on the bus, from its start to its end.

    Args:
        background: owns the work of the instance; open until it has ended.
        served: the object behind the endpoints. Its `on_start` and `on_stop` run in one task, so
            that a task group or cancel scope may be entered in one and left in the other.
        id_was_given: others could have the id too, so they are asked for it.
        announced: False for an instance that nobody finds: it serves no endpoint and has no lease,
            and all else of its life is the same.
        drain: for one that is not announced: awaited with the seconds of its drain, in which the
            calls of what it serves under other names finish.
        has_other: whether an instance but this takes calls of an endpoint, so that streams can be
            handed on to it in a drain; None where nobody knows.
        beside: what is done beside its calls, from its announcement to its drain.
        ended: called with the instance when it has stopped after it was ready.

    Attributes:
        name: where it is on the bus.
        announced: whether it can be found and called.
        broken: why it cannot serve any longer, as `report_broken` was told; empty while it can.
        hung: the same where its code does not go on, at once, also while the main loop is blocked.
        stopped: set when it has ended, `on_stop` included.
        current_name: the name of the instance whose code is running: a handler, `on_start`, a task
            that one of them began; None elsewhere.
    """

    endpoint = staticmethod(make_endpoint)
    current_name = staticmethod(current_instance)

    def __init__(
        self,
        bus: Bus,
        background: Background,
        name: InstanceName,
        endpoints: Iterable[Endpoint],
        served: Served,
        *,
        id_was_given: bool = False,
        announced: bool = True,
        drain: Callable[[float], Awaitable[None]] | None = None,
        has_other: Callable[[EndpointName, str], bool] | None = None,
        beside: Sequence[Beside] = (),
        ended: Callable[[ServedInstance], object],
    ) -> None:
        self.name = name
        self.announced = announced
        leave = enter_bus(bus)
        with inside_instance(name):  # what its calls run in
            self.server = InstanceServer(bus, name, endpoints)
        leave()
        self._state = InstanceState.NEW
        self.broken = ""
        self.hung = ""
        self.stopped = asyncio.Event()
        self._bus = bus
        self._background = background
        self._object = _ObjectLife(served, name, self._object_was_cancelled)
        self._served = served
        self._id_was_given = id_was_given
        self._on_end = ended
        self._drain_elsewhere = drain
        self._has_other = has_other
        self._beside = beside
        self._hurried = anyio.Event()
        self._keeper: LeaseKeeper | None = None
        self._metadata: dict[str, str] | None = None
        self._services: ServiceResponder | None = None
        self._resuming: Work | None = None
        self._end_listening: list[Callable[[], None]] = []
        self._opening = anyio.CancelScope()
        self._start_ended = asyncio.Event()
        self._start_refused = False
        self._start_failure: BaseException | None = None
        self._stop_asked = asyncio.Event()
        self._stop_failure: BaseException | None = None
        self._grace = 0.0
        # Whether nobody waits for the stop who would be told what it raised.
        self._stops_alone = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} [{self.state.value}] {self.server!r}>"

    @property
    def id(self) -> str:
        """The instance id, unique on the bus."""
        return self.name.instance_id

    @property
    def state(self) -> InstanceState:
        """The state of the instance."""
        return self._state

    async def start(self) -> None:
        """Run `on_start`, subscribe, and announce once the server knows every subscription.

        Raises:
            Unavailable: `stop` was called meanwhile, or other work of the background has failed;
                nothing is left behind then.
            InstanceBroken: the instance has been reported as broken; nor then.
            Exception: what `on_start` raised; nor then.
        """
        if self._state is not InstanceState.NEW:
            raise RuntimeError(f"{self!r} was started already: make another instance")
        self._state = InstanceState.STARTING
        variables = contextvars.copy_context()
        variables.run(enter_bus, self._bus)
        self._background.start(self._live, variables, name=f"the life of {self.name}")
        try:
            await self._start_ended.wait()
        except asyncio.CancelledError:
            self._opening.cancel()
            with anyio.CancelScope(shield=True):
                await self._start_ended.wait()
            if self.state is InstanceState.READY:
                # It was ready in the same moment, and its owner will not hear of it.
                self._stop_unattended(0.0)
                with anyio.CancelScope(shield=True):
                    await self.stopped.wait()
            raise
        if isinstance(self._start_failure, asyncio.CancelledError):
            text = f"the start of {self.id} was cancelled, since other work has failed"
            raise Unavailable(text, started=False)
        if self._start_failure is not None:
            raise self._start_failure

    async def stop(self, grace: float | None = None) -> None:
        """Unannounce, let calls finish within `grace` seconds, end the rest, run `on_stop`.

        A second call with another grace waits for the first, except from within an `on_stop`.
        One that is still starting is cancelled.

        Raises:
            Exception: what `on_stop` raised.
        """
        state = self.state
        if state is InstanceState.STARTING:
            self._refuse_start()
            await self._start_ended.wait()
            return
        if state is InstanceState.READY:
            self._ask_to_stop(self._bus.config.drain_grace if grace is None else grace)
        elif state is not InstanceState.DRAINING or inside_on_stop.get():
            return
        await self.stopped.wait()
        if self._stop_failure is not None:
            raise self._stop_failure

    def stop_now(self) -> None:
        """End what is still running in a drain, `on_stop` after `HURRIED_TIMEOUT` seconds."""
        self._object.hurry()
        self._hurried.set()
        self.server.end_all("the instance was stopped")

    async def serve_also(self, endpoints: Iterable[Endpoint]) -> None:
        """Serve further endpoints, while it starts or runs.

        Raises:
            ConfigError: there is one of that name already.
            RuntimeError: it does neither.
            Unavailable: it runs, and the server does not confirm the subscriptions.
        """
        if self._state not in (InstanceState.STARTING, InstanceState.READY):
            raise RuntimeError(f"{self!r} neither starts nor runs: it takes no more endpoints")
        for endpoint in endpoints:
            self.server.add(endpoint)
        if self._keeper is not None and self._metadata is not None:
            await self._bus.data.barrier()
            await self._bus.lane.run(self._describe(self._keeper, self._metadata))

    async def renew_metadata(self) -> None:
        """Ask the object what is to be announced of it now, and announce that at once.

        An instance that is not announced yet is asked when it is.

        Raises:
            ConfigError: it holds something else than strings, or is too large.
        """
        if self._keeper is not None and self._metadata is not None:
            self._metadata = _announced_metadata(self._served)
            await self._bus.lane.run(self._describe(self._keeper, self._metadata))

    def report_broken(self, reason: str, *, hung: bool = False) -> None:
        """Say that the instance cannot serve any longer; it is withdrawn at once.

        Calls go to other instances, those that are open here end with `Draining`, which is
        retryable, and `on_stop` runs. To be called from any thread; more calls change nothing.

        Args:
            hung: see `Actor.report_broken`.
        """
        if hung and not self.hung:
            self.hung = reason
            telemetry = self._bus.telemetry
            if telemetry is not None and telemetry.metrics is not None:
                telemetry.metrics.hangs.add(
                    (
                        ("dynbus.namespace", self.name.namespace),
                        ("dynbus.component", self.name.component),
                    )
                )
        if threading.get_ident() == self._bus.thread:
            self._withdraw_broken(reason)
        else:
            self._bus.to_main(self._withdraw_broken, reason)

    # Its life ------------------------------------------------------------------------------

    async def _live(self, variables: contextvars.Context) -> None:
        """From `on_start` to the end of `on_stop`, in the background: nobody's to cancel."""
        enter_bus(self._bus)
        with inside_instance(self.name):
            await self._open_and_close(variables)

    async def _open_and_close(self, variables: contextvars.Context) -> None:
        try:
            with self._opening:
                await self._open(variables)
                # What was to be cancelled may have swallowed that.
                self._check_not_refused()
            if self._opening.cancelled_caught:
                self._check_not_refused()
                raise Unavailable(f"the start of {self.id} was cancelled", started=False)
        except BaseException as error:
            self._start_failure = error
            self._object.abandon()
            try:
                with anyio.CancelScope(shield=True):
                    await self._withdraw()
            except Exception as failure:
                logger.error("%s was not withdrawn cleanly", self.name, exc_info=failure)
            finally:
                self._state = InstanceState.STOPPED
                self._start_ended.set()
            if isinstance(error, asyncio.CancelledError):
                raise
            return
        self._state = InstanceState.READY
        self._start_ended.set()
        # One that is not announced may announce others under this very name.
        level = logging.INFO if self.announced else logging.DEBUG
        logger.log(level, "%s is ready", self.name)
        self._record("ready")
        try:
            await self._wait_and_close()
        except BaseException as error:
            self._stop_failure = error
            if self._stops_alone:
                logger.error("%r did not stop cleanly", self, exc_info=error)
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            self._state = InstanceState.STOPPED
            self._on_end(self)
            self.stopped.set()
            logger.log(level, "%s is stopped", self.name)
            self._record("stopped", well=self._stop_failure is None)

    async def _wait_and_close(self) -> None:
        """Close when it is asked for, and at once when other work of the background has failed."""
        try:
            await self._stop_asked.wait()
        except asyncio.CancelledError:
            if anyio.current_effective_deadline() == -math.inf:
                self.stop_now()
                with anyio.CancelScope(shield=True):
                    await self._close()
            # Otherwise the loop itself comes to its end.
            raise
        await self._close()

    async def _open(self, variables: contextvars.Context) -> None:
        """Make ready and announce."""
        if not self.announced:
            await self._object.start(variables)
            return
        keeper = self._keeper = await self._bus.lane.run(self._make_keeper())
        if self._id_was_given:
            await self._claim_id(keeper)
        await self._object.start(variables)
        self._check_not_refused()
        metadata = self._metadata = _announced_metadata(self._served)
        await self.server.start()
        self._end_listening.append(self._bus.data.on_state(self._on_state))
        self._services = ServiceResponder(self.server, self._service_metadata())
        await self._services.start()
        await self._bus.lane.run(self._describe(keeper, metadata))
        for one in self._beside:
            await one.start(self._background)
        await self._bus.lane.run(keeper.announce())
        if self._bus.telemetry is not None:
            self._end_listening.append(self._bus.telemetry.follow_lease(keeper.remaining))

    async def _describe(self, keeper: LeaseKeeper, metadata: dict[str, str]) -> None:
        """Have the record say what the instance has now; to be called on the control lane."""
        endpoints = {name: served.endpoint for name, served in list(self.server.served.items())}
        keeper.describe(
            metadata,
            {name: endpoint.kind for name, endpoint in endpoints.items()},
            _announced_schemas(endpoints.values()),
            {name: one.places for name, one in endpoints.items() if one.places is not None},
        )

    async def _close(self) -> None:
        try:
            if not self.broken:
                await self._drain()
        finally:
            # Whatever broke, a stopped instance must not stay announced.
            try:
                await self._withdraw()
            finally:
                await self._object.stop()

    async def _drain(self) -> None:
        keeper = self._keeper
        if keeper is None:
            await self._drain_what_is_elsewhere()
            return
        self._bus.lane.call(lambda: keeper.change(draining=True))
        load = self.server.execution.load
        self._record("draining", load=load, grace=round(self._grace, 1))
        if load:
            logger.info(
                "%s: calls that run or wait: %d; they have %g s to finish",
                *(self.name, load, round(self._grace, 1)),
            )
        async with task_group() as tasks:
            for one in self._beside:
                tasks.start_soon(one.drain, self._grace)
            await self.server.drain(self._grace, self._another_serves)

    def _another_serves(self, endpoint: EndpointName) -> bool:
        return self._has_other is not None and self._has_other(endpoint, self.id)

    async def _drain_what_is_elsewhere(self) -> None:
        drain = self._drain_elsewhere
        if drain is None or self._hurried.is_set():
            return
        async with anyio.create_task_group() as tasks:

            async def run() -> None:
                await drain(self._grace)
                tasks.cancel_scope.cancel()

            tasks.start_soon(run)
            await self._hurried.wait()
            tasks.cancel_scope.cancel()

    async def _withdraw(self) -> None:
        for end in self._end_listening:
            end()
        if self._resuming is not None:
            self._resuming.cancel()
        if self._services is not None:
            self._services.stop()
        async with task_group() as tasks:
            for one in self._beside:
                tasks.start_soon(one.stop)
        if not self.announced:
            return
        try:
            if self._keeper is not None:
                await self._bus.lane.run(self._keeper.withdraw())
        finally:
            await self.server.stop()

    # Its end -------------------------------------------------------------------------------

    def _refuse_start(self) -> None:
        self._start_refused = True
        self._opening.cancel()

    def _check_not_refused(self) -> None:
        if self.broken:
            raise InstanceBroken(self) from None
        if self._start_refused:
            raise Unavailable(f"{self.id} was stopped while it started", started=False) from None

    def _ask_to_stop(self, grace: float) -> None:
        self._state = InstanceState.DRAINING
        self._grace = grace
        self._stop_asked.set()

    def _stop_unattended(self, grace: float) -> None:
        self._stops_alone = True
        if self.state is InstanceState.STARTING:
            self._refuse_start()
        elif self.state is InstanceState.READY:
            self._ask_to_stop(grace)

    def _withdraw_broken(self, reason: str) -> None:
        state = self.state
        if self.broken or state in (InstanceState.NEW, InstanceState.STOPPED):
            return
        self.broken = reason or "it gave no reason"
        logger.error("%s; it is withdrawn", InstanceBroken(self))
        self._record("broken", hung=bool(self.hung))
        if state is InstanceState.STARTING:
            self._opening.cancel()
            return
        self.server.end_all(f"the instance is broken: {self.broken}", broken=True)
        self._stop_unattended(0.0)

    def _object_was_cancelled(self) -> None:
        self._withdraw_broken("a task group or cancel scope of its on_start was cancelled")

    def _taken_over(self) -> None:
        """Another process holds our id, since we were away for longer than our lease: two that
        serve under one id would run every request twice."""
        logger.error("%s is served by another process; this instance stops", self.id)
        self._record("taken_over")
        self._stop_unattended(0.0)

    def _record(self, what: str, **details: float) -> None:
        flight = self._bus.flight
        if flight is not None and self.announced:
            flight.note(self.name.namespace, f"instance.{what}", str(self.name), **details)

    # Its lease -----------------------------------------------------------------------------

    async def _make_keeper(self) -> LeaseKeeper:
        """The keeper of the lease; to be called on the control lane."""
        bus = self._bus
        record = InstanceRecord(
            namespace=self.name.namespace,
            component=self.name.component,
            instance_id=self.id,
            incarnation=bus.incarnation,
            endpoints={},  # those that there are when it is announced
            started=unix_time(),
            address=f"{socket.gethostname()}:{os.getpid()}",
            zone=bus.config.zone,
            host=bus.config.own_host,
        )
        connection = bus.lane.connection
        keeper = LeaseKeeper(
            connection.jetstream,
            bus.lane.background,
            record,
            bus.config.lease_ttl,
            self._lease_changed,
            bus.count_instances,
            partial(connection.leave_server, f"the record of {self.name} cannot be renewed there"),
            partial(
                bus.announce_abroad,
                partial(abroad_subject, instance=self.name),
                ttl=bus.config.lease_ttl,
            ),
        )
        end = connection.on_state(keeper.connection_changed)
        self._end_listening.append(lambda: bus.lane.call(end))
        return keeper

    async def _claim_id(self, keeper: LeaseKeeper) -> None:
        """Make sure that no other process holds the id: two holders would both run every request
        until one of them notices."""
        bus = self._bus
        other = await bus.lane.run(keeper.other_holder())
        if other is None:
            # Requests go by the id alone, to all regions that are joined.
            if bus.data.region and await bus.questions.is_there(self.name):
                raise ConfigError(
                    f"instance id {self.id!r} of {self.name.address} is in use in another region, "
                    f"and each call would be done in both: put the region into it, such as "
                    f"{self.id}-{bus.data.region}"
                )
            return
        if await bus.questions.is_there(other.record.name) is not False:
            raise keeper.conflict(other.record)
        logger.warning(
            "%s waits for the lease of a process that had its id and is gone: %g s at most",
            *(self.name, other.ttl + EXPIRY_GRACE),
        )
        await bus.lane.run(keeper.outlast(other))

    def _lease_changed(self, state: LeaseState) -> None:
        level = logging.DEBUG if state in (LeaseState.HELD, LeaseState.ENDED) else logging.WARNING
        logger.log(level, "the lease of %s is %s", self.id, state.value)
        if state is LeaseState.CONFLICT:
            self._bus.loop.call_soon_threadsafe(self._taken_over)

    def _on_state(self, state: ConnectionState) -> None:
        keeper = self._keeper
        if keeper is None:
            return
        if self._resuming is not None:
            self._resuming.cancel()
            self._resuming = None
        if state is ConnectionState.CONNECTED:
            self._resuming = self._background.start(
                self._resume, keeper, name=f"the return of {self.name}"
            )
        else:
            # The lane may be back before requests can arrive; a record must not say otherwise.
            self._bus.lane.call(keeper.pause)

    async def _resume(self, keeper: LeaseKeeper) -> None:
        """Renew once the server knows the subscriptions again, however long that takes."""
        while True:
            try:
                await self._bus.data.barrier()
                break
            except DynbusError as error:
                logger.warning("%s cannot receive requests yet: %s; trying again", self.id, error)
                await anyio.sleep(BARRIER_RETRY)
        self._bus.lane.call(keeper.resume)

    def _service_metadata(self) -> dict[str, str]:
        return {
            "dynbus.namespace": self.name.namespace,
            "dynbus.incarnation": self._bus.incarnation,
        }


class _ObjectLife:
    """The task in which an instance's object starts and stops.

    It is a task of asyncio's own. The object is the user's code, which is cancelled once, so that
    what it awaits to clean up is not cancelled too, and is left behind where it swallows that.

    Args:
        cancelled: called when what `on_start` has entered cancels the task.
    """

    def __init__(self, served: Served, name: InstanceName, cancelled: Callable[[], object]) -> None:
        self._served = served
        self._name = name
        self._cancelled = cancelled
        self._started = asyncio.Event()
        self._stop_asked = asyncio.Event()
        self._hurried = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._left = False

    async def start(self, variables: contextvars.Context) -> None:
        """Run `on_start`; when this is cancelled, so is that, for `STOP_TIMEOUT` at most.

        Raises:
            RuntimeError: it raised `CancelledError`, although nobody cancelled it.
            Exception: what it raised.
        """
        loop = asyncio.get_running_loop()
        task = self._task = loop.create_task(
            self._run(), name=f"the object of {self._name}", context=variables
        )
        try:
            await self._started.wait()
        except asyncio.CancelledError:
            self._left = True
            task.cancel()
            with anyio.move_on_after(STOP_TIMEOUT, shield=True):
                await self._started.wait()
            if not self._started.is_set():
                logger.error(
                    "the start of %s did not end within %g s", self._name.instance_id, STOP_TIMEOUT
                )
            raise
        if isinstance(self._failure, asyncio.CancelledError):
            # Nobody cancelled it. As it is, it would cancel the task of its starter.
            text = f"what on_start of {self._name} waited for was cancelled"
            raise RuntimeError(text) from self._failure
        if self._failure is not None:
            raise self._failure

    async def stop(self) -> None:
        """Run `on_stop` to its end, or for `STOP_TIMEOUT`, less once it is hurried.

        Raises:
            Exception: what it raised.
        """
        task = self._task
        if task is None:
            return
        self._stop_asked.set()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._end_hurried, tasks.cancel_scope)
            with anyio.move_on_after(STOP_TIMEOUT):
                await asyncio.wait({task})
            tasks.cancel_scope.cancel()
        if not task.done():
            seconds = HURRIED_TIMEOUT if self._hurried.is_set() else STOP_TIMEOUT
            logger.error("on_stop of %s was cancelled after %g s", self._name.instance_id, seconds)
            task.cancel()
            with anyio.move_on_after(CANCEL_TIMEOUT):
                await asyncio.wait({task})
            if not task.done():
                logger.error(
                    "on_stop of %s ignores its cancellation: abandoning it", self._name.instance_id
                )
                return
        if self._failure is not None and not isinstance(self._failure, asyncio.CancelledError):
            raise self._failure

    def abandon(self) -> None:
        """End without `on_stop`, since the instance does not start."""
        self._left = True
        if self._task is not None:
            self._task.cancel()

    def hurry(self) -> None:
        """Let `on_stop` take no more than `HURRIED_TIMEOUT`."""
        self._hurried.set()

    async def _end_hurried(self, wait: anyio.CancelScope) -> None:
        await self._hurried.wait()
        await anyio.sleep(HURRIED_TIMEOUT)
        wait.cancel()

    async def _run(self) -> None:
        with inside_instance(self._name):
            try:
                await _async(self._served.on_start(), self._served, "on_start")
            except BaseException as error:  # noqa: BLE001 - raised to its starter
                self._failure = error
                return
            finally:
                self._started.set()
            if self._left:
                return
            await self._wait_for_stop()
            inside_on_stop.set(True)
            try:
                await _async(self._served.on_stop(), self._served, "on_stop")
            except BaseException as error:  # noqa: BLE001 - raised to its stopper
                self._failure = error

    async def _wait_for_stop(self) -> None:
        try:
            await self._stop_asked.wait()
        except asyncio.CancelledError:
            if anyio.current_effective_deadline() != -math.inf:
                # The loop itself comes to its end.
                raise
            # A task group that `on_start` has entered has failed; `on_stop` leaves it.
            self._cancelled()
            with anyio.CancelScope(shield=True):
                await self._stop_asked.wait()


async def _async(given: Any, served: Served, name: str) -> None:
    """Await what a method returned.

    Raises:
        ConfigError: it is no awaitable, since the method is a plain one.
    """
    if not inspect.isawaitable(given):
        raise ConfigError(f"{type(served).__name__}.{name} is not async: write `async def {name}`")
    await cast("Awaitable[object]", given)


async def stop_all(instances: Iterable[ServedInstance], grace: float | None = None) -> None:
    """Stop instances gracefully, all at once; what one of them raises is logged.

    Args:
        grace: seconds; None for the configured ones.
    """

    async def stop(instance: ServedInstance) -> None:
        try:
            await instance.stop(grace)
        except (Exception, SystemExit) as error:
            logger.error("%r did not stop cleanly", instance, exc_info=error)

    async with anyio.create_task_group() as tasks:
        for instance in list(instances):
            tasks.start_soon(stop, instance)


def _announced_schemas(endpoints: Iterable[Endpoint]) -> dict[str, str]:
    """The hashes of what endpoints read and write; none where they would make the record large."""
    contracts = ((one.name, one.contract) for one in endpoints)
    hashes = {name: known.hash for name, known in contracts if known is not None and known.hash}
    size = sum(len(name) + len(value) for name, value in hashes.items())
    return hashes if size <= MAX_SCHEMAS_BYTES else {}


def _announced_metadata(served: Served) -> dict[str, str]:
    metadata: Any = served.instance_metadata()
    label = f"{type(served).__name__}.instance_metadata()"
    if not isinstance(metadata, Mapping):
        if inspect.iscoroutine(metadata):
            metadata.close()
        raise ConfigError(
            f"{label} returned {type(metadata).__name__}: write `def` and return a dict of strings"
        )
    return checked_metadata(cast("Mapping[object, object]", metadata), label)


def checked_metadata(metadata: Mapping[object, object], label: str) -> dict[str, str]:
    """The metadata of an instance in discovery, as it is announced.

    Args:
        label: how messages name it.

    Raises:
        ConfigError: it holds something else than strings, or is too large.
    """
    pairs: dict[str, str] = {}
    size = 0
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise ConfigError(f"{label} has {key!r}={value!r}: keys and values must be strings")
        try:
            size += len(key.encode()) + len(value.encode())
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"{label} has {key!r}={value!r}, which is not text: {error}"
            ) from None
        pairs[key] = value
    if len(pairs) > MAX_METADATA or size > MAX_METADATA_BYTES:
        raise ConfigError(
            f"{label} has {len(pairs)} keys and {size} bytes; at most {MAX_METADATA} and "
            f"{MAX_METADATA_BYTES} are announced"
        )
    return pairs
