"""Agents of NIXL, in this process and in others.

Without NIXL these tests are skipped. `scripts/test-nixl` makes an environment that has it, where
`NEEDS_NIXL` says that they have to run.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("nixl") is not None:
        return
    if os.environ.get("NEEDS_NIXL"):
        raise pytest.UsageError("NEEDS_NIXL is set, and NIXL is not installed here")
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(
                pytest.mark.skip(reason="NIXL is not installed: see docs/guides/transfer.md")
            )
