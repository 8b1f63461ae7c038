"""Files of requests that are run on one machine: what is refused before anything begins."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO, cast

import pytest

from dynbus import ConfigError, Runtime
from dynbus.llm.batches import whole_file
from dynbus.llm.batches.whole_file import FileRun, run_file

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

    assert read.models == set()


def test_an_output_without_a_folder_is_refused(tmp_path: Path) -> None:
    run_of(tmp_path).check()

    with pytest.raises(ConfigError, match="cannot be written: there is no folder"):
        run_of(tmp_path, "none/out.jsonl").check()
