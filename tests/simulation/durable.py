"""The stories of durable handlers: jobs and their ends, steps, waits, order, letters, schedules."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial
from typing import Any, ClassVar, TypeVar
from unittest.mock import patch

import anyio
import msgspec

from dynbus import (
    Actor,
    Cancelled,
    DeadlineExceeded,
    HandlerError,
    InvalidRequest,
    JobHandle,
    NoJob,
    Overloaded,
    Topic,
    Unavailable,
    every,
    handler,
    signal,
    sleep_until,
    step,
    subscribe,
)
from dynbus.actors.serving import steps
from dynbus.bus.clock import unix_time
from dynbus.bus.protocol.names import EndpointName, job_cancel_subject
from dynbus.bus.work_queue import DeadLetters
from dynbus.testing import Kind, Simulation

T = TypeVar("T")

INSTANCES = 3
ACK_WAIT = 2.0
PATIENCE = 300.0
LINGERING = frozenset({Kind.SLOW, Kind.SILENCE, Kind.LATE, Kind.SPLIT})
AFTERMATH = 2.5
"""Seconds after one of these for which an answer of before may still come to a process."""
PROMPT = 1.0
"""Seconds within which what is due is done where nothing disturbs it."""
ROUNDED = 0.05
"""Seconds by which processes know the server's time differently, while no message is late."""


async def repeated(simulation: Simulation, send: Callable[[], Awaitable[T]]) -> T:
    """Send until it is confirmed."""
    while True:
        try:
            return await send()
        except (Unavailable, Overloaded):
            simulation.counts["repeated"] += 1
            await asyncio.sleep(0.5)


class Book:
    """The tries of the jobs of a story, each by its key, and what is wrong with them.

    Attributes:
        tries: how often each job was begun.
        may_begin, due: when it may begin at the earliest, and is to begin at the latest.
        ended: when the end of a job was known.
        finished: when a place in a job had come to a value.
        over: the jobs of which a try came to its end.
        since: when each wait of a job began.
        sent: when a signal of a name and a value was sent for sure.
        most: how often it may have been sent.
        values: what each place in a job came to, in all of its tries.
        faults: in words.
        is_absent: whether nobody was there to do anything for a time.
    """

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.tries = Counter[str]()
        self.may_begin: dict[str, float] = {}
        self.due: dict[str, float] = {}
        self.ended: dict[str, float] = {}
        self.finished: dict[tuple[str, object], float] = {}
        self.over: set[str] = set()
        self.since: dict[tuple[str, int], float] = {}
        self.sent: dict[tuple[str, str, int], float] = {}
        self.most: Counter[tuple[str, str, int]] = Counter()
        self.values: defaultdict[tuple[str, object], list[object]] = defaultdict(list)
        self.faults: list[str] = []
        self.is_absent = False

    def begin(self, actor: Actor, key: str) -> None:
        """A try of a job begins at an instance."""
        self.tries[key] += 1
        if self._is_past(self.ended.get(key)) and not self.may_be_late(actor):
            self.faults.append(f"{key} was begun after its end")
        self.not_before(self.may_begin.get(key, 0.0), key)
        if (
            self.tries[key] == 1
            and self.simulation.undisturbed(self.due.get(key, math.inf)) > PROMPT
        ):
            self.faults.append(f"{key} was begun after its deadline")

    def not_before(self, least: float, what: str) -> None:
        """What was to wait until a time has come."""
        early = least - self.simulation.now
        if early > (AFTERMATH if self.simulation.troubles else ROUNDED):
            self.faults.append(f"{what} came {early:.1f} s early")

    def in_time(self, due: float, what: str) -> None:
        """What was due has come."""
        late = self.simulation.undisturbed(due)
        if late > (LATE if self.simulation.troubles else PROMPT):
            self.faults.append(f"{what} came {late:.1f} s late")

    def came_to(self, key: str, place: object, value: object) -> None:
        """A place in a job has come to a value, which is the one of all tries."""
        self.finished.setdefault((key, place), self.simulation.now)
        known = self.values[key, place]
        known.append(value)
        if value != known[0]:
            self.faults.append(f"{place} of {key} came to {known}")

    def end(self, key: str) -> None:
        """The end of a job is known."""
        self.ended.setdefault(key, self.simulation.now)

    def step(self, actor: Actor, key: str, place: object) -> None:
        """A step of a job is called."""
        if self._is_past(self.finished.get((key, place))) and not self.may_be_late(actor):
            self.faults.append(f"{place} of {key} was called again")

    def _is_past(self, at: float | None) -> bool:
        """True if something was known for long enough for who looked before to have begun."""
        return at is not None and self.simulation.now > at + PROMPT

    def may_be_late(self, actor: Actor) -> bool:
        """True if a process may act on what was right before something happened to it."""
        home, now = self.simulation.kit.process_of(actor.runtime), self.simulation.now
        return any(
            home in one.processes
            and now < one.ended + (AFTERMATH if one.fault.kind in LINGERING else ROUNDED)
            for one in self.simulation.troubles
        )

    def check(self, *, waits: bool = False) -> None:
        """See that nothing is wrong, and that without faults each job had one try, unless it
        waits."""
        assert not self.faults, f"{self.faults}"
        if not self.simulation.troubles and not waits:
            assert set(self.tries.values()) <= {1}, f"nothing went wrong, and tries: {self.tries}"
        self.simulation.counts["tries beyond the first"] += self.tries.total() - len(self.tries)


