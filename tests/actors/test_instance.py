"""An instance is announced when it can be called, and gone from the bus before it ends."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

import pytest
from pydantic import BaseModel
from tests.conditions import eventually
from tests.story import on_a_kit

from dynbus import (
    Actor,
    ConfigError,
    Draining,
    Instance,
    NoInstances,
    call_options,
    depends,
    handler,
)
from dynbus.actors.runtime import ActorInstance
from dynbus.actors.serving.instance import InstanceBroken, InstanceState
from dynbus.bus.clock import monotonic
from dynbus.bus.protocol.names import InstanceName
from dynbus.testing import TestKit


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
    async def ping(self) -> None:
        return


class Broken(Logging, namespace="instance"):
    async def on_start(self) -> None:
        raise RuntimeError("no model")


# Its life ----------------------------------------------------------------------------------


def test_it_is_announced_after_on_start_and_stopped_once() -> None:
    async def story(kit: TestKit) -> tuple[list[str], list[InstanceState]]:
        instance = await kit.start(Logging)
        assert isinstance(instance.actor, Logging)
        states = [instance.state]

        await asyncio.gather(instance.stop(), instance.stop())
        await instance.stop()

        return instance.actor.log, [*states, instance.state]

    assert on_a_kit(story) == (
        ["start", "announced: False", "stop"],
        [InstanceState.READY, InstanceState.STOPPED],
    )


def test_one_whose_on_start_raises_is_never_seen() -> None:
    async def story(kit: TestKit) -> None:
        runtime = await kit.runtime()

        with pytest.raises(RuntimeError, match="no model"):
            await runtime.start(Broken)
        await asyncio.sleep(60.0)

        with pytest.raises(NoInstances):
            await kit.client(Broken).ping()

    on_a_kit(story)


def test_one_whose_on_start_is_not_async_is_refused_with_the_remedy() -> None:
    class Plain(Logging):
        def on_start(self) -> None:  # type: ignore[override]  # pyright: ignore
            self.log.append("start")

    async def story(kit: TestKit) -> None:
        with pytest.raises(ConfigError) as caught:
            await kit.start(Plain)

        assert str(caught.value) == "Plain.on_start is not async: write `async def on_start`"

    on_a_kit(story)


def test_a_call_that_runs_is_finished_before_on_stop() -> None:
    async def story(kit: TestKit) -> tuple[str, list[str]]:
        instance = await kit.start(Logging)
        assert isinstance(instance.actor, Logging)
        call = asyncio.ensure_future(kit.client(Logging).nap(5.0))
        await instance.actor.entered.wait()

        await instance.stop(grace=30.0)

        return await call, instance.actor.log[-2:]

    assert on_a_kit(story) == ("rested", ["slept", "stop"])


def test_after_the_grace_period_what_still_runs_is_ended(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dynbus.actors.serving.instance")

    async def story(kit: TestKit) -> tuple[float, str]:
        instance = await kit.start(Logging)
        assert isinstance(instance.actor, Logging)
        call = asyncio.ensure_future(kit.client(Logging).nap(600.0))
        await instance.actor.entered.wait()
        begun = monotonic()

        await instance.stop(grace=1.99992)

        await asyncio.wait({call})
        return monotonic() - begun, type(call.exception()).__name__

    seconds, error = on_a_kit(story)
    assert 1.9 <= seconds < 4.0
    assert error == "Draining"
    assert ": calls that run or wait: 1; they have 2 s to finish" in caplog.text


def test_one_whose_drain_breaks_is_withdrawn_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object) -> None:
        raise OSError("the drain broke")

    async def story(kit: TestKit) -> tuple[InstanceState, list[str]]:
        instance = await kit.start(Logging)
        monkeypatch.setattr(instance.server, "drain", broken)

        with pytest.raises(OSError, match="the drain broke"):
            await instance.stop()

        await asyncio.sleep(60.0)
        return instance.state, kit.caller.instance_ids("instance", "Logging")

    assert on_a_kit(story) == (InstanceState.STOPPED, [])


def test_what_goes_wrong_in_stopping_one_that_was_taken_over_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Breaking(Logging, namespace="instance", component="Logging"):
        async def on_stop(self) -> None:
            raise OSError("the model stays")

    async def story(kit: TestKit) -> InstanceState:
        first = await kit.start(Breaking, instance_id="mine")
        bus = first.actor.runtime.bus
        await kit.kill(first)
        await asyncio.sleep(4.0)
        await kit.start(Logging, instance_id="mine")
        for connection in (bus.data, bus.lane.connection):
            connection.reconnect()  # type: ignore[attr-defined]
        await asyncio.sleep(60.0)
        return first.state

    with caplog.at_level(logging.ERROR):
        state = on_a_kit(story, lease_ttl=2)

    assert state is InstanceState.STOPPED
    (record,) = [one for one in caplog.records if "did not stop cleanly" in one.message]
    assert record.exc_info is not None
    assert str(record.exc_info[1]) == "the model stays"


@pytest.mark.parametrize("cancellations", [1, 2, 5])
def test_one_whose_start_is_cancelled_is_withdrawn_before_the_cancellation_goes_on(
    cancellations: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(kit: TestKit) -> list[bool]:
        runtime = await kit.runtime()
        withdrawn: list[bool] = []
        withdraw = ActorInstance._withdraw  # pyright: ignore[reportPrivateUsage]

        async def slowly(instance: ActorInstance) -> None:
            await asyncio.sleep(1.0)
            await withdraw(instance)
            withdrawn.append(True)

        monkeypatch.setattr(ActorInstance, "_withdraw", slowly)
        starting = asyncio.ensure_future(runtime.start(Endless))
        for _ in range(cancellations):
            await asyncio.sleep(0.1)
            starting.cancel()
        await asyncio.wait({starting})
        assert starting.cancelled()
        return withdrawn

    assert on_a_kit(story) == [True]


class Endless(Logging, namespace="instance"):
    async def on_start(self) -> None:
        await asyncio.Event().wait()


def test_a_stopped_instance_is_called_no_more() -> None:
    async def story(kit: TestKit) -> None:
        instance = await kit.start(Logging)
        await instance.stop()

        with pytest.raises(NoInstances):
            await kit.client(Logging).ping()

    on_a_kit(story)


def test_an_id_that_another_process_holds_is_refused() -> None:
    async def story(kit: TestKit) -> None:
        holder = await kit.start(Logging, instance_id="mine")

        with pytest.raises(ConfigError, match="mine"):
            await (await kit.runtime()).start(Logging, instance_id="mine")

        assert holder.state is InstanceState.READY
        assert await kit.client(Logging).ask(Question(text="abc")) == 3

    on_a_kit(story)


def test_an_outage_of_its_connection_leaves_it_ready_and_found_again() -> None:
    async def story(kit: TestKit) -> int:
        instance = await kit.start(Logging)
        kit.bus.stop()
        await asyncio.sleep(3.0)
        kit.bus.start()
        await asyncio.sleep(30.0)
        assert instance.state is InstanceState.READY
        return await kit.client(Logging).ask(Question(text="still there"))

    assert on_a_kit(story) == 11


# What it says of itself --------------------------------------------------------------------


class Described(Actor, namespace="instance"):
    def __init__(self, metadata: Any = None) -> None:
        self.metadata = metadata if metadata is not None else {"model": "none"}

    async def on_start(self) -> None:
        if self.metadata == {"model": "none"}:
            self.metadata = {"model": "tiny", "block_size": "64"}

    def instance_metadata(self) -> dict[str, str]:
        return self.metadata

    @handler
    async def ping(self) -> None:
        return


def found(kit: TestKit, instance_id: str) -> Instance:
    instance = kit.caller.discovery.view.find(InstanceName("instance", "Described", instance_id))
    assert instance is not None
    return instance


def test_what_it_says_after_on_start_is_announced_and_stays() -> None:
    async def story(kit: TestKit) -> list[dict[str, str]]:
        await kit.start(Described, instance_id="d")
        first = found(kit, "d")
        await asyncio.sleep(60.0)
        renewed = found(kit, "d")
        assert renewed.renewed > first.renewed
        return [dict(first.metadata), dict(renewed.metadata)]

    assert on_a_kit(story) == [{"model": "tiny", "block_size": "64"}] * 2


def test_one_that_says_nothing_has_no_metadata() -> None:
    async def story(kit: TestKit) -> dict[str, str]:
        await kit.start(Logging, instance_id="l")
        instance = kit.caller.discovery.view.find(InstanceName("instance", "Logging", "l"))
        assert instance is not None
        return dict(instance.metadata)

    assert on_a_kit(story) == {}


@pytest.mark.parametrize(
    ("metadata", "text"),
    [
        ({"a": 1}, "has 'a'=1: keys and values must be strings"),
        ({1: "a"}, "has 1='a': keys and values must be strings"),
        (["a"], "returned list: write `def` and return a dict of strings"),
        ({"a": "x" * 4096}, "has 1 keys and 4097 bytes; at most 32 and 4096 are announced"),
        ({"\u00e9": "\u00e9" * 2048}, "has 1 keys and 4098 bytes"),
        ({str(n): "" for n in range(33)}, "has 33 keys and 56 bytes"),
        ({"a": "\ud800"}, "which is not text"),
    ],
)
def test_metadata_that_cannot_be_announced_is_refused_and_leaves_nothing_behind(
    metadata: Any, text: str
) -> None:
    async def story(kit: TestKit) -> str:
        runtime = await kit.runtime()
        with pytest.raises(ConfigError) as caught:
            await runtime.start(Described, metadata=metadata)
        await asyncio.sleep(30.0)
        assert kit.caller.instance_ids(Described) == []
        return str(caught.value)

    refusal = on_a_kit(story)

    assert refusal.startswith("Described.instance_metadata() ")
    assert text in refusal


def test_as_much_metadata_as_is_allowed_is_announced() -> None:
    largest = {"a": "x" * 4095}

    async def story(kit: TestKit) -> dict[str, str]:
        await kit.start(Described, instance_id="d", metadata=largest)
        return dict(found(kit, "d").metadata)

    assert on_a_kit(story) == largest


class Hasty(Described):
    async def instance_metadata(self) -> dict[str, str]:  # type: ignore[override]
        return {}


def test_metadata_that_would_have_to_be_awaited_is_refused_with_the_remedy() -> None:
    async def story(kit: TestKit) -> None:
        with pytest.raises(ConfigError, match="returned coroutine: write `def`"):
            await kit.start(Hasty)

    on_a_kit(story)


# Broken -------------------------------------------------------------------------------------


def test_one_that_reports_that_it_is_broken_is_withdrawn_at_once_and_its_calls_may_be_retried(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story(kit: TestKit) -> None:
        instance, other = await kit.start(Logging), await kit.start(Logging)
        assert isinstance(instance.actor, Logging)
        client = kit.client(Logging)
        with call_options(instance=instance.id):
            napping = asyncio.ensure_future(client.nap(60.0))
        await instance.actor.entered.wait()
        began = monotonic()

        instance.actor.report_broken("the engine died")
        instance.actor.report_broken("and again")
        with pytest.raises(Draining, match="the instance is broken: the engine died") as caught:
            await napping
        await instance.stopped.wait()

        assert caught.value.retryable
        assert monotonic() - began < 1.0
        assert (instance.broken, instance.state) == ("the engine died", InstanceState.STOPPED)
        assert instance.actor.log[-1] == "stop"
        assert kit.caller.instance_ids(Logging) == [other.id]
        assert [await client.ask(Question(text="abc")) for _ in range(4)] == [3] * 4
        await instance.stop()
        instance.actor.report_broken("afterwards")

    on_a_kit(story)

    errors = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert [text.partition("@")[0] for text in errors] == ["instance.Logging"]
    assert errors[0].endswith(" is broken: the engine died; it is withdrawn")


def test_one_that_is_broken_is_withdrawn_also_from_a_thread() -> None:
    async def story(kit: TestKit) -> str:
        instance = await kit.start(Logging)
        thread = threading.Thread(target=instance.actor.report_broken, args=("no memory",))
        thread.start()
        thread.join()
        await instance.stopped.wait()
        return instance.broken

    assert on_a_kit(story) == "no memory"


def test_one_that_breaks_in_a_drain_ends_its_calls_at_once() -> None:
    async def story(kit: TestKit) -> float:
        instance = await kit.start(Logging)
        assert isinstance(instance.actor, Logging)
        napping = asyncio.ensure_future(kit.client(Logging).nap(20.0))
        await instance.actor.entered.wait()
        began = monotonic()
        stopping = asyncio.ensure_future(instance.stop(30.0))
        await asyncio.sleep(0.1)

        instance.actor.report_broken("the engine died")
        with pytest.raises(Draining, match="is broken"):
            await napping
        await stopping
        return monotonic() - began

    assert on_a_kit(story) < 1.0


class BreaksInStart(Logging, namespace="instance"):
    async def on_start(self) -> None:
        self.report_broken("no GPU")
        await asyncio.sleep(60.0)


def test_one_that_breaks_while_it_starts_is_never_seen() -> None:
    async def story(kit: TestKit) -> float:
        began = monotonic()
        with pytest.raises(InstanceBroken, match="is broken: no GPU"):
            await kit.start(BreaksInStart)
        return monotonic() - began

    assert on_a_kit(story) < 1.0


def test_an_instance_is_started_once() -> None:
    async def story(kit: TestKit) -> None:
        instance = await kit.start(Logging)
        with pytest.raises(RuntimeError, match="was started already"):
            await instance.start()
        assert instance.state is InstanceState.READY

    on_a_kit(story)


def test_one_that_is_not_started_cannot_report_anything() -> None:
    with pytest.raises(RuntimeError, match="is not started"):
        Logging().report_broken("x")


def test_an_instance_that_is_not_enabled_is_started_and_stopped_and_nobody_finds_it() -> None:
    class Beside(Logging, enabled=False):
        pass

    class Idle(Actor, namespace="instance", enabled=False):
        logging = depends(Logging)

        async def on_start(self) -> None:
            assert self.runtime is not None

    async def story(kit: TestKit) -> None:
        beside, idle = await kit.start(Beside), await kit.start(Idle)

        assert (beside.state, idle.state) == (InstanceState.READY, InstanceState.READY)
        assert kit.caller.instance_ids(Beside) == []
        assert [one.record for one in kit.caller.discovery.view.everything()] == []
        with call_options(wait=0.0), pytest.raises(NoInstances):
            await kit.client(Beside).ping()
        await beside.stop()
        idle.report_broken("its program has ended")
        await idle.stopped.wait()

        assert isinstance(beside.actor, Beside)
        assert beside.actor.log == ["start", "announced: False", "stop"]

    on_a_kit(story)


def test_functions_are_served_beside_handlers_from_the_start_and_later() -> None:
    async def double(number: int) -> int:
        return 2 * number

    class Growing(Logging):
        async def on_start(self) -> None:
            await self.__dynbus_instance__.add_endpoints({"early": double})

    async def story(kit: TestKit) -> None:
        growing = await kit.start(Growing)
        early = await kit.caller.endpoint("instance.Growing.early").client()
        assert await early.generate(2) == 4

        late = await kit.caller.endpoint("instance.Growing.late").client()
        await growing.add_endpoints({"late": double})
        await eventually(
            lambda: (
                [sorted(each.record.endpoints) for each in kit.caller.discovery.view.everything()]
                == [["ask", "early", "late", "nap", "ping"]]
            )
        )

        assert await late.generate(3) == 6
        with pytest.raises(ConfigError, match="has two endpoints 'late'"):
            await growing.add_endpoints({"late": double})
        await growing.stop()
        with pytest.raises(RuntimeError, match="neither starts nor runs"):
            await growing.add_endpoints({"later": double})

    on_a_kit(story)
