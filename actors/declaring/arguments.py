"""Constructor arguments of an actor class: which it takes, and whether values fit them."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NoReturn, TypeAlias, cast

import msgspec
import pydantic

from dynbus.bus.config import suggestion
from dynbus.bus.errors import ConfigError
from dynbus.bus.telemetry.logs import HIDDEN

from .codec import explain, holds_struct
from .handlers import resolve_annotations
from .redaction import is_marked, shown, takes_secret

_NO_SOURCES: Final[Mapping[str, str]] = MappingProxyType({})
_NAMED: Final = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


_Path: TypeAlias = tuple[str, ...]


FILE_SUFFIX: Final = "_FILE"
"""Behind the name of an argument: its value is what the file holds, as Docker's images have it."""

_MSGSPEC_PLACE: Final = re.compile(r" - at `\$\.([\w.-]+)`$")


class Text(str):
    """A value from the command line or the environment, still to be read as its parameter's
    type."""

    __slots__ = ()


class DuplicateKey(ValueError):
    """Raised for a JSON object that has a key twice."""


def parse_json(text: str) -> Any:
    """The value of a JSON text, without the constants that only Python takes for JSON.

    Raises:
        DuplicateKey: an object in it has a key twice.
        ValueError, RecursionError: it is no JSON.
    """
    return json.loads(
        text, object_pairs_hook=_without_duplicates, parse_constant=_refuse, parse_float=_finite
    )


def read_text(text: str, source: str) -> Any:
    """A text that has no type to be read as: the value where it is JSON (`true`, `3`, `[1, 2]`),
    else the text itself.

    Raises:
        ConfigError: a JSON object in it has a key twice.
    """
    try:
        return parse_json(text)
    except DuplicateKey as error:
        raise ConfigError(f"{source}: {error}") from None
    except (ValueError, RecursionError):
        return str(text)


def is_from_file(name: str, origin: str) -> bool:
    """True if a value was read from a file, which marks it as a secret."""
    return origin.endswith(f"{name}{FILE_SUFFIX}")


def secret_arguments(actor: type[Any]) -> frozenset[str]:
    """The arguments whose annotations mark them as secrets: `Annotated[str, Field(repr=False)]`."""
    if actor.__init__ is object.__init__:
        return frozenset()
    label = f"{actor.__name__}.__init__"
    annotations = resolve_annotations(actor.__init__, label, include_extras=True)
    return frozenset(name for name, one in annotations.items() if is_marked(one))


def how_to_give(called: str, key: str) -> str:
    """The remedy for a value that is missing, for messages."""
    variable = f"DYNBUS_{called.replace('-', '_')}__{key}=VALUE, "
    return (
        f"give --{called}.{key}=VALUE, "
        # A variable's name has no colon.
        f"{'' if ':' in called else variable}or a key {key} under {called} in the YAML file"
    )


def build_arguments(
    actor: type[Any],
    given: Mapping[str, Any],
    sources: Mapping[str, str] = _NO_SOURCES,
    *,
    node: str = "",
) -> dict[str, Any]:
    """The validated constructor arguments of an actor class; what the class takes as extra
    configuration is left out.

    Args:
        sources: where arguments came from, for messages, and parts of them by their dotted path;
            the actor and its argument unless said.
        node: what the run calls it, for messages; the class name unless given.

    Raises:
        ConfigError: a name the constructor does not have, a missing one, or a value that does
            not fit its annotation.
    """
    called = node or actor.__name__
    named = _named_parameters(actor)
    extra = extra_keys(actor, given)
    _check_known(actor, [name for name in given if name not in extra], sources)
    missing = [name for name, p in named.items() if p.default is p.empty and name not in given]
    if missing:
        raise ConfigError(f"{called} needs {missing[0]!r}: {how_to_give(called, missing[0])}")
    annotations, secrets = _annotations(actor), secret_arguments(actor)
    return {
        name: _validate(
            name,
            value,
            _annotation_of(name, value, named, annotations),
            {name: f"{called}.{name}"} | dict(sources),
            is_secret=name in secrets,
        )
        for name, value in given.items()
        if name not in extra
    }


def extra_keys(actor: type[Any], given: Mapping[str, Any]) -> list[str]:
    """The names that are no arguments, and that the class takes beside them (`extra_config`)."""
    prefixes: tuple[str, ...] = getattr(actor, "__dynbus_extra_config__", ())
    taken = parameters_of(actor)
    if any(p.kind is p.VAR_KEYWORD for p in taken.values()):
        return []
    return [name for name in given if name not in taken and name.startswith(prefixes)]


def nearest_argument(actor: type[Any], name: str) -> str:
    """` (did you mean NAME?)` where the constructor has nearly such an argument, else nothing."""
    return suggestion(name, _named_parameters(actor))


def settled(
    actor: type[Any], given: Mapping[str, Any], sources: Mapping[str, str]
) -> dict[str, Any]:
    """The arguments with the texts inside of mappings read, so that only whole ones are `Text`.

    Each is read as JSON (`3`, `true`) unless its place in the annotation takes the text alone.

    Raises:
        ConfigError: a JSON object in one of them has a key twice.
    """
    annotations, named = _annotations(actor), _named_parameters(actor)
    arguments = dict(given)
    for name, value in given.items():
        if isinstance(value, Mapping):
            annotation = _annotation_of(name, value, named, annotations)
            arguments[name] = _settle(name, cast("Mapping[str, Any]", value), annotation, sources)
    return arguments


