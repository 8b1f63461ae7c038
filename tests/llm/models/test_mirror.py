"""Models in the mirror of the bus: what is put there once, read once, and refused."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.llm.small import references
from tests.llm.test_small_worker import served_folder
from tests.scenarios.processes import Process

from dynbus import Runtime
from dynbus.bus.errors import ConfigError, PermissionDenied
from dynbus.bus.memory.bus import MemoryBus, MemoryConnection
from dynbus.bus.nats.connection import connect
from dynbus.bus.nats.server_process import RunningServer, free_port
from dynbus.bus.records.objects import ObjectStore, record_subject
from dynbus.llm.generation import GenerateRequest, Sampling
from dynbus.llm.models import manifest, mirror, mirroring
from dynbus.llm.models.manifest import PART_BYTES
from dynbus.llm.models.mirror import GIB, Mirror
from dynbus.llm.models.mirroring import Mirrored, mirror_model
from dynbus.llm.models.origins import ModelUnavailable, Progress
from dynbus.llm.models.packages import cache_folder
from dynbus.llm.models.source import LocalModel, resolve
from dynbus.llm.worker import SmallWorker

from .index_server import COMMIT, local_server

pytestmark = pytest.mark.anyio

PART = 1000
WEIGHTS = Random(3).randbytes(4 * PART + 17)
FILES = {
    "config.json": b"{}",
    "model.safetensors": WEIGHTS,
    "modeling.py": b"raise SystemExit('imported')",
    "tokenizer.json": b"[]",
}
WANTED = {name: data for name, data in FILES.items() if name != "modeling.py"}
PARTS = 7
"""Of the files that are wanted."""


@pytest.fixture(autouse=True)
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with empty caches, and without a network to the hub."""
    for name in os.environ:
        if name.startswith("HF_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_port()}")


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (manifest, mirror, mirroring):
        monkeypatch.setattr(module, "PART_BYTES", PART)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return written(tmp_path / "folder", FILES)


