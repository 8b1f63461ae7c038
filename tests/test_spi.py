"""The contract of the kernel: `dynbus.spi`."""

from __future__ import annotations

import ast
import importlib
import inspect

import pytest

import dynbus.spi


def places() -> dict[str, str]:
    """Where each name lives, as type checkers are told."""
    return {
        alias.name: node.module or ""
        for node in ast.walk(ast.parse(inspect.getsource(dynbus.spi)))
        if isinstance(node, ast.ImportFrom) and node.module != "typing"
        for alias in node.names
    }


def test_what_type_checkers_see_is_what_is_listed() -> None:
    assert sorted(places()) == sorted(dynbus.spi.__all__)


@pytest.mark.parametrize("name", dynbus.spi.__all__)
def test_a_name_is_what_type_checkers_take_it_for(name: str) -> None:
    assert getattr(dynbus.spi, name) is getattr(importlib.import_module(places()[name]), name)
