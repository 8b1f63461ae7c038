"""The parts of dynbus work where what belongs to the others is not installed."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from typing import Final

import pytest
from tests.absent import run_without
from tests.parts import (
    FOREIGN,
    LAB,
    LAB_TESTS,
    PARTS,
    ROOT,
    Part,
    belongs,
    is_below,
    missing,
)
from tests.test_structure import source_files

from dynbus.bus.extras import EXTRAS

NEED_MORE: Final = {
    # Their extras are zmq, http, torch, and vLLM itself.
    "dynbus.kvrouter.engine_events.of_actor",
    "dynbus.kvrouter.engine_events.zmq_subscriber",
    "dynbus.llm.proxy.actor",
    "dynbus.llm.proxy.worker",
    "dynbus.llm.small.torch_backend",
    "dynbus.llm.vllm",
}


def modules_of(part: Part) -> Iterator[str]:
    for name, _ in source_files():
        is_own = any(name == each or name.startswith(f"{each}.") for each in part.packages)
        if is_own and not is_below(name, LAB) and not is_below(name, NEED_MORE):
            yield name


@pytest.mark.parametrize("name", PARTS)
def test_every_module_of_a_part_is_imported_without_the_other_parts(name: str) -> None:
    part = PARTS[name]
    modules = sorted(modules_of(part))

    done = run_without(
        missing(part),
        f"import importlib\nfor name in {modules!r}:\n"
        "    importlib.import_module(name)\nprint('all')",
    )

    assert (done.stdout, done.stderr) == ("all\n", "")


def test_actors_call_each_other_where_nothing_but_the_kernel_is_installed() -> None:
    program = """
import asyncio
from dynbus import Actor, handler
from dynbus.testing import TestKit, run

class Echo(Actor, namespace="demo"):
    @handler
    async def say(self, text: str) -> str:
        return text

async def main():
    async with TestKit() as kit:
        await kit.start(Echo)
        print(await kit.client(Echo).say("hello"))

run(main())
"""

    done = run_without(missing(PARTS["dynbus"]), program)

    assert (done.stdout, done.stderr) == ("hello\n", "")


def test_what_a_missing_part_needs_is_named_with_the_command_that_installs_it() -> None:
    done = run_without(FOREIGN["kv"], "import dynbus.kvrouter")

    assert done.returncode == 1
    assert "KV-aware routing takes an extra: pip install" in done.stderr
    assert "[kv]" in done.stderr


def test_the_lab_is_what_nobody_imports() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (lab,) = [each for each in contracts["contracts"] if each["type"] == "protected"]

    assert {*lab["protected_modules"], *lab["allowed_importers"]} == set(LAB)


def test_the_extras_are_those_that_are_looked_for() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    assert set(EXTRAS) <= set(declared["optional-dependencies"])
    assert not {"numpy", "xxhash"} & {each.split(">")[0] for each in declared["dependencies"]}


@pytest.mark.parametrize("name", PARTS)
def test_the_tree_of_a_part_has_its_tests_and_packages_and_nothing_of_the_others(name: str) -> None:
    part = PARTS[name]
    others = [each for each in PARTS.values() if set(each.packages) & set(part.absent)]
    absent = [each.removeprefix("dynbus.") for each in part.absent]

    assert all(belongs(path, part) for path in ("pyproject.toml", "bus/bus.py", *part.tests))
    assert all((ROOT / path).exists() for path in (*part.tests, *LAB_TESTS))
    left_out = [path for each in others for path in each.tests]
    left_out += [path for each in absent for path in (f"{each}/__init__.py", f"src/dynbus/{each}")]
    left_out += [*LAB_TESTS, "src/dynbus/compat/__init__.py", "actors/chaos/trial.py"]
    assert [path for path in left_out if belongs(path, part)] == []
