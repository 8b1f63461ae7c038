"""Files of requests that are run on one machine: what is refused before anything begins."""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

import pytest
from tests.llm.http.served import CARDS, served

from dynbus import ConfigError, NoInstances, Runtime, Unavailable
from dynbus.llm.batches import whole_file
from dynbus.llm.batches.records import Batch
from dynbus.llm.batches.service import Batches
from dynbus.llm.batches.store import BatchStore
from dynbus.llm.batches.whole_file import FileRun, run_file
from dynbus.llm.models.card import ModelType

pytestmark = pytest.mark.anyio


def run_of(folder: Path, output: str = "out.jsonl") -> FileRun:
    path = folder / output
    return FileRun(folder / "in.jsonl", path, path.with_name("errors"), "/v1/chat/completions")


class Endless:
    """A file without an end of a line."""

    def __init__(self) -> None:
        self.read = 0

    def readline(self, most: int = -1) -> bytes:
        """The next bytes.

        Args:
            most: of them; all of them where it is negative.
        """
        assert most >= 0, "there is no end of this line"
        self.read += most
        return b"x" * most


async def test_a_line_without_an_end_is_refused_before_it_fills_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = Endless()
    monkeypatch.setattr(whole_file, "MAX_LINE_BYTES", 1000)

    lines = whole_file._next_lines(  # pyright: ignore[reportPrivateUsage]
        cast("BinaryIO", endless)
    )

    assert len(lines[0]) == 1001
    assert endless.read < 2 * whole_file.READ_BYTES
    (tmp_path / "in.jsonl").write_bytes(b"x" * 2000)
    # The file is read before anything is asked of the bus.
    nobody = cast("Runtime", None)
    with pytest.raises(ConfigError, match="line 1 has more than 1000 bytes"):
        await run_file(nobody, run_of(tmp_path), lambda batch, how: None)


@pytest.mark.parametrize(
    "line", [b"{", b'{"body":{"model":"\xff"}}', b'{"body":{"x":%s}}' % (b"[" * 9000 + b"]" * 9000)]
)
@pytest.mark.parametrize("model", ["", "tiny"])
async def test_lines_that_cannot_be_read_are_left_to_the_batch(
    tmp_path: Path, line: bytes, model: str
) -> None:
    run = run_of(tmp_path)._replace(model=model)
    run.file.write_bytes(line)

    read = await whole_file._read_through(run)  # pyright: ignore[reportPrivateUsage]

    assert read.models == {}


class CatalogOfTiny:
    """A catalog in which the model tiny is served."""

    def __init__(self, _: Runtime) -> None:
        pass

    async def __aenter__(self) -> CatalogOfTiny:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def wait_for(self, name: str, _: ModelType, *, timeout: float) -> None:
        """Nothing, for a model that is there."""
        if name != "tiny":
            raise NoInstances(f"no instance serves the model {name!r} within {timeout:g} s")


async def test_a_model_that_nobody_serves_ends_a_run_where_no_other_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(whole_file, "Catalog", CatalogOfTiny)
    run = run_of(tmp_path)
    run.file.write_bytes(b'\n{"body":{"model":"nope"}}\n{"body":{"model":"nope"}}\n')
    nobody = cast("Runtime", None)
    wait_for_models = whole_file._wait_for_models  # pyright: ignore[reportPrivateUsage]
    read = await whole_file._read_through(run)  # pyright: ignore[reportPrivateUsage]

    with pytest.raises(NoInstances, match=r"in.jsonl, line 2: .*'nope'.*: start a worker of it"):
        await wait_for_models(nobody, read.models, run)
    await wait_for_models(nobody, {**read.models, "tiny": 4}, run)

    assert "line 2: no instance serves the model 'nope' within 10 s" in caplog.text


def test_an_output_without_a_folder_is_refused(tmp_path: Path) -> None:
    run_of(tmp_path).check()

    with pytest.raises(ConfigError, match="cannot be written: there is no folder"):
        run_of(tmp_path, "none/out.jsonl").check()


def test_a_file_that_a_run_would_overwrite_or_cannot_read_twice_is_refused(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    os.mkfifo(tmp_path / "pipe")

    with pytest.raises(ConfigError, match="is written as .*out.jsonl.part"):
        run._replace(file=tmp_path / "out.jsonl.part").check()
    with pytest.raises(ConfigError, match="no regular file"):
        run._replace(file=tmp_path / "pipe").check()


async def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    run.file.write_bytes(b"one\n")
    read = await whole_file._read_through(run)  # pyright: ignore[reportPrivateUsage]
    lines = whole_file._same_lines(run, read.digest)  # pyright: ignore[reportPrivateUsage]
    assert [line async for line in lines] == [b"one\n"]

    run.file.write_bytes(b"two\n")

    with pytest.raises(ConfigError, match="changes while it is read"):
        async for _ in whole_file._same_lines(  # pyright: ignore[reportPrivateUsage]
            run, read.digest
        ):
            pass


async def test_a_run_that_ends_while_it_takes_back_what_it_wrote_can_be_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(tmp_path)._replace(concurrency=0)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "say it"}]}
    asked = {"custom_id": "a", "method": "POST", "url": run.endpoint, "body": body}
    run.file.write_text(json.dumps(asked))
    told: list[str] = []

    async def there_are(*_: object) -> None:
        """Models that the catalog of the bus does not have."""

    monkeypatch.setattr(whole_file, "_wait_for_models", there_are)

    def tell(_: Batch, how: str) -> None:
        told.append(how)

    async with served(CARDS, batches=True) as front:
        runtime = front.kit.caller
        for call in range(5):
            calls = iter(range(call))
            with monkeypatch.context() as patched:
                for name in ("delete_file", "delete_batch"):
                    patched.setattr(BatchStore, name, dies_after(calls, getattr(BatchStore, name)))
                with suppress(Unavailable):
                    await run_file(runtime, run, tell)
            assert (await run_file(runtime, run, tell)).status == "completed"
            assert json.loads(run.output.read_bytes())["custom_id"] == "a"
        store = Batches(runtime).store
        assert await store.batches("") == []

    assert "resumed" in told


def dies_after(calls: Iterator[int], method: Callable[..., Awaitable[None]]) -> Any:
    async def call(*arguments: Any) -> None:
        if next(calls, None) is None:
            raise Unavailable("it is killed")
        await method(*arguments)

    return call
