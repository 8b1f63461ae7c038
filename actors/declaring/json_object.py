"""JSON without types: what untyped clients send and give."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import msgspec

from dynbus.bus.errors import InvalidRequest

from .codec import Misfit, codec_for
from .json_limits.finite import MARKS, refuse_non_finite


class JsonObject(Mapping[str, Any]):
    """A JSON object that is read by key or by attribute and cannot be changed.

    Only by key: fields whose names begin with `_`, or are those that every mapping has (`get`,
    `items`, `keys`, `values`).
    """

    __slots__ = ("_fields",)

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields

    def __getitem__(self, key: str) -> Any:
        return _wrap(self._fields[key])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            # Asked for by copying and the like, before there are any fields.
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        try:
            return _wrap(self._fields[name])
        except KeyError:
            raise AttributeError(
                f"the object has no {name!r}; it has {', '.join(map(repr, self._fields))}"
            ) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __repr__(self) -> str:
        return repr(self._fields)


def decode_json(data: bytes) -> Any:
    """The value of a JSON text, objects as `JsonObject` and arrays as tuples; None for no text.

    Raises:
        Misfit: it is no JSON.
    """
    try:
        return _wrap(msgspec.json.decode(data)) if data else None
    except (msgspec.DecodeError, RecursionError) as error:
        raise Misfit(
            f"it is not JSON: {error}; call.raw(), or --raw in a shell, gives it as bytes"
        ) from None


def decode_json_items(items: Sequence[bytes]) -> list[Any]:
    """`decode_json` of each."""
    return [decode_json(item) for item in items]


def encode_json(request: Any) -> bytes:
    """JSON of a request of any kind: a model, a struct, a mapping or a plain value.

    Bytes, and JSON as `msgspec.Raw`, are taken as they are.

    Raises:
        InvalidRequest: it has none, or holds a number that JSON cannot hold.
    """
    if isinstance(request, bytes | msgspec.Raw):
        return bytes(request)
    try:
        if hasattr(cast("Any", type(request)), "__pydantic_serializer__"):
            return codec_for(type(request)).encode(request)
        if isinstance(request, JsonObject):
            request = dict(request)
        data = msgspec.json.encode(request, enc_hook=_unwrap)
        if any(mark in data for mark in MARKS):
            refuse_non_finite(msgspec.to_builtins(request, enc_hook=_unwrap))
        return data
    except (TypeError, ValueError, RecursionError) as error:
        kind: str = type(cast("Any", request)).__name__
        raise InvalidRequest(
            f"a request of type {kind} cannot be sent as JSON: {error}",
            started=False,
        ) from None


def _wrap(value: Any) -> Any:
    if isinstance(value, dict):
        return JsonObject(cast("dict[str, Any]", value))
    if isinstance(value, list):
        return tuple(_wrap(element) for element in cast("Sequence[Any]", value))
    return value


def _unwrap(value: Any) -> Any:
    if isinstance(value, JsonObject):
        return dict(value)
    dump: Any = getattr(value, "model_dump", None)
    if dump is not None:
        return dump(mode="json")
    kind: str = value.__class__.__name__
    raise TypeError(f"{kind} is not a JSON type")