def written(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def nothing(_: Progress) -> None:
    """Shows no progress."""


async def mirrored(
    connection: MemoryConnection, path: Path | str, name: str | None = "org/tiny", **options: Any
) -> Mirrored:
    return await mirror_model(connection.jetstream, path, name, nothing, **options)


async def had(connection: MemoryConnection, path: str) -> LocalModel:
    return await resolve(path, mirror=Mirror(connection.jetstream))


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class Counted:
    """The names of what is asked of object stores; the one at `fails` is refused."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str, fails: int = 0) -> None:
        self.names: list[str] = []
        real = getattr(ObjectStore, method)

        async def counted(store: ObjectStore, name: str, *given: Any, **options: Any) -> Any:
            if name.startswith("parts/"):
                self.names.append(name)
                if len(self.names) == fails:
                    raise PermissionDenied("cut off")
            return await real(store, name, *given, **options)

        monkeypatch.setattr(ObjectStore, method, counted)


async def test_a_mirrored_folder_is_had_without_a_hub(folder: Path, small_parts: None) -> None:
    connection = await MemoryBus().connect()
    done = await mirrored(connection, folder)

    for path in ("org/tiny", "hf://org/tiny@main", "bus://org/tiny", f"org/tiny@{done[0].commit}"):
        model = await had(connection, path)
        assert content(model.path) == WANTED
        assert (model.name, model.format, model.origin) == ("tiny", "folder", path)
    assert done.put == sum(map(len, WANTED.values()))
    assert [path.name for path in cache_folder().iterdir() if path.suffix != ".lock"] == [
        model.path.name
    ]


async def test_one_gguf_file_is_mirrored_by_its_own_name(tmp_path: Path) -> None:
    connection = await MemoryBus().connect()
    await mirrored(connection, written(tmp_path / "f", {"q4.gguf": b"GGUF"}) / "q4.gguf")
    await mirrored(connection, tmp_path / "f", "org/tiny/q4.gguf@v1")

    whole = await had(connection, "org/tiny")
    one = await had(connection, "hf://org/tiny/q4.gguf@v1")

    assert whole.path == one.path
    assert (one.name, one.format, one.path.read_bytes()) == ("q4", "gguf", b"GGUF")


async def test_the_mirror_comes_before_the_hub_and_its_commit_in_the_hubs_cache_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = await MemoryBus().connect()
    (tmp_path / "wheels").mkdir()
    with local_server(tmp_path / "wheels") as hub, monkeypatch.context() as patch:
        patch.setenv("HF_ENDPOINT", hub.url)
        hub.repositories["org/tiny"] = FILES
        hub.repositories["org/other"] = FILES
        hub.repositories["org/gguf"] = {"sub/q4.gguf": b"GGUF"}
        done = await mirrored(connection, "org/tiny", None)
        await mirrored(connection, "hf://org/gguf/sub/q4.gguf", None)
        hub.asked.clear()
        cached = await had(connection, "org/tiny")
        patch.setenv("HF_HOME", str(tmp_path / "empty"))
        read = await had(connection, "org/tiny")
        one = await had(connection, "hf://org/gguf/sub/q4.gguf")
        asked = list(hub.asked)
        other = await had(connection, "org/other")

    assert done.manifest.commit == COMMIT == cached.path.name
    assert content(cached.path) == content(read.path) == content(other.path) == WANTED
    assert read.path.parent == cache_folder()
    assert one.path == cache_folder() / one.path.parent.name / "q4.gguf"
    assert asked == []
    assert other.path.is_relative_to(tmp_path / "empty")


async def test_what_is_not_mirrored_is_not_looked_for_elsewhere_where_the_path_says_so() -> None:
    connection = await MemoryBus().connect()

    with pytest.raises(
        ModelUnavailable, match="bus://org/tiny is not in the mirror .* by `dynbus mod"
    ):
        await had(connection, "bus://org/tiny")
    with pytest.raises(ModelUnavailable, match="known to workers and to register_llm alone"):
        await resolve("bus://org/tiny")
    with pytest.raises(ModelUnavailable, match="org/tiny cannot be downloaded"):
        await had(connection, "org/tiny")


async def test_a_mirror_that_cannot_be_asked_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    connection = await MemoryBus().connect()

    async def refused(*_: Any, **__: Any) -> None:
        raise PermissionDenied("not for you")

    monkeypatch.setattr(ObjectStore, "get", refused)
    (tmp_path / "wheels").mkdir()
    with local_server(tmp_path / "wheels") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.repositories["org/tiny"] = FILES
        model = await had(connection, "org/tiny")
    with pytest.raises(ModelUnavailable, match="cannot be asked for org/tiny: not for you"):
        await had(connection, "bus://org/tiny")

    assert content(model.path) == WANTED
    assert "cannot be asked for org/tiny: not for you" in caplog.text


async def test_a_model_path_that_has_no_name_on_the_bus_is_refused(folder: Path) -> None:
    connection = await MemoryBus().connect()

    with pytest.raises(ConfigError, match="by --as ORG/NAME"):
        await mirrored(connection, folder, None)
    with pytest.raises(ConfigError, match="is in the mirror already"):
        await mirrored(connection, "bus://org/tiny")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to(folder.parent / "secret")
    (folder.parent / "secret").write_text("secret")
    with pytest.raises(ConfigError, match="out of the model's folder"):
        await mirrored(connection, folder)


async def test_a_model_that_was_put_in_part_goes_on_where_it_stopped(
    folder: Path, small_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = await MemoryBus().connect()
    with monkeypatch.context() as patch:
        Counted(patch, "put", fails=4)
        with pytest.raises(PermissionDenied):
            await mirrored(connection, folder)
    not_whole = await Mirror(connection.jetstream).models()

    with monkeypatch.context() as patch:
        rest = Counted(patch, "put")
        await mirrored(connection, folder)
        again = await mirrored(connection, folder, "org/same")

    assert not_whole == []
    assert len(rest.names) == PARTS - 3
    assert again.put == 0
    assert content((await had(connection, "org/same")).path) == WANTED


async def test_a_model_that_was_read_in_part_keeps_its_whole_files(
    folder: Path, small_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = await MemoryBus().connect()
    await mirrored(connection, folder)
    with monkeypatch.context() as patch:
        Counted(patch, "get", fails=PARTS)
        with pytest.raises(ModelUnavailable, match=r"cut off.*models mirror --check"):
            await had(connection, "org/tiny")

    with monkeypatch.context() as patch:
        rest = Counted(patch, "get")
        model = await had(connection, "org/tiny")

    assert content(model.path) == WANTED
    assert len(rest.names) == 1


async def test_a_damaged_part_is_refused_until_it_is_put_again(
    folder: Path, small_parts: None
) -> None:
    connection = await MemoryBus().connect()
    done = await mirrored(connection, folder)
    chunks = await connection.jetstream.read("OBJ_dynbus_mirror", "$O.dynbus_mirror.C.*")
    [first] = [chunk for chunk in chunks if chunk.data == WEIGHTS[:PART]]
    await connection.jetstream.purge("OBJ_dynbus_mirror", first.subject)

    with pytest.raises(ModelUnavailable, match=r"model\.safetensors of org/tiny .* is damaged"):
        await had(connection, "org/tiny")
    unseen = await mirrored(connection, folder)
    seen = await mirrored(connection, folder, check=True)

    assert (done.put > PART, unseen.put, seen.put) == (True, 0, PART)
    assert content((await had(connection, "org/tiny")).path) == WANTED


async def test_a_damaged_manifest_is_not_taken_for_none(folder: Path) -> None:
    connection = await MemoryBus().connect()
    await mirrored(connection, folder)
    await connection.jetstream.publish(record_subject("dynbus_mirror", "models/org/tiny@main"), b"")

    with pytest.raises(ModelUnavailable, match="cannot be asked for org/tiny: .*purge that subj"):
        await had(connection, "bus://org/tiny")


async def test_parts_that_are_not_those_of_the_file_are_refused(
    folder: Path, small_parts: None
) -> None:
    connection = await MemoryBus().connect()
    done = await mirrored(connection, folder)
    [parts] = [one.parts for one in done.manifest.files if one.name == "model.safetensors"]
    store = ObjectStore(connection.jetstream, mirror.mirror_bucket())

    for other in (b"x" * PART, b"x" * 10 * PART):
        await store.put(f"parts/{parts[2]}", other)
        with pytest.raises(ModelUnavailable, match="it does not have the SHA-256"):
            await had(connection, "org/tiny")


async def test_a_full_mirror_says_what_gives_it_room(folder: Path, small_parts: None) -> None:
    connection = await MemoryBus().connect()

    with pytest.raises(
        ConfigError, match=r"the mirror is full .*unmirror.*.* change max_bytes .*nats stream edit"
    ):
        await mirrored(connection, folder, max_bytes=3 * PART)

    assert await Mirror(connection.jetstream).models() == []
    with pytest.raises(ConfigError, match=r"for 2.79\S+ GiB and not 1: leave out --max-gib, or"):
        await mirrored(connection, folder, max_bytes=GIB)


async def test_what_no_model_has_any_more_is_freed(
    folder: Path, tmp_path: Path, small_parts: None
) -> None:
    connection = await MemoryBus().connect()
    kept = Mirror(connection.jetstream)
    with pytest.raises(ConfigError, match="nothing was ever mirrored"):
        await kept.remove("org/tiny")
    await mirrored(connection, folder, "org/tiny@v1")
    await mirrored(connection, folder, "org/tiny")
    longer = {**WANTED, "model.safetensors": WEIGHTS + b"more"}
    await mirrored(connection, written(tmp_path / "longer", longer), "org/longer")

    names = [(one.manifest.model, one.revisions) for one in await kept.models()]
    with pytest.raises(ConfigError, match=r"has no org/tiny@v2: it has org/longer@.*, org/tiny@v1"):
        await kept.remove("org/tiny", "v2")
    freed = await kept.remove("org/tiny", "v1")
    objects = await ObjectStore(connection.jetstream, mirror.mirror_bucket()).list_objects()
    after = [one.manifest.model for one in await kept.models()]
    left = await had(connection, "org/longer")
    await kept.remove("org/longer")

    assert names == [("org/longer", ("main",)), ("org/tiny", ("main", "v1"))]
    assert after == ["org/longer"]
    assert freed > 0
    assert len([one for one in objects if one.name.startswith("parts/")]) == PARTS
    assert content(left.path) == longer
    assert (await connection.jetstream.stream_info("OBJ_dynbus_mirror")).messages == 0


async def test_a_manifest_that_cannot_be_read_has_nothing_freed_but_itself(folder: Path) -> None:
    connection = await MemoryBus().connect()
    await mirrored(connection, folder)
    store = ObjectStore(connection.jetstream, mirror.mirror_bucket())
    await store.put("models/org/new@main", b"{}")
    kept = Mirror(connection.jetstream)

    with pytest.raises(ConfigError, match="unmirror it first: models/org/new@main"):
        await kept.remove("org/tiny")
    await kept.remove("org/new")

    assert [one.manifest.model for one in await kept.models()] == ["org/tiny"]


# Processes ------------------------------------------------------------------------------------

PROGRAM = """
import asyncio, sys
from dynbus import Runtime
from dynbus.llm.models.mirror import Mirror
from dynbus.llm.models.source import resolve

async def main():
    async with Runtime.connect(sys.argv[1]) as runtime:
        mirror = Mirror(runtime.bus.data.jetstream)
        await resolve("org/tiny", mirror=mirror, progress=lambda one: print(one.what))

asyncio.run(main())
"""


async def test_of_two_processes_of_a_host_one_reads_the_mirror(
    own_server: RunningServer, folder: Path
) -> None:
    (folder / "model.safetensors").write_bytes(Random(4).randbytes(2 * PART_BYTES))
    connection = await connect([own_server.url])
    await mirror_model(connection.jetstream, folder, "org/tiny", nothing, max_bytes=GIB)
    await connection.close()

    command = [sys.executable, "-c", PROGRAM, own_server.url]
    processes = [
        await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE) for _ in range(2)
    ]
    async with asyncio.timeout(60):
        said = [(await process.communicate())[0].decode() for process in processes]

    assert [process.returncode for process in processes] == [0, 0]
    assert sum("\ndownloading org/tiny from the bus" in each for each in said) == 1, said
    assert len([path for path in cache_folder().iterdir() if path.is_dir()]) == 1


async def test_a_worker_without_a_network_to_the_hub_serves_a_mirrored_model(
    own_server: RunningServer, tmp_path: Path
) -> None:
    connection = await connect([own_server.url])
    folder = served_folder(tmp_path / "tiny")
    await mirror_model(connection.jetstream, folder, "org/tiny", nothing, max_bytes=GIB)
    await connection.close()
    worker = Process(
        tmp_path / "worker.log",
        *("dynbus", "run", "dynbus.llm:SmallWorker", "--nats", own_server.url),
        *("--SmallWorker.model=org/tiny", "--SmallWorker.backend=numpy"),
    )
    try:
        await worker.says(" is ready", 60)
        async with Runtime.connect(own_server.url) as runtime:
            request = GenerateRequest(
                references.prompt(),
                references.GENERATED,
                sampling=Sampling(temperature=0),
                ignore_eos=True,
            )
            items = runtime.client(SmallWorker).generate(request)
            tokens = [token async for item in items for token in item.token_ids]
        worker.terminate()
        await worker.ended()
    finally:
        worker.kill()

    assert tokens == references.stored()["llama"]["tokens"]
