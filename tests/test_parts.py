"""The parts of dynbus work where what belongs to the others is not installed."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import pytest
from tests.absent import run_without
from tests.test_structure import source_files

from dynbus.bus.extras import EXTRAS

ROOT = Path(__file__).parents[1]

LAB: Final = (
    "dynbus.actors.chaos",
    "dynbus.actors.commands.bench",
    "dynbus.actors.commands.chaos",
    "dynbus.actors.commands.schema",
    "dynbus.actors.documents",
    "dynbus.compat",
    "dynbus.kvrouter.commands.kv",
    "dynbus.kvrouter.commands.kv_access",
    "dynbus.kvrouter.commands.kv_arguments",
    "dynbus.kvrouter.commands.kv_reports",
    "dynbus.kvrouter.stream.history",
    "dynbus.llm.commands.replay",
    "dynbus.llm.commands.replaying",
    "dynbus.llm.replay",
)
"""What the other parts never import."""

NEED_MORE: Final = {
    # Their extras are zmq, http, torch, and vLLM itself.
    "dynbus.kvrouter.engine_events.of_actor",
    "dynbus.kvrouter.engine_events.zmq_subscriber",
    "dynbus.llm.proxy.actor",
    "dynbus.llm.proxy.worker",
    "dynbus.llm.small.torch_backend",
    "dynbus.llm.vllm",
}
FOREIGN: Final = {
    "kv": {"numpy", "xxhash"},
    "zmq": {"zmq"},
    "llm": {"huggingface_hub", "jinja2", "llguidance", "packaging", "threadpoolctl", "tokenizers"},
    "http": {"httptools", "starlette", "uvicorn"},
    "transfer": {"nixl"},
    "torch": {"torch"},
    "vllm": {"vllm"},
}


class Part(NamedTuple):
    """A part that is installed alone.

    Attributes:
        packages: that are its own, all of whose modules are imported.
        absent: packages of the other parts.
        foreign: extras whose packages it has.
    """

    packages: tuple[str, ...]
    absent: tuple[str, ...]
    foreign: tuple[str, ...] = ()


PARTS: Final = {
    "dynbus": Part(
        ("dynbus.spi", "dynbus.testing", "dynbus.cli", "dynbus.bus", "dynbus.actors"),
        ("dynbus.kvrouter", "dynbus.transfer", "dynbus.llm"),
    ),
    "kv": Part(("dynbus.kvrouter",), ("dynbus.transfer", "dynbus.llm"), ("kv",)),
    "transfer": Part(("dynbus.transfer",), ("dynbus.kvrouter", "dynbus.llm"), ("kv",)),
    "llm": Part(("dynbus.llm",), (), ("kv", "llm", "http")),
}


def modules_of(part: Part) -> Iterator[str]:
    for name, _ in source_files():
        is_own = any(name == each or name.startswith(f"{each}.") for each in part.packages)
        if is_own and not is_below(name, LAB) and not is_below(name, NEED_MORE):
            yield name


def is_below(name: str, packages: Sequence[str] | set[str]) -> bool:
    return any(name == each or name.startswith(f"{each}.") for each in packages)


def missing(part: Part) -> set[str]:
    foreign = {
        each for extra, names in FOREIGN.items() if extra not in part.foreign for each in names
    }
    return foreign | set(part.absent) | set(LAB)


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
