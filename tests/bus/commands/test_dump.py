"""`dynbus dump` collects what may be seen into one archive, and nothing that users wrote."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import tarfile
from collections.abc import Awaitable
from importlib import metadata
from pathlib import Path
from typing import Any

import anyio
import pytest
from click.testing import CliRunner, Result
from tests.bus.servers import server_stopped

from dynbus import Actor, HandlerError, Runtime, call_options, handler
from dynbus.bus import exit_codes
from dynbus.bus.commands import dump_parts
from dynbus.bus.commands.dump import dump
from dynbus.bus.commands.dump_parts import Part, collect_parts
from dynbus.bus.commands.terminal import terminal
from dynbus.bus.config import BusConfig
from dynbus.bus.errors import ConfigError, DynbusError
from dynbus.bus.nats.server_process import RunningServer, free_port, run_server
from dynbus.bus.protocol.names import EndpointName
from dynbus.bus.topics import TopicConfig, topic_config
from dynbus.bus.work_queue import WorkQueue, WorkQueueConfig

pytestmark = pytest.mark.anyio

PASSWORD = f"password-{secrets.token_hex(8)}"
PRIVATE = f"private-{secrets.token_hex(8)}"
"""Part of all that users write: prompts, jobs, headers, exceptions."""

begun = asyncio.Event()
answered = asyncio.Event()


class Desk(Actor, namespace="demo"):
    @handler
    async def ask(self, prompt: str) -> str:
        begun.set()
        await answered.wait()
        return prompt

    @handler
    async def fail(self, prompt: str) -> str:
        raise RuntimeError(f"no answer to {prompt}")


async def command(*arguments: str) -> Result:
    """`dynbus dump` in a thread: it has a loop of its own."""
    return await asyncio.to_thread(CliRunner().invoke, dump, arguments)


def contents(path: Path) -> dict[str, bytes]:
    """The files of an archive by their paths below its one folder."""
    files: dict[str, bytes] = {}
    with tarfile.open(path) as archive:
        for member in archive:
            file = archive.extractfile(member)
            assert file is not None
            files[member.name.partition("/")[2]] = file.read()
    return files


def guarded(tmp_path: Path, permissions: str = "") -> Awaitable[RunningServer]:
    users = f"{{user: ann, password: {PASSWORD}{permissions}}}, {{user: bob, password: b}}"
    return run_server(
        store_dir=tmp_path / "server", config=f"authorization {{ users = [{users}] }}"
    )


def url_of(server: RunningServer) -> str:
    return server.url.replace("nats://", f"nats://ann:{PASSWORD}@")


async def test_a_dump_tells_the_state_of_a_fleet_and_nothing_that_users_wrote(
    tmp_path: Path,
) -> None:
    begun.clear()
    answered.clear()
    path = tmp_path / "state.tar.gz"
    queue_name = EndpointName("demo", "Printer", "print")
    server = await guarded(tmp_path)
    async with server_stopped(server), Runtime.connect(url_of(server)) as runtime:
        instance = await runtime.start(Desk)
        desk = runtime.client(Desk)
        with pytest.raises(HandlerError), call_options(wait=10.0):
            await desk.fail(PRIVATE)
        topic = topic_config(TopicConfig("demo", "closed", 3600.0))
        await runtime.bus.data.jetstream.ensure_stream(topic)
        queue = WorkQueue(runtime.bus, queue_name, WorkQueueConfig())
        for job_id in ("dead", "waits"):
            await queue.put(PRIVATE.encode(), job_id=job_id, headers={"colour": PRIVATE})
        async with queue.take() as taker:
            await (await anext(taker)).bury(f"RuntimeError: {PRIVATE}")
        async with asyncio.TaskGroup() as calls:
            with call_options(request_id="r1", metadata={"note": PRIVATE}):
                calls.create_task(desk.ask(PRIVATE))
            await begun.wait()
            result = await command("-o", str(path), "--nats", url_of(server))
            answered.set()

    assert (result.exit_code, result.stdout) == (exit_codes.OK, f"{path}\n"), result.output
    files = contents(path)
    assert [name for name, data in files.items() if PRIVATE.encode() in data] == []
    assert [name for name, data in files.items() if PASSWORD.encode() in data] == []
    assert path.stat().st_mode & 0o077 == 0
    assert set(os.listdir(tmp_path)) == {"server", path.name}
    readme = files.pop("README").decode()
    assert [name for name in files if f"\n{name} " not in readme] == []
    parts = {name: json.loads(data) for name, data in files.items()}
    assert parts["versions.json"]["servers"] == [server.url.replace("//", "//ann:***@")]
    assert {"name": "headers", "status": "ok", "found": "supported", "remedy": ""} in parts[
        "doctor.json"
    ]
    (row,) = parts["instances.json"]["instances"]
    assert (row["component"], row["state"], row["running"]) == ("Desk", "serving", 1)
    (request,) = parts["requests.json"]
    assert (request["request_id"], request["endpoint"], request["state"]) == ("r1", "ask", "runs")
    (line,) = parts["queues/demo.json"]
    assert (line["queue"], line["waiting"], line["dead"]) == (str(queue_name), 1, 1)
    assert [one["topic"] for one in parts["topics/demo.json"]] == ["demo.closed"]
    stream = parts["streams/DYNBUS_WORK_demo+Printer+print.json"]
    assert stream["stream"]["state"]["messages"] == 1
    assert "demo.Printer._work.print.normal.>" in stream["stream"]["config"]["subjects"]
    assert stream["consumers"]["takers-normal"]["num_pending"] == 1
    (process,) = parts["log.json"]["processes"].values()
    assert process["instances"] == [f"demo.Desk@{instance.id}"]
    assert "RuntimeError" in {record.get("raised") for record in process["records"]}
    assert any(
        record["text"] == "job dead of demo.Printer.print is a dead letter: RuntimeError: ..."
        for record in process["records"]
    )


async def test_what_is_not_permitted_is_named_and_the_rest_is_collected(tmp_path: Path) -> None:
    path = tmp_path / "state.tar.gz"
    denied = '["$JS.API.STREAM.NAMES", "$SRV.STATS"]'
    server = await guarded(tmp_path, f", permissions: {{publish: {{deny: {denied}}}}}")
    other = server.url.replace("nats://", "nats://bob:b@")
    async with server_stopped(server), Runtime.connect(other) as runtime:
        await runtime.start(Desk)
        result = await command("-o", str(path), "--nats", url_of(server))

    assert result.exit_code == exit_codes.OK, result.output
    parts = {name: data for name, data in contents(path).items() if name != "README"}
    missing: dict[str, str] = {
        name: json.loads(data)["missing"]
        for name, data in parts.items()
        if data.startswith(b'{\n  "missing": ')
    }
    for name in ("log.json", "queues/demo.json", "requests.json", "streams.json"):
        assert missing[name].startswith("PermissionDenied: ")
        assert f"missing: {name}: PermissionDenied: " in result.stderr
    (row,) = json.loads(parts["instances.json"])["instances"]
    assert row["component"] == "Desk"
    assert not missing.keys() & {"doctor.json", "instances.json", "versions.json"}


async def test_where_no_server_answers_or_the_file_is_there_nothing_is_written(
    tmp_path: Path, nats_server: RunningServer
) -> None:
    path, taken = tmp_path / "state.tar.gz", tmp_path / "taken.tar.gz"
    taken.write_text("of before")

    nobody = await command("-o", str(path), "--nats", f"nats://127.0.0.1:{free_port()}")
    again = await command("-o", str(taken), "--nats", nats_server.url)
    nowhere = await command("-o", str(tmp_path / "no" / "x.gz"), "--nats", nats_server.url)

    assert isinstance(nobody.exception, DynbusError)
    assert exit_codes.exit_code(nobody.exception) == exit_codes.NO_SERVER
    assert isinstance(again.exception, ConfigError)
    assert str(again.exception) == f"{taken} is there already: name another file with -o"
    assert isinstance(nowhere.exception, ConfigError)
    assert "there is no folder" in str(nowhere.exception)
    assert os.listdir(tmp_path) == [taken.name]
    assert taken.read_text() == "of before"


async def slow(config: BusConfig) -> None:
    """A part that takes its time."""
    await anyio.sleep_forever()


async def broken(config: BusConfig) -> None:
    """A part that fails at nats://me:hidden@bus."""
    raise RuntimeError("no way to nats://me:hidden@bus")


