"""Compatibility of two JSON schemas: is all that one side of an endpoint writes read by the other?

Two schemas are incompatible where nothing that one side may send is read by the other: a field has
another type, or is required and never sent. Where it depends on the value (one alternative of
several, a pattern, a maximum) the value decides when it comes, and most fit. What a schema does not
say, as what a validator of a user refuses, nobody can tell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, Final, Literal, NamedTuple, cast

import msgspec

from dynbus.actors.declaring.brief_repr import brief_repr

Direction = Literal["request", "reply"]

MAX_DEPTH: Final = 64
"""Of nested schemas; what is deeper is not compared."""
MAX_STEPS: Final = 2_000
"""Pairs of schemas that are compared: written out, one may be without end."""
MAX_ALTERNATIVES: Final = 64
MAX_DIFFERENCES: Final = 100
MAX_TEXT: Final = 120
"""Characters of a type as it is shown."""
NO_FIELD: Final = "no such field"
"""A side without the field, as it is shown."""


class Fit(IntEnum):
    """The effect of a difference on calls; the worst is the largest."""

    COMPATIBLE = 0
    UNCLEAR = 1
    INCOMPATIBLE = 2


class Difference(NamedTuple):
    """A place at which two schemas differ.

    Attributes:
        field: where, such as `usage.total` or `messages[].role`; empty for the whole.
        written: what its writer sends.
        read: what its reader takes.
        what: what that means, such as `is required and never sent`.
    """

    verdict: Fit
    direction: Direction
    field: str
    written: str
    read: str
    what: str

    def __str__(self) -> str:
        where = f"field {self.field!r} of the {self.direction}" if self.field else self.direction
        writer, reader = ("client", "instance")[:: 1 if self.direction == "request" else -1]
        sides = f"the {writer} sends {self.written}, the {reader} reads {self.read}"
        return f"{where} {self.what}: {sides}"


def worst(differences: Sequence[Difference]) -> Fit:
    """The effect of several differences together."""
    return max((one.verdict for one in differences), default=Fit.COMPATIBLE)


def compare(client: Any, server: Any, direction: Direction) -> list[Difference]:
    """The differences between the schemas of the two sides, in the order of the fields.

    Args:
        client, server: canonical JSON schemas, of what the side writes where it writes and of what
            it reads where it reads. None where it has none: there is no request.
    """
    written, read = (client, server) if direction == "request" else (server, client)
    if written is None and read is None:
        return []
    if written is None or read is None:
        what = "is not taken" if read is None else "is required and never sent"
        sends, takes = ("none" if one is None else _text(one) for one in (written, read))
        # No request is read as a null, and a null as none.
        other = read if written is None else written
        verdict = Fit.UNCLEAR if _may_be_null(other) else Fit.INCOMPATIBLE
        return [Difference(verdict, direction, "", sends, takes, what)]
    return _Comparison(written, read, direction).all()[:MAX_DIFFERENCES]


def _may_be_null(schema: Any) -> bool:
    resolved = _resolve(schema, schema)
    if not isinstance(resolved, Mapping) or _is_any(resolved):
        return True
    each = [_resolve(one, schema) for one in _alternatives(_keywords(resolved), schema)]
    return any(one is None or "null" in _kinds(_keywords(one)) for one in each)


# Keywords by what is done about them -------------------------------------------------------------

_LOWER: Final = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_UPPER: Final = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
_LIMITS: Final = (
    *_LOWER,
    *_UPPER,
    "contentEncoding",
    "contentMediaType",
    "format",
    "multipleOf",
    "pattern",
    "uniqueItems",
)
_OPPOSITE: Final[Mapping[str, Sequence[str]]] = {
    **{name: (_UPPER[0], _UPPER[1]) for name in _LOWER[:2]},
    **{name: (_LOWER[0], _LOWER[1]) for name in _UPPER[:2]},
    **{one: (other,) for one, other in zip(_LOWER[2:], _UPPER[2:], strict=True)},
    **{one: (other,) for one, other in zip(_UPPER[2:], _LOWER[2:], strict=True)},
}
_COMPARED: Final = frozenset(
    (
        *_LIMITS,
        "$defs",
        "$ref",
        "additionalProperties",
        "anyOf",
        "const",
        "definitions",
        "enum",
        "items",
        "oneOf",
        "prefixItems",
        "properties",
        "required",
        "type",
    )
)
"""Every other keyword is not understood here: its schemas are equal, or nobody can tell."""


_DEFINITIONS: Final = frozenset(("$defs", "definitions"))


class _Comparison:
    """The comparison of the values that a writer may send with those that a reader accepts."""

    def __init__(self, written: Any, read: Any, direction: Direction) -> None:
        self._written, self._read = written, read
        self._direction: Direction = direction
        # What pairs of named schemas differ in. One that is being compared, and holds itself, has
        # no more differences within than without.
        self._known: dict[tuple[str, str], list[Difference]] = {}
        self._steps = 0

    def all(self) -> list[Difference]:
        return self._compare(self._written, self._read, "", 0)

    def _compare(self, written: Any, read: Any, field: str, depth: int) -> list[Difference]:
        """The differences of two schemas at a field."""
        self._steps += 1
        if depth > MAX_DEPTH or self._steps > MAX_STEPS:
            return [self._differs(Fit.UNCLEAR, field, written, read, "is too large to compare")]
        names = (_name(written), _name(read))
        if not all(names):
            return self._resolved(written, read, field, depth)
        if names not in self._known:
            self._known[names] = []
            self._known[names] = self._resolved(written, read, "", depth)[:MAX_DIFFERENCES]
        return [one._replace(field=_joined(field, one.field)) for one in self._known[names]]

    def _resolved(self, written: Any, read: Any, field: str, depth: int) -> list[Difference]:
        sends, takes = _resolve(written, self._written), _resolve(read, self._read)
        if _is_any(takes):
            if _is_any(sends):
                return []
            return [self._differs(Fit.COMPATIBLE, field, written, read, "is read as anything")]
        if sends is False:
            return []
        if takes is False:
            return [self._differs(Fit.INCOMPATIBLE, field, written, read, "is not taken")]
        if sends is None or takes is None:
            return [self._differs(Fit.UNCLEAR, field, written, read, "is not known")]
        if _is_any(sends):
            return [self._differs(Fit.UNCLEAR, field, written, read, "may be anything")]
        return self._alternatives(sends, takes, field, depth)

    def _alternatives(
        self, sends: Mapping[str, Any], takes: Mapping[str, Any], field: str, depth: int
    ) -> list[Difference]:
        """Each alternative of the writer against the alternative of the reader that fits best."""
        written = _alternatives(sends, self._written)
        read = _alternatives(takes, self._read)
        if len(written) == len(read) == 1:
            return self._single(written[0], read[0], field, depth)
        differences: list[Difference] = []
        fitting: set[int] = set()
        fits = False
        for one in written:
            tried = [self._compare(one, other, field, depth + 1) for other in read]
            best = min(range(len(tried)), key=lambda index: _badness(tried[index]))
            if worst(tried[best]) is not Fit.INCOMPATIBLE:
                fitting.add(best)
                differences += tried[best]
                # That a null fits says nothing of the values that are sent otherwise.
                fits = fits or not _is_null(one) or len(written) == 1
                continue
            alike = [index for index, other in enumerate(read) if self._are_alike(one, other)]
            if len(alike) == 1:
                # Only one can have been meant, so that what is wrong within it can be told.
                fitting.add(alike[0])
                differences += tried[alike[0]]
                continue
            what = "has another type"
            if len(written) > 1:
                what = f"may be {_text(one)}, which is not read"
            differences.append(self._differs(Fit.INCOMPATIBLE, field, sends, takes, what))
        if fits:
            differences = [
                one._replace(verdict=min(one.verdict, Fit.UNCLEAR)) for one in differences
            ]
        unused = [
            other
            for index, other in enumerate(read)
            if index not in fitting and other not in written
        ]
        if unused and not differences:
            differences.append(
                self._differs(Fit.COMPATIBLE, field, sends, takes, "is read more widely")
            )
        return differences

    def _are_alike(self, written: Any, read: Any) -> bool:
        sends = _kinds(_keywords(_resolve(written, self._written)))
        return bool(sends) and sends == _kinds(_keywords(_resolve(read, self._read)))

    def _single(self, sends: Any, takes: Any, field: str, depth: int) -> list[Difference]:
        """Two schemas without alternatives."""
        names = (_name(sends), _name(takes))
        if any(names):
            return self._compare(sends, takes, field, depth + 1)
        if "enum" in sends or "const" in sends:
            differences = self._values(sends, takes, field)
        else:
            differences = self._kinds(sends, takes, field)
        if worst(differences) is Fit.INCOMPATIBLE:
            return differences
        if "object" in _kinds(sends) and "object" in _kinds(takes):
            differences += self._object(sends, takes, field, depth)
        if "array" in _kinds(sends) and "array" in _kinds(takes):
            differences += self._array(sends, takes, field, depth)
        differences += self._limits(sends, takes, field)
        for keyword in sorted({*sends, *takes} - _COMPARED):
            if keyword in takes and sends.get(keyword) != takes[keyword]:
                what = f"has {keyword}, which is not compared"
                differences.append(self._differs(Fit.UNCLEAR, field, sends, takes, what))
        return differences

    # Values and types ------------------------------------------------------------------------

    def _values(self, sends: Any, takes: Any, field: str) -> list[Difference]:
        values = _enumerated(sends)
        if "enum" in takes or "const" in takes:
            known = [_key(value) for value in _enumerated(takes)]
            missing = [value for value in values if _key(value) not in known]
            if missing:
                what = f"may be {_listed(missing)}, which is not read"
                never = len(missing) == len(values)
                verdict = Fit.INCOMPATIBLE if never else Fit.UNCLEAR
                return [self._differs(verdict, field, sends, takes, what)]
            if len(known) > len(values):
                wider = self._differs(Fit.COMPATIBLE, field, sends, takes, "is read more widely")
                return [wider]
            return []
        kinds = _kinds(takes)
        if kinds and not all(_has_kind(value, kinds) for value in values):
            return [self._differs(Fit.INCOMPATIBLE, field, sends, takes, "has another type")]
        return [self._differs(Fit.COMPATIBLE, field, sends, takes, "is read more widely")]

    def _kinds(self, sends: Any, takes: Any, field: str) -> list[Difference]:
        written, read = _kinds(sends), _kinds(takes)
        if not read:
            return []
        if not written:
            return [self._differs(Fit.UNCLEAR, field, sends, takes, "may have another type")]
        if not written <= (read | {"integer"} if "number" in read else read):
            # Of numbers some are whole.
            may_fit = "number" in written and "integer" in read
            verdict = Fit.UNCLEAR if may_fit else Fit.INCOMPATIBLE
            return [self._differs(verdict, field, sends, takes, "has another type")]
        if ("enum" in takes or "const" in takes) and not _has_every(takes, written):
            return [self._differs(Fit.UNCLEAR, field, sends, takes, "may be what is not read")]
        if written != read:
            return [self._differs(Fit.COMPATIBLE, field, sends, takes, "is read more widely")]
        return []

    def _limits(self, sends: Any, takes: Any, field: str) -> list[Difference]:
        differences: list[Difference] = []
        for keyword in _LIMITS:
            given, limit = sends.get(keyword), takes.get(keyword)
            if given == limit or (keyword == "uniqueItems" and not limit):
                continue
            if limit is None:
                what = f"is no longer limited by {keyword} {brief_repr(given)}"
                differences.append(self._differs(Fit.COMPATIBLE, field, sends, takes, what))
                continue
            if keyword in _OPPOSITE and self._is_within(sends, keyword, limit):
                continue
            if keyword in _OPPOSITE and _is_beyond(sends, keyword, limit):
                what = f"is never within {keyword} {brief_repr(limit)}"
                differences.append(self._differs(Fit.INCOMPATIBLE, field, sends, takes, what))
                continue
            what = f"is limited by {keyword} {brief_repr(limit)}"
            differences.append(self._differs(Fit.UNCLEAR, field, sends, takes, what))
        return differences

    def _is_within(self, sends: Any, keyword: str, limit: Any) -> bool:
        """True if every value that is sent keeps to a limit."""
        given = sends.get(keyword)
        if not _is_number(given) or not _is_number(limit):
            return False
        return bool(given >= limit if keyword in _LOWER else given <= limit)

    # Objects and arrays ----------------------------------------------------------------------

    def _object(self, sends: Any, takes: Any, field: str, depth: int) -> list[Difference]:
        differences: list[Difference] = []
        written: Mapping[str, Any] = sends.get("properties", {})
        read: Mapping[str, Any] = takes.get("properties", {})
        always, wanted = set(sends.get("required", ())), set(takes.get("required", ()))
        # A class sends its fields and no more; what says that it sends others may send any.
        others = sends.get("additionalProperties", not written and "properties" not in sends)
        rest = takes.get("additionalProperties", True)
        for name in sorted({*written, *read, *wanted}):
            inner = _joined(field, name)
            if name in written and name in read:
                differences += self._compare(written[name], read[name], inner, depth + 1)
                if name in wanted and name not in always:
                    what = "is required, and may be left out"
                    optional = self._differs(Fit.UNCLEAR, inner, written[name], read[name], what)
                    differences.append(optional)
            elif name in written:
                differences += self._extra(written[name], rest, inner, depth, name in always)
            else:
                differences += self._absent(read.get(name, True), others, inner, name in wanted)
        if others is not False and rest is not True and not _is_any(rest):
            differences += self._rest(others, rest, field, depth)
        return differences

    def _extra(
        self, written: Any, rest: Any, field: str, depth: int, is_always_sent: bool
    ) -> list[Difference]:
        """A field that the reader does not name."""
        if rest is False:
            verdict = Fit.INCOMPATIBLE if is_always_sent else Fit.UNCLEAR
            what = "is refused" if is_always_sent else "is refused when it is sent"
            return [self._differs(verdict, field, written, False, what)]
        if _is_any(rest):
            text = _text(written)
            return [
                Difference(
                    Fit.COMPATIBLE,
                    self._direction,
                    field,
                    text,
                    NO_FIELD,
                    "is ignored",
                )
            ]
        return self._compare(written, rest, field, depth + 1)

    def _absent(self, read: Any, others: Any, field: str, is_wanted: bool) -> list[Difference]:
        """A field that the writer does not name."""
        if not is_wanted:
            verdict, what = Fit.COMPATIBLE, "is left out, which is allowed"
        elif others is False:
            verdict, what = Fit.INCOMPATIBLE, "is required and never sent"
        else:
            verdict, what = Fit.UNCLEAR, "is required and may be missing"
        return [Difference(verdict, self._direction, field, NO_FIELD, _text(read), what)]

    def _rest(self, others: Any, rest: Any, field: str, depth: int) -> list[Difference]:
        """Fields that neither side names."""
        inner = f"{field}{{}}"
        if rest is False:
            return [self._differs(Fit.UNCLEAR, inner, others, rest, "may be refused")]
        return self._compare(others, rest, inner, depth + 1)

    def _array(self, sends: Any, takes: Any, field: str, depth: int) -> list[Difference]:
        written: list[Any] = sends.get("prefixItems", [])
        read: list[Any] = takes.get("prefixItems", [])
        differences: list[Difference] = []
        for index in range(max(len(written), len(read))):
            # Beyond its own positions a side may have more items, of the kind of all the others.
            sent = written[index] if index < len(written) else sends.get("items", not written)
            taken = read[index] if index < len(read) else takes.get("items", not read)
            if sent is False or (index >= len(written) and written and "items" not in sends):
                # How many there have to be is a limit.
                continue
            differences += self._compare(sent, taken, f"{field}[{index}]", depth + 1)
        if not written and not read:
            items = (sends.get("items", True), takes.get("items", True))
            differences += self._compare(*items, f"{field}[]", depth + 1)
        return differences

    def _differs(self, verdict: Fit, field: str, written: Any, read: Any, what: str) -> Difference:
        return Difference(verdict, self._direction, field, _text(written), _text(read), what)


# Parts of schemas --------------------------------------------------------------------------------


def _joined(field: str, inner: str) -> str:
    separator = "." if field and inner and inner[0] not in "[{" else ""
    return f"{field}{separator}{inner}"


def _name(schema: Any) -> str:
    """The name that a schema refers to; empty where it is written out."""
    return str(_keywords(schema).get("$ref", ""))


def _keywords(schema: Any) -> Mapping[str, Any]:
    """A schema that is an object; an empty one for any other."""
    return cast("Mapping[str, Any]", schema) if isinstance(schema, Mapping) else {}


def _resolve(schema: Any, root: Any) -> Any:
    """A schema with its references followed; None where one leads nowhere."""
    for _ in range(MAX_DEPTH):
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            return None
        given = cast("Mapping[str, Any]", schema)
        if "$ref" not in given:
            every = given.get("allOf")
            if not isinstance(every, list) or len(cast("Sequence[Any]", every)) != 1:
                return given
            # Written so for what stands beside a reference.
            [inner] = cast("Sequence[Any]", every)
        else:
            inner = _find(str(given["$ref"]), root)
        if isinstance(inner, bool):
            return inner
        if not isinstance(inner, Mapping):
            return None
        beside = {key: value for key, value in given.items() if key not in ("$ref", "allOf")}
        schema = {**cast("Mapping[str, Any]", inner), **beside}
    return None


def _find(reference: str, root: Any) -> Any:
    node: Any = root
    if not reference.startswith("#"):
        return None
    for step in reference[1:].split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if not isinstance(node, Mapping) or key not in node:
            return None
        node = _keywords(cast("object", node))[key]
    return node


def _is_any(schema: Any) -> bool:
    """True if a schema accepts any value, however it is written."""
    if schema is True:
        return True
    if not isinstance(schema, Mapping):
        return False
    keywords = cast("Mapping[str, Any]", schema).keys() - _DEFINITIONS
    # What is passed on as bytes takes every body.
    return keywords <= {"contentMediaType"}


def _alternatives(schema: Mapping[str, Any], root: Any) -> list[Any]:
    """The alternatives of a schema, those within them and of its types too."""
    alternatives: list[Any] = []
    waiting: list[Any] = [schema]
    steps = 0
    while waiting and steps < MAX_ALTERNATIVES:
        steps += 1
        one = waiting.pop(0)
        resolved = _resolve(one, root)
        if not isinstance(resolved, Mapping):
            alternatives.append(one)
            continue
        given = cast("Mapping[str, Any]", resolved)
        keyword = next((word for word in ("anyOf", "oneOf") if word in given), "")
        kinds = given.get("type")
        if keyword:
            beside = {key: given[key] for key in given.keys() - {keyword, *_DEFINITIONS}}
            inner = list(cast("Sequence[Any]", given[keyword]))
            waiting = [_merged(each, beside, root) if beside else each for each in inner] + waiting
        elif isinstance(kinds, list):
            alternatives += [{**given, "type": kind} for kind in cast("list[str]", kinds)]
        else:
            alternatives.append(one)
    return (alternatives + waiting)[:MAX_ALTERNATIVES]


def _merged(one: Any, beside: Mapping[str, Any], root: Any) -> Any:
    resolved = _resolve(one, root)
    return {**beside, **_keywords(resolved)} if isinstance(resolved, Mapping) else one


def _kinds(schema: Mapping[str, Any]) -> frozenset[str]:
    """The JSON types that a schema names; empty where it does not say."""
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset((kind,))
    if isinstance(kind, list):
        return frozenset(cast("list[str]", kind))
    if "enum" in schema or "const" in schema:
        return frozenset(map(_kind_of, _enumerated(schema)))
    if "properties" in schema:
        return frozenset(("object",))
    return frozenset()


def _enumerated(schema: Mapping[str, Any]) -> list[Any]:
    return [schema["const"]] if "const" in schema else list(schema["enum"])


def _kind_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list | tuple) else "object"


def _has_kind(value: Any, kinds: frozenset[str]) -> bool:
    kind = _kind_of(value)
    return kind in kinds or (kind == "integer" and "number" in kinds)


def _has_every(schema: Mapping[str, Any], kinds: frozenset[str]) -> bool:
    """True if an enumeration has every value of some types, which are few."""
    values = {_key(value) for value in _enumerated(schema)}
    every = {"null": {_key(None)}, "boolean": {_key(False), _key(True)}}
    return all(kind in every and every[kind] <= values for kind in kinds)


def _is_null(schema: Any) -> bool:
    return _keywords(schema).get("type") == "null"


def _key(value: Any) -> bytes:
    """A key by which values of JSON differ: true is not 1."""
    return msgspec.json.encode(value, order="sorted")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_beyond(sends: Mapping[str, Any], keyword: str, limit: Any) -> bool:
    """True if no value that is sent keeps to a limit."""
    if not _is_number(limit):
        return False
    for opposite in _OPPOSITE[keyword]:
        given = sends.get(opposite)
        if _is_number(given):
            # What is excluded does not matter: it is no more than one value.
            return bool(given < limit if keyword in _LOWER else given > limit)
    return False


def _badness(differences: Sequence[Difference]) -> tuple[int, int]:
    verdict = worst(differences)
    return (verdict, sum(one.verdict == verdict for one in differences))


# Texts -------------------------------------------------------------------------------------------


def _text(schema: Any) -> str:
    """A schema in a few words: `integer or null`, `array of string`, `Usage`."""
    text = _words(schema, 0)
    if text.isprintable() and len(text) <= MAX_TEXT:
        return text
    return brief_repr(text)


def _words(schema: Any, depth: int) -> str:
    if isinstance(schema, bool):
        return "anything" if schema else "nothing"
    if not isinstance(schema, Mapping):
        return "what is not known"
    given = cast("Mapping[str, Any]", schema)
    if "$ref" in given:
        return str(given["$ref"]).rpartition("/")[2]
    for keyword in ("anyOf", "oneOf"):
        if keyword in given:
            texts = [_words(one, depth + 1) for one in cast("list[Any]", given[keyword])]
            return " or ".join(dict.fromkeys(texts))
    if "enum" in given or "const" in given:
        return _listed(_enumerated(given))
    kinds = sorted(_kinds(given))
    if kinds == ["array"] and "items" in given and depth < 3:
        return f"array of {_words(given['items'], depth + 1)}"
    if kinds == ["object"] and depth < 3:
        rest = given.get("additionalProperties")
        if isinstance(rest, Mapping):
            return f"object of {_words(rest, depth + 1)}"
    return " or ".join(kinds) or "anything"


def _listed(values: Sequence[Any]) -> str:
    shown = [brief_repr(value) for value in values[:5]]
    return " or ".join(shown) + (f" and {len(values) - 5} more" if len(values) > 5 else "")