class Order(msgspec.Struct, frozen=True):
    number: int

    @property
    def key(self) -> str:
        return f"order-{self.number}"


LONG, DELAYED, DUE, URGENT, CANCELLED = (0, 1, 6), (2, 3), 4, 5, (3, 6, 7)
"""Orders: those of which a try takes longer than the server waits for a word of it, those that are
to wait, one that is to have begun by a time, one without a key that goes before others, those that
are called off."""
DELAY = 3.0
DEADLINE = 1.0


class Billing(Actor, namespace="simulated"):
    """Does jobs of several steps."""

    book: ClassVar[Book]
    charges: ClassVar[Counter[tuple[str, int]]]
    is_deaf: ClassVar[bool]

    async def on_start(self) -> None:
        self.lock = asyncio.Lock()

    @handler(durable=True, concurrency=1, tries=20, backoff=0.5, ack_wait=ACK_WAIT)
    async def bill(self, order: Order) -> str:
        key = order.key
        self.book.begin(self, key)
        assert not self.lock.locked(), f"{key} was begun beside another"
        async with self.lock:
            is_long = order.number in LONG and self.book.tries[key] == 1
            for part in range(3):
                receipt = await step(f"charge-{part}", self.charge, key, part)
                self.book.came_to(key, part, receipt)
                long = is_long and part == order.number % 3
                await asyncio.sleep(2.5 * ACK_WAIT if long else 0.1)
        if key in self.book.ended and not (self.is_deaf or self.book.simulation.troubles):
            self.book.in_time(self.book.ended[key], f"the end of what runs of {key}")
        return f"{key} {self.book.tries[key]}"

    async def charge(self, key: str, part: int) -> str:
        self.book.step(self, key, part)
        self.charges[key, part] += 1
        receipt = f"receipt {self.charges[key, part]}"
        await asyncio.sleep(0.3 * self.book.simulation.random.random())
        return receipt


