"""What `dynbus.kvrouter` and its packages export."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys

import pytest

PACKAGES = ["", ".engine_events", ".radix", ".routing", ".stream"]


def exported(package: str) -> dict[str, object]:
    """What a package exports by name, modules that it does not import itself included."""
    path = f"dynbus.kvrouter{package}"
    module = importlib.import_module(path)
    return {
        name: getattr(module, name, None) or importlib.import_module(f"{path}.{name}")
        for name in module.__all__
    }


@pytest.mark.parametrize("package", PACKAGES)
def test_all_is_sorted_and_there(package: str) -> None:
    module = importlib.import_module(f"dynbus.kvrouter{package}")

    assert sorted(exported(package)) == sorted(module.__all__)


@pytest.mark.parametrize("package", PACKAGES)
def test_what_is_exported_says_what_it_is(package: str) -> None:
    named = exported(package).items()

    untold = [name for name, value in named if inspect.isclass(value) and not value.__doc__]

    assert untold == []


def test_what_users_and_packages_above_take_is_not_many_names() -> None:
    module = importlib.import_module("dynbus.kvrouter")

    names = [name for name in module.__all__ if not inspect.ismodule(getattr(module, name))]

    assert len(names) <= 60


def test_whoever_only_hashes_and_encodes_loads_no_actors() -> None:
    program = (
        "import sys; from dynbus.kvrouter import BlockStored, block_hashes, events; "
        "print([m for m in ('dynbus.actors', 'pydantic', 'anyio') if m in sys.modules])"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )

    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    "name", sorted(name for name, value in exported("").items() if inspect.ismodule(value))
)
def test_a_module_is_found_where_zeromq_is_not_installed(name: str) -> None:
    # The extra `zmq` is for those who follow engines over ZeroMQ.
    program = f"import sys; sys.modules['zmq'] = None; from dynbus.kvrouter import {name}"

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120
    )

    assert done.stderr == ""
