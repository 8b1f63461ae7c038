"""Calls that are routed and recorded, saved as a file, and decided again elsewhere."""

from __future__ import annotations

import asyncio
import json
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import anyio.to_thread
import pytest
from click.testing import CliRunner, Result
from tests.conditions import eventually
from tests.kvrouter.routing.routing_fixtures import BLOCK
from tests.kvrouter.routing.worker import Worker, prompt
from tests.llm.disaggregated.movers import MemoryMover, Wire
from tests.llm.disaggregated.tiny_engine import tiny_engine

from dynbus import Actor, Overloaded, Runtime, call_options, handler
from dynbus.actors.commands.recording import record, replay
from dynbus.bus.errors import ConfigError
from dynbus.bus.flight import digest_of_request, flight_stream
from dynbus.bus.nats.server_process import RunningServer
from dynbus.bus.transport import NoStream
from dynbus.kvrouter import open_router
from dynbus.llm.disaggregated.worker import DisaggregatedWorker
from dynbus.llm.generation import GenerateRequest, Sampling
from dynbus.transfer.layout import KvMemory

from .project import Folder

pytestmark = pytest.mark.anyio

CALLS = 24


async def invoke(command: Any, *arguments: str) -> Result:
    return await anyio.to_thread.run_sync(CliRunner().invoke, command, list(arguments))


async def test_decisions_that_were_recorded_come_out_the_same_elsewhere(
    own_server: RunningServer, tmp_path: Path
) -> None:
    path = tmp_path / "a.flight"
    async with Runtime.connect(own_server.url, flight=True) as runtime:
        for name in "abc":
            metadata = {"kv_events": "false", "kv_total_blocks": "64"}
            await runtime.start(Worker, name=name, metadata=metadata, instance_id=name)
        await eventually(lambda: len(runtime.instance_ids(Worker)) == 3, what="all are there")
        async with open_router(runtime, Worker, exact=False) as router:
            client = runtime.client(Worker, routing=router)
            for number in range(CALLS):
                with call_options(request_id=f"secret-{number}", metadata={"tenant": "ada"}):
                    asked = prompt(blocks=4 + number % 9, of=number % 4)
                    assert [item async for item in client.generate(asked)]
        jetstream = runtime.bus.data.jetstream
        stream = flight_stream("llm").name

        async def is_stored() -> bool:
            # The router and the instances send now and then what each of them has noted.
            try:
                stored = b"".join(one.data for one in await jetstream.read(stream))
            except NoStream:
                return False
            return stored.count(b"kv.ended") == CALLS and stored.count(b"instance.ready") == 3

        await eventually(is_stored, what="all calls and the three instances are stored")
        saved = await invoke(
            record, "save", str(path), "--namespace", "llm", "--nats", own_server.url
        )
        nothing = await invoke(
            *(record, "save", str(tmp_path / "b.flight")),
            *("--namespace", "none", "--nats", own_server.url),
        )

    same = await invoke(replay, str(path), "--json")
    shown = await invoke(record, "show", str(path))
    traced = await invoke(record, "trace", str(path))
    other = await invoke(replay, str(path), "--set", "policy=dynamo")
    plotted = await invoke(replay, str(path), "--set", "policy=dynamo", "--plot", "-")
    why = await invoke(replay, str(path), "--request", "secret-7", "--at", "0s")
    digest = digest_of_request("secret-7")
    by_digest = await invoke(replay, str(path), "--request", digest)
    before = await invoke(replay, str(path), "--at", "1h", "--json")
    wrong = await invoke(replay, str(path), "--set", "polcy=dynamo")

    assert saved.exit_code == 0, saved.output
    assert "set DYNBUS_FLIGHT=true" in str(nothing.exception)
    assert same.exit_code == 0, same.output
    routing = json.loads(same.output)["routing"]
    assert (routing["decisions"], routing["same"]) == (CALLS, CALLS)
    assert traced.exit_code == 0, traced.output
    lines = [json.loads(line) for line in traced.output.splitlines()]
    asked_for = sorted((4 + number % 9) * BLOCK for number in range(CALLS))
    assert sorted(line["input_length"] for line in lines) == asked_for
    assert shown.exit_code == 0, shown.output
    whos = [line.split()[1:] for line in shown.output.splitlines()]
    assert sorted(whos) == [["instance.ready", f"llm.Worker@{name}"] for name in "abc"]
    assert other.exit_code == 0, other.output
    assert f"of {CALLS} decisions as on record" in other.output
    assert "Requests, on record and now" not in other.output
    places = [line.split()[0] for line in plotted.output.splitlines() if "  on record  " in line]
    assert places
    assert plotted.output.startswith(other.output)
    assert why.exit_code == 0, why.output
    assert f"router to llm.Worker: {CALLS} decisions, 0 requests run, 0 wait" in why.output
    assert "secret-7, attempt 1: " in why.output
    assert "by policy kv" in why.output
    assert f"{digest}, attempt 1: " in by_digest.output
    assert json.loads(before.output)["routing"]["decisions"] == 0
    assert isinstance(wrong.exception, ConfigError)
    assert "did you mean policy?" in str(wrong.exception)
    assert b"secret-" not in path.read_bytes()
    assert BLOCK == 16