async def jobs(simulation: Simulation) -> None:
    """A job that was submitted is done, or cancelled, or was not begun by its deadline; it has one
    end, whoever asks for it how often, and is not begun after that. All tries go on from one
    receipt of each step. Where nothing goes wrong there is one try."""
    book = Billing.book = Book(simulation)
    charges = Billing.charges = Counter[tuple[str, int]]()
    for _ in range(INSTANCES):
        await simulation.start(Billing)
    client = simulation.client(Billing)
    chance = simulation.random
    Billing.is_deaf = chance.random() < 0.5
    if Billing.is_deaf:
        # Nobody has to hear that a job is cancelled.
        simulation.kit.bus.drop(job_cancel_subject(EndpointName("simulated", "Billing", "bill")))

    async def end_of(job: JobHandle[str]) -> str:
        with suppress(Cancelled, DeadlineExceeded):
            return await job.result(timeout=PATIENCE)
        return (await repeated(simulation, job.state)).error

    async def submit(number: int) -> None:
        await asyncio.sleep(4.0 * chance.random())
        key = f"order-{number}"
        submit = partial(
            client.bill.submit,
            Order(number),
            idempotency_key=None if number == URGENT else key,
            delay=DELAY if number in DELAYED else 0.0,
            deadline=DEADLINE if number == DUE else None,
            priority=1 if number == URGENT else None,
        )
        if number in DELAYED:
            book.may_begin[key] = simulation.now + DELAY
        try:
            job = await (submit() if number == URGENT else repeated(simulation, submit))
        except Unavailable:
            # Without a key it would be another one.
            return
        if number == DUE:
            book.due[key] = simulation.now + DEADLINE
        was_cancelled = False
        if number in CANCELLED:
            await asyncio.sleep(2.0 * chance.random())
            was_cancelled = await repeated(simulation, job.cancel)
        end = await end_of(job)
        book.end(key)
        if was_cancelled:
            assert end.startswith("Cancelled"), f"{key} was cancelled, and ended as {end!r}"
        elif number != DUE and number not in CANCELLED:
            assert end.startswith(key), f"{key} ended as {end!r}"
        await asyncio.sleep(10.0 * chance.random())
        # Its key is known, and begins nothing.
        again = end if number == URGENT else await end_of(await repeated(simulation, submit))
        await simulation.over()
        at_last = await end_of(job)
        assert again == at_last == end, f"{key} ended as {end!r}, {again!r} and {at_last!r}"

    async with anyio.create_task_group() as submitters:
        for number in range(8):
            submitters.start_soon(submit, number)
    book.check()
    simulation.counts["steps begun again"] += charges.total() - len(charges)


class Wait(msgspec.Struct, frozen=True):
    """A wait for a signal of a name, at most for so long, or where there is no name for the time
    alone."""

    name: str
    seconds: float | None = None


class Waits(msgspec.Struct, frozen=True):
    customer: str
    number: int
    waits: list[Wait]


STAYS = 0.5
"""Seconds for which a job waits in its process in these stories, so that many wait outside."""
WAITS = (
    Wait("", 0.3),
    Wait("", 2.0),
    Wait("a"),
    Wait("a"),
    Wait("b"),
    Wait("a", 60.0),
    Wait("a", 0.4),
    Wait("b", 4.0),
)
"""Most end by signals, others by the time."""
LATE = 12.0
"""Seconds within which a job goes on, after the last fault: its taker may have to be missed."""


class Clerk(Actor, namespace="simulated"):
    """Waits as it is told to."""

    book: ClassVar[Book]

    @handler(durable=True, tries=8, backoff=0.5, ack_wait=ACK_WAIT)
    async def wait(self, order: Waits) -> list[int | None]:
        return await self._carry_out(order)

    @handler(durable=True, tries=8, backoff=0.5, ack_wait=ACK_WAIT, ordered_by="customer")
    async def wait_in_turn(self, order: Waits) -> list[int | None]:
        earlier = {f"{order.customer}-{number}" for number in range(order.number)}
        if left := earlier - self.book.over - self.book.ended.keys():
            self.book.faults.append(f"{order} began before {left} ended")
        return await self._carry_out(order)

    async def _carry_out(self, order: Waits) -> list[int | None]:
        key = f"{order.customer}-{order.number}"
        self.book.begin(self, key)
        taken: list[int | None] = []
        for place, one in enumerate(order.waits):
            taken.append(await self._wait(key, place, one))
            if one.name and taken[-1] is None:
                self._check_timeout(key, place, order, taken)
            self.book.came_to(key, place, taken[-1])
        self.book.over.add(key)
        return taken

    def _check_timeout(self, key: str, place: int, order: Waits, taken: list[int | None]) -> None:
        """See that the signal which a wait has not had was not there in time."""
        book, one = self.book, order.waits[place]
        had = {value for of, value in zip(order.waits, taken, strict=False) if of.name == one.name}
        over = book.since[key, place] + (one.seconds or 0.0)
        over -= AFTERMATH if book.simulation.troubles else PROMPT
        if book.sent.get((key, one.name, len(had - {None})), math.inf) < over:
            book.faults.append(f"{one} of {key} was over before what had come")

    async def _wait(self, key: str, place: int, one: Wait) -> int | None:
        book, now = self.book, self.book.simulation.now
        since = book.since.setdefault((key, place), now)
        value = None
        if one.name:
            with suppress(DeadlineExceeded):
                value = await signal(one.name, int, timeout=one.seconds)
        else:
            await sleep_until(timedelta(seconds=one.seconds or 0.0))
        if value is None:
            over = since + (one.seconds or 0.0)
            book.not_before(over, f"{one} of {key}")
        else:
            over = max(since, book.sent.get((key, one.name, value), math.inf))
        if (key, place) not in book.values:
            book.in_time(over, f"{one} of {key}")
        return value


