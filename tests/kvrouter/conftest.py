"""What is tested here comes last, when the kernel is compiled."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def on_compiled_kernel(compiled_kernel: None) -> None:
    """An index takes the compiled kernel where that is there: let that not change meanwhile."""
