"""Load sharing over a bus: new routers, lost messages, dead routers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from dynbus.bus.background import Background
from dynbus.bus.errors import ConfigError
from dynbus.kvrouter.names import kv_load_subject
from dynbus.kvrouter.radix.index import Rank
from dynbus.kvrouter.routing.shared_load import HEARTBEAT, SILENCE, Heard, LoadSharing, SharedLoad
from dynbus.testing import TestKit, run

from .routing_fixtures import until

A = Rank("a", 0)


class Stage:
    """Routers of one component, each on a connection of its own."""

    def __init__(self, kit: TestKit) -> None:
        self.kit = kit
        self.changes = 0
        self.connections: dict[str, Any] = {}

    @asynccontextmanager
    async def router(self, name: str) -> AsyncGenerator[LoadSharing]:
        bus = (await self.kit.runtime()).bus
        self.connections[name] = bus.data
        async with Background(name, lambda error: pytest.fail(str(error))) as background:
            load = SharedLoad(name)
            sharing = LoadSharing(bus.data, background, "llm", "Worker", load, self._note)
            await sharing.open()
            yield sharing

    def _note(self, heard: Heard) -> None:
        self.changes += heard.released


def requests(sharing: LoadSharing) -> int:
    return sharing.load.of(A).requests


def test_what_one_router_decides_is_known_to_others_within_milliseconds() -> None:
    async def story() -> float:
        async with TestKit() as kit:
            stage = Stage(kit)
            async with stage.router("one") as one, stage.router("two") as two:
                one.load.add("1", A, [1, 2], 32, 0)
                one.notify()
                spent = await until(lambda: requests(two) == 1)
                one.load.free("1")
                one.notify()
                await until(lambda: requests(two) == 0)
                assert stage.changes
                return spent

    assert run(story()) < 0.01


def test_a_new_router_learns_what_runs_already() -> None:
    async def story() -> float:
        async with TestKit() as kit:
            stage = Stage(kit)
            async with stage.router("one") as one:
                for number in range(50):
                    one.load.add(str(number), A, [number], 16, 0)
                one.notify()
                async with stage.router("late") as late:
                    return await until(lambda: requests(late) == 50)

    assert run(story()) < 0.1


def test_what_is_said_while_cut_off_is_known_soon_after() -> None:
    async def story() -> float:
        async with TestKit() as kit:
            stage = Stage(kit)
            async with stage.router("one") as one, stage.router("two") as two:
                await until(lambda: bool(two.load.routers()))
                connection = stage.connections["one"]
                connection.disconnect()
                one.load.add("1", A, [1], 16, 0)
                one.notify()
                await asyncio.sleep(0.01)
                connection.reconnect()
                return await until(lambda: requests(two) == 1)

    assert run(story()) < 2.0


def test_a_router_that_dies_takes_its_load_along_and_one_that_leaves_at_once() -> None:
    async def story() -> tuple[float, float]:
        async with TestKit() as kit:
            stage = Stage(kit)
            async with stage.router("stays") as stays:
                async with stage.router("leaves") as leaves:
                    leaves.load.add("1", A, [1], 16, 0)
                    leaves.notify()
                    await until(lambda: requests(stays) == 1)
                left = await until(lambda: requests(stays) == 0)
                async with stage.router("dies") as dies:
                    dies.load.add("1", A, [1], 16, 0)
                    dies.notify()
                    await until(lambda: requests(stays) == 1)
                    stage.connections["dies"].disconnect()
                    died = await until(lambda: requests(stays) == 0)
                return left, died

    left, died = run(story())

    assert left < 0.1
    assert 4.0 < died < 6.5


def test_a_message_that_is_none_is_counted_and_harms_nobody() -> None:
    async def story() -> tuple[int, int]:
        async with TestKit() as kit:
            stage = Stage(kit)
            async with stage.router("one") as one, stage.router("two") as two:
                subject = kv_load_subject("llm", "Worker", "three")
                kit.caller.bus.data.publish(subject, b"nonsense")
                one.load.add("1", A, [1], 16, 0)
                one.notify()
                await until(lambda: requests(two) == 1)
                return one.dropped, two.dropped

    assert run(story()) == (1, 1)


def test_nobody_speaks_for_another_router() -> None:
    async def story() -> tuple[int, int]:
        async with TestKit() as kit:
            stage = Stage(kit)
            async with stage.router("one") as one, stage.router("two") as two:
                liar = SharedLoad("two")
                liar.add("7", A, [1], 16, 0)
                for message in liar.outgoing(0.0):
                    kit.caller.bus.data.publish(kv_load_subject("llm", "Worker", "x"), message)
                two.load.add("1", A, [1], 16, 0)
                two.notify()
                await until(lambda: requests(one) == 1)
                return one.dropped, requests(one)

    assert run(story()) == (2, 1)


def test_callers_may_not_publish_what_routers_tell_each_other() -> None:
    subject = kv_load_subject("llm", "Worker", "one")

    assert subject.count(".") > "demo.*.*.*".count(".")


def test_a_heartbeat_goes_on_after_one_that_failed(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        async with TestKit() as kit:
            stage = Stage(kit)
            async with stage.router("one") as one, stage.router("two") as two:
                expire, failed = one.load.expire, list[float]()

                def fail_once(now: float) -> bool:
                    if not failed:
                        failed.append(now)
                        raise OverflowError("a number that no message can have")
                    return expire(now)

                one.load.expire = fail_once  # type: ignore[method-assign]
                await until(lambda: bool(failed))
                await asyncio.sleep(SILENCE + 2 * HEARTBEAT)
                assert two.load.routers() == ["one"]

    run(story())

    assert "telling the load failed" in caplog.text


def test_a_name_that_is_no_part_of_a_subject_is_refused() -> None:
    async def story() -> None:
        async with TestKit() as kit:
            bus = (await kit.runtime()).bus
            with pytest.raises(ConfigError, match=r"a\.b"):
                LoadSharing(bus.data, bus.background, "a.b", "Worker", SharedLoad("one"), print)

    run(story())
