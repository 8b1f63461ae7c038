"""A host store whose memory is a file: the next process has what a killed one has kept."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus.bus.errors import ConfigError
from dynbus.kvrouter.events import BlockStored
from dynbus.llm.generation import Session
from dynbus.llm.tiers.host_index import HostIndex
from dynbus.llm.tiers.lasting import KEY_BYTES, LastingBlock, LastingMemory

from .remembering import expected
from .test_host_store import SIZE, Engine

SESSION = Session("chat", 600.0)


def prompt(number: int, blocks: int = 5) -> list[int]:
    return [(number * 7 + at) % 90 for at in range(blocks * SIZE + 1)]


def test_the_next_process_goes_on_with_what_was_kept(tmp_path: Path) -> None:
    before = Engine(folder=tmp_path)
    for number in range(4):
        before.generate(prompt(number))
    kept = before.store.statistics.blocks
    assert kept > 8
    before.store.leave()

    after = Engine(folder=tmp_path)
    # Routers are told before any request comes.
    assert after.engine.has_work
    after.follow(after.engine.step().events)
    assert not after.engine.has_work
    assert after.store.statistics.blocks == kept
    assert after.overlap(prompt(0)).total == 5
    assert after.generate(prompt(0)) == (expected(prompt(0), 2), 5 * SIZE)
    assert len([*tmp_path.iterdir()]) == 1


def test_a_conversation_is_kept_before_its_process_ends_and_others_are_not(tmp_path: Path) -> None:
    before = Engine(folder=tmp_path)
    before.generate(prompt(0, 2), session=SESSION)
    before.generate(prompt(1, 2))
    before.store.leave()

    after = Engine(folder=tmp_path)
    assert after.generate(prompt(1, 2))[1] == 0
    assert after.generate(prompt(0, 2)) == (expected(prompt(0, 2), 2), 2 * SIZE)


def test_bytes_that_have_changed_meanwhile_are_not_used(tmp_path: Path) -> None:
    before = Engine(folder=tmp_path)
    before.generate(prompt(0, 2), session=SESSION)
    before.store.leave()
    [path] = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    # The first number of the second block that was kept.
    data[4096 + before.store.memory.layout.block_bytes] ^= 1
    path.write_bytes(data)

    after = Engine(folder=tmp_path)
    assert after.generate(prompt(0, 2)) == (expected(prompt(0, 2), 2), SIZE)
    assert after.store.statistics.damaged == 1


def test_files_of_stores_that_nobody_has_are_named_with_their_size(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    used, left = (LastingMemory(tmp_path, kind, 4, 4096) for kind in ("used", "left"))
    left.close()
    os.utime(left.path, (1_700_000_000, 1_700_000_000))
    (tmp_path / "notes.kv").write_text("somebody's own")
    (tmp_path / f"{'0' * 16}-0.kv").symlink_to(left.path)
    caplog.clear()

    mine = LastingMemory(tmp_path, "mine", 4, 4096)

    [told] = [record.getMessage() for record in caplog.records]
    size = left.path.stat().st_blocks * 512
    assert f"no process has these files in {tmp_path}, which are of other models" in told
    assert f"{left.path.name} ({size / 2**20:,.0f} MiB, last begun to be used 2023-11-14" in told
    assert used.path.name not in told
    # Who looks leaves it as it is: its own process goes on with it.
    again = LastingMemory(tmp_path, "left", 4, 4096)
    assert again.path == left.path
    assert again.path.stat().st_mtime > 1_700_000_000
    for one in (used, mine, again):
        one.close()


def test_what_is_forgotten_does_not_come_back(tmp_path: Path) -> None:
    before = Engine(folder=tmp_path)
    before.generate(prompt(0, 2), session=SESSION)
    before.store.close()
    before.store.leave()

    assert Engine(folder=tmp_path).store.statistics.blocks == 0


def test_two_processes_have_a_file_each_and_other_models_others(tmp_path: Path) -> None:
    first = LastingMemory(tmp_path, "a model", 4, 64)
    second = LastingMemory(tmp_path, "a model", 4, 64)
    other = LastingMemory(tmp_path, "another", 4, 64)
    assert len({first.path, second.path, other.path}) == 3
    second.note(LastingBlock(2, 20, None, 30, 40))
    second.close()

    again = LastingMemory(tmp_path, "a model", 4, 64)
    assert again.path == second.path
    assert [*again.blocks()] == [LastingBlock(2, 20, None, 30, 40)]


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="host_folder: .* cannot be used"):
        LastingMemory(tmp_path / "file", "a model", 4, 64)


def test_files_that_are_not_ones_own_are_passed_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = LastingMemory(tmp_path, "a model", 4, 64).path
    theirs.unlink()
    (tmp_path / "elsewhere").write_bytes(b"kept")
    theirs.symlink_to(tmp_path / "elsewhere")
    own = LastingMemory(tmp_path, "a model", 4, 64)
    assert own.path != theirs
    own.close()

    opened = os.open

    def refused(path: Path, *options: int) -> int:
        if path == own.path:
            raise PermissionError(errno.EACCES, "it is another user's")
        return opened(path, *options)

    monkeypatch.setattr(os, "open", refused)
    assert LastingMemory(tmp_path, "a model", 4, 64).path not in (theirs, own.path)
    assert (tmp_path / "elsewhere").read_bytes() == b"kept"


def test_blocks_without_the_key_of_their_names_are_not_there(tmp_path: Path) -> None:
    before = LastingMemory(tmp_path, "a model", 4, 64)
    before.note(LastingBlock(2, 20, None, 30, 40))
    before.close()
    with before.path.open("r+b") as file:
        file.write(bytes(KEY_BYTES))

    assert [*LastingMemory(tmp_path, "a model", 4, 64).blocks()] == []


def test_a_file_that_was_left_is_neither_read_nor_written(tmp_path: Path) -> None:
    before = Engine(folder=tmp_path)
    before.generate(prompt(0, 2), session=SESSION)
    store: Any = before.store
    hashes = store._index.hashes
    assert before.store.find(hashes) == 2
    before.store.leave()
    after = Engine(folder=tmp_path)
    after.store.memory.views()[0][:] = 7

    assert before.store.fill([0, 1], hashes) == 0
    assert before.store.statistics.damaged == 0
    before.store.close()
    after.store.leave()
    assert Engine(folder=tmp_path).store.statistics.blocks == 2


def test_a_file_is_left_once_what_is_copied_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(folder=tmp_path)
    leaving = threading.Thread(target=engine.store.leave)
    store: Any = engine.store
    copy = store._copier.keep

    def keep(blocks: Sequence[int], places: Sequence[int]) -> None:
        leaving.start()
        leaving.join(0.2)
        assert leaving.is_alive()
        copy(blocks, places)

    monkeypatch.setattr(store._copier, "keep", keep)
    engine.generate(prompt(0, 2), session=SESSION)
    leaving.join()

    assert Engine(folder=tmp_path).store.statistics.blocks == 2


WRITER = """
import os, sys
from pathlib import Path
from dynbus.llm.tiers.lasting import LastingBlock, LastingMemory

