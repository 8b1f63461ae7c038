"""Whoever asks for an embedding has it, or is told why not, and leaves nothing in the engine."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from tests.conditions import eventually
from tests.llm.engine.engines import CountingEngine
from tests.llm.engine.test_worker import Silent, Worker

from dynbus.bus.errors import Cancelled, DynbusError, HandlerError, InvalidRequest, Unavailable
from dynbus.llm.embedding import Embedded, EmbedRequest, Pooling
from dynbus.llm.engine import Step
from dynbus.llm.engine.pooling import StatePool
from dynbus.llm.engine.runner import EngineRunner
from dynbus.testing import TestKit, run

TEXT = EmbedRequest([1, 2, 3])


# How states become an embedding ----------------------------------------------------------


@given(
    states=arrays(np.float32, (12, 4), elements=st.floats(-4, 4, width=32)),
    cuts=st.lists(st.integers(1, 11), unique=True).map(sorted),
    pooling=st.sampled_from(["mean", "last"]),
    dimensions=st.integers(1, 4),
)
def test_an_embedding_has_length_1_and_the_same_bits_whatever_the_chunks_were(
    states: np.ndarray[tuple[int, int], np.dtype[np.float32]],
    cuts: list[int],
    pooling: Pooling,
    dimensions: int,
) -> None:
    whole = StatePool(pooling, dimensions)
    whole.add(states[-whole.wanted(12, is_last=True) :])
    cut = StatePool(pooling, dimensions)
    for first, last in zip([0, *cuts], [*cuts, 12], strict=True):
        wanted = cut.wanted(last - first, is_last=last == 12)
        if wanted:
            cut.add(states[last - wanted : last])

    one, other = whole.embedding(), cut.embedding()

    if one is None:
        assert other is None
        return
    assert other is not None
    assert one.tobytes() == other.tobytes()
    assert len(one) == dimensions
    assert np.linalg.norm(one) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_states_that_are_no_numbers_have_no_embedding(value: float) -> None:
    pool = StatePool("mean", 2)

    pool.add(np.full((3, 2), value, np.float32))

    assert pool.embedding() is None


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
def test_an_embedding_is_the_same_as_numbers_and_as_bytes(numbers: list[float]) -> None:
    as_numbers = Embedded(numbers)
    as_bytes = msgspec.json.decode(
        msgspec.json.encode(Embedded(np.array(numbers, "<f4").tobytes())), type=Embedded
    )

    assert as_bytes.vector().tolist() == as_numbers.vector().tolist() == numbers


@pytest.mark.parametrize("broken", [b"abc", b"", [], [1.0, 1e300], [float("nan")]])
def test_what_is_no_embedding_says_so(broken: bytes | list[float]) -> None:
    with pytest.raises(ValueError, match="numbers|multiple"):
        Embedded(broken).vector()


# What runs an engine ---------------------------------------------------------------------


async def error_of(runner: EngineRunner, request: EmbedRequest = TEXT) -> DynbusError:
    with pytest.raises(DynbusError) as raised:
        await runner.embed("a", request)
    return raised.value


def test_texts_are_embedded_side_by_side() -> None:
    async def story() -> list[Embedded]:
        async with EngineRunner(CountingEngine()) as runner:
            texts = (runner.embed(str(count), EmbedRequest([1] * count)) for count in (1, 2, 3))
            return await asyncio.gather(*texts)

    assert [one.vector().tolist() for one in run(story())] == [[1.0], [2.0], [3.0]]


def test_a_text_that_the_engine_refuses_says_why() -> None:
    async def story() -> DynbusError:
        async with EngineRunner(CountingEngine()) as runner:
            return await error_of(runner, EmbedRequest([]))

    error = run(story())

    assert isinstance(error, InvalidRequest)
    assert "empty" in str(error)


def test_a_text_that_cannot_be_embedded_ends_alone() -> None:
    async def story() -> tuple[DynbusError, Embedded, int]:
        engine = CountingEngine(allowed=0)
        async with EngineRunner(engine) as runner:
            async with asyncio.TaskGroup() as tasks:
                failed = tasks.create_task(error_of(runner))
                made = tasks.create_task(runner.embed("b", TEXT))
                await asyncio.sleep(0)
                engine.failing["a"] = "it has no embedding"
                engine.allowed.release(10)
            return failed.result(), made.result(), runner.failed_requests

    error, made, count = run(story())

    assert isinstance(error, HandlerError)
    assert "it has no embedding" in str(error)
    assert (made.vector().tolist(), count) == ([3.0], 1)


def test_a_text_with_which_the_engine_fails_is_not_to_be_sent_elsewhere() -> None:
    async def story() -> tuple[DynbusError, DynbusError]:
        engine = CountingEngine()
        engine.broken = RuntimeError("no memory")
        async with EngineRunner(engine) as runner:
            return await error_of(runner), await error_of(runner)

    first, later = run(story())

    assert isinstance(first, HandlerError)
    assert "no memory" in str(first)
    assert isinstance(later, Unavailable)


def test_texts_of_an_engine_that_is_stopped_may_go_elsewhere() -> None:
    async def story() -> DynbusError:
        engine = CountingEngine(allowed=0)
        async with asyncio.TaskGroup() as tasks:
            async with EngineRunner(engine) as runner:
                asked = tasks.create_task(error_of(runner))
                await eventually(lambda: bool(engine.texts), what="the engine has the text")
                # When nobody listens to the engine any more.
                asyncio.get_running_loop().call_later(0.2, engine.allowed.release)
            return await asked

    assert isinstance(run(story()), Unavailable)


def test_a_text_that_the_engine_loses_ends() -> None:
    class Forgetful(CountingEngine):
        def step(self) -> Step:
            super().step()
            return Step(())

    async def story() -> DynbusError:
        async with EngineRunner(Forgetful()) as runner:
            return await error_of(runner)

    error = run(story())

    assert isinstance(error, HandlerError)
    assert "lost" in str(error)


@pytest.mark.parametrize("by_name", [True, False], ids=["cancelled", "its task is gone"])
def test_a_text_that_nobody_waits_for_leaves_the_engine(by_name: bool) -> None:
    async def story() -> tuple[BaseException | None, int]:
        engine = CountingEngine(allowed=0)
        async with EngineRunner(engine) as runner:
            asked = asyncio.ensure_future(runner.embed("a", TEXT))
            await eventually(lambda: bool(engine.texts), what="the engine has the text")
            if by_name:
                runner.cancel("a")
            else:
                asked.cancel()
            await asyncio.wait({asked})
            engine.allowed.release(10)
            await eventually(lambda: not engine.texts, what="the engine has forgotten it")
            error = None if asked.cancelled() else asked.exception()
            return error, runner.failed_requests

    error, failed = run(story())

    assert isinstance(error, Cancelled) is by_name
    assert failed == 0


# A worker --------------------------------------------------------------------------------


def test_a_worker_embeds_where_its_engine_does() -> None:
    async def story() -> tuple[Embedded, DynbusError]:
        async with TestKit() as kit:
            await kit.start(Worker)
            await kit.start(Silent)
            made = await kit.client(Worker).embed(TEXT)
            with pytest.raises(InvalidRequest) as refused:
                await kit.client(Silent).embed(TEXT)
            return made, refused.value

    made, refused = run(story())

    assert made.vector().tolist() == [3.0]
    assert "makes no embeddings" in str(refused)
