"""Turning requests and results into JSON and back, by the handler's own annotations.

pydantic does the work for models, dataclasses, TypedDicts and plain types; msgspec for its
own structs. What does not fit raises with the path of what is wrong. What is annotated `bytes` or
`msgspec.Raw` as a whole crosses as it is.

Both sides validate. A pydantic model was validated when it was made and is not again, except
that a request of one whose fields were changed since is read back. Dataclasses and structs
are not validated when they are made, so that what they were turned into is read back as the
other side will read it.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from math import isfinite
from typing import Any, Final, cast

import msgspec
import pydantic
import pydantic_core
from pydantic.dataclasses import is_pydantic_dataclass
from pydantic.json_schema import GenerateJsonSchema

from .brief_repr import brief_repr
from .json_limits.finite import (
    MARKS,
    UNSURE,
    NotFinite,
    marks_of_floats,
    parts_of,
    refuse_non_finite,
    struct_may_hold_float,
    total_of,
)
from .json_limits.raw_bytes import refuse_bytes, refuse_bytes_of_msgspec


class Misfit(ValueError):
    """Raised when a value or its bytes do not fit the annotation."""


_STRUCT_REFUSALS: Final = (msgspec.MsgspecError, TypeError, ValueError, RecursionError)
"""The exceptions of msgspec for a value that it cannot write: a `ValueError` for text that is no
Unicode.
"""


class _Written(GenerateJsonSchema):
    """Makes the schema of what is written: fields with a default are, and are in `required`."""

    def field_is_required(self, field: Any, total: bool) -> bool:
        if field["type"] == "typed-dict-field":
            return super().field_is_required(field, total)
        excluded = field.get("serialization_exclude") or "serialization_exclude_if" in field
        return not excluded


class Codec:
    """Encodes and validates values of one annotation.

    Args:
        annotation: a resolved type, not a string.

    Raises:
        HoldsBytes: it holds bytes that JSON would not carry.
    """

    __slots__ = (
        "_adapter",
        "_aliased",
        "_changeable",
        "_list_adapter",
        "_marks",
        "_schemas",
        "_to_json",
        "_total",
        "_type",
        "_unvalidated",
        "_validate_json",
        "annotation",
    )

    def __init__(self, annotation: Any) -> None:
        self.annotation = annotation
        self._adapter: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(annotation)
        self._validate_json: Callable[[bytes], Any] = self._adapter.validator.validate_json
        self._list_adapter: pydantic.TypeAdapter[list[Any]] | None = None
        self._schemas: dict[bool, dict[str, Any]] = {}
        refuse_bytes(self._adapter.core_schema)
        parts = list(parts_of(self._adapter.core_schema))
        self._type: Any = annotation if _is_data_class(annotation) else None
        # A class whose constructor does not validate: its instances pass as they are.
        self._unvalidated = any(_is_plain_dataclass(part) for part in parts)
        self._changeable = any(part.get("type") in ("model", "dataclass") for part in parts)
        to_json = self._adapter.serializer.to_json
        # What is read by an alias has to be written by it.
        self._aliased = any("validation_alias" in part for part in parts)
        self._to_json: Callable[..., bytes] = (
            partial(to_json, by_alias=True) if self._aliased else to_json
        )
        self._marks = marks_of_floats(self._adapter.core_schema)
        self._total = total_of(self._adapter.core_schema) if self._marks else None

    def encode(self, value: object) -> bytes:
        """JSON of `value`, which is validated unless it was when it was made.

        Raises:
            Misfit: it does not fit.
        """
        return self._encode(value, self._changeable)

    def encoder(self, failure: Callable[[str], Exception]) -> Callable[[Any], bytes]:
        """`encode` for the hot path of a stream, which raises `failure` with the reason.

        Whether a model was changed after it was made is left to its reader.
        """

        def checked(value: Any) -> bytes:
            try:
                return self._encode(value, False)
            except Misfit as error:
                raise failure(str(error)) from None

        kind, total = self._type, self._total
        if kind is None or (self._marks and total is None):
            return checked
        quick = self._read_back if self._unvalidated else self._to_json

        def encode(value: Any) -> bytes:
            try:
                if type(value) is kind and (total is None or isfinite(total(value))):
                    return quick(value)
            except UNSURE:
                # What it is that does not fit is found out below.
                pass
            return checked(value)

        return encode

    def _read_back(self, value: Any) -> bytes:
        """JSON of `value` that was validated as its reader will."""
        data = self._to_json(value, warnings=False)
        self._adapter.validator.validate_json(data)
        return data

    def _encode(self, value: Any, suspicious: bool) -> bytes:
        """`encode`, which looks for changed instances only when `suspicious`."""
        validator, to_json = self._adapter.validator, self._to_json
        try:
            if type(value) is not self._type:
                value = validator.validate_python(value)
            read_back = self._unvalidated
            if read_back:
                data = to_json(value, warnings=False)
            elif suspicious:
                try:
                    data = to_json(value, warnings="error")
                except pydantic_core.PydanticSerializationError:
                    data = to_json(value, warnings=False)
                    read_back = True
            else:
                data = to_json(value)
            if self._marks:
                self._check_finite(value, data)
            if read_back:
                validator.validate_json(data)
        except pydantic.ValidationError as error:
            raise Misfit(explain(error)) from None
        except (pydantic_core.PydanticSerializationError, NotFinite) as error:
            raise Misfit(str(error)) from None
        return data

    def decode(self, data: bytes) -> Any:
        """The validated value of `data`.

        Raises:
            Misfit: it does not fit.
        """
        try:
            return self._validate_json(data)
        except pydantic.ValidationError as error:
            raise Misfit(explain(error)) from None

    def decoder(self) -> Callable[[bytes], Any]:
        """`decode` for the hot path of a stream, which raises what the library does."""
        return self._validate_json

    def decode_many(self, items: Sequence[bytes]) -> list[Any]:
        """`decode` of each; a run of items is validated in one go.

        Raises:
            Misfit: one of them does not fit.
        """
        try:
            if len(items) == 1:
                return [self._validate_json(items[0])]
            if self._list_adapter is None:
                self._list_adapter = pydantic.TypeAdapter(list[self.annotation])  # type: ignore[name-defined]
            values = self._list_adapter.validator.validate_json(b"[" + b",".join(items) + b"]")
        except pydantic.ValidationError as error:
            raise Misfit(explain(error)) from None
        if len(values) != len(items):
            raise Misfit("an item is not one JSON value")
        return list(values)

    def schema(self, *, written: bool = False) -> dict[str, Any]:
        """The JSON schema of what is read; or of what is `written`, computed fields included.

        It is made once, and not to be changed.
        """
        made = self._schemas.get(written)
        if made is None:
            adapter = self._adapter
            made = self._schemas[written] = (
                adapter.json_schema(
                    mode="serialization", by_alias=self._aliased, schema_generator=_Written
                )
                if written
                else adapter.json_schema()
            )
        return made

    def _check_finite(self, value: Any, data: bytes) -> None:
        total = self._total
        if total is not None:
            try:
                if isfinite(total(value)):
                    return
            except UNSURE:
                # It is searched like a value of which nothing is known.
                pass
        if any(data.find(mark) >= 0 for mark in self._marks):
            # Not in the JSON mode, where some of them are None already.
            refuse_non_finite(self._adapter.serializer.to_python(value, warnings=False))


class StructCodec:
    """The same by msgspec: for annotations that hold its structs."""

    __slots__ = ("_decoder", "_encoder", "_may_hold_float", "_type", "annotation")

    def __init__(self, annotation: Any) -> None:
        self.annotation = annotation
        self._decoder = msgspec.json.Decoder(annotation)
        self._encoder = msgspec.json.Encoder()
        self._type: Any = annotation if isinstance(annotation, type) else None
        self._may_hold_float = struct_may_hold_float(annotation)

    def encode(self, value: object) -> bytes:
        try:
            if type(value) is not self._type:
                value = msgspec.convert(value, self.annotation, from_attributes=True)
            data = self._encoder.encode(value)
            try:
                same = self._decoder.decode(data) == value
            except msgspec.DecodeError:
                self._check_finite(value)
                raise
            if not same and any(data.find(mark) >= 0 for mark in MARKS):
                self._check_finite(value)
        except _STRUCT_REFUSALS as error:
            raise Misfit(str(error)) from None
        return data

    def encoder(self, failure: Callable[[str], Exception]) -> Callable[[Any], bytes]:
        kind, write, read = self._type, self._encoder.encode, self._decoder.decode

        def encode(value: Any) -> bytes:
            try:
                if type(value) is kind:
                    data = write(value)
                    if read(data) == value:
                        return data
                return self.encode(value)
            except _STRUCT_REFUSALS as error:
                raise failure(str(error)) from None

        return encode

    def _check_finite(self, value: Any) -> None:
        if self._may_hold_float:
            refuse_non_finite(msgspec.to_builtins(value))

    def decode(self, data: bytes) -> Any:
        try:
            return self._decoder.decode(data)
        except (msgspec.DecodeError, RecursionError) as error:
            raise Misfit(str(error)) from None

    def decoder(self) -> Callable[[bytes], Any]:
        return self._decoder.decode

    def decode_many(self, items: Sequence[bytes]) -> list[Any]:
        return [self.decode(item) for item in items]

    def schema(self, *, written: bool = False) -> dict[str, Any]:
        return msgspec.json.schema(self.annotation)


class WholeCodec:
    """Carries bytes, or a JSON value that is encoded already, through as they are.

    Args:
        annotation: `bytes`, or `msgspec.Raw` for JSON.
    """

    __slots__ = ("annotation",)

    def __init__(self, annotation: type[bytes | msgspec.Raw]) -> None:
        self.annotation = annotation

    def encode(self, value: object) -> bytes:
        kind = self.annotation
        if not isinstance(value, kind):
            raise Misfit(f"the value: it should be {kind.__name__}, got {brief_repr(value)}")
        data = bytes(value)
        self._check_not_empty(data)
        return data

    def encoder(self, failure: Callable[[str], Exception]) -> Callable[[Any], bytes]:
        def encode(value: Any) -> bytes:
            if type(value) is bytes is self.annotation:
                return value
            try:
                return self.encode(value)
            except Misfit as error:
                raise failure(str(error)) from None

        return encode

    def decode(self, data: bytes) -> Any:
        self._check_not_empty(data)
        return self.annotation(data)

    def decoder(self) -> Callable[[bytes], Any]:
        return bytes if self.annotation is bytes else self.decode

    def decode_many(self, items: Sequence[bytes]) -> list[Any]:
        return list(items) if self.annotation is bytes else [self.decode(item) for item in items]

    def schema(self, *, written: bool = False) -> dict[str, Any]:
        # Any JSON value, or what is no JSON at all.
        binary = {"contentMediaType": "application/octet-stream"}
        return binary if self.annotation is bytes else {}

    def _check_not_empty(self, data: bytes) -> None:
        if not data and self.annotation is not bytes:
            raise Misfit("the value: it is empty, which is not JSON")


AnyCodec = Codec | StructCodec | WholeCodec


def holds_struct(annotation: Any) -> bool:
    """True if an annotation is, or contains, a msgspec struct."""
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return True
    return any(holds_struct(argument) for argument in typing.get_args(annotation))


def codec_for(annotation: Any) -> AnyCodec:
    """The codec of an annotation.

    Raises:
        HoldsBytes: it holds bytes that JSON would not carry.
        TypeError: neither pydantic nor msgspec can handle it.
    """
    return _cached(annotation) if _is_hashable(annotation) else _make(annotation)


_QUOTING: Final = ("assertion_error", "union_tag_invalid", "value_error")
"""Errors whose text may have the value in it; that of the first and the last is a user's own."""


