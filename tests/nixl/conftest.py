"""Agents of NIXL, in this process and in others.

Without NIXL these tests are skipped. `scripts/test-nixl` makes an environment that has it, where
`NEEDS_NIXL` says that they have to run.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.optional_package import skip_without


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip_without("nixl", items, Path(__file__).parent, "docs/guides/transfer.md")
