"""Which instances exist: the view that clients choose from.

`InstanceView` is the state, without I/O. `Discovery` feeds it from one ordered consumer on
the control lane and wakes whoever waits on the main loop. The view forgets an instance late
rather than early: an expiry seen just after an outage of ours may only mean that its renewal
is on the way, and an instance that still answers is not dead whatever a record says. Nor is one
alive because of a record that nobody renews: a server that was killed may bring records back
that had expired, and never remove them.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from dynbus.bus.cleanup import end_tasks
from dynbus.bus.clock import monotonic, unix_time
from dynbus.bus.drops import DropReason
from dynbus.bus.errors import DynbusError, NoInstances, PermissionDenied, Unavailable
from dynbus.bus.protocol.headers import MARKER_REASON
from dynbus.bus.protocol.names import EndpointName
from dynbus.bus.protocol.wire import InstanceRecord
from dynbus.bus.transport import ConnectionState, OrderedConsumer, StoredMessage

from .leases import INSTANCES_STREAM, ensure_bucket, record_key, record_of, ttl_of
from .presence import InstanceKey, Presence

if TYPE_CHECKING:
    from dynbus.bus.bus import Bus

logger = logging.getLogger(__name__)

EXPIRY_GRACE: Final = 3.0
SUSPECT_SECONDS: Final = 5.0
RETRY_DELAY: Final = 0.5
HEARD_AGAIN: Final = 1.0
FIRST_READING: Final = 5.0
RETURN_SECONDS: Final = 1.5
FIRST_QUESTION: Final = 0.1
LAST_QUESTION: Final = 30.0
LOOK_PAUSE: Final = 5.0
QUESTIONS_PER_TURN: Final = 100
READ_AFTER: Final = 0.3
READ_INTERVAL: Final = 1.0
READ_TIMEOUT: Final = 2.0

ComponentKey = tuple[str, str]


class Instance(NamedTuple):
    """An instance as a client may choose it.

    Attributes:
        started: Unix time of its start.
        renewed: Unix time of its last renewal, on the server's clock.
    """

    record: InstanceRecord
    renewed: float

    @property
    def id(self) -> str:
        return self.record.instance_id

    @property
    def metadata(self) -> Mapping[str, str]:
        """What the instance says of itself; not to be changed."""
        return self.record.metadata


class InstanceView:
    """All instances that are known, by component. Times are of one monotonic clock.

    Args:
        renewal_grace: seconds within which every living instance renews its record.
    """

    def __init__(self, renewal_grace: float = 0.0) -> None:
        self._instances: dict[ComponentKey, dict[str, Instance]] = {}
        self._expired: dict[tuple[str, str, str], float] = {}
        self._suspect: dict[tuple[str, str, str], float] = {}
        self._absent: dict[tuple[str, str, str], float] = {}
        self._unseen: set[tuple[str, str, str]] = set()
        self._believed_until: dict[tuple[str, str, str], float] = {}
        self._is_reading = False
        self._grace_until = 0.0
        self._renewal_grace = renewal_grace
        self._choice: dict[ComponentKey, list[Instance]] = {}

    def __repr__(self) -> str:
        count = sum(len(instances) for instances in self._instances.values())
        return f"<InstanceView [{count} instances, {len(self._expired)} expired]>"

    def put(self, record: InstanceRecord, renewed: float, believed_until: float = math.inf) -> bool:
        """An instance announced itself or renewed; True when it was not known so.

        Args:
            believed_until: when its lease is over for certain, unless it is renewed again.
        """
        key = (record.namespace, record.component, record.instance_id)
        component = self._instances.setdefault(key[:2], {})
        before = component.get(record.instance_id)
        if before is None or renewed > before.renewed:
            # The same record read again is no renewal.
            self._believed_until[key] = believed_until
        component[record.instance_id] = Instance(record, renewed)
        self._choice.pop(key[:2], None)
        self._expired.pop(key, None)
        self._unseen.discard(key)
        news = before is None or before.record.incarnation != record.incarnation
        if news:
            self.trust(*key)
        return news or before is None or before.record.draining != record.draining

    def delete(self, namespace: str, component: str, instance_id: str) -> None:
        """An instance said that it goes."""
        self._drop((namespace, component, instance_id))

    def expire(self, namespace: str, component: str, instance_id: str, now: float) -> None:
        """A record ran out; counts at once, or after the grace that follows an outage."""
        key = (namespace, component, instance_id)
        if now < self._grace_until:
            self._expired[key] = self._grace_until
        else:
            self._drop(key)

    def outage_ended(self, now: float) -> None:
        """We or others were cut off until now: give records time to be renewed."""
        self._grace_until = now + EXPIRY_GRACE

    def pass_began(self) -> None:
        """A complete reading of all records begins."""
        self._is_reading = True
        self._unseen = {
            (*key, instance_id)
            for key, instances in self._instances.items()
            for instance_id in instances
        }

    def is_settling(self, now: float) -> bool:
        """Whether we or others were cut off a moment ago, and others may be so still."""
        return now < self._grace_until

    def is_reading(self) -> bool:
        """Whether records come that may have been stored long ago."""
        return self._is_reading

    def doubt(self, namespace: str, component: str, instance_id: str) -> None:
        """An instance counts as not shown by the reading that began, unless it still is."""
        self._unseen.add((namespace, component, instance_id))

    def pass_ended(self, now: float) -> None:
        """It is complete: what it did not show has ended while we did not look.

        Or the bucket was lost as a whole, and its instances are about to announce themselves
        again: each has the time until its next renewal.
        """
        for key in self._unseen:
            self._expired[key] = max(self._grace_until, now + self._renewal_grace)
        self._unseen = set()
        self._is_reading = False

    def is_outdated(self, namespace: str, component: str, instance_id: str, now: float) -> bool:
        """Whether an instance has not renewed its record for longer than its lease can live."""
        return self._believed_until.get((namespace, component, instance_id), math.inf) <= now

    def outdated(self, now: float) -> list[InstanceKey]:
        """The instances of outdated records, but for those of which it is known that nobody
        listens there."""
        return [
            key
            for key, until in self._believed_until.items()
            if until <= now and key not in self._absent
        ]

    def vouch(self, namespace: str, component: str, instance_id: str, until: float) -> None:
        """Believe the record of an instance for longer: somebody listens there."""
        key = (namespace, component, instance_id)
        if key in self._believed_until:
            self._believed_until[key] = max(self._believed_until[key], until)

    def suspect(
        self,
        namespace: str,
        component: str,
        instance_id: str,
        now: float,
        seconds: float = SUSPECT_SECONDS,
    ) -> None:
        """Do not choose an instance until it renews, or for so long: it does not answer."""
        self._suspect[(namespace, component, instance_id)] = now + seconds

    def note_absent(self, namespace: str, component: str, instance_id: str, now: float) -> bool:
        """Do not choose an instance until it is trusted: nobody listens where it would.

        True when that was not known of it.
        """
        key = (namespace, component, instance_id)
        if key in self._absent or self.find(*key) is None:
            return False
        self._absent[key] = now
        self._choice.pop(key[:2], None)
        return True

    def is_absent(self, namespace: str, component: str, instance_id: str) -> bool:
        """Whether nobody listens where an instance would, as far as is known."""
        return (namespace, component, instance_id) in self._absent

    def returning(self, namespace: str, component: str, now: float) -> float:
        """Seconds for which an instance of a component may still only be changing servers: a
        server was lost, or we were, and that nobody listens was found a moment ago. 0 for none."""
        if not self.is_settling(now):
            return 0.0
        key = (namespace, component)
        found = [since for absent, since in self._absent.items() if absent[:2] == key]
        return max(0.0, max(found, default=now - RETURN_SECONDS) + RETURN_SECONDS - now)

    def trust(self, namespace: str, component: str, instance_id: str) -> bool:
        """End every suspicion of an instance; True when there was one."""
        key = (namespace, component, instance_id)
        was_suspect = self._suspect.pop(key, None) is not None
        if key not in self._absent:
            return was_suspect
        del self._absent[key]
        self._choice.pop(key[:2], None)
        return True

    def instances(self, namespace: str, component: str, now: float) -> list[Instance]:
        """The instances of a component that may be chosen, in a stable order."""
        if self._expired:
            for expired in [key for key, until in self._expired.items() if until <= now]:
                self._drop(expired)
        key = (namespace, component)
        choice = self._choice.get(key)
        if choice is None:
            known = self._instances.get(key, {})
            absent = self._absent
            choice = [
                one
                for one in known.values()
                if not one.record.draining and (namespace, component, one.id) not in absent
            ]
            self._choice[key] = choice
        if not self._suspect:
            return choice
        for suspect in [key for key, until in self._suspect.items() if until <= now]:
            del self._suspect[suspect]
        return [one for one in choice if (namespace, component, one.id) not in self._suspect]

    def find(self, namespace: str, component: str, instance_id: str) -> Instance | None:
        """One instance, whether it may be chosen or not."""
        return self._instances.get((namespace, component), {}).get(instance_id)

    def everything(self) -> list[Instance]:
        """Every known instance."""
        return [one for instances in self._instances.values() for one in instances.values()]

    def _drop(self, key: tuple[str, str, str]) -> None:
        self._expired.pop(key, None)
        self._suspect.pop(key, None)
        self._absent.pop(key, None)
        self._believed_until.pop(key, None)
        self._choice.pop(key[:2], None)
        component = self._instances.get(key[:2])
        if component is not None:
            component.pop(key[2], None)


class Discovery:
    """The view of one process, kept current from `begin` to `close`.

    Args:
        is_heard: whether heartbeats of the instance of an id arrive just now.

    Attributes:
        view: belongs to the main loop.
    """

    def __init__(self, bus: Bus, is_heard: Callable[[str, str, str], bool]) -> None:
        self._bus = bus
        self._is_heard = is_heard
        # Records are renewed three times in a lease.
        self.view = InstanceView(max(EXPIRY_GRACE, bus.config.lease_ttl / 2))
        self.synchronized = asyncio.Event()
        self._changed: set[asyncio.Future[None]] = set()
        self._consumer: OrderedConsumer | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._begun = False
        self._is_watching = False
        self._is_closed = False
        self._presence = Presence(bus)
        self._looked_around: dict[ComponentKey, float] = {}
        self._asked: set[InstanceKey] = set()

    def begin(self) -> None:
        """Start watching, once; returns at once."""
        if not self._begun:
            self._begun = True
            if self._bus.data.has_peers:
                # Who comes to a cluster that has just lost a server is there before instances
                # that were connected to it.
                self._note_outage()
            self._bus.data.on_peer_lost(self._note_outage)
            self._bus.lane.call(self._launch)

    async def close(self) -> None:
        """Stop watching; whoever waits is told."""
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
            async with asyncio.timeout(timeout):
                await self.synchronized.wait()
            self._check_open()
        except TimeoutError:
            raise Unavailable(
                f"the instances bucket could not be read within {timeout} s: "
                "is JetStream enabled on the server?",
                started=False,
            ) from None

    async def wait(
        self, endpoint: EndpointName, count: int, timeout: float | None
    ) -> list[Instance]:
        """The instances of an endpoint's component, once there are `count`.

        Args:
            timeout: seconds to wait; None waits for ever, 0 does not wait beyond the first
                complete reading, and a moment for instances that may be changing servers.

        Raises:
            NoInstances: there are not as many in time.
        """
        try:
            async with asyncio.timeout(timeout or None):
                await self.wait_synchronized(FIRST_READING if timeout == 0 else None)
                while True:
                    found = self.view.instances(endpoint.namespace, endpoint.component, monotonic())
                    if len(found) >= count:
                        break
                    at_most = 1.0
                    if timeout == 0:
                        at_most = self.view.returning(
                            endpoint.namespace, endpoint.component, monotonic()
                        )
                        if not at_most:
                            break
                    await self._change(at_most)
                    self._check_open()
        except TimeoutError:
            found = self.view.instances(endpoint.namespace, endpoint.component, monotonic())
        if len(found) < count:
            waited = f" within {timeout:.3g} s" if timeout else ""
            have = f", {len(found)} of {count} found" if found else ""
            raise NoInstances(f"no instance serves {endpoint}{waited}{have}", started=False)
        return found

    def _check_open(self) -> None:
        self._bus.check()
        if self._is_closed:
            raise Unavailable("the runtime is closed", started=False)

    async def wait_for_instance(
        self, namespace: str, component: str, instance_id: str, *, timeout: float = 5.0
    ) -> Instance:
        """This very instance, once it is known.

        Raises:
            NoInstances: it is not known after `timeout` seconds.
        """
        self.begin()
        end = monotonic() + timeout
        while (left := end - monotonic()) > 0:
            found = self.view.find(namespace, component, instance_id)
            if found is not None:
                return found
            await self._change(left)
        raise NoInstances(
            f"{namespace}.{component}@{instance_id} is not known after {timeout} s", started=False
        )

    def suspect(
        self,
        namespace: str,
        component: str,
        instance_id: str,
        seconds: float,
        *,
        nobody_listens: bool,
    ) -> None:
        """Have other instances chosen: a call to this one failed.

        Args:
            seconds: for how long at most, where somebody listens.
            nobody_listens: as the server says, so that it is chosen again once somebody does;
                False for one that does not answer.
        """
        key = (namespace, component, instance_id)
        if not nobody_listens:
            self.view.suspect(*key, monotonic(), seconds)
            return
        self._note_absent(key)
        self._look_around((namespace, component))

    async def _change(self, at_most: float) -> None:
        future: asyncio.Future[None] = self._bus.loop.create_future()
        self._changed.add(future)
        try:
            # Bounded: suspicion and grace end by time alone.
            async with asyncio.timeout(at_most):
                await future
        except TimeoutError:
            return
        finally:
            self._changed.discard(future)

    def _notify(self) -> None:
        for future in self._changed:
            if not future.done():
                future.set_result(None)

    # On the lane ---------------------------------------------------------------------------

    def _launch(self) -> None:
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._watch(), name="discovery"),
            loop.create_task(self._read_until_watching(), name="discovery-reading"),
        ]

    async def _stop(self) -> None:
        await end_tasks(*self._tasks)
        if self._consumer is not None:
            await self._consumer.stop()

    async def _watch(self) -> None:
        connection = self._bus.lane.connection
        connection.on_state(self._on_state)
        self._bus.data.on_state(self._on_state)
        while True:
            try:
                self._bus.to_main(self.view.pass_began)
                self._consumer = await connection.jetstream.consume(
                    INSTANCES_STREAM.name,
                    self._receive,
                    last_per_subject=True,
                    on_restart=lambda: self._bus.to_main(self.view.pass_began),
                    on_caught_up=lambda: self._bus.to_main(self._caught_up),
                )
                return
            except DynbusError as error:
                if error.code == "NoStream":
                    await self._make_bucket()
                    continue
                logger.warning("discovery cannot watch yet: %s", error)
                await asyncio.sleep(RETRY_DELAY)

    async def _read_until_watching(self) -> None:
        """Read the records from any server that keeps them, while there is no consumer yet.

        To make one takes the leader of the servers, and for some seconds there may be none.
        """
        jetstream = self._bus.lane.connection.jetstream
        delay = READ_AFTER
        while True:
            await asyncio.sleep(delay)
            if self._is_watching:
                return
            delay = READ_INTERVAL
            try:
                records = await jetstream.read(INSTANCES_STREAM.name, timeout=READ_TIMEOUT)
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
            await ensure_bucket(jetstream, self._bus.config.replicas)
        except DynbusError as error:
            logger.warning("the instances bucket cannot be made: %s", error)
            await asyncio.sleep(RETRY_DELAY)

    def _on_state(self, state: ConnectionState) -> None:
        if state is ConnectionState.CONNECTED:
            self._bus.to_main(self._note_outage)

    def _receive(self, message: StoredMessage) -> None:
        key = record_key(message.subject)
        if key is None:
            self._bus.to_main(self._bus.drop, DropReason.MALFORMED)
        elif message.is_marker:
            end = self._expire if MARKER_REASON in message.headers else self._delete
            self._bus.to_main(end, *key)
        elif (record := record_of(message)) is None:
            self._bus.to_main(self._bus.drop, DropReason.MALFORMED)
        else:
            self._bus.to_main(self._put, record, message.time, ttl_of(message))

    # On the main loop ----------------------------------------------------------------------

    def _note_outage(self) -> None:
        self.view.outage_ended(monotonic())

    def _take_reading(self, messages: list[StoredMessage]) -> None:
        """All records as one server keeps them, which may be some moments old."""
        if self._is_watching:
            return
        for message in messages:
            record = None if message.is_marker else record_of(message)
            if record is None:
                continue
            key = (record.namespace, record.component, record.instance_id)
            known = self.view.find(*key)
            if known is None or known.renewed < message.time:
                self._put(record, message.time, ttl_of(message))
            # Who is gone by then is not shown by the consumer.
            self.view.doubt(*key)
        self._ask_outdated()
        self._end_reading()

    def _put(self, record: InstanceRecord, renewed: float, ttl: float | None) -> None:
        key = (record.namespace, record.component, record.instance_id)
        before = self.view.find(*key)
        # What comes while nothing is read anew was written just now, whatever our clock says.
        age = max(0.0, unix_time() - renewed) if self.view.is_reading() else 0.0
        lifetime = (ttl or self._bus.config.lease_ttl) + EXPIRY_GRACE
        news = self.view.put(record, renewed, monotonic() + lifetime - age)
        # Who renews is alive; a reading anew of what is stored long since says nothing.
        if before is not None and renewed > before.renewed:
            news = self.view.trust(*key) or news
        if news:
            self._notify()

    def _expire(self, namespace: str, component: str, instance_id: str) -> None:
        instance = self.view.find(namespace, component, instance_id)
        if instance is not None:
            self._expire_unless_heard(instance)

    def _expire_unless_heard(self, instance: Instance) -> None:
        record = instance.record
        key = (record.namespace, record.component, record.instance_id)
        if self.view.find(*key) is not instance:
            return
        if self._is_heard(*key):
            # JetStream could not take its renewal in time; it is no less alive for that.
            self._bus.loop.call_later(HEARD_AGAIN, self._expire_unless_heard, instance)
            return
        # Its renewal may wait for servers that elect a leader: is there anybody?
        self._presence.ask(key, partial(self._expire_or_wait, instance))

    def _expire_or_wait(self, instance: Instance, there: bool | None) -> None:
        record = instance.record
        key = (record.namespace, record.component, record.instance_id)
        if self._is_closed or self.view.find(*key) is not instance:
            return
        if there is False:
            self.view.expire(*key, monotonic())
            self._notify()
        else:
            self._bus.loop.call_later(EXPIRY_GRACE, self._expire_after_grace, instance)

    def _expire_after_grace(self, instance: Instance) -> None:
        record = instance.record
        key = (record.namespace, record.component, record.instance_id)
        if self._is_closed or self.view.find(*key) is not instance:
            return
        if self._is_heard(*key):
            self._expire_unless_heard(instance)
            return
        self.view.expire(*key, monotonic())
        self._notify()

    def _note_absent(self, key: InstanceKey) -> None:
        if self.view.note_absent(*key, monotonic()):
            self._notify()
            self._bus.loop.call_later(FIRST_QUESTION, self._ask_absent, key, FIRST_QUESTION)

    def _ask_absent(self, key: InstanceKey, pause: float) -> None:
        """Ask again for an instance that was not there: it may only have changed servers."""
        if not self._is_closed and self.view.is_absent(*key):
            self._presence.ask(key, partial(self._answer_of_absent, key, pause))

    def _answer_of_absent(self, key: InstanceKey, pause: float, there: bool | None) -> None:
        if self._is_closed or not self.view.is_absent(*key):
            return
        if there:
            self.view.trust(*key)
            self.view.vouch(*key, monotonic() + LAST_QUESTION)
            self._notify()
            return
        now = monotonic()
        if there is False and self.view.is_outdated(*key, now) and not self.view.is_settling(now):
            self._delete(*key)
            return
        pause = min(2 * pause, LAST_QUESTION)
        self._bus.loop.call_later(pause, self._ask_absent, key, pause)

    def _look_around(self, component: ComponentKey) -> None:
        """Ask for all instances of a component of which one is not there: of thousands of
        records nobody may stand behind, a call would find that out one by one."""
        now = monotonic()
        if now - self._looked_around.get(component, -LOOK_PAUSE) < LOOK_PAUSE:
            return
        self._looked_around[component] = now
        known = self.view.instances(*component, now)
        self._ask_all([(*component, one.id) for one in known])

    def _ask_all(self, keys: list[InstanceKey]) -> None:
        if self._is_closed:
            return
        for key in keys[:QUESTIONS_PER_TURN]:
            self._presence.ask(key, partial(self._answer_of_known, key))
        if len(keys) > QUESTIONS_PER_TURN:
            self._bus.loop.call_soon(self._ask_all, keys[QUESTIONS_PER_TURN:])

    def _answer_of_known(self, key: InstanceKey, there: bool | None) -> None:
        if self._is_closed:
            return
        if there is False:
            self._note_absent(key)
        elif there:
            self.view.vouch(*key, monotonic() + LAST_QUESTION)
        if key in self._asked:
            self._asked.discard(key)
            self._end_reading()

    def _ask_outdated(self) -> None:
        """Ask for those whose records should have expired long ago: who is not there is not
        chosen, and forgotten when a second question finds nobody either."""
        keys = [key for key in self.view.outdated(monotonic()) if key not in self._asked]
        self._asked.update(keys)
        self._ask_all(keys)

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

    def _delete(self, namespace: str, component: str, instance_id: str) -> None:
        self.view.delete(namespace, component, instance_id)
        self._notify()

    def _caught_up(self) -> None:
        if not self._is_watching:
            self._is_watching = True
            self._bus.loop.call_later(LOOK_PAUSE, self._look_for_outdated)
        self.view.pass_ended(monotonic())
        self._ask_outdated()
        self._end_reading()
        self._notify()
