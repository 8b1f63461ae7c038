"""A test whose event loop reports something that nobody is left to hear does not pass."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

HEAD = """
import asyncio
import pytest
from dynbus.testing import run

async def fail():
    raise ValueError("unheard")

async def leave_a_failure_behind():
    task = asyncio.create_task(fail())
    await asyncio.wait([task])
    # A cycle: found by the garbage collector, and not when the last name is gone.
    task.itself = lambda: task
"""

CARELESS = {
    "an async test": """
@pytest.mark.anyio
async def test_it():
    asyncio.get_running_loop().careless = asyncio.create_task(fail())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
""",
    "a loop of its own": """
def test_it():
    asyncio.run(leave_a_failure_behind())
""",
    "a loop whose clock jumps": """
def test_it():
    run(leave_a_failure_behind())
""",
    "a future": """
@pytest.mark.anyio
async def test_it():
    asyncio.get_running_loop().create_future().set_exception(ValueError("unheard"))
""",
    "a callback": """
@pytest.mark.anyio
async def test_it():
    def fail():
        raise ValueError("unheard")
    asyncio.get_running_loop().call_soon(fail)
    await asyncio.sleep(0)
""",
}


@pytest.mark.parametrize("place", CARELESS)
def test_an_exception_that_nobody_retrieves_fails_its_test(place: str, tmp_path: Path) -> None:
    (tmp_path / "test_careless.py").write_text(HEAD + CARELESS[place])

    output = run_tests(tmp_path)

    assert "ValueError: unheard" in output
    assert "1 passed, 1 error" in output


def test_an_exception_that_was_retrieved_fails_nobody(tmp_path: Path) -> None:
    careful = """
@pytest.mark.anyio
async def test_it():
    with pytest.raises(ValueError):
        await asyncio.create_task(fail())
"""
    (tmp_path / "test_careful.py").write_text(HEAD + careful)

    output = run_tests(tmp_path)

    assert "1 passed in" in output


def run_tests(folder: Path) -> str:
    paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    (folder / "conftest.py").write_text("from tests.conftest import *")
    options = ["-p", "no:cacheprovider", "-p", "no:randomly", "-q"]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(folder), f"--rootdir={folder}"],
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        timeout=30,
        check=False,
    )
    return ended.stdout + ended.stderr
