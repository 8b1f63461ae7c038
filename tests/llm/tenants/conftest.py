"""A time that stands still, for tests that count."""

from __future__ import annotations

import time

import pytest

from dynbus.llm.tenants import ledger, purse
from dynbus.llm.tenants.ledger import Window, window_of


@pytest.fixture
def one_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the minute nor the month ends while a test runs."""
    window = window_of(time.time())

    def same(_: float) -> Window:
        return window

    for module in (ledger, purse):
        monkeypatch.setattr(module, "window_of", same)