async def waits(simulation: Simulation, in_turn: bool = False) -> None:
    """A job that waits has each signal, in the order in which they were sent, and none twice; it
    waits for as long as it is to, and goes on in time. All tries go on from the same. One of which
    the sender does not know whether it arrived may come again where it is repeated."""
    book = Clerk.book = Book(simulation)
    chance = simulation.random
    for _ in range(INSTANCES):
        await simulation.start(Clerk)
    client = simulation.client(Clerk)
    submit = client.wait_in_turn.submit if in_turn else client.wait.submit

    async def pause(key: str) -> None:
        """Sleep for a drawn time, or until the job is about to wait outside of its process."""
        seconds = 3.0 * chance.random() ** 2
        since = [at for (of, _), at in book.since.items() if of == key]
        if since and chance.random() < 0.5:
            aimed = max(since) + STAYS + 0.2 * (chance.random() - 0.7)
            seconds = max(aimed - simulation.now, seconds / 10)
        await asyncio.sleep(seconds)

    async def tell(job: JobHandle[Any], key: str, name: str, number: int) -> None:
        """Send as many signals as are waited for."""
        tries = Counter[int]()

        async def send(value: int) -> None:
            tries[value] += 1
            await job.signal(name, value)

        for value in range(number):
            await pause(key)
            with suppress(NoJob):
                await repeated(simulation, partial(send, value))
            book.sent[key, name, value] = simulation.now
            book.most[key, name, value] = tries[value]

    async def follow(job: JobHandle[list[int | None]], key: str, order: Waits) -> None:
        names = Counter(one.name for one in order.waits if one.name)
        is_cancelled = False
        async with anyio.create_task_group() as tellers:
            for name, number in names.items():
                tellers.start_soon(tell, job, key, name, number)
            if in_turn and order.number == 1 and chance.random() < 0.5:
                await pause(key)
                is_cancelled = await repeated(simulation, job.cancel)
                if is_cancelled:
                    book.end(key)
        try:
            taken = await job.result(timeout=PATIENCE)
        except Cancelled:
            book.end(key)
            return
        assert not is_cancelled, f"{key} was cancelled, and came to {taken}"
        book.end(key)
        for name in names:
            came = zip(order.waits, taken, strict=True)
            heard = [value for one, value in came if one.name == name and value is not None]
            assert heard == sorted(heard), f"{key} heard {heard} as {name}"
            assert set(heard) == set(range(len(set(heard)))), f"{key} heard {heard} as {name}"
            again = {value for value in heard if heard.count(value) > book.most[key, name, value]}
            assert not again, f"{key} heard {again} of {heard} more often than it was sent"
            simulation.counts["signals heard again"] += len(heard) - len(set(heard))

    async def serve(customer: str) -> None:
        async with anyio.create_task_group() as followers:
            for number in range(3 if in_turn else 1):
                drawn = [
                    WAITS[int(chance.random() * len(WAITS))] for _ in range(3 if in_turn else 6)
                ]
                order, key = Waits(customer, number, drawn), f"{customer}-{number}"
                send = partial(submit, order, idempotency_key=key)
                followers.start_soon(follow, await repeated(simulation, send), key, order)

    with patch.object(steps, "STAYS", STAYS):
        async with anyio.create_task_group() as customers:
            for customer in ("one", "another"):
                customers.start_soon(serve, customer)
    book.check(waits=True)


