"""Configuration of a run: the constructor arguments of actors, how many instances, the bus.

Precedence, highest first: command line (`--Splitter.separator=,`), environment
(`DYNBUS_Splitter__separator`), YAML file, the constructor's default. The YAML file has a key
for each node, whose keys are constructor arguments, `class` and `ServiceArgs`, and a key `bus`
for the fields of `BusConfig`. It is read as data alone: no tags, no key twice, bounded however it
is written.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple, cast

import yaml

from dynbus.actors.declaring.arguments import Text, build_arguments, parameters_of
from dynbus.actors.declaring.service_args import ServiceArgs
from dynbus.bus.config import check_field, suggestion, variable
from dynbus.bus.errors import ConfigError
from dynbus.bus.protocol.names import check_token

from .graph import Node, full_key
from .loader import DeclaredNode

BUS_KEY: Final = "bus"
CLASS_KEY: Final = "class"
SERVICE_KEY: Final = "ServiceArgs"
WORKERS: Final = "workers"
_OPTION = re.compile(r"--((?:[\w.]+:)?\w[\w-]*)\.([A-Za-z_][\w.]*)(?:=(.*))?", re.DOTALL)
_VARIABLE = re.compile(r"DYNBUS_(\w+?)__\w+")

MAX_FILE_BYTES: Final = 1024 * 1024
MAX_VALUES: Final = 100_000
"""Values that a file may hold when its aliases are written out."""

_MERGE: Final = "tag:yaml.org,2002:merge"


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """What a file says; without arguments, that there is none.

    Attributes:
        name: the file as its user wrote it.
        keys: its top-level keys.
    """

    name: str = ""
    keys: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def place(self, *keys: str) -> str:
        """How a message names a value: `config.yaml: Splitter.count`."""
        return f"{self.name}: {'.'.join(keys)}"


class NodeOption(NamedTuple):
    """`--NODE.key=value` of the command line."""

    node: str
    key: str
    value: str

    def __str__(self) -> str:
        return f"--{self.node}.{self.key}"


class NodeSettings(NamedTuple):
    """What a run gives one node.

    Attributes:
        arguments: of the constructor, as written: values of the YAML file, and `Text`.
        service: how its class is served.
    """

    arguments: dict[str, Any]
    service: ServiceArgs = ServiceArgs()


class BusSettings(NamedTuple):
    """Fields of `BusConfig` for `load_config`, and where each came from as a user names it."""

    values: dict[str, Any]
    sources: dict[str, str]


def split_options(words: Sequence[str]) -> tuple[list[NodeOption], list[str]]:
    """Take the `--NODE.key=value` (or `--NODE.key value`) out of a command line.

    Nothing after `--` is taken.

    Raises:
        ConfigError: one of them has no value.
    """
    options: list[NodeOption] = []
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
        node, key, value = found.groups()
        if value is None:
            if position == len(words):
                raise ConfigError(f"{word} has no value: write {word}=VALUE")
            value = words[position]
            position += 1
        options.append(NodeOption(node, key, value))
    return options, rest


def declared_nodes(file: ConfigFile) -> list[DeclaredNode]:
    """The nodes to which the file gives a class.

    Raises:
        ConfigError: a name is not legal, or a class is no name.
    """
    declared: list[DeclaredNode] = []
    for name, section in file.keys.items():
        given = mapping(section) or {}
        if name == BUS_KEY or CLASS_KEY not in given:
            continue
        source, class_name = file.place(name, CLASS_KEY), given[CLASS_KEY]
        if not isinstance(class_name, str):
            raise ConfigError(f"{source} = {class_name!r} must be the name of an actor class")
        try:
            check_token("node", name)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None
        declared.append(DeclaredNode(name, class_name, source))
    return declared


def node_settings(
    nodes: Sequence[Node],
    *,
    file: ConfigFile,
    options: Sequence[NodeOption],
    environment: Mapping[str, str],
    namespace: str = "",
) -> dict[Node, NodeSettings]:
    """What each node of a run gets, checked against its constructor.

    Args:
        environment: variables of actors that are not started are not looked at.
        namespace: that of `--namespace`, for every node; empty for none.

    Raises:
        ConfigError: an actor is not started by the run, an argument does not exist or is
            missing, or a value does not fit; the message names where it came from.
    """
    names = _Names(nodes)
    given = {node: _Given(node) for node in nodes}
    taken: dict[Node, str] = {}
    for key, section in file.keys.items():
        if key == BUS_KEY:
            continue
        node = names.find(key, file.place(key), "; a further node needs a key `class`")
        if node in taken:
            raise ConfigError(f"{file.place(key)} and {taken[node]} are the same actor: merge them")
        taken[node] = key
        given[node].take_section(file, key, section)
    for variable_name, value in environment.items():
        found = names.of_variable(variable_name)
        if found is not None:
            node, key = found
            given[node].take_text(key.replace("__", "."), value, variable_name)
    if namespace:
        for each in given.values():
            each.take_text(f"{SERVICE_KEY}.namespace", namespace, "--namespace")
    for option in options:
        node = names.find(option.node, str(option))
        given[node].take_text(option.key, option.value, str(option))
    settings: dict[Node, NodeSettings] = {}
    for node, each in given.items():
        build_arguments(node.actor, each.arguments, each.sources, node=names.name_of(node))
        settings[node] = NodeSettings(each.arguments, each.service)
    return settings


def misspelt_variables(nodes: Sequence[Node], environment: Mapping[str, str]) -> list[str]:
    """A warning for each variable whose actor is not of this run but has nearly a name of it.

    Others may belong to another run that shares the environment.
    """
    names = _Names(nodes)
    return [
        f"the environment variable {name} is not used: this run has no actor {found[1]}{near}"
        for name in environment
        if names.of_variable(name) is None
        and (found := _VARIABLE.fullmatch(name))
        and (near := suggestion(found[1], names))
    ]


class _Names(Mapping[str, list[Node]]):
    """What options, variables and the file may call the nodes of a run: each by its own name, and
    by that of its class; in options and the file also with the module before it, `module:Name`."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes: dict[str, list[Node]] = {}
        for node in nodes:
            self._nodes.setdefault(node.name, []).append(node)
        names = set(self._nodes)
        for node in nodes:
            if node.actor.__name__ not in names:
                self._nodes.setdefault(node.actor.__name__, []).append(node)

    def __getitem__(self, name: str) -> list[Node]:
        return self._nodes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._nodes)

    def __len__(self) -> int:
        return len(self._nodes)

    def name_of(self, node: Node) -> str:
        """The name that means this node alone."""
        return node.name if len(self[node.name]) == 1 else full_key(node)

    def find(self, name: str, source: str, hint: str = "") -> Node:
        """The node that a name means.

        Args:
            hint: said where no other name is near.

        Raises:
            ConfigError: it means none, or several.
        """
        found = self.get(name) or self._in_module(name)
        if len(found) == 1:
            return found[0]
        if found:
            kind = "name" if any(node.name == name for node in found) else "class"
            ways = ", ".join(map(self.name_of, found))
            # A variable's name has no colon.
            where = ", in an option or the YAML file" if ":" in ways else ""
            raise ConfigError(
                f"{source}: {name} is the {kind} of several nodes: write one of {ways}{where}"
            )
        known = dict.fromkeys(self.name_of(node) for nodes in self.values() for node in nodes)
        near = suggestion(name, self)
        raise ConfigError(
            f"{source}: this run has no actor {name}{near}; it has {', '.join(known)}"
            f"{'' if near else hint}"
        )

    def of_variable(self, name: str) -> tuple[Node, str] | None:
        """The node and the rest of the name of an environment variable."""
        for known in self:
            # A shell's variables have no hyphen in their names.
            prefix = f"DYNBUS_{known.replace('-', '_')}__"
            if name.startswith(prefix):
                return self.find(known, name), name.removeprefix(prefix)
        return None

    def _in_module(self, name: str) -> list[Node]:
        """The nodes that are meant by `module:Name`, of a node or of a class."""
        module, _, own = name.rpartition(":")
        nodes = [node for found in self.values() for node in found]
        there = [node for node in dict.fromkeys(nodes) if node.actor.__module__ == module]
        exact = [node for node in there if full_key(node) == name]
        return exact or [node for node in there if node.actor.__name__ == own]