def explain(error: pydantic.ValidationError, *, quoting: bool = True) -> str:
    """A validation error on one line: where, what, and, with `quoting`, the value."""
    parts: list[str] = []
    for detail in error.errors(include_url=False, include_context=False)[:5]:
        where = ".".join(str(step) for step in detail["loc"]) or "the value"
        if len(where) > 80:
            where = f"...{where[-77:]}"
        if quoting:
            parts.append(f"{where}: {detail['msg']}, got {brief_repr(detail['input'])}")
        else:
            quotes = detail["type"] in _QUOTING
            parts.append(f"{where}: {'it is refused' if quotes else detail['msg']}")
    more = error.error_count() - len(parts)
    return "; ".join(parts) + (f"; and {more} more" if more > 0 else "")


def _make(annotation: Any) -> AnyCodec:
    if annotation in (bytes, msgspec.Raw):
        return WholeCodec(annotation)
    if holds_struct(annotation):
        return StructCodec(annotation)
    try:
        return Codec(annotation)
    except pydantic.PydanticUserError as error:
        if error.code == "typed-dict-version":
            # pydantic reads `typing.TypedDict` from Python 3.12 on, msgspec always does.
            refuse_bytes_of_msgspec(annotation)
            return StructCodec(annotation)
        raise TypeError(str(error).partition("\n")[0]) from None


_cached: Callable[[Any], AnyCodec] = lru_cache(maxsize=1024)(_make)


def _is_hashable(annotation: Any) -> bool:
    try:
        hash(annotation)
    except TypeError:
        return False
    return True


def _is_data_class(annotation: Any) -> bool:
    """True if pydantic lets instances of a class pass as they are."""
    if not isinstance(annotation, type):
        return False
    kind = cast("type[object]", annotation)
    return issubclass(kind, pydantic.BaseModel) or dataclasses.is_dataclass(kind)


def _is_plain_dataclass(part: dict[str, Any]) -> bool:
    """True if a part of a core schema is a class whose constructor does not validate."""
    return part.get("type") == "dataclass" and not is_pydantic_dataclass(part["cls"])
