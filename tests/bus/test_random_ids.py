"""Tokens are handed out once: in one process, and in a parent and its forked child."""

from __future__ import annotations

import os
import string
import subprocess
import sys

import pytest

from dynbus.bus.protocol.random_ids import random_bytes, random_id

FORKING = """
import os
from dynbus.bus.protocol.random_ids import random_id

random_id()  # now the pool is full, and the child gets a copy of it
reading, writing = os.pipe()
child = os.fork()
if child == 0:
    os.write(writing, " ".join(random_id() for _ in range(8)).encode())
    os._exit(0)
os.waitpid(child, 0)
print(os.read(reading, 4096).decode())
print(" ".join(random_id() for _ in range(8)))
"""


def test_an_id_is_32_hexadecimal_digits() -> None:
    identifier = random_id()

    assert len(identifier) == 32
    assert set(identifier) <= set(string.hexdigits.lower())


def test_ids_do_not_repeat() -> None:
    assert len({random_id() for _ in range(10_000)}) == 10_000


@pytest.mark.parametrize("count", [1, 7, 16, 1000, 4096])
def test_as_many_bytes_come_as_are_asked_for(count: int) -> None:
    pieces = [random_bytes(count) for _ in range(10)]

    assert {len(piece) for piece in pieces} == {count}


def test_pieces_of_different_sizes_do_not_overlap() -> None:
    whole = b"".join(random_bytes(16 + n % 17) for n in range(2000))

    blocks = [whole[n : n + 8] for n in range(len(whole) - 8)]

    assert len(set(blocks)) == len(blocks)


def test_a_forked_child_hands_out_other_ids_than_its_parent() -> None:
    # In a process of its own: this one may have threads, and then must not fork.
    done = subprocess.run(
        [sys.executable, "-c", FORKING],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )

    child, parent = (line.split() for line in done.stdout.splitlines())
    assert len(child) == len(parent) == 8
    assert not set(child) & set(parent)