def bus_settings(
    file: ConfigFile, environment: Mapping[str, str], *, nats: str | None = None
) -> BusSettings:
    """The fields of the bus that go before the environment: those of the file that the
    environment does not have, and the servers of `--nats`.

    Raises:
        ConfigError: the file names a field that does not exist.
    """
    section = mapping(file.keys.get(BUS_KEY) or {})
    if section is None:
        raise ConfigError(
            f"{file.place(BUS_KEY)} must have fields as its keys, for example "
            f"`{BUS_KEY}: {{drain_grace: 10}}`"
        )
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for key, value in section.items():
        place = file.place(BUS_KEY, key)
        check_field(key, place)
        if variable(key) in environment or (key == "servers" and environment.get("NATS_URL")):
            continue
        values[key], sources[key] = value, place
    if nats is not None:
        values["servers"], sources["servers"] = nats, "--nats"
    return BusSettings(values, sources)


class _Given:
    """What one node is given; what is taken later replaces what was taken before."""

    def __init__(self, node: Node) -> None:
        self.arguments: dict[str, Any] = {}
        self.sources: dict[str, str] = {}
        self.service = node.actor.__dynbus_service__
        self._actor = node.actor

    def take_section(self, file: ConfigFile, name: str, section: Any) -> None:
        """Take the node's section of the YAML file."""
        given = mapping({} if section is None else section)
        if given is None:
            raise ConfigError(f"{file.place(name)} must have constructor arguments as its keys")
        given.pop(CLASS_KEY, None)
        service = mapping(given.pop(SERVICE_KEY, None) or {})
        if service is None:
            raise ConfigError(
                f"{file.place(name, SERVICE_KEY)} must be a mapping, for example {{{WORKERS}: 2}}"
            )
        for key, value in given.items():
            self._take(key, value, file.place(name, key))
        for key, value in service.items():
            self._take_service(key, value, file.place(name, SERVICE_KEY, key))

    def take_text(self, key: str, text: str, source: str) -> None:
        """Take a value that was given by its dotted key."""
        first, _, rest = key.partition(".")
        if key == CLASS_KEY:
            raise ConfigError(
                f"{source}: only the YAML file gives a node its class: NAME: {{class: {text}}}"
            )
        if first == SERVICE_KEY:
            self._take_service(rest, Text(text), source)
        elif rest:
            raise ConfigError(f"{source}: only whole arguments can be set: give {first} as JSON")
        else:
            self._take(key, Text(text), source)

    def _take(self, key: str, value: Any, source: str) -> None:
        if key == WORKERS and WORKERS not in parameters_of(self._actor):
            self._take_service(key, value, source)
        else:
            self.arguments[key], self.sources[key] = value, source

    def _take_service(self, key: str, value: Any, source: str) -> None:
        self.service = self.service.overridden({key: value}, lambda _: source)


