"""NIXL where it is not installed."""

from __future__ import annotations

import sys

import pytest

from dynbus.bus.errors import ConfigError
from dynbus.transfer import binding


def test_a_missing_nixl_is_an_error_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    binding.nixl.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"transfers need NIXL: pip install .*\[transfer\]"):
            binding.nixl()
    finally:
        binding.nixl.cache_clear()