def _check_known(actor: type[Any], given: Sequence[str], sources: Mapping[str, str]) -> None:
    taken = parameters_of(actor)
    named = _named_parameters(actor)
    unknown = [name for name in given if name not in named]
    if not unknown or any(p.kind is p.VAR_KEYWORD for p in taken.values()):
        return
    known = f"it has {', '.join(named)}" if named else "its constructor takes none"
    prefixes: tuple[str, ...] = getattr(actor, "__dynbus_extra_config__", ())
    beside = f", and takes keys that begin with {' or '.join(prefixes)}" if prefixes else ""
    place = f"{sources[unknown[0]]}: " if unknown[0] in sources else ""
    # `workers` has a place beside the arguments; its neighbours are looked for there too.
    service = getattr(actor, "__dynbus_service__", None)
    is_of_service = service is not None and hasattr(service, unknown[0])
    near = (
        f" (did you mean ServiceArgs.{unknown[0]}?)"
        if is_of_service
        else suggestion(unknown[0], [*named, *prefixes])
    )
    raise ConfigError(
        f"{place}{actor.__name__} has no argument {unknown[0]!r}{near}: {known}{beside}"
    )


def defaults(actor: type[Any]) -> dict[str, Any]:
    """The constructor arguments that have a default, and it."""
    return {
        name: p.default
        for name, p in parameters_of(actor).items()
        if p.default is not p.empty and p.kind in _NAMED
    }


def default_mapping(actor: type[Any], name: str) -> dict[str, Any] | None:
    """The default of an argument that is a mapping, a model, a dataclass or a struct, in the types
    of JSON; None for any other, and for one that JSON does not hold whole."""
    default = defaults(actor).get(name)
    if isinstance(default, type):
        return None
    try:
        if isinstance(default, pydantic.BaseModel):
            written = default.model_dump(mode="json", exclude_unset=True)
            if written != default.model_dump(mode="json", exclude_unset=True, by_alias=True):
                return None  # what is given may have either name
        elif isinstance(default, Mapping | msgspec.Struct) or dataclasses.is_dataclass(default):
            written = msgspec.json.decode(msgspec.json.encode(default))
        else:
            return None
        read = written if isinstance(default, Mapping) else _Reader(type(default)).read(written)
    except (TypeError, ValueError, RecursionError, pydantic.PydanticUserError):
        return None
    return written if read == default else None


def parameters_of(actor: type[Any]) -> dict[str, inspect.Parameter]:
    """The parameters of the constructor, by name."""
    if actor.__init__ is object.__init__:
        return {}
    parameters = dict(inspect.signature(actor.__init__).parameters)
    parameters.pop(next(iter(parameters), ""), None)
    return parameters


def _named_parameters(actor: type[Any]) -> dict[str, inspect.Parameter]:
    return {name: p for name, p in parameters_of(actor).items() if p.kind in _NAMED}


def _annotations(actor: type[Any]) -> dict[str, Any]:
    if actor.__init__ is object.__init__:
        return {}
    return resolve_annotations(actor.__init__, f"{actor.__name__}.__init__")


def _annotation_of(
    name: str,
    value: Any,
    named: Mapping[str, inspect.Parameter],
    annotations: Mapping[str, Any],
) -> Any:
    """The annotation of a value; None for anything. A text without an annotation is to be of the
    type of the default.
    """
    annotation = annotations.get(name)
    if annotation not in (None, Any):
        return annotation
    default = named[name].default if name in named else None
    if not isinstance(value, Text):
        return None
    if isinstance(default, int) and not isinstance(default, bool):
        return int | float
    return type(default) if isinstance(default, bool | float | str) else None


def _validate(
    name: str, value: Any, annotation: Any, sources: Mapping[str, str], *, is_secret: bool
) -> Any:
    source = sources[name]
    if annotation is None:
        return read_text(value, source) if isinstance(value, Text) else value
    try:
        reader = _Reader(annotation)
    except pydantic.PydanticSchemaGenerationError:
        # A type that only code can make, such as a client: given in a program, not as text.
        return value
    try:
        return reader.read(value, source)
    except (pydantic.ValidationError, msgspec.ValidationError) as error:
        path = _place_of(error, name, sources)
        part = value
        for key in path:
            part = part[key]
        source = sources[".".join((name, *path))]
        hides = is_secret or takes_secret(annotation) or is_from_file(name, source)
        given = HIDDEN if hides else shown(part)
        raise ConfigError(
            f"{source} = {given!r}: {_remedy(annotation, error, hides=hides)}"
        ) from None


