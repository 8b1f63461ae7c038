"""Turning requests and results into JSON and back, by the handler's own annotations.

pydantic does the work for models, dataclasses, TypedDicts and plain types; msgspec for its
own structs. What does not fit raises with the path of what is wrong.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final, cast

import msgspec
import msgspec.inspect
import pydantic
import pydantic_core


class Misfit(ValueError):
    """Raised when a value or its bytes do not fit the annotation."""


_WITHOUT_FLOATS: Final = frozenset(
    # fmt: off
    {
        "bool",
        "bytes",
        "computed-field",
        "dataclass",
        "dataclass-args",
        "dataclass-field",
        "date",
        "datetime",
        "default",
        "definition-ref",
        "definitions",
        "dict",
        "frozenset",
        "function-after",
        "function-before",
        "function-wrap",
        "int",
        "list",
        "literal",
        "model",
        "model-field",
        "model-fields",
        "none",
        "nullable",
        "set",
        "str",
        "tagged-union",
        "time",
        "tuple",
        "typed-dict",
        "typed-dict-field",
        "union",
        "uuid",
    }
    # fmt: on
)
"""Kinds of pydantic's core schemas that hold a float only where a schema within them does."""

MARKS: Final = (b"null", b"NaN", b"Infinity")
"""What is written for a number that JSON cannot hold: the first for a declared float, any of
them where the type, or a user's configuration, leaves it open."""


class Codec:
    """Encodes and validates values of one annotation.

    Args:
        annotation: a resolved type, not a string.

    Attributes:
        model: the type whose instances need no validation; None when there is none.
        to_json: JSON of such an instance; raises `Misfit` for a number that JSON cannot hold.
    """

    __slots__ = ("_adapter", "_list_adapter", "model", "to_json", "annotation")

    def __init__(self, annotation: Any) -> None:
        self.annotation = annotation
        self._adapter: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(annotation)
        self._list_adapter: pydantic.TypeAdapter[list[Any]] | None = None
        is_model = isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel)
        self.model: Any = annotation if is_model else None
        self.to_json: Callable[[Any], bytes] = self._adapter.serializer.to_json
        marks = _marks_of_floats(self._adapter.core_schema)
        if marks:
            # Not in the JSON mode, where some of them are None already.
            to_plain = self._adapter.serializer.to_python
            self.to_json = _finite_only(self.to_json, to_plain, marks)

    def encode(self, value: object) -> bytes:
        """JSON of `value`, which is validated unless it already is an instance of the model.

        Raises:
            Misfit: it does not fit.
        """
        try:
            if type(value) is self.model:
                return self.to_json(value)
            return self.to_json(self._adapter.validate_python(value))
        except pydantic.ValidationError as error:
            raise Misfit(explain(error)) from None
        except pydantic_core.PydanticSerializationError as error:
            raise Misfit(str(error)) from None

    def decode(self, data: bytes) -> Any:
        """The validated value of `data`.

        Raises:
            Misfit: it does not fit.
        """
        try:
            return self._adapter.validator.validate_json(data)
        except pydantic.ValidationError as error:
            raise Misfit(explain(error)) from None

    def decode_many(self, items: Sequence[bytes]) -> list[Any]:
        """`decode` of each; a run of items is validated in one go.

        Raises:
            Misfit: one of them does not fit.
        """
        if len(items) == 1:
            return [self.decode(items[0])]
        if self._list_adapter is None:
            self._list_adapter = pydantic.TypeAdapter(list[self.annotation])  # type: ignore[name-defined]
        try:
            values = self._list_adapter.validator.validate_json(b"[" + b",".join(items) + b"]")
        except pydantic.ValidationError as error:
            raise Misfit(explain(error)) from None
        if len(values) != len(items):
            raise Misfit("an item is not one JSON value")
        return list(values)

    def schema(self) -> dict[str, Any]:
        """The JSON schema."""
        return self._adapter.json_schema()


class StructCodec:
    """The same by msgspec: for annotations that hold its structs."""

    __slots__ = ("_decoder", "annotation", "model", "to_json")

    def __init__(self, annotation: Any) -> None:
        self.annotation = annotation
        self._decoder = msgspec.json.Decoder(annotation)
        self.model: Any = annotation if isinstance(annotation, type) else None
        self.to_json: Callable[[Any], bytes] = msgspec.json.Encoder().encode
        if _struct_may_hold_float(annotation):
            self.to_json = _finite_only(
                self.to_json, lambda value: msgspec.to_builtins(value, str_keys=True), [b"null"]
            )

    def encode(self, value: object) -> bytes:
        try:
            if type(value) is not self.model:
                value = msgspec.convert(value, self.annotation, from_attributes=True)
            return self.to_json(value)
        except (msgspec.ValidationError, TypeError, RecursionError) as error:
            raise Misfit(str(error)) from None

    def decode(self, data: bytes) -> Any:
        try:
            return self._decoder.decode(data)
        except (msgspec.DecodeError, RecursionError) as error:
            raise Misfit(str(error)) from None

    def decode_many(self, items: Sequence[bytes]) -> list[Any]:
        return [self.decode(item) for item in items]

    def schema(self) -> dict[str, Any]:
        return msgspec.json.schema(self.annotation)