async def odd(config: BusConfig) -> object:
    """A part that no JSON can hold."""
    return object()


async def own(config: BusConfig) -> dict[Any, Any]:
    """A part of another package."""
    return {"url": "nats://me:hidden@bus", 1: ("a",)}


async def parts_with(
    monkeypatch: pytest.MonkeyPatch, url: str, seconds: float, **values: str
) -> dict[str, Part]:
    """The parts that are collected in so many seconds with these of other packages."""
    given = [metadata.EntryPoint(n, v, dump_parts.ENTRY_POINTS) for n, v in values.items()]

    def entry_points(*, group: str) -> list[metadata.EntryPoint]:
        return [one for one in given if one.group == group]

    monkeypatch.setattr(metadata, "entry_points", entry_points)
    async with terminal.server(BusConfig(servers=(url,)), "test") as server:
        return {part.path: part for part in await collect_parts(server, seconds)}


async def test_a_part_of_another_package_that_fails_or_hangs_leaves_the_others(
    own_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = await parts_with(
        monkeypatch,
        own_server.url,
        3.0,
        absent="no_such_module:part",
        broken=f"{__name__}:broken",
        odd=f"{__name__}:odd",
        own=f"{__name__}:own",
        slow=f"{__name__}:slow",
    )

    assert parts["absent.json"].missing.startswith("ModuleNotFoundError: ")
    assert parts["broken.json"].missing == "RuntimeError: no way to nats://me:***@bus"
    assert parts["odd.json"].missing.startswith("TypeError: ")
    assert parts["slow.json"].missing == "it was not there within the 3 s for all of it"
    assert json.loads(parts["own.json"].data) == {"url": "nats://me:***@bus", "1": ["a"]}
    assert parts["own.json"].about == "A part of another package"
    assert parts["versions.json"].missing == ""
