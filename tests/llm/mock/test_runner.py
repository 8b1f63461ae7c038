"""An engine in real time: nobody who reads is left waiting, and its time is kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import numpy as np
import pytest

from dynbus.bus.clock import monotonic
from dynbus.bus.errors import Unavailable
from dynbus.kvrouter.events import KvEvent
from dynbus.llm.mock.engine import EngineConfig, EngineRequest, Output
from dynbus.llm.mock.runner import EngineRunner
from dynbus.testing import run

CONFIG = EngineConfig(block_size=4, blocks=64)


def request(name: str = "a", max_tokens: int = 20) -> EngineRequest:
    return EngineRequest(name, np.arange(16), max_tokens)


async def read(runner: EngineRunner, wanted: EngineRequest) -> list[int]:
    return [token async for output in runner.generate(wanted) for token in output.tokens]


async def drain(outputs: AsyncGenerator[Output, None]) -> None:
    async for _ in outputs:
        pass


class BrokenSink:
    def publish(self, events: Sequence[KvEvent]) -> None:
        raise OSError("the disk is gone")


def test_requests_side_by_side_share_the_steps() -> None:
    async def story() -> tuple[list[list[int]], float]:
        async with EngineRunner(CONFIG) as runner:
            begun = monotonic()
            found = await asyncio.gather(*(read(runner, request(name)) for name in "abc"))
            return found, monotonic() - begun

    made, seconds = run(story())

    assert [len(tokens) for tokens in made] == [20, 20, 20]
    timing, capacity = CONFIG.timing, CONFIG.capacity_tokens
    prefill = timing.prefill(16 + 4 + 4)
    assert seconds == pytest.approx(
        prefill + float(timing.decode_steps(3 * 17, 3, 19, capacity).sum()), abs=0.001
    )


def test_an_engine_that_fails_ends_its_requests(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        async with EngineRunner(CONFIG, BrokenSink()) as runner:
            with pytest.raises(Unavailable, match="does not run: the disk is gone"):
                await read(runner, request())
            with pytest.raises(Unavailable, match="does not run: the disk is gone"):
                await read(runner, request("b"))

    run(story())

    assert "the mock engine failed" in caplog.text


def test_an_engine_that_is_stopped_ends_its_requests() -> None:
    async def story() -> None:
        async with EngineRunner(CONFIG) as runner:
            tokens = runner.generate(request())
            await anext(tokens)
        async with aclosing(tokens):
            with pytest.raises(Unavailable, match="the engine was stopped"):
                await drain(tokens)

    run(story())


def test_a_request_that_is_cancelled_just_ends() -> None:
    async def story() -> tuple[int, int]:
        async with EngineRunner(CONFIG) as runner:
            tokens = runner.generate(request())
            await anext(tokens)
            runner.cancel("a")
            rest = [each async for each in tokens]
            return len(rest), runner.engine.manager.free

    assert run(story()) == (0, 64)


def test_an_engine_wakes_up_for_a_request_after_it_was_idle() -> None:
    async def story() -> float:
        async with EngineRunner(CONFIG) as runner:
            await read(runner, request("a", 1))
            await asyncio.sleep(60.0)
            begun = monotonic()
            await read(runner, request("b", 1))
            return monotonic() - begun

    # The sleep is not caught up with: the step takes its time.
    assert run(story()) > 0.5 * CONFIG.timing.prefill(4)
