"""Configuration of a run: the constructor arguments of actors, how many instances, the bus.

Precedence, highest first: command line (`--Splitter.separator=,`), environment
(`DYNBUS_Splitter__separator`), YAML file, the constructor's default. The YAML file has a key
for each actor class, whose keys are constructor arguments and `ServiceArgs`, and a key `bus`
for the fields of `BusConfig`.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import pydantic
import yaml

from dynbus.bus.config import BusConfig
from dynbus.bus.errors import ConfigError

from .codec import explain

MAX_FILE_BYTES: Final = 1024 * 1024
MAX_VALUES: Final = 100_000
"""Values that a YAML file may hold when its aliases are written out."""
MAX_WORKERS: Final = 1024

BUS_KEY: Final = "bus"
SERVICE_KEY: Final = "ServiceArgs"
WORKERS: Final = "workers"

_OPTION = re.compile(r"--([A-Za-z_]\w*)\.([A-Za-z_][\w.]*)(?:=(.*))?", re.DOTALL)
_ENVIRONMENT: Final = "DYNBUS_{}__"
_BUS_ENVIRONMENT: Final = "DYNBUS_{}"
_MERGE: Final = "tag:yaml.org,2002:merge"


class Text(str):
    """A value from the command line or the environment, still to be read as its parameter's
    type."""

    __slots__ = ()


class ActorOption(NamedTuple):
    """`--Actor.key=value` of the command line."""

    actor: str
    key: str
    value: str

    def __str__(self) -> str:
        return f"--{self.actor}.{self.key}"


class ActorSettings(NamedTuple):
    """What a run gives one actor class.

    Attributes:
        arguments: of the constructor, as written: values of the YAML file, and `Text`.
        workers: the number of instances.
    """

    arguments: dict[str, Any]
    workers: int


def split_options(words: Sequence[str]) -> tuple[list[ActorOption], list[str]]:
    """Take the `--Actor.key=value` (or `--Actor.key value`) out of a command line.

    Nothing after `--` is taken.

    Raises:
        ConfigError: one of them has no value.
    """
    options: list[ActorOption] = []
    rest: list[str] = []
    position = 0
    while position < len(words):
        word = words[position]
        if word == "--":
            rest += words[position:]
            break
        found = _OPTION.fullmatch(word)
        position += 1
        if found is None:
            rest.append(word)
            continue
        actor, key, value = found.groups()
        if value is None:
            if position == len(words):
                raise ConfigError(f"{word} has no value: write {word}=VALUE")
            value = words[position]
            position += 1
        options.append(ActorOption(actor, key, value))
    return options, rest


def read_file(path: Path) -> dict[str, Any]:
    """The keys of a YAML file.

    Raises:
        ConfigError: it cannot be read, is too large, has a key twice or a tag, or is no mapping.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
    try:
        loaded: object = yaml.load(data, Loader=_Loader)  # a SafeLoader
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None
    if loaded is None:
        return {}
    keys = _mapping(loaded)
    if keys is None:
        raise ConfigError(f"{path} must have actor names as its top-level keys")
    _check_size(path, keys)
    return keys


def actor_settings(
    actors: Sequence[type[Any]],
    *,
    file: Mapping[str, Any],
    options: Sequence[ActorOption],
    environment: Mapping[str, str],
) -> dict[type[Any], ActorSettings]:
    """What each actor of a run gets, checked against its constructor.

    Args:
        file: the keys of the YAML file.
        environment: variables of actors that are not started are not looked at.

    Raises:
        ConfigError: an actor is not started by the run, an argument does not exist or is
            missing, or a value does not fit.
    """
    names = {actor.__name__: actor for actor in actors}
    _check_names([key for key in file if key != BUS_KEY], names, "the configuration file: {}")
    _check_names([option.actor for option in options], names, "--{}.…")
    settings: dict[type[Any], ActorSettings] = {}
    for name, actor in names.items():
        given, service = _from_file(name, file.get(name))
        prefix = _ENVIRONMENT.format(name)
        texts = {
            key.removeprefix(prefix).replace("__", "."): value
            for key, value in environment.items()
            if key.startswith(prefix)
        }
        texts |= {option.key: option.value for option in options if option.actor == name}
        for key, value in texts.items():
            _set(actor, key, Text(value), given, service)
        build_arguments(actor, given)
        settings[actor] = ActorSettings(given, _workers(name, service))
    return settings


