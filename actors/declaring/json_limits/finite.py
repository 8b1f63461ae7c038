"""Refusing NaN and the infinities, which JSON cannot hold and serializers turn into null.

Looking at the floats is cheaper than looking through the JSON: where a schema says which
values are floats, their sum is finite only if each of them is. Elsewhere the JSON is searched
for what such a number becomes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any, Final, cast

import msgspec.inspect

Total = Callable[[Any], float]
"""The sum of all floats in a value, finite only if each of them is. It may be infinite or NaN
for numbers that are all finite, and may raise one of `UNSURE` for a value that breaks its
annotation: its caller looks closely then."""

UNSURE: Final = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)

MARKS: Final = (b"null", b'nan"', b'inf"', b"None", b"NaN", b"Infinity")
"""The texts written for a number that JSON cannot hold: one of the first three for a declared
float, as a value or the key of a mapping; any of them where the type, or a user's configuration,
leaves it open.
"""

_WITHOUT_FLOATS: Final = frozenset(
    ("bool", "bytes", "date", "datetime", "int", "literal", "none", "str", "time", "uuid")
)
"""Kinds of pydantic's core schemas that never hold a float."""

_TRANSPARENT: Final = frozenset(
    # fmt: off
    {
        "computed-field",
        "dataclass",
        "dataclass-args",
        "dataclass-field",
        "default",
        "definition-ref",
        "definitions",
        "dict",
        "frozenset",
        "function-after",
        "function-before",
        "function-wrap",
        "list",
        "model",
        "model-field",
        "model-fields",
        "nullable",
        "set",
        "tagged-union",
        "tuple",
        "typed-dict",
        "typed-dict-field",
        "union",
    }
    # fmt: on
)
"""Kinds that hold a float only where a schema within them does."""

_SCALARS: Final[Mapping[str, type]] = {
    "bool": bool,
    "int": int,
    "none": type(None),
    "str": str,
}


class NotFinite(ValueError):
    """Raised when a value holds a number that JSON cannot hold."""


class _Unknown(Exception):
    """Raised when a schema does not say where its floats are."""


def refuse_non_finite(plain: Any) -> None:
    """Check that no NaN or infinity, which JSON would turn into null, is in a value.

    Args:
        plain: of dicts, sequences, sets and scalars only.

    Raises:
        NotFinite: there is one; the message says where.
    """
    open_values: list[tuple[str, Any]] = [("", [plain])]
    while open_values:
        where, value = open_values.pop()
        if isinstance(value, dict):
            inner: Any = cast("dict[object, Any]", value).items()
        else:
            inner = enumerate(cast("Sequence[Any]", value))
        for step, each in inner:
            if not _is_finite_key(step):
                place = where[3:] or "the value"
                raise NotFinite(f"{place}: JSON cannot hold the key {step}")
            if isinstance(each, float):
                if not math.isfinite(each):
                    place = f"{where}.{step}"[3:] or "the value"
                    raise NotFinite(f"{place}: JSON cannot hold the number {each}")
            elif isinstance(each, dict | list | tuple | set | frozenset):
                open_values.append((f"{where}.{step}", cast("Any", each)))


def marks_of_floats(schema: Any) -> Sequence[bytes]:
    """The `MARKS` to look for in values of a pydantic core schema.

    None for one without floats, or whose user chose to have them as strings.
    """
    marks: Sequence[bytes] = ()
    for part in parts_of(schema):
        kind, form = part.get("type"), part.get("ser_json_inf_nan")
        if form == "strings":
            return ()
        if kind == "float":
            marks = marks or MARKS[:3]
        elif (isinstance(kind, str) and kind not in _WITHOUT_FLOATS | _TRANSPARENT) or (
            form is not None or _is_open(part)
        ):
            marks = MARKS
    return marks


def total_of(schema: Any) -> Total | None:
    """The function that sums the floats in values of a pydantic core schema that has some.

    None when it does not say where they are, or refers to itself.
    """
    try:
        return _total(schema, {})
    except _Unknown:
        return None


def parts_of(schema: Any) -> Iterable[dict[str, Any]]:
    """Every mapping within a pydantic core schema, itself included."""
    open_parts: list[Any] = [schema]
    while open_parts:
        part = open_parts.pop()
        if isinstance(part, list | tuple):
            open_parts += cast("Sequence[Any]", part)
        elif isinstance(part, dict):
            keys = cast("dict[str, Any]", part)
            yield keys
            open_parts += [value for key, value in keys.items() if key != "metadata"]


def struct_may_hold_float(annotation: Any) -> bool:
    """True if a value that msgspec handles may have a float somewhere; True in doubt."""
    floats = (
        msgspec.inspect.FloatType,
        msgspec.inspect.AnyType,
        msgspec.inspect.CustomType,
        msgspec.inspect.RawType,
        msgspec.inspect.EnumType,
    )
    return any(isinstance(part, floats) for part in struct_parts(annotation))


def struct_parts(annotation: Any) -> Iterable[object]:
    """Every type and field within what msgspec handles, itself included."""
    open_parts: list[Any] = [msgspec.inspect.type_info(annotation)]
    seen: set[int] = set()
    while open_parts:
        part = open_parts.pop()
        if isinstance(part, tuple):
            open_parts += cast("Sequence[Any]", part)
        elif (
            isinstance(part, msgspec.inspect.Type | msgspec.inspect.Field) and id(part) not in seen
        ):
            seen.add(id(part))
            yield part
            open_parts += [getattr(part, name) for name in part.__struct_fields__]


def _is_finite_key(key: Any) -> bool:
    parts = cast("tuple[object, ...]", key) if isinstance(key, tuple) else (key,)
    return all(math.isfinite(part) for part in parts if isinstance(part, float))


