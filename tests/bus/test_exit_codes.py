"""Every way that a call can end has an exit code of its own, and --help tells it."""

from __future__ import annotations

import pytest

from dynbus.bus import exit_codes
from dynbus.bus.errors import ERRORS, ConfigError, DynbusError, Overloaded, Unavailable


def test_every_error_but_the_general_one_has_a_code_of_its_own_for_calls() -> None:
    codes = exit_codes.CALL_CODES

    assert set(codes) == set(ERRORS) - {"DynbusError"}
    assert len(set(codes.values())) == len(codes)


@pytest.mark.parametrize(
    ("error", "code"),
    [(Overloaded(), 13), (Unavailable(), 12), (ConfigError(), 3), (DynbusError(), 1)],
)
def test_a_call_ends_with_the_code_of_its_error(error: DynbusError, code: int) -> None:
    assert exit_codes.call_exit_code(error) == code


@pytest.mark.parametrize(
    ("error", "code"),
    [(Unavailable(), 4), (ConfigError(), 3), (Overloaded(), 1), (DynbusError(), 1)],
)
def test_other_commands_end_with_the_code_of_the_condition(error: DynbusError, code: int) -> None:
    assert exit_codes.exit_code(error) == code


def test_the_help_of_call_lists_every_code() -> None:
    missing = [
        name
        for name, code in exit_codes.CALL_CODES.items()
        if f"{code} {name}" not in exit_codes.CALL
    ]

    assert missing == []
