"""What `dynbus` and its folders export is listed, sorted and complete."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys

import pytest

import dynbus
import dynbus.bus.errors


def test_everything_that_the_specification_promises_is_there() -> None:
    promised = {"Actor", "Context", "Runtime", "call_options", "context", "depends", "handler"}

    assert promised <= set(dynbus.__all__)


def test_all_is_sorted() -> None:
    # Constants, then classes, then functions: the order that ruff writes.
    assert dynbus.__all__ == sorted(dynbus.__all__, key=lambda name: (name.islower(), name))


def test_a_name_that_is_not_exported_is_refused() -> None:
    with pytest.raises(AttributeError, match="module 'dynbus' has no attribute 'Aktor'"):
        _ = vars(dynbus)["__getattr__"]("Aktor")


def test_the_exported_names_are_listed_before_they_are_loaded() -> None:
    assert set(dynbus.__all__) <= set(dir(dynbus))


def test_every_error_that_a_caller_can_see_is_exported() -> None:
    assert set(dynbus.bus.errors.ERRORS) <= set(dynbus.__all__)


@pytest.mark.parametrize("name", dynbus.__all__)
def test_every_public_name_has_a_docstring(name: str) -> None:
    assert (getattr(dynbus, name).__doc__ or "").strip()


def test_every_public_name_tells_where_it_lives() -> None:
    classes = [one for name in dynbus.__all__ if inspect.isclass(one := getattr(dynbus, name))]

    assert {one.__module__.partition(".")[0] for one in classes} == {"dynbus"}


def test_the_import_loads_nothing_that_is_only_sometimes_needed() -> None:
    heavy = ["opentelemetry.sdk", "rich", "watchfiles", "structlog", "click", "nats.aio.client"]
    names = "from dynbus import *"
    program = f"import sys; {names}; print([m for m in {heavy!r} if m in sys.modules])"

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )

    assert done.stdout == "[]\n"


def test_the_package_is_not_shadowed_by_a_module_called_actors() -> None:
    assert importlib.import_module("dynbus.actors").__name__ == "dynbus.actors"