async def turns(simulation: Simulation) -> None:
    """The jobs of a key are done in the order in which they were submitted, one at a time, whatever
    they wait for, and whichever of them are cancelled."""
    await waits(simulation, in_turn=True)


TRIES = 3
REFUSED, FAILED = "no such street", "no door"
FAILURES = (HandlerError, InvalidRequest, Unavailable)
"""With which a job may end: also a step that nobody could look up fails a try."""


class Post(Actor, namespace="simulated"):
    """Fails with a job as often as it is told to."""

    book: ClassVar[Book]
    stamps: ClassVar[Counter[str]]
    failing: ClassVar[dict[str, int]]

    @handler(durable=True, tries=TRIES, backoff=0.2, ack_wait=ACK_WAIT)
    async def deliver(self, order: Order) -> str:
        key = order.key
        self.book.begin(self, key)
        self.book.since[key, 0] = self.book.simulation.now
        self.book.came_to(key, "stamp", await step("stamp", self.stamp, key))
        if self.failing[key] > 0:
            self.failing[key] -= 1
            raise InvalidRequest(REFUSED) if order.number == 0 else HandlerError(FAILED)
        await asyncio.sleep(0.3)
        return key

    async def stamp(self, key: str) -> int:
        self.book.step(self, key, "stamp")
        self.stamps[key] += 1
        await asyncio.sleep(0.1)
        return self.stamps[key]


MOST_REDRIVES = 6
"""As often as a job is redriven: in vain at first, and while kills use up its tries."""


async def letters(simulation: Simulation) -> None:
    """A job that fails as often as it may, or that is refused, is a dead letter with the reason;
    one that is redriven has all its tries, goes on with its steps, is done, and has one end."""
    book = Post.book = Book(simulation)
    failing = Post.failing = dict[str, int]()
    Post.stamps = Counter()
    for _ in range(INSTANCES):
        await simulation.start(Post)
    client = simulation.client(Post)
    queue = EndpointName("simulated", "Post", "deliver")
    dead = DeadLetters(simulation.kit.caller.bus.data.jetstream, "simulated")

    async def redrive(key: str) -> None:
        letter = await dead.of_job(queue, key)
        if letter is not None:
            await dead.redrive(letter)

    async def send(number: int) -> None:
        await asyncio.sleep(4.0 * simulation.random.random())
        key, tries = f"order-{number}", TRIES if number else 1
        failing[key] = 2 * TRIES
        submit = partial(client.deliver.submit, Order(number), idempotency_key=key)
        job = await repeated(simulation, submit)
        with suppress(*FAILURES):
            raise AssertionError(f"{key} came to {await job.result(timeout=PATIENCE)}")
        letter = await repeated(simulation, partial(dead.of_job, queue, key))
        assert letter is not None, f"{key} failed for good, and is no dead letter"
        state = await repeated(simulation, job.state)
        if not simulation.troubles:
            assert book.tries[key] == state.tries == letter.tries == tries, f"{state}, {letter}"
            assert [one.error for one in state.failures] == [FAILED] * (tries - 1), f"{state}"
            assert simulation.now < book.since[key, 0] + PROMPT, f"{key} was tried again too late"
        result = ""
        for redriven in range(1, MOST_REDRIVES):
            failing[key] = tries if redriven == 1 else tries - 1
            await repeated(simulation, partial(redrive, key))
            with suppress(*FAILURES):
                result = await job.result(timeout=PATIENCE)
                break
            await asyncio.sleep(PROMPT)
        if not result and simulation.undisturbed(0.0) < LATE:
            # One that was frozen, or is not heard, may have noted its failure after the redrive.
            return
        assert redriven == 2 or simulation.troubles, f"{key} had not all tries when redriven"
        book.end(key)
        assert result == key, f"{key} came to {result!r} after it was redriven"
        again = await repeated(simulation, submit)
        assert await again.result(timeout=PATIENCE) == key

    async with anyio.create_task_group() as senders:
        for number in range(4):
            senders.start_soon(send, number)
    await simulation.over()
    left = await repeated(simulation, dead.find)
    kinds = {one.fault.kind for one in simulation.troubles}
    assert not left or kinds - {Kind.KILL, Kind.LEAVE}, f"of jobs that are done there are {left}"
    # The last try of one may have ended though its taker was given up: it is not begun again.
    for letter in left:
        await repeated(simulation, partial(dead.redrive, letter))
    await asyncio.sleep(ACK_WAIT)
    for key in book.ended:
        job = simulation.kit.caller.job(f"{queue}.{key}", Post.deliver)
        assert await job.result(timeout=PATIENCE) == key
    book.check(waits=True)