class Engine(DisaggregatedWorker, namespace="llm"):
    """Hands prompts over within this process."""

    wire: ClassVar = Wire()

    def open_mover(self, name: str, memory: KvMemory) -> AbstractAsyncContextManager[MemoryMover]:
        return self.wire.mover(str(self.__dynbus_name__), memory)


class Mailbox(Actor, namespace="llm"):
    """Does one thing at a time, and takes no other meanwhile."""

    def __init__(self) -> None:
        self.has_begun, self.may_end = asyncio.Event(), asyncio.Event()

    @handler(concurrency=1, queue=0)
    async def take(self, text: str) -> str:
        self.has_begun.set()
        await self.may_end.wait()
        return text


async def test_a_call_that_is_refused_and_a_hand_over_that_fails_are_in_a_saved_file(
    own_server: RunningServer, tmp_path: Path
) -> None:
    path = tmp_path / "a.flight"
    model = tiny_engine(tmp_path, checksums=True)
    request = GenerateRequest(
        [4 + number % 50 for number in range(100)],
        4,
        sampling=Sampling(temperature=0),
        ignore_eos=True,
    )
    async with Runtime.connect(own_server.url, flight=True) as runtime:
        mailbox = (await runtime.start(Mailbox)).actor
        assert isinstance(mailbox, Mailbox)
        for node in ("prefill", "decode"):
            remote: dict[str, Any] = (
                {"disaggregation": {"mode": "remote"}} if node == "decode" else {}
            )
            engine = await runtime.start(Engine, node=node, **model, **remote)
            await runtime.discovery.wait_for_instance(engine.name)
        decode = runtime.client(Engine, node="decode", wait=10.0)
        for damages in (False, True):
            Engine.wire.damages = damages
            with call_options(request_id=f"secret-{damages}"):
                assert [item async for item in decode.generate(request)]
            request.token_ids.reverse()

        takes = runtime.client(Mailbox, retries=0)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(takes.take, "hidden")
            with anyio.fail_after(10.0):
                await mailbox.has_begun.wait()
            with pytest.raises(Overloaded), call_options(request_id="secret-refused"):
                await takes.take("hidden")
            mailbox.may_end.set()
        # What is gathered is sent at the end.
    saved = await invoke(record, "save", str(path), "--namespace", "llm", "--nats", own_server.url)
    shown = await invoke(record, "show", str(path), "--json")
    one = await invoke(record, "show", str(path), "--request", "secret-True")
    by_digest = await invoke(
        record, "show", str(path), "--request", digest_of_request("secret-True")
    )

    assert saved.exit_code == 0, saved.output
    events = [json.loads(line) for line in shown.output.splitlines()]
    by_what = {event["what"]: event for event in events}
    refused, done, failed = (
        by_what[what] for what in ("call.refused", "hand_over.done", "hand_over.failed")
    )
    assert refused["request"] == digest_of_request("secret-refused")
    assert (refused["error"], refused["why"], refused["running"]) == ("Overloaded", "full", 1)
    assert done["request"] == digest_of_request("secret-False")
    assert (done["kind"], done["blocks"]) == ("prefill", 7)
    assert done["bytes"] > 0
    assert (failed["why"], failed["error"]) == ("damaged", "ChecksumMismatch")
    assert failed["request"] == digest_of_request("secret-True")
    assert "hand_over.failed llm.decode@" in one.output
    assert by_digest.output == one.output
    assert "secret" not in shown.output
    assert "hidden" not in shown.output


async def test_what_a_run_does_is_on_record(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYNBUS_FLIGHT", "true")
    monkeypatch.setenv("DYNBUS_HOST", "node-7")
    await anyio.to_thread.run_sync(folder.start_ready, "actors.py:Splitter")
    [worker] = folder.workers()
    async with Runtime.connect(folder.url) as runtime:
        jetstream, stream = runtime.bus.data.jetstream, flight_stream("demo").name

        async def is_recorded(what: str) -> bool:
            try:
                stored = await jetstream.read(stream)
            except NoStream:
                return False
            return any(what.encode() in one.data for one in stored)

        # By the bus: a run that answers there records.
        over_the_bus = ("scale", "Splitter=2", "--host", "node-7", "--nats", folder.url)

        async def is_scaled() -> bool:
            done = await anyio.to_thread.run_sync(folder.dynbus_in_a_process, *over_the_bus)
            return done.returncode == 0

        await eventually(is_scaled, what="the run is scaled over the bus")
        await eventually(partial(is_recorded, "node.scaled"), what="the scaling is on record")
        worker.kill()
        await eventually(partial(is_recorded, "process.ended"), what="the kill is on record")
    path = folder.path / "run.flight"
    saved = await invoke(record, "save", str(path), "--namespace", "demo", "--nats", folder.url)
    shown = await invoke(record, "show", str(path))

    assert saved.exit_code == 0, saved.output
    happened = [line.partition(" ")[2] for line in shown.output.splitlines()]
    assert happened.index("node.scaled demo.Splitter before=1 count=2") < happened.index(
        "process.ended demo.Splitter/1 code=-9"
    )
