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


CAREFUL = """
@pytest.mark.anyio
async def test_it():
    with pytest.raises(ValueError):
        await asyncio.create_task(fail())
"""


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a run of all of these tests printed, the careful one last."""
    folder = tmp_path_factory.mktemp("careless")
    (folder / "conftest.py").write_text("from tests.conftest import *")
    for number, body in enumerate(CARELESS.values()):
        (folder / f"test_{number}.py").write_text(HEAD + body)
    (folder / "test_careful.py").write_text(HEAD + CAREFUL)
    return run_tests(folder)


@pytest.mark.parametrize("place", CARELESS)
def test_an_exception_that_nobody_retrieves_fails_its_test(place: str, output: str) -> None:
    test = f"test_{list(CARELESS).index(place)}.py::test_it"

    assert f"PASSED {test}\n" in output
    (error,) = [line for line in output.splitlines() if line.startswith(f"ERROR {test} ")]
    assert "an event loop reported" in error


def test_what_was_not_retrieved_is_shown(output: str) -> None:
    reports = output.count("AssertionError: an event loop reported:")

    assert reports >= len(CARELESS)
    assert output.count("ValueError: unheard") >= len(CARELESS)


def test_an_exception_that_was_retrieved_fails_nobody(output: str) -> None:
    assert "PASSED test_careful.py::test_it\n" in output
    assert "ERROR test_careful.py" not in output
    assert f"{len(CARELESS) + 1} passed, {len(CARELESS)} errors" in output


def run_tests(folder: Path) -> str:
    paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    options = ["-p", "no:cacheprovider", "-p", "no:randomly", "-q", "-rEp"]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(folder), f"--rootdir={folder}"],
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "COLUMNS": "200"},
        timeout=120,
        check=False,
    )
    return ended.stdout + ended.stderr
