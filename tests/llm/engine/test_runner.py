"""Whoever reads is not left waiting, and whoever does not holds up nobody else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import msgspec
import pytest
from tests.conditions import eventually
from tests.llm.engine.engines import CountingEngine, Reader

from dynbus.bus.clock import monotonic
from dynbus.bus.errors import HandlerError, InvalidRequest, Unavailable
from dynbus.kvrouter.events import BlockRemoved, KvEvent
from dynbus.llm.engine import Engine, Step
from dynbus.llm.engine.runner import MAX_JOINED_TOKENS, EngineRunner
from dynbus.llm.engine.stepping import STEPS_AHEAD, STOP_TIMEOUT
from dynbus.llm.generation import Generated, GenerateRequest
from dynbus.llm.mock.engine import MockConfig, MockEngine
from dynbus.llm.mock.timing import Timing
from dynbus.testing import run

CONFIG = MockConfig(block_size=4, blocks=64)


def request(max_tokens: int = 20, *, n: int = 1) -> GenerateRequest:
    return GenerateRequest(list(range(16)), max_tokens, n=n)


async def read(runner: EngineRunner, name: str, wanted: GenerateRequest) -> list[int]:
    """The tokens of a request; raises what it ended with."""
    reader = Reader()
    runner.submit(name, wanted, reader.reply)
    await reader.closed()
    if reader.error is not None:
        raise reader.error
    return reader.token_ids


class BrokenSink:
    def publish(self, events: Sequence[KvEvent]) -> None:
        raise OSError("the disk is gone")


# An engine that models time --------------------------------------------------------------


def test_requests_side_by_side_share_the_steps() -> None:
    async def story() -> tuple[list[list[int]], float]:
        async with EngineRunner(MockEngine(CONFIG)) as runner:
            begun = monotonic()
            found = await asyncio.gather(*(read(runner, name, request()) for name in "abc"))
            return found, monotonic() - begun

    made, seconds = run(story())

    assert [len(tokens) for tokens in made] == [20, 20, 20]
    timing, capacity = Timing(), CONFIG.capacity_tokens
    prefill = timing.prefill(16 + 4 + 4)
    assert seconds == pytest.approx(
        prefill + float(timing.decode_steps(3 * 17, 3, 19, capacity).sum()), abs=0.001
    )


def test_an_engine_wakes_up_for_a_request_after_it_was_idle() -> None:
    async def story() -> float:
        async with EngineRunner(MockEngine(CONFIG)) as runner:
            await read(runner, "a", request(1))
            await asyncio.sleep(60.0)
            begun = monotonic()
            await read(runner, "b", request(1))
            return monotonic() - begun

    # The sleep is not caught up with: the step takes its time.
    assert run(story()) > 0.5 * Timing().prefill(4)


# Its failures ----------------------------------------------------------------------------


def test_an_engine_that_fails_ends_its_requests(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> list[str]:
        told: list[str] = []
        async with EngineRunner(MockEngine(CONFIG), BrokenSink(), failed=told.append) as runner:
            with pytest.raises(Unavailable, match="does not run: the disk is gone"):
                await read(runner, "a", request())
            with pytest.raises(Unavailable, match="does not run: the disk is gone"):
                await read(runner, "b", request())
        return told

    [reason] = run(story())

    assert "the disk is gone" in reason
    assert "the engine failed" in caplog.text


class Panic(BaseException):
    """As libraries in Rust raise."""


@pytest.mark.parametrize("kind", [RuntimeError, Panic])
def test_an_engine_that_fails_in_its_thread_ends_its_requests(
    kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> list[str]:
        told: list[str] = []
        engine = CountingEngine(allowed=5)
        async with EngineRunner(engine, failed=told.append) as runner:
            reader = Reader()
            runner.submit("a", request(), reader.reply)
            await eventually(lambda: len(reader.items) == 5)
            engine.broken = kind("out of memory")
            engine.allowed.release()
            await reader.closed()
            # It may have been the cause: it is not to be sent elsewhere.
            assert isinstance(reader.error, HandlerError)
            with pytest.raises(Unavailable, match="does not run: .*out of memory"):
                await read(runner, "b", request())
            assert runner.failed_requests == 1
        return told

    [reason] = run(story())

    assert "out of memory" in reason
    assert "the engine failed" in caplog.text


@pytest.mark.parametrize("is_new", [True, False])
def test_only_requests_that_may_have_made_the_engine_fail_are_not_to_be_sent_elsewhere(
    is_new: bool,
) -> None:
    async def story() -> dict[str, type[Exception]]:
        engine = CountingEngine(allowed=2)
        async with EngineRunner(engine) as runner:
            readers = {name: Reader() for name in ("old", "new", "late")}
            runner.submit("old", request(), readers["old"].reply)
            await eventually(lambda: len(readers["old"].items) == 2)
            if is_new:
                engine.poison = 99
                runner.submit("new", GenerateRequest([99], 5), readers["new"].reply)
            else:
                # A token that is made is poison as well.
                engine.broken = RuntimeError("a token is poison")
            # The step that waits for its turn knows nothing of it.
            engine.allowed.release(2)
            await eventually(lambda: runner.failed_requests)
            with pytest.raises(Unavailable):
                runner.submit("late", request(), readers["late"].reply)
            return {name: type(one.error) for name, one in readers.items() if one.error}

    ended = run(story())

    assert ended == ({"old": Unavailable, "new": HandlerError} if is_new else {"old": HandlerError})


def test_a_request_that_cannot_go_on_ends_alone(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        engine = CountingEngine(allowed=0)
        async with EngineRunner(engine) as runner:
            good, bad = Reader(), Reader()
            runner.submit("good", request(5), good.reply)
            runner.submit("bad", request(50), bad.reply)
            # The first step may have begun before the second request came.
            engine.allowed.release(2)
            await eventually(lambda: bad.items)
            engine.failing["bad"] = "its logits are no numbers"
            engine.allowed.release(100)
            await bad.closed()
            await good.closed()

        assert isinstance(bad.error, HandlerError)
        assert "its logits are no numbers" in str(bad.error)
        assert "bad failed: its logits are no numbers" in caplog.text
        assert good.token_ids == [0, 1, 2, 3, 4]

    run(story())


def test_who_asks_for_what_shows_to_be_impossible_is_told_why() -> None:
    class Choosy(CountingEngine):
        """Finds out with the second token."""

        def step(self) -> Step:
            step = super().step()
            refusals = [
                (name, "it is too much") for name, (_, made) in self.requests.items() if made > 1
            ]
            for name, _ in refusals:
                del self.requests[name]
            return step._replace(refusals=refusals)

    async def story() -> None:
        async with EngineRunner(Choosy()) as runner:
            good, bad = Reader(), Reader()
            runner.submit("bad", request(50), bad.reply)
            runner.submit("good", request(1), good.reply)
            await bad.closed()
            await good.closed()

        assert isinstance(bad.error, InvalidRequest)
        assert "it is too much" in str(bad.error)
        assert good.error is None

    run(story())


@pytest.mark.parametrize("computes", [False, True])
def test_a_request_that_the_engine_loses_ends_alone(
    computes: bool, caplog: pytest.LogCaptureFixture
) -> None:
    class Forgetful(CountingEngine):
        """Knows nothing of further continuations, and so never ends them."""

        def add(self, request_id: str, request: GenerateRequest) -> None:
            super().add(request_id, msgspec.structs.replace(request, n=1))

    async def story() -> None:
        engine = Forgetful()
        engine.computes = computes
        async with EngineRunner(engine) as runner:
            lost = Reader()
            runner.submit("lost", request(3, n=2), lost.reply)
            whole = await read(runner, "whole", request(5))
            await lost.closed()

            assert whole == [0, 1, 2, 3, 4]
            assert lost.token_ids == [0, 1, 2]
            assert isinstance(lost.error, HandlerError)
            assert "the engine has lost the request" in str(lost.error)
            assert await read(runner, "later", request(2)) == [0, 1]

    run(story())

    assert "lost: the engine has lost the request" in caplog.text
    assert "has not ended the continuations with index 1" in caplog.text


def test_an_engine_that_is_stopped_ends_its_requests() -> None:
    async def story() -> None:
        computing = CountingEngine(allowed=3)
        engines: list[Engine] = [MockEngine(CONFIG), computing]
        for engine in engines:
            reader = Reader()
            async with EngineRunner(engine) as runner:
                runner.submit("a", request(200), reader.reply)
                await eventually(lambda reader=reader: reader.items)  # type: ignore[misc]
                asyncio.get_running_loop().call_later(1.0, computing.allowed.release)
            assert "the engine was stopped" in str(reader.error)

    run(story())


def test_a_step_that_does_not_end_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> float:
        engine = CountingEngine(allowed=3)
        async with EngineRunner(engine) as runner:
            reader = Reader()
            runner.submit("a", request(200), reader.reply)
            await eventually(lambda: len(reader.items) == 3)
            begun = monotonic()
        seconds = monotonic() - begun
        engine.allowed.release()
        return seconds

    assert run(story()) == pytest.approx(STOP_TIMEOUT)
    assert "did not end its step in 10 s: it is left alone" in caplog.text


def test_a_request_that_the_engine_refuses_says_why() -> None:
    async def story() -> None:
        engines: list[Engine] = [MockEngine(CONFIG), CountingEngine()]
        for engine in engines:
            async with EngineRunner(engine) as runner:
                with pytest.raises(InvalidRequest, match="the prompt is empty"):
                    await read(runner, "a", GenerateRequest([], 5))
                assert len(await read(runner, "a", request(3))) == 3

    run(story())


# An engine that computes ------------------------------------------------------------------


def test_an_engine_that_computes_belongs_to_one_thread() -> None:
    async def story() -> CountingEngine:
        engine = CountingEngine()
        async with EngineRunner(engine) as runner:
            found = await asyncio.gather(*(read(runner, name, request()) for name in "abc"))
            assert found == [list(range(20))] * 3
        return engine

    engine = run(story())

    assert len(engine.threads) == 1
    assert threading.get_ident() not in engine.threads


def test_the_loop_goes_on_while_a_step_computes() -> None:
    async def story() -> None:
        engine = CountingEngine(allowed=0)
        async with EngineRunner(engine) as runner:
            reader = Reader()
            runner.submit("a", request(1), reader.reply)
            for _ in range(100):
                await asyncio.sleep(0)
            assert not reader.items
            engine.allowed.release()
            await reader.closed()

    run(story())


def test_a_blocked_loop_holds_up_the_engine_after_some_steps() -> None:
    async def story() -> int:
        engine = CountingEngine()
        async with EngineRunner(engine) as runner:
            reader = Reader()
            runner.submit("a", request(10_000), reader.reply)
            # The loop does not get its turn, and the engine comes to rest.
            threading.Event().wait(0.2)
            taken = engine.steps
            runner.cancel("a")
            return taken

    assert run(story()) <= STEPS_AHEAD


def test_what_is_cancelled_is_gone_before_the_next_step() -> None:
    async def story() -> None:
        engine = CountingEngine(allowed=1)
        async with EngineRunner(engine) as runner:
            reader, other = Reader(), Reader()
            runner.submit("a", request(1000), reader.reply)
            runner.submit("b", request(4), other.reply)
            await eventually(lambda: reader.items)
            runner.cancel("a")
            # The step that computes already, and the one before which it is taken out.
            engine.allowed.release(2)
            await eventually(lambda: "a" not in engine.requests)
            engine.allowed.release(5)
            await other.closed()

        assert reader.items[-1] == Generated([], finish_reason="cancelled")
        assert reader.error is None

    run(story())


def test_a_request_that_is_cancelled_ends_as_cancelled_and_frees_its_blocks() -> None:
    async def story() -> tuple[list[Generated], int]:
        engine = MockEngine(CONFIG)
        async with EngineRunner(engine) as runner:
            reader = Reader()
            runner.submit("a", request(n=2), reader.reply)
            await eventually(lambda: len(reader.items) >= 2)
            before = len(reader.items)
            runner.cancel("a")
            await reader.closed()
            return reader.items[before:], engine.manager.free

    last, free = run(story())

    assert [(item.index, item.finish_reason) for item in last] == [
        (0, "cancelled"),
        (1, "cancelled"),
    ]
    assert free == 64


# Readers ----------------------------------------------------------------------------------


def test_a_reader_without_credit_gets_nothing_more_and_others_all_of_theirs() -> None:
    async def story() -> None:
        async with EngineRunner(CountingEngine()) as runner:
            slow, fast = Reader(credit=3), Reader()
            runner.submit("slow", request(50), slow.reply)
            runner.submit("fast", request(50), fast.reply)
            await fast.closed()
            await eventually(lambda: runner.load.running == 0)

            assert fast.token_ids == list(range(50))
            assert slow.token_ids == [0, 1, 2]
            assert not slow.ended
            slow.grant(1)
            await slow.closed()

        # What was kept comes joined.
        assert [len(item.token_ids) for item in slow.items] == [1, 1, 1, 47]
        assert slow.token_ids == list(range(50))
        assert slow.items[-1].finish_reason == "length"

    run(story())


def test_what_is_kept_for_a_reader_is_joined_in_bounded_items() -> None:
    async def story() -> Reader:
        async with EngineRunner(CountingEngine()) as runner:
            reader = Reader(credit=1)
            runner.submit("a", request(MAX_JOINED_TOKENS * 3, n=2), reader.reply)
            await eventually(lambda: runner.output_tokens == MAX_JOINED_TOKENS * 6)
            reader.grant(1)
            await eventually(lambda: len(reader.items) >= 3)
            reader.grant(1000)
            await reader.closed()
            return reader

    reader = run(story())

    assert max(len(item.token_ids) for item in reader.items) == MAX_JOINED_TOKENS
    for index in range(2):
        mine = [item for item in reader.items if item.index == index]
        tokens = [token for item in mine for token in item.token_ids]
        assert tokens == list(range(MAX_JOINED_TOKENS * 3))
        assert [item.finish_reason for item in mine if item.finish_reason] == ["length"]


@pytest.mark.parametrize("n", [1, 3])
def test_a_reader_whose_call_has_ended_costs_nothing_more(n: int) -> None:
    async def story() -> None:
        engine = CountingEngine(allowed=2)
        async with EngineRunner(engine) as runner:
            reader = Reader()
            runner.submit("a", request(1000, n=n), reader.reply)
            await eventually(lambda: len(reader.items) == 2 * n)
            reader.end()
            engine.allowed.release(100)
            await eventually(lambda: not engine.requests)
            assert await read(runner, "b", request(2)) == [0, 1]

        assert engine.steps < 10

    run(story())


# Requests without a stream ----------------------------------------------------------------


def whole(max_tokens: int, *, n: int = 1) -> GenerateRequest:
    return GenerateRequest(list(range(16)), max_tokens, n=n, stream=False)


@pytest.mark.parametrize("n", [1, 3])
def test_a_request_that_wants_no_stream_gets_few_items(n: int) -> None:
    async def story() -> Reader:
        async with EngineRunner(MockEngine(CONFIG)) as runner:
            reader, streamed = Reader(), Reader()
            runner.submit("a", whole(60, n=n), reader.reply)
            runner.submit("b", request(60, n=n), streamed.reply)
            await streamed.closed()
            await reader.closed()
            assert len(streamed.items) == 60 * n
            assert sorted(reader.token_ids) == sorted(streamed.token_ids)
            return reader

    items = run(story()).items

    # The first one tells that the prompt is computed.
    assert (len(items[0].token_ids), items[0].cached_tokens) == (1, 0)
    assert len(items) <= 2 * n + 1
    for index in range(n):
        reasons = [item.finish_reason for item in items if item.index == index]
        assert reasons[-1] == "length"
        assert set(reasons[:-1]) <= {None}


def test_what_is_gathered_is_bounded_and_not_kept_for_longer_than_it_may_be() -> None:
    async def story(hold: float | None) -> list[int]:
        async with EngineRunner(MockEngine(CONFIG), kept_for=hold) as runner:
            reader = Reader()
            runner.submit("a", whole(MAX_JOINED_TOKENS + 60), reader.reply)
            await reader.closed()
            return [len(item.token_ids) for item in reader.items]

    assert run(story(None)) == [1, MAX_JOINED_TOKENS, 59]
    # Steps take 5.8 ms and more.
    in_time = run(story(0.1))
    assert sum(in_time) == MAX_JOINED_TOKENS + 60
    assert max(in_time) <= 0.1 / 0.0058 + 1


def test_a_gathered_request_that_is_cancelled_has_what_came_and_ends_at_once() -> None:
    async def story() -> tuple[Reader, int]:
        engine = CountingEngine(allowed=10)
        async with EngineRunner(engine) as runner:
            reader = Reader()
            runner.submit("a", whole(100), reader.reply)
            await eventually(lambda: runner.output_tokens == 10)
            runner.cancel("a")
            assert reader.ended
            engine.allowed.release(2)
            await eventually(lambda: not engine.requests)
            return reader, engine.steps

    reader, steps = run(story())

    assert reader.token_ids == list(range(10))
    assert reader.items[-1].finish_reason == "cancelled"
    assert steps < 13


def test_a_gathered_request_waits_for_its_reader_like_others() -> None:
    async def story() -> Reader:
        async with EngineRunner(MockEngine(CONFIG)) as runner:
            reader = Reader(credit=1)
            runner.submit("a", whole(40), reader.reply)
            await eventually(lambda: runner.output_tokens == 40)
            assert len(reader.items) == 1
            reader.grant(1)
            await reader.closed()
            return reader

    assert [len(item.token_ids) for item in run(story()).items] == [1, 39]


class Checking(CountingEngine):
    """An engine with checks of its own to do while it is idle.

    Attributes:
        checks: that it has done, and how many there are.
    """

    def __init__(self, wanted: int) -> None:
        super().__init__()
        self.checks = 0
        self.wanted = wanted
        self.while_busy = 0

    def idle_for(self) -> float | None:
        return 0.001 if self.checks < self.wanted else None

    def check(self) -> Step:
        self.threads.add(threading.get_ident())
        self.checks += 1
        self.while_busy += bool(self.requests)
        return Step((), [BlockRemoved([self.checks])])

    def note_source(self, request_id: str, source: str) -> None:
        raise AssertionError(request_id)


def test_an_engine_checks_while_it_has_no_work_and_tells_of_what_it_dropped() -> None:
    published: list[KvEvent] = []

    class Sink:
        def publish(self, events: Sequence[KvEvent]) -> None:
            published.extend(events)

    async def story() -> tuple[Checking, list[int]]:
        engine = Checking(5)
        async with EngineRunner(engine, Sink()) as runner:
            reader = Reader()
            runner.submit("a", GenerateRequest([1], 50), reader.reply)
            await reader.closed()
            await eventually(lambda: len(published) == 5)
        return engine, reader.token_ids

    engine, tokens = asyncio.run(story())

    assert tokens == list(range(50))
    assert engine.checks == 5
    assert engine.while_busy == 0
    assert len(engine.threads - {threading.get_ident()}) == 1