STRIKES, CHIMES = 1.1, 2.0
"""Seconds between the firings of two handlers."""
RUNS = 10.0
LONG_WAIT = 30.0
"""Seconds after which a job of theirs is handed out again of which nothing is heard."""
LEFT_OUT = 60.0
"""Seconds by which a firing is late that is left out unless all are to be made up."""
ABSENT = 70.0
"""Seconds for which nobody is there, in some stories: more than is made up unless asked for."""


class Clock(Actor, namespace="simulated"):
    """Notes when it is fired."""

    book: ClassVar[Book]

    @every(STRIKES, missed="catch_up")
    @handler(durable=True, tries=20, backoff=0.5)
    async def strike(self, due: datetime) -> None:
        await self._note("strike", due)

    @every(CHIMES)
    @handler(durable=True, tries=20, backoff=0.5)
    async def chime(self, due: datetime) -> None:
        await self._note("chime", due)

    async def _note(self, what: str, due: datetime) -> None:
        key, now = f"{what} {due.timestamp():.3f}", self.book.simulation.now
        if not (self.book.simulation.troubles or self.book.is_absent):
            self.book.in_time(now - unix_time() + due.timestamp(), key)
        self.book.begin(self, key)
        await asyncio.sleep(0.2)
        self.book.over.add(key)


async def schedules(simulation: Simulation) -> None:
    """A handler is fired for each time that is due from the first on, in time where nothing is in
    the way, and where nothing goes wrong once. What nobody was there for is made up, for a minute
    or all of it."""
    book = Clock.book = Book(simulation)
    for _ in range(1 + int(INSTANCES * simulation.random.random())):
        await simulation.start(Clock)
    await asyncio.sleep(RUNS)
    await simulation.over()
    if simulation.random.random() < 0.15:
        book.is_absent = True
        for one in [one for one in simulation.kit.alive() if one.instances]:
            one.kill()
        await asyncio.sleep(ABSENT)
        await simulation.start(Clock)
    await asyncio.sleep(LATE)
    until = unix_time() - LATE
    if any(_missing(book, until)) and simulation.troubles:
        # What a process had that could not tell so in time is handed out again.
        await asyncio.sleep(LONG_WAIT)
    book.check(waits=book.is_absent)
    struck, chimed = _missing(book, until)
    assert not struck, f"never fired: {struck}"
    assert book.is_absent or not chimed, f"never fired: {chimed}"
    most = until - LEFT_OUT + CHIMES
    assert all(one < most for one in chimed), f"not made up: {chimed} before {most}"


def _missing(book: Book, until: float) -> list[list[float]]:
    """The times until one for which each handler was not fired."""
    missing: list[list[float]] = []
    for what, period in (("strike", STRIKES), ("chime", CHIMES)):
        times = [float(key.split()[1]) for key in book.over if key.startswith(what)]
        fired = {round(time / period, 2) for time in times}
        assert all(one.is_integer() for one in fired), f"{what} was fired at other times: {fired}"
        due = range(int(min(fired)), int(until / period))
        missing.append([number * period for number in due if number not in fired])
    return missing


