"""Discovery: the task that keeps the view of instances current from which clients choose.

`Discovery` feeds an `InstanceView` from one ordered consumer on the control lane, asks for those
of which records say too little, and wakes the calls that wait on the main loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

import anyio

from dynbus.bus.background import Work
from dynbus.bus.clock import monotonic, unix_time
from dynbus.bus.drops import DropReason
from dynbus.bus.errors import DynbusError, NoInstances, PermissionDenied, Unavailable
from dynbus.bus.protocol.headers import MARKER_REASON
from dynbus.bus.protocol.names import EndpointName, InstanceName
from dynbus.bus.protocol.wire import InstanceRecord
from dynbus.bus.transport import ConnectionState, NoStream, StoredMessage

from .abroad import ABROAD_STREAM, region_at
from .expired_records import ExpiredRecords
from .instance_records import INSTANCES_STREAM, ensure_bucket, instance_at, record_of
from .instance_view import (
    EXPIRY_GRACE,
    SUSPECT_SECONDS,
    ComponentKey,
    Instance,
    InstanceView,
)

if TYPE_CHECKING:
    from dynbus.bus.bus import Bus

logger = logging.getLogger(__name__)

RETRY_DELAY: Final = 0.5
HEARD_AGAIN: Final = 1.0
FIRST_READING: Final = 5.0
FIRST_QUESTION: Final = 0.1
LAST_QUESTION: Final = 30.0
LOOK_PAUSE: Final = 5.0
QUESTIONS_PER_TURN: Final = 100
READ_AFTER: Final = 0.3
READ_INTERVAL: Final = 1.0
READ_TIMEOUT: Final = 2.0
RENEWAL_MARGIN: Final = 0.5
"""Seconds that renewals may come late."""


class Discovery:
    """The view of one process, kept current from `begin` to `close`.

    Args:
        is_heard: whether heartbeats of an instance arrive just now.
        silent_since: when it was found that those of an instance come no more; None for never.
        abroad: whether it follows the instances of other regions, in place of those of the own.

    Attributes:
        view: belongs to the main loop.
    """

    def __init__(
        self,
        bus: Bus,
        is_heard: Callable[[InstanceName], bool],
        silent_since: Callable[[InstanceName], float | None],
        *,
        abroad: bool = False,
    ) -> None:
        self._bus = bus
        self._is_heard = is_heard
        self._silent_since = silent_since
        self._is_abroad = abroad
        self._stream = (ABROAD_STREAM if abroad else INSTANCES_STREAM).name
        # Records are renewed three times in a lease.
        grace = max(EXPIRY_GRACE, bus.config.lease_ttl / 2)
        # Nobody abroad is near, whatever the zones there are called.
        self.view = InstanceView(grace, "" if abroad else bus.config.zone)
        self.synchronized = asyncio.Event()
        self._changed: set[asyncio.Future[None]] = set()
        self._works: list[Work] = []
        self._begun = False
        self._is_watching = False
        self._problem = ""
        self._is_closed = False
        self._looked_around: dict[ComponentKey, float] = {}
        self._missed: dict[ComponentKey, float] = {}
        self._asked: set[InstanceName] = set()

    async def answers(self, *, timeout: float) -> bool:
        """True if JetStream answers within `timeout` seconds when it is asked for the records.

        That there are none, or that we may not ask, is an answer.
        """
        try:
            await self._bus.data.jetstream.stream_info(self._stream, timeout=timeout)
        except Unavailable:
            return False
        except DynbusError:
            pass
        return True

    def begin(self) -> None:
        """Start watching, once; returns at once."""
        if not (self._begun or self._is_closed):
            self._begun = True
            if self._bus.data.has_peers:
                # Who comes to a cluster that has just lost a server is there before instances
                # that were connected to it.
                self._note_outage()
            self._bus.data.on_peer_lost(self._note_outage)
            self._bus.lane.call(self._launch)

    async def close(self) -> None:
        """Stop watching; waiting calls are told."""
        self._is_closed = True
        self.synchronized.set()
        self._notify()
        if self._begun:
            await self._bus.lane.run(self._stop())

    async def wait_synchronized(self, timeout: float | None) -> None:
        """Wait for the first complete reading of all records, and for the answers about those
        that look outdated.

        Raises:
            Unavailable: it is not complete within `timeout` seconds, or the runtime is closed.
        """
        self._check_open()
        self.begin()
        if self.synchronized.is_set():
            return
        try:
            with anyio.fail_after(timeout):
                await self.synchronized.wait()
            self._check_open()
        except TimeoutError:
            raise Unavailable(
                f"the instances bucket could not be read within {timeout} s: "
                f"{self._problem or 'is JetStream enabled on the server?'}",
                started=False,
            ) from None

    async def wait(
        self,
        endpoint: EndpointName,
        count: int,
        timeout: float | None,
        *,
        suits: Callable[[Instance], bool] = lambda _: True,
    ) -> list[Instance]:
        """The instances of an endpoint's component, once there are `count`.

        Args:
            timeout: seconds to wait; None waits for ever, 0 does not wait beyond the first
                complete reading, and a moment for instances that may be changing servers.
            suits: which of them count.

        Raises:
            NoInstances: there are not as many in time.
        """
        try:
            with anyio.fail_after(timeout or None):
                await self.wait_synchronized(FIRST_READING if timeout == 0 else None)
                while True:
                    instances = self._serving(endpoint, suits)
                    if len(instances) >= count:
                        break
                    self._ask_missed(endpoint[:2])
                    at_most = 1.0
                    if timeout == 0 and not (at_most := self._returning(endpoint)):
                        break
                    await self._change(at_most)
                    self._check_open()
        except TimeoutError:
            instances = self._serving(endpoint, suits)
        if len(instances) < count:
            waited = f" within {timeout:.3g} s" if timeout else ""
            have = f", {len(instances)} of {count} found" if instances else ""
            raise NoInstances(f"no instance serves {endpoint}{waited}{have}", started=False)
        return instances

    def _returning(self, endpoint: EndpointName) -> float:
        """Seconds for which an instance may still only be on its way to another server, which it
        leaves its own for where that cannot do what the others do; 0 for none."""
        now = monotonic()
        if not (self._bus.data.has_peers or self.view.is_settling(now)):
            return 0.0
        return self.view.returning(endpoint.namespace, endpoint.component, now)

    def _serving(self, endpoint: EndpointName, suits: Callable[[Instance], bool]) -> list[Instance]:
        known = self.view.instances(endpoint.namespace, endpoint.component, monotonic())
        return [one for one in known if suits(one)]

    def _check_open(self) -> None:
        self._bus.check()
        if self._is_closed:
            raise Unavailable("the runtime is closed", started=False)

    async def wait_for_instance(self, name: InstanceName, *, timeout: float = 5.0) -> Instance:
        """This very instance, once it is known.

        Raises:
            NoInstances: it is not known after `timeout` seconds.
        """
        self.begin()
        end = monotonic() + timeout
        while (left := end - monotonic()) > 0:
            instance = self.view.find(name)
            if instance is not None:
                return instance
            await self._change(left)
        raise NoInstances(f"{name} is not known after {timeout} s", started=False)

    def suspect(self, name: InstanceName, seconds: float = SUSPECT_SECONDS) -> None:
        """Have other instances chosen for so long at most: this one did not answer a call.

        Unless we have come back to the bus since it was found to be lost: then it was most likely
        our own link, or our server, and calls that wait for that one find it again.
        """
        if not self.view.was_judged_in_vain(self._silent_since(name)):
            self.view.suspect(name, monotonic(), seconds)

    def note_silent(self, name: InstanceName) -> None:
        """Have other instances chosen until this one is heard again, or renews its record, which
        lives no longer than that: calls that had begun there were lost."""
        is_new = not self.view.is_suspect(name, monotonic())
        self.suspect(name, self._bus.config.lease_ttl + EXPIRY_GRACE)
        if is_new:
            self._bus.loop.call_later(HEARD_AGAIN, self._ask_silent, name)

    def hear(self, name: InstanceName) -> None:
        """An instance that had fallen silent is heard again."""
        if self.view.trust(name):
            self._notify()

    def note_absent(self, name: InstanceName) -> None:
        """Have other instances chosen until somebody listens there again: as the server says,
        nobody did when this one was called."""
        self._note_absent(name)
        self._look_around(name[:2])

    async def _change(self, at_most: float) -> None:
        future: asyncio.Future[None] = self._bus.loop.create_future()
        self._changed.add(future)
        try:
            # Bounded: suspicion and grace end by time alone.
            with anyio.move_on_after(at_most):
                await future
        finally:
            self._changed.discard(future)

    def _notify(self) -> None:
        for future in self._changed:
            if not future.done():
                future.set_result(None)

    # On the lane ---------------------------------------------------------------------------

    def _launch(self) -> None:
        background = self._bus.lane.background
        expired = ExpiredRecords(self._bus.lane.connection.jetstream, self._stream)
        self._works = [
            background.start(partial(self._watch, expired), name="discovery"),
            background.start(expired.remove, name="the removal of expired records"),
            background.start(self._read_until_watching, name="discovery's first reading"),
        ]

    async def _stop(self) -> None:
        for work in self._works:
            await work.end()

    async def _watch(self, expired: ExpiredRecords) -> None:
        began = partial(self._bus.to_main, self.view.pass_began)
        self._bus.lane.connection.on_state(self._on_state)
        self._bus.data.on_state(self._on_state)
        self._bus.heartbeats.on_heard_again(self._came_back)
        logged = ""
        while True:
            began()
            try:
                consumer = await expired.consume(
                    self._receive,
                    on_restart=began,
                    on_caught_up=partial(self._bus.to_main, self._caught_up),
                )
                break
            except NoStream:
                await (self._look_abroad() if self._is_abroad else self._make_bucket())
            except DynbusError as error:
                level = logging.DEBUG if str(error) == logged else logging.WARNING
                logged = str(error)
                logger.log(level, "discovery cannot watch yet: %s", error)
                await anyio.sleep(RETRY_DELAY)
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await consumer.stop()

    async def _read_until_watching(self) -> None:
        """Read the records from any server that keeps them, while there is no consumer yet.

        To make one takes the leader of the servers, and for some seconds there may be none.
        """
        jetstream = self._bus.lane.connection.jetstream
        delay = READ_AFTER
        while True:
            await anyio.sleep(delay)
            if self._is_watching:
                return
            delay = READ_INTERVAL
            try:
                records = await jetstream.read(self._stream, timeout=READ_TIMEOUT)
            except PermissionDenied as error:
                logger.info("the records are not read directly: %s", error)
                return
            except DynbusError as error:
                logger.debug("the records were not read directly: %s", error)
                continue
            self._bus.to_main(self._take_reading, records)

    async def _make_bucket(self) -> None:
        try:
            jetstream = self._bus.lane.connection.jetstream
            await ensure_bucket(jetstream)
        except DynbusError as error:
            self._cannot_make(error)
            await anyio.sleep(RETRY_DELAY)

    def _cannot_make(self, error: DynbusError) -> None:
        # Once for each reason: it is tried again and again.
        level = logging.DEBUG if self._problem == str(error) else logging.WARNING
        self._problem = str(error)
        logger.log(level, "the stream %s cannot be made: %s", self._stream, error)

    async def _look_abroad(self) -> None:
        """Have this region keep what others say of themselves, and wait until all have said it."""
        connection = self._bus.lane.connection
        if not connection.region:
            # It is joined to no other one. A server that is started again may be.
            self._bus.to_main(self._end_reading)
            await anyio.sleep(self._bus.config.lease_ttl)
            return
        try:
            await connection.jetstream.ensure_stream(ABROAD_STREAM)
        except DynbusError as error:
            self._cannot_make(error)
            self._bus.to_main(self._end_reading)
        await anyio.sleep(self._bus.config.lease_ttl / 3 + RENEWAL_MARGIN)

    def _on_state(self, state: ConnectionState) -> None:
        if state is ConnectionState.CONNECTED:
            self._bus.to_main(self._came_back)

    def _receive(self, message: StoredMessage) -> None:
        if self._is_passed_over(message):
            return
        name = instance_at(message.subject)
        if name is None:
            self._bus.to_main(self._bus.drop, DropReason.MALFORMED)
        elif message.is_marker:
            end = self._expire if MARKER_REASON in message.headers else self._delete
            self._bus.to_main(end, name)
        elif (record := record_of(message)) is None:
            self._bus.to_main(self._bus.drop, DropReason.MALFORMED)
        else:
            self._bus.to_main(self._put, record, message)

    def _is_passed_over(self, message: StoredMessage) -> bool:
        """True if a message is of the own region, where those of others are followed."""
        return self._is_abroad and region_at(message.subject) == self._bus.data.region

    # On the main loop ----------------------------------------------------------------------

    def _note_outage(self) -> None:
        self.view.outage_ended(monotonic())

    def _came_back(self) -> None:
        self.view.came_back(monotonic())
        self._notify()

    def _take_reading(self, messages: list[StoredMessage]) -> None:
        """All records as one server keeps them, which may be some moments old."""
        if self._is_watching:
            return
        for message in messages:
            record = None if message.is_marker else record_of(message)
            if record is None or self._is_passed_over(message):
                continue
            known = self.view.find(record.name)
            if known is None or known.renewed < message.time:
                self._put(record, message)
            # Who is gone by then is not shown by the consumer.
            self.view.doubt(record.name)
        self._ask_outdated()
        self._end_reading()

    def _put(self, record: InstanceRecord, stored: StoredMessage) -> None:
        before = self.view.find(record.name)
        renewed = stored.time
        # What comes while nothing is read anew was written just now, whatever our clock says.
        age = max(0.0, unix_time() - renewed) if self.view.is_reading() else 0.0
        lifetime = (stored.ttl or self._bus.config.lease_ttl) + EXPIRY_GRACE
        region = region_at(stored.subject) if self._is_abroad else ""
        news = self.view.put(record, renewed, monotonic() + lifetime - age, region)
        # Who renews is alive; a reading anew of what is stored long since says nothing.
        if before is not None and renewed > before.renewed:
            if (
                self.view.is_suspect(record.name, monotonic())
                and self._silent_since(record.name) is not None
            ):
                # One that goes on after it stood still is heard by then, if there is a way here.
                self._bus.questions.have_say_something(record.name)
                self._bus.loop.call_later(HEARD_AGAIN, self._trust_renewed, record.name)
            else:
                news = self.view.trust(record.name) or news
        if news:
            self._notify()

    def _trust_renewed(self, name: InstanceName) -> None:
        """An instance that fell silent has renewed its record a moment ago."""
        if self._is_closed or not self.view.is_suspect(name, monotonic()):
            return
        if self._silent_since(name) is not None:
            # It lives, and what it says does not come: another server may have a way to it.
            leave = self._bus.lane.connection.leave_server
            self._bus.lane.call(leave, f"{name} renews its record and is not heard")
        self.view.trust(name)
        self._notify()

    def _ask_silent(self, name: InstanceName) -> None:
        """Ask one that fell silent for a word, again and again: its record may wait for servers
        that elect a leader, and be renewed long after there is a way to it."""
        if not self._is_closed and self.view.is_suspect(name, monotonic()):
            self._bus.questions.have_say_something(name)
            self._bus.loop.call_later(HEARD_AGAIN, self._ask_silent, name)

    def _expire(self, name: InstanceName) -> None:
        instance = self.view.find(name)
        if instance is not None:
            self._expire_unless_heard(instance)

    def _expire_unless_heard(self, instance: Instance) -> None:
        name = instance.record.name
        if self.view.find(name) is not instance:
            return
        if self._is_heard(name):
            # JetStream could not take its renewal in time; it is no less alive for that.
            self._bus.loop.call_later(HEARD_AGAIN, self._expire_unless_heard, instance)
            return
        # Its renewal may wait for servers that elect a leader: is there anybody?
        self._bus.questions.ask_for(name, partial(self._expire_or_wait, instance))

    def _expire_or_wait(self, instance: Instance, there: bool | None) -> None:
        name = instance.record.name
        if self._is_closed or self.view.find(name) is not instance:
            return
        if there is False:
            self.view.expire(name, monotonic())
            self._notify()
        else:
            self._bus.loop.call_later(EXPIRY_GRACE, self._expire_after_grace, instance)

    def _expire_after_grace(self, instance: Instance) -> None:
        name = instance.record.name
        if self._is_closed or self.view.find(name) is not instance:
            return
        if self._is_heard(name):
            self._expire_unless_heard(instance)
            return
        self.view.expire(name, monotonic())
        self._notify()

    def _note_absent(self, name: InstanceName) -> None:
        if self.view.note_absent(name, monotonic()):
            self._notify()
            self._bus.loop.call_later(FIRST_QUESTION, self._ask_absent, name, FIRST_QUESTION)

    def _ask_absent(self, name: InstanceName, pause: float) -> None:
        """Ask again for an instance that was not there: it may only have changed servers."""
        if not self._is_closed and self.view.is_absent(name):
            self._bus.questions.ask_for(name, partial(self._answer_of_absent, name, pause))

    def _answer_of_absent(self, name: InstanceName, pause: float, there: bool | None) -> None:
        if self._is_closed or not self.view.is_absent(name):
            return
        if there:
            self._answer_of_missed(name, there)
            return
        now = monotonic()
        if there is False and self.view.is_outdated(name, now) and not self.view.is_settling(now):
            self._delete(name)
            return
        pause = min(2 * pause, LAST_QUESTION)
        self._bus.loop.call_later(pause, self._ask_absent, name, pause)

    def _ask_missed(self, component: ComponentKey) -> None:
        """Ask, at most once in a while, for the absent instances of a component of which a call
        finds too few: the pauses between the questions about one grow."""
        now = monotonic()
        if now - self._missed.get(component, -HEARD_AGAIN) < HEARD_AGAIN:
            return
        self._missed[component] = now
        for name in self.view.absent(*component)[:QUESTIONS_PER_TURN]:
            self._bus.questions.ask_for(name, partial(self._answer_of_missed, name))

    def _answer_of_missed(self, name: InstanceName, there: bool | None) -> None:
        if there and not self._is_closed and self.view.trust(name):
            self.view.vouch(name, monotonic() + LAST_QUESTION)
            self._notify()

    def _look_around(self, component: ComponentKey) -> None:
        """Ask for all instances of a component of which one is not there: of thousands of
        records nobody may stand behind, a call would find that out one by one."""
        now = monotonic()
        if now - self._looked_around.get(component, -LOOK_PAUSE) < LOOK_PAUSE:
            return
        self._looked_around[component] = now
        known = self.view.instances(*component, now)
        self._ask_all([one.record.name for one in known])

    def _ask_all(self, names: list[InstanceName]) -> None:
        if self._is_closed:
            return
        for name in names[:QUESTIONS_PER_TURN]:
            self._bus.questions.ask_for(name, partial(self._answer_of_known, name))
        if len(names) > QUESTIONS_PER_TURN:
            self._bus.loop.call_soon(self._ask_all, names[QUESTIONS_PER_TURN:])

    def _answer_of_known(self, name: InstanceName, there: bool | None) -> None:
        if self._is_closed:
            return
        if there is False:
            self._note_absent(name)
        elif there:
            self.view.vouch(name, monotonic() + LAST_QUESTION)
        if name in self._asked:
            self._asked.discard(name)
            self._end_reading()

    def _ask_outdated(self) -> None:
        """Ask for those whose records should have expired long ago: who is not there is not
        chosen, and forgotten when a second question finds nobody either."""
        names = [name for name in self.view.outdated(monotonic()) if name not in self._asked]
        self._asked.update(names)
        self._ask_all(names)

    def _look_for_outdated(self) -> None:
        if self._is_closed:
            return
        if not self.view.is_reading():
            self._ask_outdated()
        self._bus.loop.call_later(LOOK_PAUSE, self._look_for_outdated)

    def _end_reading(self) -> None:
        """All records are known, once no answer is missing about those that look outdated."""
        if not self._asked and not self.synchronized.is_set():
            self.synchronized.set()
            self._notify()

    def _delete(self, name: InstanceName) -> None:
        self.view.delete(name)
        self._notify()

    def _caught_up(self) -> None:
        if not self._is_watching:
            self._is_watching = True
            self._bus.loop.call_later(LOOK_PAUSE, self._look_for_outdated)
        self.view.pass_ended(monotonic())
        self._ask_outdated()
        self._end_reading()
        self._notify()
