"""What is tested here comes last, when the kernel is compiled."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest
from tests.kvrouter.kernels import Compilation

HERE = Path(__file__).parent

compilation = Compilation()


def is_here(item: pytest.Item) -> bool:
    return HERE in item.path.parents


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=is_here)
    if any(map(is_here, items)) and not config.option.collectonly:
        compilation.begin()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    # Around the whole protocol: the time that a test may take does not run yet.
    if is_here(item):
        compilation.wait()
    return (yield)


def pytest_sessionfinish() -> None:
    compilation.end()