def bus_settings(
    file: Mapping[str, Any], environment: Mapping[str, str], **explicit: Any
) -> dict[str, Any]:
    """The fields of `BusConfig` for `load_config`, which lets its argument win over the
    environment: those of the file that the environment does not have, and the explicit ones.

    Raises:
        ConfigError: the file names a field that does not exist.
    """
    values = _mapping(file.get(BUS_KEY) or {})
    if values is None:
        raise ConfigError(f"the configuration file: {BUS_KEY} must have fields as its keys")
    for key in values:
        if key not in BusConfig.__struct_fields__:
            raise ConfigError(
                f"the configuration file: {BUS_KEY}.{key} does not exist; there are: "
                f"{', '.join(BusConfig.__struct_fields__)}"
            )
    kept = {
        key: value
        for key, value in values.items()
        if _BUS_ENVIRONMENT.format(key.upper()) not in environment
        and not (key == "servers" and environment.get("NATS_URL"))
    }
    return kept | {key: value for key, value in explicit.items() if value is not None}


def build_arguments(actor: type[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The validated constructor arguments of an actor class.

    Raises:
        ConfigError: a name the constructor does not have, a missing one, or a value that does
            not fit its annotation.
    """
    parameters = _parameters(actor)
    accepts_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = {
        name: p
        for name, p in parameters.items()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    unknown = [name for name in given if name not in named]
    if unknown and not accepts_any:
        known = f"it has {', '.join(named)}" if named else "its constructor takes none"
        raise ConfigError(f"{actor.__name__} has no argument {unknown[0]!r}: {known}")
    missing = [name for name, p in named.items() if p.default is p.empty and name not in given]
    if missing:
        raise ConfigError(
            f"{actor.__name__} needs {missing[0]!r}: give --{actor.__name__}.{missing[0]}=VALUE, "
            f"or a key {missing[0]} under {actor.__name__} in the YAML file"
        )
    hints = _hints(actor)
    return {name: _validate(actor, name, value, hints.get(name)) for name, value in given.items()}


def _parameters(actor: type[Any]) -> dict[str, inspect.Parameter]:
    if actor.__init__ is object.__init__:
        return {}
    parameters = dict(inspect.signature(actor.__init__).parameters)
    parameters.pop(next(iter(parameters), ""), None)
    return parameters


def _hints(actor: type[Any]) -> dict[str, Any]:
    if actor.__init__ is object.__init__:
        return {}
    try:
        return typing.get_type_hints(actor.__init__)
    except NameError as error:
        raise ConfigError(f"{actor.__name__}.__init__: {error}") from None


def _validate(actor: type[Any], name: str, value: Any, annotation: Any) -> Any:
    if annotation is None or annotation is Any:
        return str(value) if isinstance(value, Text) else value
    try:
        adapter: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(annotation)
    except pydantic.PydanticSchemaGenerationError:
        # A type that only code can make, such as a client: given in a program, not as text.
        return value
    try:
        if not isinstance(value, Text):
            return adapter.validate_python(value)
        return _read_text(adapter, value)
    except pydantic.ValidationError as error:
        raise ConfigError(f"{actor.__name__}.{name} = {str(value)!r}: {explain(error)}") from None


def _read_text(adapter: pydantic.TypeAdapter[Any], text: Text) -> Any:
    """A value written as text: itself where that fits (`,`, `3`, `true`), else JSON (`[1, 2]`)."""
    try:
        return adapter.validate_strings(str(text))
    except pydantic.ValidationError:
        if text[:1] in ("[", "{", '"'):
            return adapter.validate_json(text)
        raise


class _Loader(yaml.SafeLoader):
    """A safe loader that refuses explicit tags, and a key that is written twice.

    Merge keys work as YAML has them; what they bring counts towards `MAX_VALUES`.
    """

    def __init__(self, stream: bytes) -> None:
        super().__init__(stream)
        self._merged = 0
        # The nodes themselves, so that no other can have the same identity.
        self._flat: dict[int, yaml.MappingNode] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = cast("Any", self).peek_event()
        tag: str | None = getattr(event, "tag", None)
        if tag is not None:
            raise yaml.constructor.ConstructorError(
                None, None, f"the tag {tag} is not allowed: write the plain value", event.start_mark
            )
        return super().compose_node(parent, index)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        if id(node) in self._flat:
            return
        merged: list[tuple[yaml.Node, yaml.Node]] = []
        own: list[tuple[yaml.Node, yaml.Node]] = []
        seen: set[Hashable] = set()
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE:
                merged += self._merge(value_node)
                continue
            self._check_key(key_node, seen)
            own.append((key_node, value_node))
        # Later ones win.
        node.value = merged + own
        self._flat[id(node)] = node

    def _merge(self, value_node: yaml.Node) -> list[tuple[yaml.Node, yaml.Node]]:
        several = isinstance(value_node, yaml.SequenceNode)
        # The first of several mappings wins.
        sources: list[yaml.Node] = value_node.value[::-1] if several else [value_node]
        found: list[tuple[yaml.Node, yaml.Node]] = []
        for source in sources:
            if not isinstance(source, yaml.MappingNode):
                raise yaml.constructor.ConstructorError(
                    None, None, "<< takes a mapping, or a list of mappings", source.start_mark
                )
            self.flatten_mapping(source)
            self._merged += 1 + len(source.value)
            if self._merged > MAX_VALUES:
                raise yaml.constructor.ConstructorError(
                    None, None, f"merges bring more than {MAX_VALUES} values", source.start_mark
                )
            found += source.value
        return found

    def _check_key(self, key_node: yaml.Node, seen: set[Hashable]) -> None:
        if not isinstance(key_node, yaml.ScalarNode):
            raise yaml.constructor.ConstructorError(
                None, None, "a key must be a plain value", key_node.start_mark
            )
        key: Any = self.construct_object(key_node)  # pyright: ignore[reportUnknownMemberType]
        if key in seen:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {key!r} is there twice", key_node.start_mark
            )
        seen.add(key)


def _mapping(value: Any) -> dict[str, Any] | None:
    """The value with its keys as text; None when it is no mapping."""
    if not isinstance(value, dict):
        return None
    keys = cast("dict[object, Any]", value)
    return {str(key): each for key, each in keys.items()}


def _check_size(path: Path, loaded: Any) -> None:
    """Refuse what grows without end when it is written out: aliases within aliases."""
    count = 0
    open_values: list[Any] = [loaded]
    while open_values:
        value = open_values.pop()
        count += 1
        if count > MAX_VALUES:
            raise ConfigError(f"{path} holds more than {MAX_VALUES} values: its aliases multiply")
        if isinstance(value, dict):
            open_values += cast("dict[object, Any]", value).values()
        elif isinstance(value, list):
            open_values += cast("list[object]", value)


def _check_names(given: Sequence[str], known: Mapping[str, Any], where: str) -> None:
    for name in given:
        if name not in known:
            raise ConfigError(
                f"{where.format(name)} is no actor of this run; there are: "
                f"{', '.join(known) or 'none'}"
            )


def _from_file(name: str, section: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The constructor arguments and the service arguments of one actor."""
    if section is None:
        return {}, {}
    given = _mapping(section)
    if given is None:
        raise ConfigError(
            f"the configuration file: {name} must have constructor arguments as its keys"
        )
    service = _mapping(given.pop(SERVICE_KEY, None) or {})
    if service is None:
        raise ConfigError(
            f"the configuration file: {name}.{SERVICE_KEY} must be a mapping, for example "
            f"{{{WORKERS}: 2}}"
        )
    for key in service:
        _check_service_key(name, key)
    return given, service


def _set(
    actor: type[Any], key: str, value: Text, given: dict[str, Any], service: dict[str, Any]
) -> None:
    """Enter a value that was given by its dotted key."""
    first, _, rest = key.partition(".")
    if first == SERVICE_KEY:
        _check_service_key(actor.__name__, rest)
        service[rest] = value
    elif rest:
        raise ConfigError(
            f"{actor.__name__}.{key}: only whole arguments can be set: give {first} as JSON"
        )
    elif key == WORKERS and WORKERS not in _parameters(actor):
        service[WORKERS] = value
    else:
        given[key] = value


def _check_service_key(name: str, key: str) -> None:
    if key != WORKERS:
        raise ConfigError(f"{name}.{SERVICE_KEY}.{key} does not exist; there is: {WORKERS}")


def _workers(name: str, service: Mapping[str, Any]) -> int:
    value = service.get(WORKERS, 1)
    if isinstance(value, Text) and value.isascii() and value.isdigit():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_WORKERS:
        raise ConfigError(
            f"{name}.{WORKERS} = {value!r} must be a number of instances from 0 to {MAX_WORKERS}"
        )
    return value