memory = LastingMemory(Path(sys.argv[1]), "a model", 64, 4096)
number = 0
while True:
    place = number % 64
    memory.drop([place])
    memory.data[place * 4096 : (place + 1) * 4096] = number % 251
    memory.note(LastingBlock(place, number + 1, None, 0, number % 251))
    number += 1
    if number == 100:
        print("ready", flush=True)
"""


def test_a_process_that_is_killed_leaves_whole_blocks(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        os.kill(writer.pid, signal.SIGKILL)

    left = LastingMemory(tmp_path, "a model", 64, 4096)
    blocks = [*left.blocks()]
    assert len(blocks) >= 63
    for block in blocks:
        data = left.data[block.place * 4096 : (block.place + 1) * 4096]
        assert set(data.tolist()) == {block.checksum}


@given(st.lists(st.integers(-1, 20), max_size=20))
def test_an_index_has_what_begins_somewhere_and_tells_it_in_order(parents: list[int]) -> None:
    blocks = [
        # Those whose parent is themselves or comes later begin nowhere.
        LastingBlock(at, 100 + at, None if parent < 0 else 100 + parent, at, 0)
        for at, parent in enumerate(parents)
    ]
    index = HostIndex(20)
    here = index.restore(blocks)

    known: set[int | None] = {None}
    while added := {
        one.sequence_hash
        for one in blocks
        if one.parent_hash in known and one.sequence_hash not in known
    }:
        known |= added
    assert {one.sequence_hash for one in here} == known - {None}
    seen: set[int | None] = {None}
    for event in index.take_events():
        assert isinstance(event, BlockStored)
        assert event.parent_hash in seen
        seen.update(event.engine_hashes)
    assert seen == known
    # What is here can go: all places are found again.
    assert len(index.add(None, [*range(20)], [0] * 20)) == 20
