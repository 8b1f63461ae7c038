"""Every error is listed, crosses the wire, and is never taken for success."""

from __future__ import annotations

import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dynbus.bus.errors as errors
from dynbus.bus.errors import (
    ERRORS,
    STATUS_CODES,
    ConfigError,
    DeadlineExceeded,
    DynbusError,
    HandlerError,
    Overloaded,
)
from dynbus.bus.wire import Failed, decode_batch, encode_batch, error_of, failed_frame

SECRET = bytes(16)
KINDS = list(ERRORS.values())


def across_the_wire(error: DynbusError) -> DynbusError:
    frame = failed_frame(7, SECRET, 1, 3, error)
    batch = decode_batch(encode_batch("i", "n", 0, [frame]))
    assert batch is not None
    [arrived] = batch.frames
    assert isinstance(arrived, Failed)
    return error_of(arrived)


def test_every_error_of_the_module_is_listed_under_its_name() -> None:
    defined = {
        name: kind
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and issubclass(kind, DynbusError)
    }

    assert defined == ERRORS
    assert {kind.code for kind in KINDS} == set(ERRORS)


def test_the_tree_at_the_top_of_the_module_names_every_error() -> None:
    assert [name for name in ERRORS if name not in (errors.__doc__ or "")] == []


def test_every_status_code_belongs_to_an_error() -> None:
    assert set(STATUS_CODES) <= set(ERRORS)
    assert all(400 <= status <= 599 for status in STATUS_CODES.values())


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_crosses_the_wire_as_itself(kind: type[DynbusError]) -> None:
    error = kind("why", hop="d.S.g@i", request_id="r1", started=False)

    arrived = across_the_wire(error)

    assert type(arrived) is kind
    assert vars(arrived) == vars(error) | {"code": kind.code, "retryable": kind.retryable} | (
        {"remote_traceback": ""} if kind is HandlerError else {}
    )
    assert str(arrived) == "why (at d.S.g@i)"


def test_overloaded_carries_when_to_retry() -> None:
    arrived = across_the_wire(Overloaded("full", retry_after=1.5))

    assert isinstance(arrived, Overloaded)
    assert arrived.retry_after == 1.5


def test_a_handler_error_carries_its_traceback() -> None:
    error = HandlerError("ValueError: no")
    error.remote_traceback = "Traceback ..."

    arrived = across_the_wire(error)

    assert isinstance(arrived, HandlerError)
    assert arrived.remote_traceback == "Traceback ..."


@given(st.text(), st.text(), st.booleans())
def test_an_unknown_code_is_an_error_that_keeps_its_code(
    code: str, message: str, retryable: bool
) -> None:
    unknown = "Unheard" + code
    frame = Failed(7, SECRET, 1, 3, unknown, message, retryable, True, "", "", 0.0, "")

    error = error_of(frame)

    assert type(error) is DynbusError
    assert (error.code, error.message, error.retryable) == (unknown, message, retryable)


def test_an_error_without_a_message_prints_its_code() -> None:
    assert str(DeadlineExceeded()) == "DeadlineExceeded"


def test_errors_are_also_what_python_calls_them() -> None:
    assert issubclass(DeadlineExceeded, TimeoutError)
    assert issubclass(ConfigError, ValueError)
