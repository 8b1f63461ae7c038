"""Jobs and events while hosts that take them, and those of the servers, lose power, freeze, or are
cut off in silence.

Takers run on c, d and e, of which c has a server too; who submits and publishes is on f, and is
hit by nothing.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.conditions import wait_until
from tests.scenarios import event_shop, job_shop
from tests.scenarios.job_shop import CUSTOMERS, STEPS, Note

from .cluster import Cluster
from .customer import KINDS, PUBLISHERS, Done, Left
from .faults import Fault, Nemesis, draw_faults
from .host import Host
from .lab import Lab
from .program import Program

SECONDS = float(os.environ.get("HOSTS_SECONDS", "300"))
SEED = int(os.environ.get("HOSTS_SEED", "1"))
PASSED_ON = 1.0
"""Seconds in which a taker writes down that it begins what had not ended when it looked."""
EACH = (
    # A job is handed to another taker while its own is silent: `ack_wait` is 1 s.
    Fault("freeze", "d", "", 4.0, 2.0),
    Fault("cut", "e", "", 4.0, 2.0),
    Fault("power", "d", "", 1.0, 2.0),
    Fault("power", "a", "", 2.0, 3.0),
    Fault("cut", "b", "", 5.0, 3.0),
    # A server and a taker at once.
    Fault("freeze", "c", "", 5.0, 3.0),
    Fault("power", "c", "", 2.0, 3.0),
)


class Shops(Cluster):
    """Servers and takers on hosts."""

    def start_worker(self, host: Host) -> Program:
        return host.python("tests.hosts.taker", self.url)


class Story:
    """What a customer and the takers have written down."""

    def __init__(self, lab: Lab, jobs: Path, events: Path) -> None:
        self.cluster = Shops(lab, servers="abc", workers="cde")
        self.cluster.start()
        self._jobs, self._events = jobs, events
        self._journal = lab["f"].folder / "customer.jsonl"
        self._customer = lab["f"].python("tests.hosts.customer", self.cluster.url, self._journal)
        self._customer.says("ready")
        self.serves()

    @property
    def done(self) -> list[Done]:
        return [msgspec.convert(one, Done) for one in self._lines() if "ends" not in one]

    @property
    def left(self) -> dict[str, Left]:
        every = [msgspec.convert(one, Left) for one in self._lines() if "ends" in one]
        return {one.what: one for one in every}

    def _lines(self) -> list[dict[str, Any]]:
        lines = self._journal.read_bytes().splitlines(keepends=True)
        return [msgspec.json.decode(line) for line in lines if line.endswith(b"\n")]

    def serves(self) -> None:
        """Wait until of everything one was done that began after now, or a moment before."""
        now = time.monotonic() + 1.0
        wait_until(
            lambda: (
                self._journal.exists()
                and {one.what for one in self.done if one.when > now} == {*KINDS, "event"}
            ),
            what=lambda: f"jobs and events go on: {self._customer.output[-2000:]}",
        )

    def hit(self, faults: Iterable[Fault]) -> None:
        nemesis = Nemesis(self.cluster)
        for fault in faults:
            began = time.monotonic()
            nemesis.carry_out(fault)
            print(f"{began:.2f} to {time.monotonic():.2f}: {fault}", flush=True)
            time.sleep(fault.pause)

    def end(self) -> None:
        """Submit no more; returns when all jobs have ended and all events are heard.

        Raises:
            AssertionError: something did not end, or a promise is broken.
        """
        self.serves()
        assert self._customer.end(180.0) == 0, self._customer.output[-3000:]
        done, notes = self.done, self._notes()
        confirmed = {(one.what, one.number): one.when for one in done if one.what != "event"}
        assert len(confirmed) == sum(one.what != "event" for one in done)
        self._check_ends(done)
        begun = Counter((one.name, one.number) for one in notes if one.what == "begun")
        assert begun.keys() == confirmed.keys()
        late = [
            one
            for one in notes
            if one.what == "begun" and one.when > confirmed[one.name, one.number] + PASSED_ON
        ]
        again = sum(begun.values()) - len(begun)
        print(f"{len(begun)} jobs; begun again before their end: {again}; after it: {len(late)}")
        assert late == []
        self._check_steps(done, notes)
        self._check_order(notes)
        self._check_events(done)
        for host in self.cluster.lab:
            host.check()

    def _notes(self) -> list[Note]:
        lines = self._jobs.read_text().rpartition("\n")[0].splitlines()
        return sorted(map(Note.read, lines))

    def _check_ends(self, done: Iterable[Done]) -> None:
        """Each job has one result, which is the one that its submitter got."""
        left = self.left
        for kind in KINDS:
            given = Counter(json.dumps(one.result) for one in done if one.what == kind)
            assert Counter(map(json.dumps, left[kind].ends)) == given
            assert left[kind].dead_letters == 0

    def _check_steps(self, done: Iterable[Done], notes: Iterable[Note]) -> None:
        """No finished step is begun again."""
        stored: dict[tuple[str, int], float] = {}
        again: list[float] = []
        for one in notes:
            if one.what == "stored":
                stored.setdefault((one.name, one.number), one.when)
            elif one.what == "step" and (one.name, one.number) in stored:
                again.append(one.when - stored[one.name, one.number])
        assert again == []
        for job in done:
            if job.what == "sell":
                of = [step.partition(" by ")[0] for step in job.result]
                assert of == [f"{step} {job.number}" for step in STEPS]

    def _check_order(self, notes: Iterable[Note]) -> None:
        """A job of a customer begins when the one before it has been done."""
        worked, begun = set[int](), defaultdict[int, list[int]](list)
        for one in notes:
            if one.name != "ship":
                continue
            if one.what == "worked":
                worked.add(one.number)
            elif one.number not in begun[one.number % CUSTOMERS]:
                assert one.number < CUSTOMERS or one.number - CUSTOMERS in worked, one
                begun[one.number % CUSTOMERS].append(one.number)
        assert all(numbers == sorted(numbers) for numbers in begun.values())

    def _check_events(self, done: Iterable[Done]) -> None:
        """Each group hears every event, the ordered one those of a customer in their order."""
        published = [(one.customer, one.number) for one in done if one.what == "event"]

        def heard(group: str) -> list[tuple[str, int]]:
            lines = [line.split() for line in self._events.read_text().splitlines()]
            return [(customer, int(number)) for name, customer, number in lines if name == group]

        def has_heard_all(group: str) -> bool:
            return set(heard(group)) == set(published)

        for group in event_shop.GROUPS:
            wait_until(partial(has_heard_all, group), what=f"{group} hears every event")
        firsts = dict.fromkeys(heard(event_shop.ORDERED))
        print(f"{len(published)} events, {len(heard(event_shop.ORDERED)) - len(firsts)} again")
        for of in range(PUBLISHERS):
            own = [number for customer, number in firsts if customer == f"c{of}"]
            assert own == sorted(own)


@pytest.fixture
def story(namespaces: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterable[Story]:
    jobs, events = tmp_path / "jobs", tmp_path / "events"
    monkeypatch.setenv(job_shop.LEDGER, str(jobs))
    monkeypatch.setenv(event_shop.LEDGER, str(events))
    with Lab("abcdef", tmp_path / "hosts") as lab:
        yield Story(lab, jobs, events)


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_no_job_or_event_is_lost_when_hosts_lose_power_freeze_and_are_cut_off(story: Story) -> None:
    story.hit(EACH)

    story.end()


@pytest.mark.soak
@pytest.mark.timeout(SECONDS + 400)
def test_no_job_or_event_is_lost_under_faults_drawn_by_a_seed(story: Story) -> None:
    end = time.monotonic() + SECONDS
    faults = draw_faults(SEED, "abcde", "abc")

    story.hit(iter(lambda: next(faults) if time.monotonic() < end else None, None))

    story.end()
