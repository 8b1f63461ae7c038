"""The compiled kernel is there for those who have Numba, and missed by nobody else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dynbus.bus.errors import ConfigError
from dynbus.kvrouter import hashing
from dynbus.kvrouter.radix.index import RadixIndex
from dynbus.kvrouter.radix.python_kernel import PythonKernel

WITHOUT_NUMBA = """
import sys
sys.modules["numba"] = None
from dynbus.kvrouter import BlockStored, RadixIndex, block_hashes, encode_events
blocks = block_hashes(range(64), 16)
index = RadixIndex()
index.apply("a", encode_events([BlockStored(None, blocks, blocks)], event_epoch=1, first_id=0))
print(type(index.kernel).__name__, index.lookup(blocks))
"""

UNLESS_ASKED_FOR = """
import sys
from dynbus.kvrouter import RadixIndex, block_hashes
RadixIndex(kernel="python")
block_hashes(range(64), 16)
print("numba" in sys.modules)
"""


NOT_COMPILED_YET = """
import sys
from dynbus.kvrouter import RadixIndex
print(type(RadixIndex().kernel).__name__, "numba" in sys.modules)
"""


def run(program: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | environment,
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_without_numba_an_index_runs_in_plain_python() -> None:
    assert run(WITHOUT_NUMBA) == "PythonKernel {'a': 4}"


def test_an_index_does_not_wait_for_a_kernel_that_is_not_compiled_yet(tmp_path: Path) -> None:
    assert run(NOT_COMPILED_YET, NUMBA_CACHE_DIR=str(tmp_path)) == "PythonKernel False"


def test_the_plain_kernel_imports_no_numba() -> None:
    assert run(UNLESS_ASKED_FOR) == "False"


def test_asking_for_the_compiled_kernel_without_numba_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hashing, "compiled", None)
    monkeypatch.setitem(sys.modules, "numba", None)

    with pytest.raises(ConfigError, match=r"dynbus\[fast\]"):
        RadixIndex(kernel="compiled")
    assert isinstance(RadixIndex().kernel, PythonKernel)