def _is_open(part: Mapping[str, Any]) -> bool:
    """True if a part of a core schema leaves open what is written for its value."""
    return "serialization" in part or "allow" in (
        part.get("extra_behavior"),
        part.get("extra_fields_behavior"),
    )


def _total(schema: Any, definitions: dict[str, Any]) -> Total | None:
    """The `Total` of a core schema; None for one without floats.

    Args:
        definitions: the schemas that may be referred to. One that is being read is not among
            them, so that what refers to itself ends here.

    Raises:
        _Unknown: it does not say where its floats are.
    """
    kind = schema["type"]
    if _is_open(schema) or _is_open(schema.get("config", {})):
        raise _Unknown
    if kind in _WITHOUT_FLOATS:
        return None
    match kind:
        case "float":
            return _itself
        case (
            "default" | "function-after" | "function-before" | "function-wrap"
            | "model-field" | "typed-dict-field" | "dataclass-field"
        ):  # fmt: skip
            return _total(schema["schema"], definitions)
        case "definitions":
            known = {one["ref"]: one for one in schema["definitions"]}
            return _total(schema["schema"], {**definitions, **known})
        case "definition-ref":
            name = schema["schema_ref"]
            if name not in definitions:
                raise _Unknown
            others = {key: one for key, one in definitions.items() if key != name}
            return _total(definitions[name], others)
        case "nullable":
            return _or_none(_total(schema["schema"], definitions))
        case "list" | "set" | "frozenset":
            return _of_each(_total(schema.get("items_schema", _ANY), definitions))
        case "tuple":
            return _of_tuple(schema, definitions)
        case "dict":
            if _total(schema.get("keys_schema", _ANY), definitions) is not None:
                raise _Unknown
            inner = _of_each(_total(schema.get("values_schema", _ANY), definitions))
            return None if inner is None else lambda value: inner(value.values())
        case "union":
            return _of_union(schema["choices"], definitions)
        case "tagged-union":
            return _of_union(schema["choices"].values(), definitions)
        case "model" if schema.get("root_model"):
            return _of_fields({"root": schema["schema"]}, definitions, attrgetter)
        case "model" | "dataclass":
            return _of_fields(_fields(schema["schema"]), definitions, attrgetter)
        case "typed-dict":
            _check_no_computed(schema)
            fields = schema["fields"]
            if not all(one.get("required", schema.get("total", True)) for one in fields.values()):
                raise _Unknown
            return _of_fields(fields, definitions, itemgetter)
        case _:
            raise _Unknown


_ANY: Final[Mapping[str, Any]] = {"type": "any"}


def _itself(value: float) -> float:
    return value


def _zero(_: Any) -> float:
    return 0.0


def _or_none(inner: Total | None) -> Total | None:
    if inner is None:
        return None
    if inner is _itself:
        return lambda value: value or 0.0
    return lambda value: 0.0 if value is None else inner(value)


def _of_each(inner: Total | None) -> Total | None:
    if inner is None:
        return None
    if inner is _itself:
        return sum
    return lambda values: sum(map(inner, values))


def _of_tuple(schema: Any, definitions: dict[str, Any]) -> Total | None:
    items: Sequence[Any] = schema["items_schema"]
    if schema.get("variadic_item_index") is not None:
        if len(items) > 1:
            raise _Unknown
        return _of_each(_total(items[0], definitions))
    return _of_fields(dict(enumerate(items)), definitions, itemgetter)


def _of_union(choices: Iterable[Any], definitions: dict[str, Any]) -> Total | None:
    """By the type of the value; one of none of them is a `LookupError`."""
    totals: dict[type, Total | None] = {}
    for choice in choices:
        # One with a label of its own is a pair.
        schema: Any = cast("Any", choice[0]) if isinstance(choice, tuple) else choice
        total = _total(schema, definitions)
        if schema["type"] == "definition-ref":
            schema = definitions[schema["schema_ref"]]
        kind: str = schema["type"]
        if kind in ("model", "dataclass"):
            totals[schema["cls"]] = total
        elif kind == "float":
            totals[float] = total
        elif kind in _SCALARS:
            totals[_SCALARS[kind]] = total
        else:
            raise _Unknown
    if not any(totals.values()):
        return None
    by_type = {kind: total or _zero for kind, total in totals.items()}
    return lambda value: by_type[type(value)](value)


def _fields(schema: Any) -> dict[str, Any]:
    """The fields of a model's or a dataclass's inner schema."""
    if schema["type"] in ("function-after", "function-before", "function-wrap"):
        return _fields(schema["schema"])
    if _is_open(schema) or schema["type"] not in ("model-fields", "dataclass-args"):
        raise _Unknown
    _check_no_computed(schema)
    fields = schema["fields"]
    if isinstance(fields, dict):
        return cast("dict[str, Any]", fields)
    return {one["name"]: one for one in fields if not one.get("init_only")}


def _check_no_computed(schema: Any) -> None:
    # To look at one is to compute it once more.
    if schema.get("computed_fields"):
        raise _Unknown


def _of_fields(
    fields: Mapping[Any, Any],
    definitions: dict[str, Any],
    getter: Callable[..., Callable[[Any], Any]],
) -> Total | None:
    by_name = {name: _total(one, definitions) for name, one in fields.items()}
    totals = {name: total for name, total in by_name.items() if total is not None}
    if not totals:
        return None
    get = getter(*totals)
    inner = list(totals.values())
    if len(totals) == 1:
        first = inner[0]
        return get if first is _itself else lambda value: first(get(value))
    if all(one is _itself for one in inner):
        return lambda value: sum(get(value))
    return lambda value: sum([one(each) for one, each in zip(inner, get(value), strict=True)])