def _place_of(error: Exception, name: str, sources: Mapping[str, str]) -> _Path:
    """The path of the part that does not fit, where it came from a place of its own."""
    locations = _locations(error)
    if not locations:
        return ()
    paths = [
        tuple(each.split(".")[1:])
        for each, source in sources.items()
        if each.startswith(f"{name}.") and source != f"{sources[name]}{each.removeprefix(name)}"
    ]
    within = [path for path in paths if _leads_through(locations[0], path)]
    return max(within, key=len, default=())


def _remedy(annotation: Any, error: Exception, *, hides: bool) -> str:
    if isinstance(error, pydantic.ValidationError):
        details = error.errors(include_url=False, include_context=False, include_input=False)
        plain = len(details) == 1 and not details[0]["loc"]
        why = details[0]["msg"] if plain and not hides else explain(error, quoting=not hides)
    else:
        # msgspec quotes a text that is none of several.
        why = "it is refused" if hides else str(error)
    return f"give {inspect.formatannotation(annotation)}: {why}"


class _Reader:
    """Reads values as one annotation: pydantic's, or msgspec's where a struct is in it.

    Raises:
        pydantic.PydanticSchemaGenerationError: values of it are made by code alone.
    """

    def __init__(self, annotation: Any) -> None:
        self._annotation = annotation
        self._adapter: pydantic.TypeAdapter[Any] | None = None
        if not holds_struct(annotation):
            self._adapter = pydantic.TypeAdapter(annotation)

    def read(self, value: Any, source: str = "") -> Any:
        """The value as the annotation has it.

        Raises:
            pydantic.ValidationError, msgspec.ValidationError: it does not fit.
        """
        if self._adapter is None:
            plain: Any = read_text(value, source) if isinstance(value, Text) else value
            if not isinstance(value, Mapping | list | str | int | float | None):
                return plain  # given in a program, which need not build it of plain values
            try:
                return msgspec.convert(plain, self._annotation, strict=False)
            except TypeError:  # a union with a type that only code can make
                return plain
        if isinstance(value, Text):
            return _read_text(self._adapter, value)
        return self._adapter.validate_python(value)


def _read_text(adapter: pydantic.TypeAdapter[Any], text: Text) -> Any:
    """A value written as text: itself where that fits (`,`, `3`, `true`), else JSON (`[1, 2]`),
    else the elements of a list with commas between them (`1,2`)."""
    try:
        return adapter.validate_strings(str(text))
    except pydantic.ValidationError:
        if text[:1] in ("[", "{", '"') or text == "null":
            return adapter.validate_json(text)
        parts = filter(None, map(str.strip, text.split(",")))
        try:
            return adapter.validate_python(list(parts))
        except pydantic.ValidationError:
            pass
        raise


# Texts within mappings -----------------------------------------------------------------------


def _settle(
    name: str, value: Mapping[str, Any], annotation: Any, sources: Mapping[str, str]
) -> dict[str, Any]:
    texts = list(_texts(value))
    as_json = {
        path: read_text(text, sources.get(".".join((name, *path)), name)) for path, text in texts
    }
    read = _with_texts(value, as_json)
    if not texts or annotation is None:
        return read
    try:
        reader = _Reader(annotation)
    except pydantic.PydanticSchemaGenerationError:
        return read
    misfits = _misfits(reader, read)
    if misfits is None:
        return read
    refused = {
        path: str(text)
        for path, text in texts
        if not misfits or any(_leads_through(location, path) for location in misfits)
    }
    partly = _with_texts(value, as_json | refused)
    return partly if _misfits(reader, partly) is None else read


def _texts(value: Mapping[str, Any], path: _Path = ()) -> Iterator[tuple[_Path, Text]]:
    for key, each in value.items():
        if isinstance(each, Text):
            yield (*path, key), each
        elif isinstance(each, Mapping):
            yield from _texts(cast("Mapping[str, Any]", each), (*path, key))


def _with_texts(
    value: Mapping[str, Any], read: Mapping[_Path, Any], path: _Path = ()
) -> dict[str, Any]:
    return {
        key: read[(*path, key)]
        if isinstance(each, Text)
        else _with_texts(cast("Mapping[str, Any]", each), read, (*path, key))
        if isinstance(each, Mapping)
        else each
        for key, each in value.items()
    }


def _misfits(reader: _Reader, value: Any) -> list[_Path] | None:
    """The places where a value does not fit; None where it does. Nowhere in particular is an empty
    list.
    """
    try:
        reader.read(value)
    except (pydantic.ValidationError, msgspec.ValidationError) as error:
        return _locations(error)
    return None


def _locations(error: Exception) -> list[_Path]:
    if not isinstance(error, pydantic.ValidationError):
        match = _MSGSPEC_PLACE.search(str(error))
        return [tuple(match[1].split("."))] if match else []
    details = error.errors(include_url=False, include_context=False, include_input=False)
    return [tuple(map(str, detail["loc"])) for detail in details]


def _leads_through(location: _Path, path: _Path) -> bool:
    """True if a location lies at the path or below; between its keys are names of types, where
    there is a union.
    """
    steps = iter(location)
    return all(key in steps for key in path)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for key, value in pairs:
        if key in mapping:
            raise DuplicateKey(f"the key {key!r} is there twice")
        mapping[key] = value
    return mapping


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits} is too large for a number")
    return number
