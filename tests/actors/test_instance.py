"""An instance is announced when it can be called, and gone from the bus before it ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator

import pytest
from pydantic import BaseModel

from dynbus import Actor, ConfigError, InvalidRequest, InvalidResponse, NoInstances, handler
from dynbus.actors.instance import make_endpoint
from dynbus.actors.lifecycle import InstanceState
from dynbus.bus.clock import monotonic
from dynbus.bus.context import Context, enter_context
from dynbus.bus.endpoint import Endpoint
from dynbus.testing import TestKit, run


class Question(BaseModel):
    text: str


class Logging(Actor, namespace="instance"):
    def __init__(self, log: list[str] | None = None) -> None:
        self.log = log if log is not None else []
        self.entered = asyncio.Event()

    async def on_start(self) -> None:
        self.log.append("start")
        known = self.runtime.instance_ids("instance", "Logging")
        self.log.append(f"announced: {self.instance_id in known}")

    async def on_stop(self) -> None:
        self.log.append("stop")

    @handler
    async def ask(self, question: Question) -> int:
        return len(question.text)

    @handler
    async def nap(self, seconds: float) -> str:
        self.entered.set()
        await asyncio.sleep(seconds)
        self.log.append("slept")
        return "rested"

    @handler
    async def count(self, *, limit: int, context: Context) -> AsyncGenerator[str, None]:
        for number in range(limit):
            yield f"{context.id}:{number}"

    @handler
    async def ping(self) -> None:
        return


class Broken(Logging, namespace="instance"):
    async def on_start(self) -> None:
        raise RuntimeError("no model")


# Its life ----------------------------------------------------------------------------------


def test_it_is_announced_after_on_start_and_stopped_once() -> None:
    async def story() -> tuple[list[str], list[InstanceState]]:
        async with TestKit() as kit:
            instance = await kit.start(Logging)
            assert isinstance(instance.actor, Logging)
            states = [instance.state]

            await asyncio.gather(instance.stop(), instance.stop())
            await instance.stop()

            return instance.actor.log, [*states, instance.state]

    assert run(story()) == (
        ["start", "announced: False", "stop"],
        [InstanceState.READY, InstanceState.STOPPED],
    )


def test_one_whose_on_start_raises_is_never_seen() -> None:
    async def story() -> None:
        async with TestKit() as kit:
            runtime = await kit.runtime()

            with pytest.raises(RuntimeError, match="no model"):
                await runtime.start(Broken)
            await asyncio.sleep(60.0)

            with pytest.raises(NoInstances):
                await kit.client(Broken).ping()

    run(story())


def test_a_call_that_runs_is_finished_before_on_stop() -> None:
    async def story() -> tuple[str, list[str]]:
        async with TestKit() as kit:
            instance = await kit.start(Logging)
            assert isinstance(instance.actor, Logging)
            call = asyncio.ensure_future(kit.client(Logging).nap(5.0))
            await instance.actor.entered.wait()

            await instance.stop(grace=30.0)

            return await call, instance.actor.log[-2:]

    assert run(story()) == ("rested", ["slept", "stop"])


def test_after_the_grace_period_what_still_runs_is_ended() -> None:
    async def story() -> tuple[float, str]:
        async with TestKit() as kit:
            instance = await kit.start(Logging)
            assert isinstance(instance.actor, Logging)
            call = asyncio.ensure_future(kit.client(Logging).nap(600.0))
            await instance.actor.entered.wait()
            begun = monotonic()

            await instance.stop(grace=2.0)

            await asyncio.wait({call})
            return monotonic() - begun, type(call.exception()).__name__

    seconds, error = run(story())
    assert 2.0 <= seconds < 4.0
    assert error == "Draining"


def test_one_whose_drain_breaks_is_withdrawn_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(grace: float) -> None:
        raise OSError("the drain broke")

    async def story() -> tuple[InstanceState, list[str]]:
        async with TestKit() as kit:
            instance = await kit.start(Logging)
            monkeypatch.setattr(instance.server, "drain", broken)

            with pytest.raises(OSError, match="the drain broke"):
                await instance.stop()

            await asyncio.sleep(60.0)
            return instance.state, kit.caller.instance_ids("instance", "Logging")

    assert run(story()) == (InstanceState.STOPPED, [])


def test_a_stopped_instance_is_called_no_more() -> None:
    async def story() -> None:
        async with TestKit() as kit:
            instance = await kit.start(Logging)
            await instance.stop()

            with pytest.raises(NoInstances):
                await kit.client(Logging).ping()

    run(story())


def test_an_id_that_another_process_holds_is_refused() -> None:
    async def story() -> None:
        async with TestKit() as kit:
            holder = await kit.start(Logging, instance_id="mine")

            with pytest.raises(ConfigError, match="mine"):
                await (await kit.runtime()).start(Logging, instance_id="mine")

            assert holder.state is InstanceState.READY
            assert await kit.client(Logging).ask(Question(text="abc")) == 3

    run(story())


def test_an_outage_of_its_connection_leaves_it_ready_and_found_again() -> None:
    async def story() -> int:
        async with TestKit() as kit:
            instance = await kit.start(Logging)
            kit.bus.stop()
            await asyncio.sleep(3.0)
            kit.bus.start()
            await asyncio.sleep(30.0)
            assert instance.state is InstanceState.READY
            return await kit.client(Logging).ask(Question(text="still there"))

    assert run(story()) == 11


# What the bus needs of its handlers --------------------------------------------------------


def endpoint(attribute: str) -> Endpoint:
    return make_endpoint(Logging(), attribute, Logging.__dynbus_handlers__[attribute])


def test_a_request_is_decoded_and_a_result_encoded() -> None:
    async def story() -> bytes:
        made = endpoint("ask")
        result = await made.invoke(made.decode(b'{"text": "four"}'))
        return made.encode(result)

    assert run(story()) == b"4"


@pytest.mark.parametrize("data", [b"", b"no json", b"{}", b'{"text": 1}'])
def test_a_request_that_does_not_fit_is_the_callers_fault(data: bytes) -> None:
    async def story() -> None:
        made = endpoint("ask")

        with pytest.raises(InvalidRequest):
            made.decode(data)

    run(story())


def test_a_result_that_does_not_fit_is_the_handlers_fault() -> None:
    async def story() -> None:
        made = endpoint("ask")

        with pytest.raises(InvalidResponse):
            made.encode("many")

    run(story())


def test_a_handler_is_called_by_name_and_with_its_context_where_it_asks_so() -> None:
    async def story() -> list[str]:
        made = endpoint("count")
        enter_context(Context(id="r"))
        return [item async for item in made.invoke(made.decode(b"2"))]

    assert run(story()) == ["r:0", "r:1"]


def test_a_handler_without_a_request_takes_none() -> None:
    async def story() -> bytes:
        made = endpoint("ping")
        assert "request" not in made.schemas
        with pytest.raises(InvalidRequest, match="takes no request"):
            made.decode(b"anything")
        return made.encode(await made.invoke(made.decode(b"")))

    assert json.loads(run(story())) is None


def test_an_endpoint_has_the_schemas_of_both_sides() -> None:
    async def story() -> object:
        made = endpoint("ask")
        return made.schemas

    assert run(story()) == {
        "request": Question.model_json_schema(),
        "response": {"type": "integer"},
    }
