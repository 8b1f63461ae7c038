"""A runtime gives clients, runs instances, and leaves nothing behind when it is closed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from tests.conditions import PATIENCE
from tests.story import on_a_kit

from dynbus import (
    Actor,
    ConfigError,
    DeadlineExceeded,
    NoInstances,
    Runtime,
    Unavailable,
    handler,
)
from dynbus.actors.calling.clients import WAIT_TIMEOUT
from dynbus.actors.serving.instance import STOP_TIMEOUT, InstanceState
from dynbus.bus.clock import monotonic
from dynbus.bus.memory.bus import MemoryConnection
from dynbus.bus.nats.server_process import RunningServer, free_port
from dynbus.bus.transport import ConnectionState
from dynbus.testing import TestKit, run


class Greeter(Actor, namespace="runtime"):
    def __init__(self, fail: str = "") -> None:
        self.fail = fail

    async def on_start(self) -> None:
        if self.fail == "start":
            raise KeyError("no start")

    async def on_stop(self) -> None:
        if self.fail == "stop":
            raise KeyError("no stop")

    @handler
    async def greet(self, name: str) -> str:
        return f"hello {name}"


class Homeless(Actor, abstract=True):
    @handler
    async def greet(self, name: str) -> str:
        return name


def data_connection(runtime: Runtime) -> MemoryConnection:
    connection = runtime.bus.data
    assert isinstance(connection, MemoryConnection)
    return connection


# Clients -----------------------------------------------------------------------------------


def test_a_client_of_an_actor_without_a_namespace_is_refused() -> None:
    async def story(kit: TestKit) -> None:
        with pytest.raises(ConfigError, match="Homeless has no namespace"):
            kit.caller.client(Homeless)

    on_a_kit(story)


@pytest.mark.parametrize("name", ["", "runtime", "runtime.Greeter", "a.b.c.d", "a.b.*", "a..c"])
def test_what_is_no_endpoint_is_refused_where_it_is_written(name: str) -> None:
    async def story(kit: TestKit) -> None:
        with pytest.raises(ConfigError):
            kit.caller.endpoint(name)

    on_a_kit(story)


def test_both_ways_to_an_untyped_client_reach_the_endpoint() -> None:
    async def story(kit: TestKit) -> list[str]:
        await kit.start(Greeter)
        long = kit.caller.namespace("runtime").component("Greeter").endpoint("greet")
        short = kit.caller.endpoint("runtime.Greeter.greet")
        return [await (await one.client()).generate("you") for one in (long, short)]

    assert on_a_kit(story) == ["hello you", "hello you"]


def test_the_instances_that_are_known_have_their_ids() -> None:
    async def story(kit: TestKit) -> tuple[list[str], list[str]]:
        before = kit.caller.instance_ids("runtime", "Greeter")
        for number in range(3):
            await kit.start(Greeter, instance_id=f"g{number}")
        return before, sorted(kit.caller.instance_ids("runtime", "Greeter"))

    assert on_a_kit(story) == ([], ["g0", "g1", "g2"])


def test_a_component_is_named_by_its_class_by_one_word_or_by_two() -> None:
    async def story(kit: TestKit) -> list[list[str]]:
        await kit.start(Greeter, instance_id="g")
        caller = kit.caller
        return [
            caller.instance_ids(Greeter),
            caller.instance_ids("runtime.Greeter"),
            caller.instance_ids("runtime", "Greeter"),
            caller.instance_ids(namespace="runtime", component="Greeter"),
        ]

    assert on_a_kit(story) == [["g"]] * 4


@pytest.mark.parametrize(
    ("component", "text"),
    [
        ("Greeter", "'Greeter' is not a component: write namespace.component"),
        ("a.b.c", "'a.b.c' is not a component: write namespace.component"),
        ("", "'' is not a component"),
        ("a.*", "component '*' is not a valid name"),
        (Homeless, "Homeless has no namespace"),
    ],
)
def test_what_is_no_component_is_refused_with_the_remedy(
    component: str | type[Actor], text: str
) -> None:
    async def story(kit: TestKit) -> str:
        with pytest.raises(ConfigError) as caught:
            kit.caller.instance_ids(component)
        return str(caught.value)

    assert text in on_a_kit(story)


def test_waiting_for_instances_ends_by_itself() -> None:
    async def story(kit: TestKit) -> float:
        client = await kit.caller.endpoint("runtime.Greeter.greet").client()
        begun = monotonic()

        with pytest.raises(NoInstances):
            await client.wait_for_instances()

        return monotonic() - begun

    assert on_a_kit(story) == pytest.approx(WAIT_TIMEOUT, abs=1.0)


# Instances ---------------------------------------------------------------------------------


def test_an_id_that_is_in_use_here_is_refused() -> None:
    async def story(kit: TestKit) -> None:
        runtime = await kit.runtime()
        first = await runtime.start(Greeter, instance_id="taken")

        with pytest.raises(ConfigError, match="'taken' is in use in this process"):
            await runtime.start(Greeter, instance_id="taken")

        assert runtime.instances == {"taken": first}
        assert first.state is InstanceState.READY

    on_a_kit(story)


@pytest.mark.parametrize("instance_id", ["a.b", "*", "with space", "_hidden", "x" * 64])
def test_an_id_that_no_subject_can_hold_is_refused(instance_id: str) -> None:
    async def story(kit: TestKit) -> None:
        with pytest.raises(ConfigError, match="instance_id"):
            await kit.caller.start(Greeter, instance_id=instance_id)

    on_a_kit(story)


def test_an_instance_that_does_not_start_is_forgotten_and_its_id_is_free() -> None:
    async def story(kit: TestKit) -> None:
        runtime = await kit.runtime()

        with pytest.raises(KeyError, match="no start"):
            await runtime.start(Greeter, instance_id="mine", fail="start")
        left = dict(runtime.instances)
        again = await runtime.start(Greeter, instance_id="mine")

        assert left == {}
        assert again.state is InstanceState.READY

    on_a_kit(story)


def test_one_instance_that_does_not_stop_cleanly_keeps_no_other_from_stopping(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story(kit: TestKit) -> list[InstanceState]:
        runtime = await kit.runtime()
        instances = [await runtime.start(Greeter, fail=fail) for fail in ("stop", "")]

        await runtime.stop()

        assert runtime.instances == {}
        return [instance.state for instance in instances]

    with caplog.at_level(logging.ERROR):
        states = on_a_kit(story)

    assert states == [InstanceState.STOPPED] * 2
    assert "did not stop cleanly" in caplog.text


# The connection ----------------------------------------------------------------------------


def test_who_waits_for_the_bus_goes_on_when_it_is_back() -> None:
    async def story(kit: TestKit) -> float:
        runtime = await kit.runtime()
        connection = data_connection(runtime)
        connection.disconnect()
        was_connected = runtime.is_connected
        begun = monotonic()
        asyncio.get_running_loop().call_later(2.0, connection.reconnect)

        await runtime.wait_connected(None)

        assert not was_connected
        assert runtime.is_connected
        return monotonic() - begun

    assert on_a_kit(story) == pytest.approx(2.0, abs=0.1)


@pytest.mark.parametrize(("timeout", "waits"), [(None, 3.0), (0.5, 0.5), (60.0, 3.0)])
def test_the_wait_for_the_bus_is_bounded(timeout: float | None, waits: float) -> None:
    async def story(kit: TestKit) -> float:
        runtime = await kit.runtime()
        data_connection(runtime).disconnect()
        begun = monotonic()

        with pytest.raises(Unavailable, match="the bus cannot be reached") as raised:
            await runtime.wait_connected(timeout)

        assert not raised.value.started
        return monotonic() - begun

    assert on_a_kit(story, connect_timeout=3.0) == pytest.approx(waits)


def test_closing_stops_the_instances_leaves_the_bus_and_may_be_repeated() -> None:
    async def story(kit: TestKit) -> None:
        runtime = await kit.runtime()
        instance = await runtime.start(Greeter)

        await runtime.close()
        await runtime.close()

        assert instance.state is InstanceState.STOPPED
        assert runtime.bus.data.state is ConnectionState.CLOSED
        assert repr(runtime).startswith("<Runtime [closed")
        with pytest.raises(Unavailable, match="the runtime is closed"):
            await runtime.wait_connected(None)

    on_a_kit(story)


@pytest.mark.anyio
async def test_a_runtime_is_awaited_or_entered(nats_server: RunningServer) -> None:
    awaited = await Runtime.connect(nats_server.url)
    await awaited.close()

    async with Runtime.connect(nats_server.url) as entered:
        connected = entered.is_connected

    assert connected
    assert awaited.bus.data.state is entered.bus.data.state is ConnectionState.CLOSED


@pytest.mark.anyio
async def test_a_runtime_that_was_awaited_can_be_entered_too(nats_server: RunningServer) -> None:
    async with await Runtime.connect(nats_server.url) as runtime:
        connected = runtime.is_connected

    assert connected
    assert runtime.bus.data.state is ConnectionState.CLOSED


def test_a_runtime_over_a_bus_is_closed_at_the_end_of_its_block() -> None:
    async def story(kit: TestKit) -> None:
        async with await kit.runtime() as runtime:
            instance = await runtime.start(Greeter)

        assert instance.state is InstanceState.STOPPED
        assert runtime.bus.data.state is ConnectionState.CLOSED

    on_a_kit(story)


@pytest.mark.anyio
async def test_a_setting_that_does_not_fit_is_refused_before_anything_is_opened() -> None:
    with pytest.raises(ConfigError, match="lease_tll"):
        await Runtime.connect(f"nats://127.0.0.1:{free_port()}", lease_tll=3)


@pytest.mark.anyio
async def test_a_runtime_waits_for_a_server_that_is_not_there_yet(
    own_server: RunningServer,
) -> None:
    own_server.kill()
    with pytest.raises(Unavailable, match="no NATS server can be reached"):
        await Runtime.connect(own_server.url)

    async with asyncio.TaskGroup() as tasks:
        connecting = tasks.create_task(connected(own_server.url))
        await asyncio.sleep(0.5)
        assert not connecting.done()
        await own_server.restart()

    assert connecting.result() is ConnectionState.CONNECTED


async def connected(url: str) -> ConnectionState:
    """How a runtime is connected that waits for its server."""
    async with Runtime.connect(url, wait=PATIENCE) as runtime:
        return runtime.bus.data.state


@pytest.mark.anyio
async def test_a_runtime_waits_no_longer_than_it_is_told(own_server: RunningServer) -> None:
    own_server.kill()
    began = monotonic()

    with pytest.raises(Unavailable, match="no NATS server can be reached"):
        await Runtime.connect(own_server.url, wait=0.6)

    assert monotonic() - began >= 0.6
    for wait in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="wait = .* is not usable"):
            Runtime.connect(own_server.url, wait=wait)


# Ends that take too long -------------------------------------------------------------------


class Slow(Actor, namespace="runtime"):
    """Hangs where it is told to; `stubborn` swallows the first cancellation."""

    def __init__(self, hang: str, stubborn: bool = False) -> None:
        self.hang = hang
        self.stubborn = stubborn
        self.told: list[str] = []

    async def on_start(self) -> None:
        if self.hang == "start":
            await self._hang()

    async def on_stop(self) -> None:
        self.told.append("stop")
        if self.hang == "stop":
            await self._hang()
        elif self.hang == "close":
            await asyncio.wait_for(self.runtime.close(), 1000.0)
        elif self.hang == "stop all":
            await self.runtime.stop()
        self.told.append("stopped")

    async def _hang(self) -> None:
        try:
            await asyncio.sleep(1000.0)
        except asyncio.CancelledError:
            if not self.stubborn:
                raise

    @handler
    async def ping(self) -> None:
        return


@pytest.mark.parametrize("stubborn", [False, True])
def test_an_on_stop_that_hangs_does_not_keep_the_runtime_open(
    stubborn: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(kit: TestKit) -> float:
        runtime = await kit.runtime()
        instance = await runtime.start(Slow, hang="stop", stubborn=stubborn)
        begun = monotonic()

        await runtime.close()

        assert instance.state is InstanceState.STOPPED
        assert runtime.bus.data.state is ConnectionState.CLOSED
        return monotonic() - begun

    assert on_a_kit(story) == pytest.approx(STOP_TIMEOUT, abs=1.0)
    assert f"was cancelled after {STOP_TIMEOUT:g} s" in caplog.text


def test_who_waits_for_a_close_can_be_cancelled_and_the_close_goes_on() -> None:
    async def story(kit: TestKit) -> float:
        runtime = await kit.runtime()
        await runtime.start(Slow, hang="stop")
        begun = monotonic()

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(runtime.close(), 1.0)
        waited = monotonic() - begun
        await runtime.close()

        assert runtime.bus.data.state is ConnectionState.CLOSED
        return waited

    assert on_a_kit(story) == pytest.approx(1.0)


@pytest.mark.parametrize("how", ["close", "stop all"])
def test_an_on_stop_may_close_its_own_runtime(how: str) -> None:
    async def story(kit: TestKit) -> float:
        runtime = await kit.runtime()
        instances = [await runtime.start(Slow, hang=how) for _ in range(2)]
        begun = monotonic()

        await instances[0].stop()
        await runtime.close()

        assert runtime.bus.data.state is ConnectionState.CLOSED
        for instance in instances:
            assert isinstance(instance.actor, Slow)
            assert instance.actor.told == ["stop", "stopped"]
        return monotonic() - begun

    assert on_a_kit(story) < 1.0


@pytest.mark.parametrize("stubborn", [False, True])
def test_closing_cancels_an_instance_that_is_starting(stubborn: bool) -> None:
    async def story(kit: TestKit) -> float:
        runtime = await kit.runtime()
        starting = asyncio.ensure_future(runtime.start(Slow, hang="start", stubborn=stubborn))
        await asyncio.sleep(1.0)
        (instance,) = runtime.instances.values()
        begun = monotonic()

        await runtime.close()

        assert instance.state is InstanceState.STOPPED
        assert runtime.instances == {}
        with pytest.raises(Unavailable, match="was stopped while it started"):
            await starting
        return monotonic() - begun

    assert on_a_kit(story) < 1.0


def test_a_closed_runtime_starts_nothing() -> None:
    async def story(kit: TestKit) -> None:
        runtime = await kit.runtime()
        await runtime.close()

        with pytest.raises(Unavailable, match="the runtime is closed"):
            await runtime.start(Greeter)

    on_a_kit(story)


def test_a_call_that_waits_for_an_instance_ends_when_its_runtime_is_closed() -> None:
    async def story(kit: TestKit) -> tuple[list[str], float]:
        runtime = await kit.runtime()
        greeter = runtime.client(Greeter, wait=60.0)
        waiting = [asyncio.create_task(greeter.greet("Ada")) for _ in range(3)]
        await asyncio.sleep(1.0)
        closing = monotonic()
        await runtime.close()
        told = await asyncio.gather(*waiting, return_exceptions=True)
        return [f"{type(error).__name__}: {error}" for error in told], monotonic() - closing

    told, seconds = on_a_kit(story)

    assert len(told) == 3
    assert all(text.startswith("Unavailable: the runtime is closed") for text in told), told
    assert seconds < 1.0


class Patient(Actor, namespace="runtime"):
    @handler(timeout=200.0)
    async def work(self, seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    @handler
    async def count(self, seconds: float) -> AsyncGenerator[int, None]:
        for number in range(4):
            await asyncio.sleep(seconds / 4)
            yield number


def test_an_untyped_call_lasts_as_long_as_its_handler_allows() -> None:
    async def story(kit: TestKit) -> tuple[Any, list[Any], str]:
        await kit.start(Patient)
        work = await kit.caller.endpoint("runtime.Patient.work").client()
        count = await kit.caller.endpoint("runtime.Patient.count").client()

        done = await work.generate(100.0)
        items = [item async for item in count.generate(100.0)]
        with pytest.raises(DeadlineExceeded) as caught:
            await work.generate(300.0)
        return done, items, caught.value.hop

    done, items, hop = on_a_kit(story)

    assert (done, items) == (100.0, [0, 1, 2, 3])
    assert hop.startswith("runtime.Patient.work@")


@pytest.mark.parametrize("whose", ["bus", "runtime"])
def test_a_runtime_whose_background_work_fails_closes_and_its_block_raises_why(whose: str) -> None:
    async def lose() -> None:
        raise LookupError("lost")

    async def story() -> tuple[InstanceState, list[str]]:
        said: list[str] = []
        async with TestKit() as kit:
            runtime = await kit.runtime()
            instance = await runtime.start(Greeter)
            client = runtime.client(Greeter)
            assert await client.greet("you") == "hello you"

            background = runtime.bus.background if whose == "bus" else runtime.background
            background.start(lose, name="loses")
            async with asyncio.timeout(5.0):
                await instance.stopped.wait()
                await runtime.close()

            with pytest.raises(Unavailable) as refused:
                await client.greet("you")
            with pytest.raises(Unavailable) as caught:
                async with runtime:
                    pass
            said += [refused.value.message, caught.value.message]
            assert isinstance(caught.value.__cause__, LookupError)
            return instance.state, said

    assert run(story()) == (
        InstanceState.STOPPED,
        ["the bus has failed: LookupError: lost"] * 2,
    )