# The YAML file ------------------------------------------------------------------------------


def read_file(path: Path) -> ConfigFile:
    """Read the file of `dynbus run --file`.

    Raises:
        ConfigError: it cannot be read, is too large, has a key twice or a tag, or is no mapping.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"--file {path}: {error.strerror}: give the path of a YAML file"
        ) from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
    try:
        loaded: object = yaml.load(data, Loader=_Loader)  # a SafeLoader
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError) as error:
        raise ConfigError(_explain(path, error)) from None
    if loaded is None:
        return ConfigFile(str(path))
    keys = mapping(loaded)
    if keys is None:
        raise ConfigError(
            f"{path} must have actor names as its top-level keys, for example "
            "`Splitter: {separator: ','}`"
        )
    _check_size(path, keys)
    return ConfigFile(str(path), keys)


def mapping(value: Any) -> dict[str, Any] | None:
    """The value with its keys as text; None when it is no mapping."""
    if not isinstance(value, dict):
        return None
    keys = cast("dict[object, Any]", value)
    return {str(key): each for key, each in keys.items()}


def _explain(path: Path, error: Exception) -> str:
    """What a parser says, with its place in the file in front."""
    if isinstance(error, yaml.reader.ReaderError):
        return f"{path}: it is not text: {error.reason}"
    mark: Any = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    problem = getattr(error, "problem", None) or str(error) or type(error).__name__
    where = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
    return f"{path}{where}: {' '.join(str(problem).split())}"


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
