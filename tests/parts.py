"""The parts of dynbus, each of which is installed alone, and the tree in which its tests run so.

`scripts/test-parts` makes such a tree and an environment for each part.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[1]

LAB: Final = (
    "dynbus.actors.chaos",
    "dynbus.actors.commands.lab.bench",
    "dynbus.actors.commands.lab.chaos",
    "dynbus.actors.commands.deploy",
    "dynbus.actors.commands.schema",
    "dynbus.actors.deploying",
    "dynbus.actors.documents",
    "dynbus.compat",
    "dynbus.kvrouter.commands.kv",
    "dynbus.kvrouter.commands.kv_access",
    "dynbus.kvrouter.commands.kv_arguments",
    "dynbus.kvrouter.commands.kv_reports",
    "dynbus.kvrouter.stream.history",
    "dynbus.llm.commands.plan",
    "dynbus.llm.commands.planning",
    "dynbus.llm.commands.profiling",
    "dynbus.llm.commands.replay",
    "dynbus.llm.commands.replaying",
    "dynbus.llm.planning",
    "dynbus.llm.profiling",
    "dynbus.llm.replay",
)
"""What the other parts never import."""

LAB_TESTS: Final = (
    "tests/actors/chaos",
    "tests/actors/commands/test_bench.py",
    "tests/actors/commands/test_chaos.py",
    "tests/actors/commands/test_deploy.py",
    "tests/actors/commands/test_rollout.py",
    "tests/actors/commands/test_schema.py",
    "tests/actors/test_compatibility.py",
    "tests/actors/deploying",
    "tests/actors/test_documents.py",
    "tests/actors/test_monitoring.py",
    "tests/kvrouter/commands/test_kv.py",
    "tests/kvrouter/stream/test_history.py",
    "tests/llm/commands/test_plan.py",
    "tests/llm/commands/test_profile.py",
    "tests/llm/commands/test_replay.py",
    "tests/llm/planning",
    "tests/llm/profiling",
    "tests/llm/replay",
)

RIG: Final = ("dynbus.actors.chaos.proxy",)
"""What tests of the other parts take of the lab: a network that fails."""

FOREIGN: Final = {
    "kv": {"numpy", "xxhash"},
    "zmq": {"zmq"},
    "llm": {
        "fastokens",
        "huggingface_hub",
        "jinja2",
        "llguidance",
        "packaging",
        "threadpoolctl",
        "tokenizers",
    },
    "http": {"httptools", "starlette", "uvicorn"},
    "oidc": {"jwt"},
    "transfer": {"nixl"},
    "torch": {"torch"},
    "vllm": {"vllm"},
}
"""Packages of others, by the extra that brings them."""

OF_THE_TESTS: Final = {"packaging", "starlette"}
"""Those of them that packages of the tests bring."""


class Part(NamedTuple):
    """A part that is installed alone.

    Attributes:
        packages: that are its own.
        absent: packages of the other parts.
        tests: that it has to pass.
        foreign: extras whose packages its modules need.
        extras: that its tests need, those of what it can do beside among them.
        group: of dependencies, which its tests need beside.
    """

    packages: tuple[str, ...]
    absent: tuple[str, ...]
    tests: tuple[str, ...]
    foreign: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()
    group: str = "tests"


PARTS: Final = {
    "dynbus": Part(
        ("dynbus.spi", "dynbus.testing", "dynbus.cli", "dynbus.bus", "dynbus.actors"),
        ("dynbus.kvrouter", "dynbus.transfer", "dynbus.llm"),
        ("tests/bus", "tests/actors", "tests/contracts"),
        extras=("metrics", "nkeys", "otlp"),
    ),
    "kv": Part(
        ("dynbus.kvrouter",),
        ("dynbus.transfer", "dynbus.llm"),
        ("tests/kvrouter",),
        foreign=("kv",),
        extras=("kv", "metrics", "zmq"),
    ),
    "transfer": Part(
        ("dynbus.transfer",),
        ("dynbus.kvrouter", "dynbus.llm"),
        ("tests/transfer",),
        foreign=("kv",),
        extras=("kv",),
    ),
    "llm": Part(
        ("dynbus.llm",),
        (),
        ("tests/llm",),
        foreign=("kv", "llm", "http"),
        extras=("http", "keda", "metrics", "oidc", "zmq"),
        group="tests-llm",
    ),
}


def is_below(name: str, packages: Iterable[str]) -> bool:
    return any(name == each or name.startswith(f"{each}.") for each in packages)


def packages_beside(extras: Iterable[str]) -> set[str]:
    """Packages of others that no extra of these brings."""
    return {each for extra, names in FOREIGN.items() if extra not in extras for each in names}


def missing(part: Part) -> set[str]:
    """All that is not there where a part is installed alone."""
    return packages_beside(part.foreign) | set(part.absent) | set(LAB)


# The tree --------------------------------------------------------------------------------------


def module_of(path: str) -> str:
    """The module in a file of the repository; of a link to a package the package."""
    name = path.removeprefix("src/dynbus/").removesuffix(".py").removesuffix("/__init__")
    return f"dynbus.{name.replace('/', '.')}"


def belongs(path: str, part: Part) -> bool:
    """Whether a file of the repository is there where a part is alone."""
    folder = path.partition("/")[0]
    if folder == "tests":
        others = {
            test
            for each in PARTS.values()
            if set(each.packages) & set(part.absent)
            for test in each.tests
        }
        left_out = {*LAB_TESTS, *others}
        return not any(path == one or path.startswith(f"{one}/") for one in left_out)
    name = module_of(path)
    if is_below(name, RIG) or name == "dynbus.actors.chaos":
        return True
    return not is_below(name, (*part.absent, *LAB))


def make_tree(part: Part, tree: Path) -> None:
    """Copy what is there where a part is alone."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for path in listed.stdout.splitlines():
        if belongs(path, part) and (ROOT / path).exists():
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / path, tree / path, follow_symlinks=False)
    project = tree / "pyproject.toml"
    project.write_text("\n".join(entries(project.read_text(), part)) + "\n")


def entries(text: str, part: Part) -> Iterator[str]:
    """The lines of a project without its commands that are not there."""
    for line in text.splitlines():
        command = re.fullmatch(r'\w+ = "(dynbus[\w.]*):\w+"', line)
        if command is None or not is_below(command[1], (*part.absent, *LAB)):
            yield line


def main(name: str, *rest: str) -> None:
    """Make a tree and print what its environment and its tests are; without one, refuse packages
    that should not be there."""
    part = PARTS[name]
    if rest:
        make_tree(part, Path(rest[0]))
        print(",".join(part.extras), part.group, *part.tests)
        return
    beside = packages_beside((*part.foreign, *part.extras)) - OF_THE_TESTS
    found = [each for each in sorted({*beside, *part.absent}) if is_there(each)]
    if found:
        sys.exit(f"part {name}: {', '.join(found)} can be imported: remove this environment")


def is_there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


if __name__ == "__main__":
    main(*sys.argv[1:])