class Closed(msgspec.Struct, frozen=True):
    customer: str
    number: int


FAILS = 2
"""The number of an event that fails at first."""
GROUPS = ("archive", "ledger")
closed = Topic("closed", Closed, namespace="simulated", retain="1h")


EVENTS = [Closed(customer, number) for customer in ("one", "another") for number in range(6)]
EVERYTHING = {(group, event) for group in GROUPS for event in EVENTS}


class Archive(Actor, namespace="simulated"):
    """Hears each event once for its groups, and once for each instance."""

    book: ClassVar[Book]
    heard: ClassVar[Counter[tuple[str, Closed]]]
    complete: ClassVar[asyncio.Event]

    async def on_start(self) -> None:
        self.started_at = self.book.simulation.now

    @subscribe(closed, group="archive", ack_wait=ACK_WAIT, backoff=0.5, tries=20)
    async def keep(self, event: Closed) -> None:
        await asyncio.sleep(0.3)
        self._hear_as("archive", event)

    @subscribe(closed, group="ledger", ordered=True, ack_wait=ACK_WAIT, backoff=0.5, tries=20)
    async def enter(self, event: Closed) -> None:
        key = f"{event}"
        self.book.begin(self, key)
        for number in range(event.number):
            if not self.heard["ledger", Closed(event.customer, number)]:
                self.book.faults.append(f"{event} came before the end of {number}")
        await asyncio.sleep(0.2)
        if event.number == FAILS and self.book.tries[key] < 3:
            raise HandlerError("not yet")
        self._hear_as("ledger", event)

    @subscribe(closed)
    async def hear(self, event: Closed) -> None:
        if self.book.finished.get((event.customer, event.number), math.inf) < self.started_at:
            self.book.faults.append(f"{self.instance_id} heard {event}, which was there before")
        self._hear_as(self.instance_id, event)

    def _hear_as(self, reader: str, event: Closed) -> None:
        self.heard[reader, event] += 1
        if self.heard.keys() >= EVERYTHING:
            self.complete.set()


async def events(simulation: Simulation) -> None:
    """An event that was published reaches each of its groups, those of a key in their order where
    the group is ordered, and each instance once."""
    heard = Archive.heard = Counter()
    book = Archive.book = Book(simulation)
    complete = Archive.complete = asyncio.Event()
    first = {(await simulation.start(Archive)).id for _ in range(INSTANCES)}

    async def publish(customer: str) -> None:
        for event in (one for one in EVENTS if one.customer == customer):
            await asyncio.sleep(2.0 * simulation.random.random())
            send = partial(
                closed.publish,
                *(event,),
                key=customer,
                runtime=simulation.kit.caller,
                idempotency_key=f"{customer}-{event.number}",
            )
            await repeated(simulation, send)
            book.finished[customer, event.number] = simulation.now

    async with anyio.create_task_group() as publishers:
        for customer in {event.customer: None for event in EVENTS}:
            publishers.start_soon(publish, customer)
    await simulation.over()
    with anyio.move_on_after(200.0):
        await complete.wait()
    assert heard.keys() >= EVERYTHING, f"not heard: {EVERYTHING - heard.keys()}"
    await asyncio.sleep(PROMPT)
    alive = {instance.id for one in simulation.kit.alive() for instance in one.instances}
    missed = {(one, event) for one in alive & first for event in EVENTS} - heard.keys()
    assert not missed, f"instances did not hear {missed}"
    twice = {one for one, times in heard.items() if times > 1 and one[0] not in GROUPS}
    assert not twice, f"instances heard again {twice}"
    if not simulation.troubles:
        assert set(heard.values()) == {1}, f"nothing went wrong, and heard were {heard}"
    book.check(waits=True)
    simulation.counts["events heard again"] += heard.total() - len(heard)
