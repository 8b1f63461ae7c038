"""Calls that are routed and recorded, saved as a file, and decided again elsewhere."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest
from click.testing import CliRunner, Result
from tests.conditions import eventually
from tests.kvrouter.routing.routing_fixtures import BLOCK
from tests.kvrouter.routing.worker import Worker, prompt

from dynbus import Runtime, call_options
from dynbus.actors.commands.recording import record, replay
from dynbus.bus.errors import ConfigError
from dynbus.bus.flight import flight_stream
from dynbus.bus.nats.server_process import RunningServer
from dynbus.bus.transport import NoStream
from dynbus.kvrouter import open_router

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
            # Of the router, and of the instances.
            return (await jetstream.stream_info(stream)).messages > 1

        await eventually(is_stored, what="the flight is stored")
        saved = await invoke(
            record, "save", str(path), "--namespace", "llm", "--nats", own_server.url
        )
        nothing = await invoke(
            record, "save", str(path), "--namespace", "none", "--nats", own_server.url
        )

    same = await invoke(replay, str(path), "--json")
    shown = await invoke(record, "show", str(path))
    traced = await invoke(record, "trace", str(path))
    other = await invoke(replay, str(path), "--set", "policy=dynamo")
    why = await invoke(replay, str(path), "--request", "secret-7", "--at", "0s")
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
    assert why.exit_code == 0, why.output
    assert f"router to llm.Worker: {CALLS} decisions, 0 requests run, 0 wait" in why.output
    assert "secret-7, attempt 1: " in why.output
    assert "by policy kv" in why.output
    assert json.loads(before.output)["routing"]["decisions"] == 0
    assert isinstance(wrong.exception, ConfigError)
    assert "did you mean policy?" in str(wrong.exception)
    assert b"secret-" not in path.read_bytes()
    assert BLOCK == 16


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
