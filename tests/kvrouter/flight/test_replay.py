"""Decisions on a tape, made again: the same where the tape is whole, and told apart where it is
not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

import anyio
import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from tests.flights import ListedRecords, entries_on
from tests.kvrouter.routing.routing_fixtures import At, HandIndex, profile, request, shape
from tests.kvrouter.routing.worker import Worker, prompt, start, where

from dynbus import DynbusError, call_options
from dynbus.bus.flight import SAMPLED as SAMPLED_EVENT
from dynbus.bus.flight.records import Entry, Event, decode_message, encode_records, entries_of
from dynbus.kvrouter.flight.replay import (
    BEFORE,
    NO_POLICY,
    SAMPLED,
    UNKNOWN,
    WARM_AFTER,
    Replay,
    Replayed,
)
from dynbus.kvrouter.radix.index import Overlap, Rank
from dynbus.kvrouter.routing.config import RouterConfig
from dynbus.kvrouter.routing.decision import Decision
from dynbus.kvrouter.routing.queue import SchedulingRequest, Ticket
from dynbus.kvrouter.routing.requests import Constraints
from dynbus.kvrouter.routing.router import open_router
from dynbus.kvrouter.routing.shared_load import SharedLoad
from dynbus.kvrouter.routing.tape import (
    Elsewhere,
    Ended,
    Released,
    Submitted,
    TapedLoad,
    TapedScheduler,
)
from dynbus.testing import TestKit, run

Records = list[tuple[float, msgspec.Struct]]
BUSY = RouterConfig(queue_threshold=0.5, queue_limit=8, session_ttl=5.0, prediction_ttl=0.5)


class Fleet:
    """Requests, engines and other routers that do what a seed draws, on a taped scheduler."""

    def __init__(self, seed: int, config: RouterConfig, *, is_exact: bool = True) -> None:
        self.recorder = ListedRecords()
        self._draw = Random(seed)
        self._index = DrawnIndex() if is_exact else None
        load = TapedLoad("here")
        self.scheduler = TapedScheduler(
            config, self.recorder, target="llm.Engine", load=load, follower=self._index
        )
        self._load = load
        self._other = SharedLoad("there")
        self._profiles = [
            profile(
                name,
                max_batched_tokens=256,
                total_blocks=64,
                dp_size=size,
                tags=tags,
                events=str(is_exact).lower(),
            )
            for name, size, tags in (
                ("a", 1, "far-east,quickest"),
                ("b", 2, "far-east"),
                ("c", 1, "west"),
            )
        ]
        self._running: list[int] = []
        self._waiting: list[Ticket] = []
        self._now = 100.0
        self._requests = 0
        self._elsewhere = 0

    def run(self, steps: int) -> Records:
        """Let so much happen; the tape so far."""
        for _ in range(steps):
            self._now += self._draw.expovariate(20.0)
            if self._index is not None and self._draw.random() < 0.5:
                self._index.position = At(self._index.position.sequence + 1)
            self._draw.choices(
                [self._submit, self._first, self._end, self._leave, self._hear, self._change],
                [10, 6, 6, 1, 3, 1],
            )[0]()
            self._release()
        return self.recorder.records

    def _submit(self) -> None:
        draw = self._draw
        self._requests += 1
        wanted = shape(draw.choice([0, 1, 7, 8, 9, 40]), of=draw.randrange(6))
        wanted.metadata = {"tenant": draw.choice(["tenant-ada", "tenant-bob"])}
        wanted.priority = draw.randrange(2)
        constraints = draw.choice(
            [
                Constraints(),
                Constraints(frozenset({"far-east"})),
                Constraints(preferred={"quickest": 0.5}),
            ]
        )
        request = SchedulingRequest(
            f"request-{self._requests}",
            wanted,
            draw.sample(self._profiles, draw.randrange(1, 4)),
            self._now,
            session=draw.choice(["", "", "session-1", "session-2"]),
            constraints=constraints,
            hops=draw.choice([{}, {"c": 20.0}]),
        )
        try:
            found = self.scheduler.submit(request, self._now)
        except DynbusError:
            return
        if isinstance(found, Decision):
            self._running.append(found.number)
        else:
            self._waiting.append(found)

    def _release(self) -> None:
        for ticket, found in self.scheduler.release(self._now):
            self._waiting.remove(ticket)
            if isinstance(found, Decision):
                self._running.append(found.number)

    def _first(self) -> None:
        if self._running:
            number = self._draw.choice(self._running)
            self.scheduler.first_item(number, self._now)
            self.scheduler.note_reused(number, self._draw.randrange(64), self._now)
            self.scheduler.grown(number, self._draw.randrange(64))

    def _end(self) -> None:
        if self._running:
            number = self._running.pop(self._draw.randrange(len(self._running)))
            self.scheduler.ended(number, self._now, self._draw.choice(["", "Unavailable"]))

    def _leave(self) -> None:
        if self._waiting:
            self.scheduler.withdraw(self._waiting.pop())

    def _hear(self) -> None:
        """Another router sends a prompt somewhere, or falls silent."""
        self._elsewhere += 1
        rank, prompt = Rank(self._draw.choice("abc"), 0), shape(4, of=self._elsewhere % 5)
        hashes = prompt.sequence_hashes
        self._other.add(str(self._elsewhere), rank, hashes, prompt.prompt_tokens, 0, None)
        for message in self._other.outgoing(self._now):
            heard = self._load.receive(message, self._now)
            for place, blocks in heard.sent:
                self.scheduler.note_elsewhere(place, blocks, self._now)
        if self._elsewhere % 7 == 0:
            self._load.expire(self._now + 10.0)

    def _change(self) -> None:
        """Instances go, or begin anew."""
        match self._draw.randrange(3):
            case 0:
                self.scheduler.refresh(self._profiles)
            case 1:
                self.scheduler.forget_cache("b")
            case _:
                self.scheduler.remove_instance("c")


class DrawnIndex(HandIndex):
    """An index whose ranks hold what is drawn, anew at each place in its stream."""

    def overlaps(self, block_hashes: NDArray[np.uint64]) -> dict[Rank, Overlap]:
        draw = Random(f"{self.position.sequence} {block_hashes.tobytes().hex()}")
        blocks = len(block_hashes)
        return {
            Rank(name, 0): Overlap(draw.randrange(blocks + 1), 0, 0, 0)
            for name in "ab"
            if blocks and draw.random() < 0.7
        }


def told(records: Sequence[tuple[float, msgspec.Struct]], first: int = 0) -> list[Entry]:
    """Records as they are read of a stream."""
    data = encode_records("r", first, 1000.0, list(records))
    message = decode_message(data)
    assert message is not None
    return list(entries_of([message]))


def replayed(entries: Sequence[Entry], **settings: object) -> Replayed:
    replay = Replay(settings)  # type: ignore[arg-type]  # what users give
    for entry in entries:
        replay.take(entry)
    return replay.outcome


@pytest.mark.parametrize(
    ("config", "is_exact"),
    [
        (RouterConfig(), True),
        (BUSY, True),
        (BUSY, False),
        (RouterConfig(policy="dynamo", temperature=0.7), True),
    ],
    ids=["plain", "queue", "no events", "drawn"],
)
@pytest.mark.parametrize("seed", range(3))
def test_a_whole_tape_gives_the_same_decisions(
    seed: int, config: RouterConfig, is_exact: bool
) -> None:
    outcome = replayed(told(Fleet(seed, config, is_exact=is_exact).run(1500)))

    assert outcome.differing == []
    assert outcome.left_out == {}
    assert outcome.decisions > 400
    assert outcome.placed == outcome.recorded_placed
    assert outcome.reuse == outcome.recorded_reuse


def test_a_tape_that_is_read_from_the_middle_on_is_understood_once_it_begins_anew() -> None:
    records = Fleet(1, BUSY).run(4000)

    outcome = replayed(told(records[700:]))

    assert outcome.unexplained == []
    assert outcome.left_out.keys() == {UNKNOWN}
    assert outcome.decisions > 3 * outcome.left_out[UNKNOWN]
    assert {one.why for one in outcome.differing} <= {BEFORE}


def test_a_router_that_was_there_before_the_file_begins_is_heard_from_its_first_change_on() -> None:
    recorder, load, other = ListedRecords(), TapedLoad("here"), SharedLoad("there")
    scheduler = TapedScheduler(RouterConfig(), recorder, target="llm.Engine", load=load)
    profiles = [profile("a"), profile("b")]

    def submit(at: float, of: int) -> Decision:
        decided = scheduler.submit(request(f"{at}", profiles, blocks=2, of=of, now=at), at)
        assert isinstance(decided, Decision)
        return decided

    def tell(at: float, number: int, rank: Rank, blocks: int) -> None:
        asked = shape(blocks, of=number)
        other.add(str(number), rank, asked.sequence_hashes, asked.prompt_tokens, 0, None)
        for message in other.outgoing(at):
            load.receive(message, at)

    tell(0.0, 1, Rank("a", 0), 1)
    before = len(recorder.records)
    warm = 100.0 + WARM_AFTER
    scheduler.ended(submit(100.0, 2).number, 101.0)
    first = submit(warm, 3)
    (rest,) = (each.ranks[0] for each in profiles if each.ranks[0] != first.chosen)
    tell(warm, 4, rest, 40)
    assert submit(warm, 5).chosen == first.chosen

    outcome = replayed(told(recorder.records[before:]))

    assert (outcome.decisions, outcome.differing) == (3, [])


def test_records_that_are_missing_are_counted_and_what_follows_is_explained() -> None:
    records = Fleet(2, BUSY).run(4000)
    whole = told(records)
    first = told(records[:900])
    rest = [each._replace(number=each.number + 1000) for each in told(records[1000:])]
    rest[0] = rest[0]._replace(missing=100)

    outcome = replayed([*first, *rest])

    assert outcome.missing == 100
    assert outcome.unexplained == []
    assert 0 < outcome.left_out[UNKNOWN] < outcome.decisions < replayed(whole).decisions


def test_a_gap_that_no_record_of_a_router_is_behind_is_one() -> None:
    records = Fleet(2, BUSY).run(4000)
    # As a recorder tells it that has lost what it told before.
    share: Records = [(records[1000][0], Event(SAMPLED_EVENT, "r", "", {"one_in": 1}))]
    first = told(records[:900])
    rest = told([*share, *records[1000:]], 999)
    rest[0] = rest[0]._replace(missing=99)

    outcome = replayed([*first, *rest])

    assert outcome.missing == 99
    assert outcome.unexplained == []
    assert outcome.left_out[UNKNOWN] > 0


@pytest.mark.parametrize("config", [RouterConfig(), BUSY], ids=["plain", "queue"])
def test_of_a_share_of_the_requests_all_is_on_the_tape_and_differences_are_explained(
    config: RouterConfig,
) -> None:
    fleet = Fleet(7, config)
    fleet.recorder.one_in = 4

    records = fleet.run(4000)

    taken = [one for _, one in records if isinstance(one, Submitted)]
    assert {(one.one_in, one.request % 4) for one in taken} == {(4, 0)}
    assert 100 < len(taken) < 800
    outcomes = [one for _, each in records if isinstance(each, Released) for one in each.outcomes]
    chosen = [one.chosen for one in taken] + [each[1] for each in outcomes]
    numbers = {one.number for one in chosen if one is not None}
    ended = [one.number for _, one in records if isinstance(one, Ended)]
    assert len(ended) > 50
    assert set(ended) <= numbers
    outcome = replayed(told(records))
    assert outcome.decisions > 100
    assert outcome.left_out == {}
    assert outcome.unexplained == []
    assert {one.why for one in outcome.differing} <= {SAMPLED}


def test_another_policy_decides_the_same_requests_otherwise() -> None:
    entries = told(Fleet(3, RouterConfig()).run(1500))

    same, other = replayed(entries), replayed(entries, policy="dynamo", temperature=5.0)

    assert same.recorded_placed == same.placed == other.recorded_placed
    assert other.placed != other.recorded_placed
    assert other.placed.total() == other.recorded_placed.total()


@pytest.mark.parametrize(("threshold", "more"), [(None, True), (0.1, False)])
def test_with_another_queue_requests_wait_shorter_or_longer_than_on_record(
    threshold: float | None, more: bool
) -> None:
    outcome = replayed(told(Fleet(6, BUSY).run(3000)), queue_threshold=threshold)

    now, before = outcome.placed.total(), outcome.recorded_placed.total()
    assert min(now, before) > 100
    assert (now >= before) is more


def test_decisions_of_a_policy_without_a_name_are_left_out_and_made_by_one_that_is_given() -> None:
    def first(request: object, candidates: Sequence[object]) -> list[float]:
        return [float(at) for at in range(len(candidates))]

    entries = told(Fleet(4, RouterConfig(policy=first)).run(500))

    outcome = replayed(entries)

    assert outcome.decisions == 0
    assert outcome.left_out.keys() == {NO_POLICY}
    assert replayed(entries, policy="kv").decisions > 100


def test_no_name_of_a_user_and_no_prompt_is_on_a_tape() -> None:
    records = Fleet(5, BUSY).run(500)

    data = encode_records("r", 0, 0.0, records)

    for word in (b"tenant-", b"request-", b"far-east", b"quickest", b"session-"):
        assert word not in data


def test_a_file_names_no_code_that_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "it-ran"
    policy = f"subprocess:call(args='touch {mark}', shell=True)"
    fleet = Fleet(1, RouterConfig())
    records = [
        (at, msgspec.structs.replace(one, policy=policy) if hasattr(one, "policy") else one)
        for at, one in fleet.run(50)
    ]

    outcome = replayed(told(records))

    assert not mark.exists()
    assert set(outcome.left_out) == {NO_POLICY}


def test_a_record_that_is_damaged_is_missing() -> None:
    fleet = Fleet(2, RouterConfig())
    records = fleet.run(50)
    damaged: Records = [(records[-1][0], Elsewhere("a", 0, b"short"))]

    outcome = replayed(told([*records, *damaged]))

    assert outcome.missing == 1
    assert outcome.decisions


def test_routers_that_share_their_load_decide_the_same_again() -> None:
    async def story() -> list[Entry]:
        async with TestKit(flight=True) as kit:
            await start(kit, "a", "b")
            other = await kit.runtime()
            async with (
                open_router(kit.caller, Worker, exact=False) as one,
                open_router(other, Worker, exact=False) as two,
                anyio.create_task_group() as held,
            ):
                clients = [kit.client(Worker, routing=one), other.client(Worker, routing=two)]
                with call_options(wait=5.0):
                    for client in clients:
                        await where(client, prompt(of=9))
                # The other one's request is so heavy that the third goes where the first is.
                for number, (which, blocks) in enumerate([(0, 2), (1, 40), (0, 2)]):
                    held.start_soon(where, clients[which], prompt(blocks, number, hold=True))
                    await anyio.sleep(0.1)
                held.cancel_scope.cancel()
            await anyio.sleep(1.0)
            return await entries_on(kit.bus, "llm")

    replay = Replay()
    for entry in run(story()):
        replay.take(entry)

    outcome = replay.outcome
    assert (outcome.decisions, outcome.differing, outcome.missing) == (5, [], 0)


def test_a_record_that_cannot_be_read_is_missing_and_what_follows_is_explained() -> None:
    records = Fleet(2, BUSY).run(4000)
    place = next(at for at, (_, one) in enumerate(records) if at > 900 and isinstance(one, Ended))
    time, ended = records[place]
    assert isinstance(ended, Ended)
    records[place] = time, msgspec.structs.replace(ended, number="odd")

    outcome = replayed(told(records))

    assert outcome.missing == 1
    assert outcome.unexplained == []
    assert outcome.left_out[UNKNOWN] > 0


def test_a_request_that_is_there_again_while_it_waits_is_damage() -> None:
    records = Fleet(2, BUSY).run(500)
    place, waits = next(
        (place, one)
        for place, (_, one) in enumerate(records)
        if isinstance(one, Submitted) and one.chosen is None and not one.refused
    )
    records.insert(place + 1, (records[place][0], waits))

    outcome = replayed(told(records))

    assert outcome.missing == 1
    assert outcome.decisions
