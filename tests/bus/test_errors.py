"""Every error is listed, crosses the wire, and is never taken for success."""

from __future__ import annotations

import gc
import inspect
import math
import sys

import msgspec
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
from dynbus.bus.protocol.wire import (
    MAX_RETRY_AFTER,
    Failed,
    decode_batch,
    encode_batch,
    error_of,
    failed_frame,
)

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
        {"remote_traceback": "", "error_type": ""} if kind is HandlerError else {}
    )
    assert str(arrived) == "why (at d.S.g@i)"


def test_overloaded_carries_when_to_retry() -> None:
    arrived = across_the_wire(Overloaded("full", retry_after=1.5))

    assert isinstance(arrived, Overloaded)
    assert arrived.retry_after == 1.5


@pytest.mark.parametrize(
    ("said", "believed"),
    [(math.inf, 0.0), (math.nan, 0.0), (-5.0, 0.0), (1e300, MAX_RETRY_AFTER)],
)
def test_an_instance_keeps_nobody_waiting_for_longer_than_a_day(
    said: float, believed: float
) -> None:
    sent = failed_frame(7, SECRET, 1, 3, Overloaded("full"))
    error = error_of(msgspec.structs.replace(sent, retry_after=said))

    assert isinstance(error, Overloaded)
    assert error.retry_after == believed


def test_a_handler_error_carries_the_type_of_the_exception_and_its_traceback() -> None:
    error = HandlerError("ValueError: no")
    error.error_type = "ValueError"
    error.remote_traceback = "Traceback ..."

    arrived = across_the_wire(error)

    assert isinstance(arrived, HandlerError)
    assert (arrived.error_type, arrived.remote_traceback) == ("ValueError", "Traceback ...")


class NoSuchModel(DynbusError):
    """An error of a user, whose constructor takes what it likes."""

    code = "NoSuchModel"
    retryable = True

    def __init__(self, model: str, known: list[str]) -> None:
        super().__init__(f"there is no {model}, but {known}")
        self.model = model


class Full(Overloaded):
    """A kind of an error of dynbus, with a code of its own."""

    code = "Full"


class Silent(Overloaded):
    """A kind of an error of dynbus, without a code of its own."""


class Unmakeable(DynbusError):
    """An error that cannot be made from a message."""

    code = "Unmakeable"

    def __new__(cls, one: int, two: int) -> Unmakeable:
        return super().__new__(cls)

    def __init__(self, one: int, two: int) -> None:
        super().__init__("unmakeable")


class Disguised(DynbusError):
    """An error of a user with a code of dynbus."""

    code = "Draining"


def test_an_error_of_a_user_arrives_as_itself_where_its_class_is_defined() -> None:
    arrived = across_the_wire(NoSuchModel("m", ["n"]))

    assert type(arrived) is NoSuchModel
    assert (arrived.code, arrived.retryable) == ("NoSuchModel", True)
    assert str(arrived) == "there is no m, but ['n']"
    assert not hasattr(arrived, "model")


def test_an_error_of_a_user_keeps_the_fields_of_the_one_that_it_is_a_kind_of() -> None:
    arrived = across_the_wire(Full("full", retry_after=2.0, hop="d.S.g@i", started=False))

    assert type(arrived) is Full
    assert (arrived.retry_after, arrived.hop, arrived.started) == (2.0, "d.S.g@i", False)


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (Silent("full", retry_after=2.0), Overloaded, "Overloaded"),
        (Unmakeable(1, 2), DynbusError, "Unmakeable"),
        (Disguised("no"), errors.Draining, "Draining"),
    ],
)
def test_any_other_error_of_a_user_arrives_as_what_dynbus_has_for_its_code(
    error: DynbusError, kind: type[DynbusError], code: str
) -> None:
    arrived = across_the_wire(error)

    assert type(arrived) is kind
    assert (arrived.code, arrived.message) == (code, error.message)


def test_a_code_whose_class_is_gone_arrives_as_the_base() -> None:
    def define() -> type[DynbusError]:
        return type("Passing", (DynbusError,), {"code": "Passing"})

    kept = define()
    while_defined = type(across_the_wire(kept("no")))
    frame = failed_frame(7, SECRET, 1, 3, kept("no"))
    del kept

    assert while_defined.__name__ == "Passing"
    del while_defined
    gc.collect()
    assert type(error_of(frame)) is DynbusError


@pytest.mark.parametrize("code", ["os.system", "builtins.KeyError", "Passing\n", "", "object"])
def test_nothing_is_looked_up_or_imported_by_a_name_from_the_wire(code: str) -> None:
    before = set(sys.modules)
    frame = Failed(7, SECRET, 1, 3, code, "m", False, True, "", "", 0.0, "", "os.system")

    error = error_of(frame)

    assert (type(error), error.code) == (DynbusError, code)
    assert set(sys.modules) == before


def test_a_group_of_one_is_what_is_in_it() -> None:
    inner = KeyError("k")

    assert errors.only_cause(ExceptionGroup("a", [ExceptionGroup("b", [inner])])) is inner
    assert errors.only_cause(inner) is inner


def test_a_group_of_several_tells_what_is_in_it() -> None:
    group = ExceptionGroup("two", [ValueError("a"), ExceptionGroup("in", [KeyError("b")])])
    many = ExceptionGroup("many", [ValueError(str(n)) for n in range(7)])

    assert errors.only_cause(group) is group
    assert errors.describe_exception(group) == (
        "ExceptionGroup: two (2 sub-exceptions): ValueError: a; KeyError: 'b'"
    )
    assert errors.describe_exception(many).endswith("ValueError: 4; and 2 more")
    assert errors.describe_exception(ValueError("a")) == "ValueError: a"


def test_an_exception_without_a_text_is_told_by_its_type_alone() -> None:
    assert errors.describe_exception(TimeoutError()) == "TimeoutError"


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
