"""Code of users that is based on anyio works inside handlers, `on_start` and `on_stop`."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator

import anyio
import pytest
from tests.conditions import eventually
from tests.story import on_a_kit

from dynbus import Actor, DeadlineExceeded, Runtime, context, handler, with_options
from dynbus.bus.nats.server_process import RunningServer
from dynbus.testing import TestKit, run


class Inside(Actor, namespace="anyio"):
    def __init__(self) -> None:
        self.cleaned: list[str] = []

    @handler
    async def gather(self, count: int) -> list[int]:
        found: list[int] = []

        async def one(number: int) -> None:
            await anyio.sleep(0.01 * (count - number))
            found.append(number)

        async with anyio.create_task_group() as tasks:
            for number in range(count):
                tasks.start_soon(one, number)
        return sorted(found)

    @handler
    async def bounded(self) -> str:
        with anyio.move_on_after(0.1):
            await anyio.sleep(3600)
        try:
            with anyio.fail_after(0.1):
                await anyio.sleep(3600)
        except TimeoutError:
            return context().id
        return "the time was not over"

    @handler
    async def in_thread(self, seconds: float) -> str:
        await anyio.to_thread.run_sync(time.sleep, seconds)
        return context().id

    @handler(timeout=None)
    async def hold(self) -> str:
        async def child() -> None:
            try:
                await anyio.sleep_forever()
            finally:
                with anyio.CancelScope(shield=True):
                    await anyio.sleep(0.05)
                    self.cleaned.append("child")

        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(child)
                await anyio.sleep_forever()
        finally:
            self.cleaned.append("handler")
        return ""

    @handler
    async def relay(self, count: int) -> AsyncGenerator[int, None]:
        send, receive = anyio.create_memory_object_stream[int](1)

        async def produce() -> None:
            async with send:
                for number in range(count):
                    await send.send(number)

        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(produce)
                async with receive:
                    async for number in receive:
                        yield number
        finally:
            self.cleaned.append("relay")

    @handler
    async def fetch(self, port: int) -> str:
        """What a library for HTTP on anyio does, in short."""
        with anyio.fail_after(60):
            async with await anyio.connect_tcp("127.0.0.1", port) as connection:
                await connection.send(b"GET / HTTP/1.0\r\n\r\n")
                try:
                    return (await connection.receive()).decode()
                finally:
                    self.cleaned.append("fetch")


def test_task_groups_and_scopes_do_their_work_in_a_handler() -> None:
    async def story(kit: TestKit) -> tuple[list[int], str]:
        await kit.start(Inside)
        client = kit.client(Inside)
        return (
            await client.gather(4),
            await with_options(client, request_id="r1").bounded(),
        )

    assert on_a_kit(story) == ([0, 1, 2, 3], "r1")


@pytest.mark.anyio
async def test_a_handler_may_wait_for_a_thread_of_anyio(nats_server: RunningServer) -> None:
    async with Runtime.connect(nats_server.url) as runtime:
        await runtime.start(Inside)
        client = runtime.client(Inside, wait=60.0)

        assert await with_options(client, request_id="r2").in_thread(0.05) == "r2"
        with pytest.raises(DeadlineExceeded):
            await with_options(client, timeout=0.1).in_thread(0.5)


@pytest.mark.parametrize("how", ["cancelled", "timeout"])
def test_a_handler_that_is_ended_leaves_its_task_group_tidily(how: str) -> None:
    async def story(kit: TestKit) -> list[str]:
        actor = (await kit.start(Inside)).actor
        assert isinstance(actor, Inside)
        if how == "timeout":
            with pytest.raises(DeadlineExceeded):
                await with_options(kit.client(Inside), timeout=0.5).hold()
        else:
            with anyio.move_on_after(0.5):
                await kit.client(Inside).hold()
        await eventually(lambda: len(actor.cleaned) == 2)
        return actor.cleaned

    assert on_a_kit(story) == ["child", "handler"]


@pytest.mark.parametrize("taken", [2, 5])
def test_a_stream_over_anyio_s_streams_may_be_read_in_part(taken: int) -> None:
    async def story() -> tuple[list[int], list[str]]:
        found: list[int] = []
        async with TestKit() as kit:
            actor = (await kit.start(Inside)).actor
            assert isinstance(actor, Inside)
            async with contextlib.aclosing(kit.client(Inside).relay(5)) as numbers:
                async for number in numbers:
                    found.append(number)
                    if len(found) == taken:
                        break
            await eventually(lambda: bool(actor.cleaned))
            return found, actor.cleaned

    assert run(story()) == (list(range(taken)), ["relay"])


@pytest.mark.anyio
@pytest.mark.parametrize("answers", [True, False])
async def test_a_client_on_anyio_s_sockets_works_in_a_handler(
    nats_server: RunningServer, answers: bool
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if answers:
            writer.write(b"HTTP/1.0 204 No Content\r\n\r\n")
            await writer.drain()
        else:
            await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port: int = server.sockets[0].getsockname()[1]
    async with server, Runtime.connect(nats_server.url) as runtime:
        actor = (await runtime.start(Inside)).actor
        assert isinstance(actor, Inside)
        # A busy machine has to begin the call in time: one that was never begun cleans up nothing.
        client = runtime.client(Inside, wait=60.0, timeout=60.0 if answers else 2.0)
        if answers:
            assert (await client.fetch(port)).startswith("HTTP/1.0 204")
        else:
            with pytest.raises(DeadlineExceeded):
                await client.fetch(port)
        await eventually(lambda: actor.cleaned == ["fetch"])


class Spanning(Actor, namespace="anyio"):
    """A task group that is entered in `on_start` and left in `on_stop`."""

    def __init__(self, dies_after: float = 3600.0) -> None:
        self.dies_after = dies_after
        self.beats = 0
        self.stopped_with = ""

    async def on_start(self) -> None:
        self.tasks = await anyio.create_task_group().__aenter__()
        self.tasks.start_soon(self._beat)
        with anyio.fail_after(60):
            await anyio.sleep(0.1)

    async def _beat(self) -> None:
        with anyio.move_on_after(self.dies_after):
            while True:
                self.beats += 1
                await anyio.sleep(0.1)
        raise ConnectionError("the engine is gone")

    async def on_stop(self) -> None:
        self.tasks.cancel_scope.cancel()
        try:
            await self.tasks.__aexit__(None, None, None)
        except* ConnectionError as group:
            self.stopped_with = str(group.exceptions[0])

    @handler
    async def count(self) -> int:
        return self.beats


class FailsWhileItStarts(Actor, namespace="anyio_inside"):
    """Its `on_start` has entered a task group, of which a task fails before it has ended."""

    @handler
    async def ping(self) -> str:
        return "pong"

    async def on_start(self) -> None:
        tasks = anyio.create_task_group()
        await tasks.__aenter__()
        tasks.start_soon(self.fail)
        await anyio.sleep(1.0)

    async def fail(self) -> None:
        raise ValueError("no engine")


class Other(Actor, namespace="anyio_inside"):
    @handler
    async def ping(self) -> str:
        return "pong"


def test_an_on_start_that_its_own_task_group_cancels_harms_no_other_instance() -> None:
    async def story(kit: TestKit) -> str:
        other = await kit.start(Other)
        runtime = other.actor.runtime

        with pytest.raises(RuntimeError, match="waited for was cancelled"):
            await runtime.start(FailsWhileItStarts)
        await asyncio.sleep(60.0)
        await runtime.start(Other)

        return await kit.client(Other).ping()

    assert on_a_kit(story) == "pong"


def test_a_task_group_may_span_on_start_and_on_stop() -> None:
    async def story(kit: TestKit) -> tuple[int, str, str]:
        instance = await kit.start(Spanning)
        actor = instance.actor
        assert isinstance(actor, Spanning)
        await asyncio.sleep(1.0)
        count = await kit.client(Spanning).count()
        await instance.stop()
        return count, actor.stopped_with, instance.broken

    count, stopped_with, broken = on_a_kit(story)
    assert count > 5
    assert (stopped_with, broken) == ("", "")


def test_an_instance_whose_task_group_fails_is_withdrawn_as_broken(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story(kit: TestKit) -> tuple[str, str]:
        instance = await kit.start(Spanning, dies_after=1.0)
        actor = instance.actor
        assert isinstance(actor, Spanning)
        async with asyncio.timeout(60):
            await instance.stopped.wait()
        return instance.broken, actor.stopped_with

    broken, stopped_with = on_a_kit(story)
    assert broken == "a task group or cancel scope of its on_start was cancelled"
    assert stopped_with == "the engine is gone"


def test_a_start_within_a_scope_of_anyio_ends_with_it() -> None:
    class Stuck(Actor, namespace="anyio"):
        cleaned = False

        async def on_start(self) -> None:
            try:
                await anyio.sleep_forever()
            finally:
                # It is cancelled once, so that what it awaits to clean up is not.
                await asyncio.sleep(0.1)
                Stuck.cleaned = True

        @handler
        async def ask(self) -> str:
            return ""

    async def story(kit: TestKit) -> bool:
        with anyio.move_on_after(0.5) as scope:
            await kit.start(Stuck)
        assert kit.caller.instances == {}
        return scope.cancelled_caught

    assert on_a_kit(story)
    assert Stuck.cleaned