AnyCodec = Codec | StructCodec


def holds_struct(annotation: Any) -> bool:
    """Whether an annotation is, or contains, a msgspec struct."""
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return True
    return any(holds_struct(argument) for argument in typing.get_args(annotation))


def codec_for(annotation: Any) -> AnyCodec:
    """The codec of an annotation.

    Raises:
        TypeError: neither pydantic nor msgspec can handle it.
    """
    return _cached(annotation) if _is_hashable(annotation) else _make(annotation)


def explain(error: pydantic.ValidationError) -> str:
    """A validation error on one line: where, what, and the value."""
    parts: list[str] = []
    for detail in error.errors(include_url=False, include_context=False)[:5]:
        where = ".".join(str(step) for step in detail["loc"]) or "the value"
        value = repr(detail["input"])
        shown = value if len(value) <= 80 else value[:77] + "..."
        parts.append(f"{where}: {detail['msg']}, got {shown}")
    more = error.error_count() - len(parts)
    return "; ".join(parts) + (f"; and {more} more" if more > 0 else "")


def refuse_non_finite(plain: Any) -> None:
    """Check that no NaN or infinity, which JSON would turn into null, is in a value.

    Args:
        plain: of dicts, sequences, sets and scalars only.

    Raises:
        Misfit: there is one; the message says where.
    """
    open_values: list[tuple[str, Any]] = [("", [plain])]
    while open_values:
        where, value = open_values.pop()
        if isinstance(value, dict):
            inner: Any = cast("dict[object, Any]", value).items()
        else:
            inner = enumerate(cast("Sequence[Any]", value))
        for step, each in inner:
            if isinstance(each, float):
                if not math.isfinite(each):
                    place = f"{where}.{step}"[3:] or "the value"
                    raise Misfit(f"{place}: JSON cannot hold the number {each}")
            elif isinstance(each, dict | list | tuple | set | frozenset):
                open_values.append((f"{where}.{step}", cast("Any", each)))


def _finite_only(
    to_json: Callable[[Any], bytes], to_plain: Callable[[Any], Any], marks: Sequence[bytes]
) -> Callable[[Any], bytes]:
    """`to_json` that refuses numbers which JSON cannot hold.

    Only what has one of the marks is looked at closely.
    """

    def checked(value: Any) -> bytes:
        data = to_json(value)
        # `in` takes twice as long for bytes.
        if data.find(first) >= 0 or (others and any(mark in data for mark in others)):
            refuse_non_finite(to_plain(value))
        return data

    first, others = marks[0], marks[1:]
    return checked


def _marks_of_floats(schema: Any) -> Sequence[bytes]:
    """The `MARKS` to look for in values of a pydantic core schema.

    None for one without floats, or whose user chose to have them as strings.
    """
    marks: Sequence[bytes] = ()
    open_parts: list[Any] = [schema]
    while open_parts:
        part = open_parts.pop()
        if isinstance(part, list | tuple):
            open_parts += cast("Sequence[Any]", part)
        elif isinstance(part, dict):
            keys = cast("dict[str, Any]", part)
            kind, form = keys.get("type"), keys.get("ser_json_inf_nan")
            if form == "strings":
                return ()
            if kind == "float":
                marks = marks or MARKS[:1]
            elif (isinstance(kind, str) and kind not in _WITHOUT_FLOATS) or (
                form is not None
                or "serialization" in keys
                or "allow" in (keys.get("extra_behavior"), keys.get("extra_fields_behavior"))
            ):
                marks = MARKS
            open_parts += [value for key, value in keys.items() if key != "metadata"]
    return marks


def _struct_may_hold_float(annotation: Any) -> bool:
    """Whether a value of what msgspec handles may have a float somewhere; rather yes."""
    floats = (
        msgspec.inspect.FloatType,
        msgspec.inspect.AnyType,
        msgspec.inspect.CustomType,
        msgspec.inspect.RawType,
        msgspec.inspect.EnumType,
    )
    open_parts: list[Any] = [msgspec.inspect.type_info(annotation)]
    seen: set[int] = set()
    while open_parts:
        part = open_parts.pop()
        if isinstance(part, floats):
            return True
        if isinstance(part, tuple):
            open_parts += cast("Sequence[Any]", part)
        elif (
            isinstance(part, msgspec.inspect.Type | msgspec.inspect.Field) and id(part) not in seen
        ):
            seen.add(id(part))
            open_parts += [getattr(part, name) for name in part.__struct_fields__]
    return False


def _make(annotation: Any) -> AnyCodec:
    if holds_struct(annotation):
        return StructCodec(annotation)
    try:
        return Codec(annotation)
    except pydantic.PydanticUserError as error:
        if error.code == "typed-dict-version":
            # pydantic reads `typing.TypedDict` from Python 3.12 on, msgspec always does.
            return StructCodec(annotation)
        raise TypeError(str(error).partition("\n")[0]) from None


_cached: Callable[[Any], AnyCodec] = lru_cache(maxsize=1024)(_make)


def _is_hashable(annotation: Any) -> bool:
    try:
        hash(annotation)
    except TypeError:
        return False
    return True
