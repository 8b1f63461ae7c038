"""Two engines, each run by its own: one computes a prompt, the other goes on with it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.conditions import eventually
from tests.llm.engine.engines import CountingEngine, Reader
from tests.llm.engine.test_model_engine import BLOCK, EOS, PROMPT, VOCABULARY, PagedModel, alone
from tests.llm.engine.test_model_engine import tokens_of as outputs_of

from dynbus.bus.errors import Cancelled, HandlerError, InvalidRequest, Unavailable
from dynbus.llm.engine import Chunk, EngineLimits, EngineRunner, ModelEngine
from dynbus.llm.engine.interface import Held, transfers
from dynbus.llm.generation import Generated, GenerateRequest, Sampling
from dynbus.testing import run
from dynbus.transfer.layout import BlockLayout, KvMemory

REQUEST = GenerateRequest(
    PROMPT, 12, sampling=Sampling(seed=7, frequency_penalty=0.3), ignore_eos=True
)


class SharedModel(PagedModel):
    """A model that others may read; it computes while `allowed`."""

    def __init__(self, blocks: int = 64) -> None:
        super().__init__(blocks)
        layout = BlockLayout.packed(
            ("block", "token", "kv", "head"),
            dtype="float32",
            layers=1,
            kv_heads=1,
            head_dim=1,
            block_size=4,
            blocks=blocks,
        )
        self.memory = KvMemory.allocate(layout)
        self.allowed = threading.Event()
        self.allowed.set()
        self.broken: Exception | None = None

    def compute(self, chunks: Sequence[Chunk]) -> NDArray[np.float32]:
        self.allowed.wait(60)
        if self.broken is not None:
            raise self.broken
        return super().compute(chunks)


def engine_of(model: SharedModel, *, computes: bool) -> ModelEngine:
    limits = EngineLimits(BLOCK, len(model.pages), 4, 4, 120, vocabulary=VOCABULARY)
    engine = ModelEngine(model, limits, eos_token_ids=[EOS])
    engine.computes = computes
    return engine


@asynccontextmanager
async def running(model: SharedModel, *, computes: bool = True) -> AsyncGenerator[EngineRunner]:
    engine = engine_of(model, computes=computes)
    async with EngineRunner(engine) as runner:
        yield runner
        await eventually(lambda: runner.load.held_blocks == runner.load.active_blocks == 0)


def move(source: SharedModel, theirs: Held, to: SharedModel, ours: Held, first: int) -> int:
    """Copy what is computed of a prompt, from a token on; how many tokens are there then."""
    for at in range(first, theirs.computed):
        block, place = at // BLOCK, at % BLOCK
        to.pages[ours.blocks[block], place] = source.pages[theirs.blocks[block], place]
    return theirs.computed


BOTH = pytest.mark.parametrize("computes", [False, True])


@BOTH
def test_a_prompt_goes_over_while_it_is_computed_and_its_first_token_is_shown_at_once(
    computes: bool,
) -> None:
    async def story() -> None:
        there, here = SharedModel(), SharedModel()
        async with (
            running(there, computes=computes) as prefill,
            running(here, computes=computes) as decode,
        ):
            assert decode.memory is here.memory
            reader = Reader()
            decode.reserve("a", REQUEST, reader.reply)
            ours = await decode.next_held("a")
            prefill.add_held("p", REQUEST)
            moved = ours.cached
            while moved < len(PROMPT):
                moved = move(there, await prefill.next_held("p"), here, ours, moved)
            first = await prefill.first("p")

            assert decode.show_first("a", first)
            assert reader.items == [Generated(first.token_ids, cached_tokens=0)]
            decode.deliver("a", moved, first)
            decode.release("a")
            prefill.release("p")
            await reader.closed()

            assert reader.error is None
            assert reader.token_ids == outputs_of(alone(REQUEST))
            assert decode.output_tokens == 12

    run(story())


@BOTH
def test_a_first_token_that_is_the_last_ends_the_request_without_a_delivery(
    computes: bool,
) -> None:
    async def story() -> None:
        async with running(SharedModel(), computes=computes) as decode:
            for name, most, reason in (("a", 1, "length"), ("b", 9, "stop")):
                reader = Reader()
                decode.reserve(name, GenerateRequest(PROMPT, most), reader.reply)
                await decode.next_held(name)

                assert not decode.show_first(name, Generated([5], finish_reason=reason))  # type: ignore[arg-type]

                await reader.closed()
                assert reader.items == [Generated([5], finish_reason=reason)]  # type: ignore[arg-type]
                decode.release(name)
            assert not decode.show_first("c", Generated([5]))

    run(story())


@BOTH
def test_a_request_whose_prompt_does_not_come_is_computed_where_it_is(computes: bool) -> None:
    async def story() -> None:
        async with running(SharedModel(), computes=computes) as decode:
            shown, other = Reader(), Reader()
            decode.reserve("a", REQUEST, shown.reply)
            decode.reserve("b", REQUEST, other.reply)
            await decode.next_held("a")
            first = alone(REQUEST)[0]

            decode.show_first("a", first)
            decode.deliver("a", 0, first)
            decode.deliver("b", 0, None)
            await shown.closed()
            await other.closed()

            assert shown.token_ids == other.token_ids == outputs_of(alone(REQUEST))
            decode.release("a")
            decode.release("b")

    run(story())


@BOTH
def test_who_waits_for_blocks_hears_of_the_end_of_their_request(computes: bool) -> None:
    async def story() -> None:
        model = SharedModel(blocks=4)
        async with running(model, computes=computes) as runner:
            reader, waiting = Reader(), Reader()
            runner.reserve("a", REQUEST.continued([1]), reader.reply)
            with pytest.raises(InvalidRequest, match="shorten the prompt or lower max_tokens"):
                await runner.next_held("a")
            assert isinstance(reader.error, InvalidRequest)
            runner.release("a")

            fits = GenerateRequest(PROMPT, 4)
            runner.reserve("b", fits, waiting.reply)
            await runner.next_held("b")
            runner.add_held("c", fits)
            more = asyncio.ensure_future(runner.next_held("c"))
            await eventually(lambda: runner.load.waiting == 1)
            runner.cancel("c")
            with pytest.raises(Cancelled, match="the request was cancelled"):
                await more
            with pytest.raises(Cancelled, match="the request was cancelled"):
                await runner.first("c")
            runner.release("c")
            with pytest.raises(Cancelled, match="holds no blocks, or was released"):
                await runner.next_held("c")

            more = asyncio.ensure_future(runner.next_held("b"))
            await asyncio.sleep(0)
            runner.cancel("b")
            with pytest.raises(Cancelled, match="the request was cancelled"):
                await more
            assert waiting.items == [Generated([], finish_reason="cancelled")]
            await eventually(lambda: not runner.load.running)
            assert runner.load.held_blocks == 3, "nobody knows yet whether something writes there"
            runner.release("b")

    run(story())


@BOTH
def test_a_cached_prefix_is_held_and_released(computes: bool) -> None:
    async def story() -> None:
        async with running(SharedModel(), computes=computes) as runner:
            reader = Reader()
            runner.submit("a", GenerateRequest(PROMPT, 2), reader.reply)
            await reader.closed()

            held = await runner.hold("h", GenerateRequest(PROMPT))

            assert (held.computed, held.cached, len(held.blocks)) == (8, 8, 2)
            with pytest.raises(ValueError, match="holds blocks of the engine: release it first"):
                await runner.hold("h", GenerateRequest(PROMPT))
            with pytest.raises(InvalidRequest, match="the prompt is empty"):
                await runner.hold("other", GenerateRequest([]))
            runner.release("h")
            runner.release("h")
            await eventually(lambda: runner.load.held_blocks == 0)
            # An id that was released may be used again.
            await runner.hold("h", GenerateRequest(PROMPT))
            runner.release("h")

    run(story())


@BOTH
def test_whoever_leaves_while_a_prefix_is_being_held_holds_nothing(computes: bool) -> None:
    async def story() -> None:
        model = SharedModel()
        async with running(model, computes=computes) as runner:
            reader = Reader()
            runner.submit("a", GenerateRequest(PROMPT, 2), reader.reply)
            await reader.closed()
            leaving = asyncio.ensure_future(runner.hold("h", GenerateRequest(PROMPT)))
            await asyncio.sleep(0)
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving

            held = await runner.hold("h", GenerateRequest(PROMPT))

            assert held.computed == 8
            runner.release("h")

    run(story())


@pytest.mark.parametrize("fails", [True, False])
def test_an_engine_that_ends_leaves_nobody_waiting(
    fails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        model = SharedModel()
        engine = engine_of(model, computes=True)
        reader = Reader()
        async with EngineRunner(engine) as runner:
            runner.reserve("a", REQUEST, reader.reply)
            await runner.next_held("a")
            model.allowed.clear()
            runner.add_held("b", REQUEST)
            waits = [
                asyncio.ensure_future(each)
                for each in (
                    runner.next_held("a"),
                    runner.next_held("b"),
                    runner.first("b"),
                    runner.hold("h", REQUEST),
                )
            ]
            await asyncio.sleep(0)
            if fails:
                model.broken = RuntimeError("out of memory")
                model.allowed.set()
                await asyncio.wait(waits, timeout=60)
                assert runner.failed_requests == 1
                with pytest.raises(Unavailable, match="does not run"):
                    runner.add_held("c", REQUEST)
                runner.deliver("a", 10, None)
                runner.release("a")
            else:
                asyncio.get_running_loop().call_later(0.2, model.allowed.set)
        ended = await asyncio.gather(*waits, return_exceptions=True)
        kinds = [type(error) for error in ended]
        cause = HandlerError if fails else Unavailable
        assert kinds == [Unavailable, cause, cause, Unavailable]
        assert isinstance(reader.error, Unavailable)

    run(story())

    assert ("the engine failed" in caplog.text) is fails


def test_an_engine_whose_blocks_stay_says_so() -> None:
    async def story() -> None:
        async with EngineRunner(CountingEngine()) as runner:
            for use in (
                lambda: runner.reserve("a", REQUEST, Reader().reply),
                lambda: runner.add_held("a", REQUEST),
                lambda: runner.memory,
            ):
                with pytest.raises(InvalidRequest, match=r"CountingEngine.* cannot be transferred"):
                    use()
            with pytest.raises(InvalidRequest, match="cannot be transferred"):
                await runner.hold("a", REQUEST)

    run(story())

    assert not transfers(engine_without_memory())


def engine_without_memory() -> ModelEngine:
    limits = EngineLimits(BLOCK, 8, 4, 4, 30, vocabulary=VOCABULARY)
    return ModelEngine(PagedModel(8), limits)
