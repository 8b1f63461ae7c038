"""Configuration of a run: the constructor arguments of actors, how they are served, the bus.

Precedence, highest first: command line (`--Splitter.separator=,`), variable of an actor
(`DYNBUS_Splitter__separator`), variable of the graph (`DYNBUS_CONFIG`), YAML files, the later one
first, what the class says, the constructor's defaults. Mappings merge, everything else is replaced.

A file, and the JSON of `DYNBUS_CONFIG`, has a key for each node, whose keys are constructor
arguments, `class` and `ServiceArgs`, and a key `bus` for the fields of `BusConfig`.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from dynbus.actors.declaring.arguments import (
    FILE_SUFFIX,
    Text,
    build_arguments,
    default_mapping,
    defaults,
    extra_keys,
    nearest_argument,
    parameters_of,
    read_text,
    settled,
)
from dynbus.actors.declaring.redaction import shown
from dynbus.actors.declaring.service_args import SERVICE_KEY, ServiceArgs
from dynbus.actors.declaring.specification import load_options
from dynbus.bus.config import check_field, suggestion, variable
from dynbus.bus.errors import ConfigError
from dynbus.bus.protocol.names import check_token

from .config_file import MAX_DEPTH, ConfigFile, is_text, mapping
from .graph import Node, full_key
from .layers import Section, entry_at, entry_of, merge, over_default, plain, sources
from .loader import DeclaredNode

BUS_KEY: Final = "bus"
CLASS_KEY: Final = "class"
WORKERS: Final = "workers"
GUIDES_KEY: Final = "dynamo"
"""In the guides of Dynamo, `ServiceArgs` has `namespace` and `enabled` under this key."""
MAX_SECRET_BYTES: Final = 64 * 1024
_OPTION = re.compile(r"--((?:[\w.]+:)?\w[\w-]*)\.([A-Za-z_][\w.-]*)(?:=(.*))?", re.DOTALL)
_VARIABLE = re.compile(r"DYNBUS_(\w+?)__\w+")


class NodeOption(NamedTuple):
    """`--NODE.key=value` of the command line."""

    node: str
    key: str
    value: str

    def __str__(self) -> str:
        return f"--{self.node}.{self.key}"


class NodeSettings(NamedTuple):
    """The settings that a run gives one node.

    Attributes:
        arguments: of the constructor, and the extra keys that its class takes, as written: values
            of JSON, and `Text`.
        service: how its class is served.
        origins: where each of them came from, by its dotted key, defaults included.
    """

    arguments: dict[str, Any]
    service: ServiceArgs = ServiceArgs()
    origins: Mapping[str, str] = {}


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
        match = _OPTION.fullmatch(word)
        position += 1
        if match is None:
            rest.append(word)
            continue
        node, key, value = match.groups()
        if value is None:
            if position == len(words):
                raise ConfigError(f"{word} has no value: write {word}=VALUE")
            value = words[position]
            position += 1
        options.append(NodeOption(node, key, value))
    return options, rest


def declared_nodes(files: Sequence[ConfigFile]) -> list[DeclaredNode]:
    """The nodes to which the files give a class, the later ones over the earlier ones.

    Raises:
        ConfigError: a name is not legal, or a class is no name.
    """
    declared: dict[str, DeclaredNode] = {}
    for file in files:
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
            declared[name] = DeclaredNode(name, class_name, source)
    return list(declared.values())


def node_settings(
    nodes: Sequence[Node],
    *,
    files: Sequence[ConfigFile],
    options: Sequence[NodeOption],
    environment: Mapping[str, str],
    namespace: str | None = None,
) -> dict[Node, NodeSettings]:
    """The settings of each node of a run, checked against its constructor.

    Args:
        files: each before what overrides it.
        environment: variables of actors that are not started are not looked at.
        namespace: that of `--namespace`, which only an option of a node overrides.

    Raises:
        ConfigError: an actor is not started by the run, an argument does not exist or is
            missing, or a value does not fit; the message names where it came from.
    """
    names = _Names(nodes)
    given = {node: _Given(node) for node in nodes}
    for file in files:
        _take_file(file, names, given)
    for variable_name, node, key in _variables(names, environment):
        given[node].take_text(key, environment[variable_name], variable_name)
    if namespace is not None:
        for each in given.values():
            each.take_service({"namespace": namespace}, lambda _: "--namespace")
    for option in options:
        node = names.find(option.node, str(option))
        given[node].take_text(option.key, option.value, str(option))
    return {node: each.settings(names.name_of(node)) for node, each in given.items()}


def _variables(names: _Names, environment: Mapping[str, str]) -> Iterator[tuple[str, Node, str]]:
    """The variables of actors of the run, each with what it gives: whole mappings before their
    parts."""
    taken: dict[tuple[Node, str], str] = {}
    for variable_name in sorted(environment, key=lambda name: (name.count("__"), name)):
        target = names.of_variable(variable_name)
        if target is None:
            continue
        node, key = target
        other = taken.setdefault((node, key.removesuffix(FILE_SUFFIX)), variable_name)
        if other != variable_name:
            raise ConfigError(
                f"{other} and {variable_name} are both set and give the same value: unset one"
            )
        yield variable_name, node, key.replace("__", ".")


def _take_file(file: ConfigFile, names: _Names, given: Mapping[Node, _Given]) -> None:
    taken: dict[Node, str] = {}
    for key, section in file.keys.items():
        if key == BUS_KEY:
            continue
        node = names.find(key, file.place(key), "; a further node needs a key `class`")
        if node in taken:
            raise ConfigError(f"{file.place(key)} and {taken[node]} are the same actor: merge them")
        taken[node] = key
        given[node].take_section(section, file.place(key))


def misspelt_keys(settings: Mapping[Node, NodeSettings]) -> list[str]:
    """A warning for each extra key that is nearly an argument of its actor."""
    return [
        f"{given.origins[key]} is no argument of {node.actor.__name__}{near}: the actor has it "
        "in self.config alone"
        for node, given in settings.items()
        for key in extra_keys(node.actor, given.arguments)
        if (near := nearest_argument(node.actor, key))
    ]


def misspelt_variables(nodes: Sequence[Node], environment: Mapping[str, str]) -> list[str]:
    """A warning for each variable whose actor is not of this run but has nearly a name of it.

    Others may belong to another run that shares the environment.
    """
    names = _Names(nodes)
    return [
        f"the environment variable {name} is not used: this run has no actor {match[1]}{near}"
        for name in environment
        if names.of_variable(name) is None
        and (match := _VARIABLE.fullmatch(name))
        and (near := suggestion(match[1], names))
    ]


class _Names(Mapping[str, list[Node]]):
    """The names by which options, variables and the file may mean the nodes of a run: each its own
    name, and that of its class; in options and the file also with the module before it,
    `module:Name`.
    """

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
        nodes_named = self.get(name) or self._in_module(name)
        if len(nodes_named) == 1:
            return nodes_named[0]
        if nodes_named:
            kind = "name" if any(node.name == name for node in nodes_named) else "class"
            ways = ", ".join(map(self.name_of, nodes_named))
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
        nodes = [node for same_name in self.values() for node in same_name]
        there = [node for node in dict.fromkeys(nodes) if node.actor.__module__ == module]
        exact = [node for node in there if full_key(node) == name]
        return exact or [node for node in there if node.actor.__name__ == own]


def bus_settings(
    files: Sequence[ConfigFile], environment: Mapping[str, str], *, nats: str | None = None
) -> BusSettings:
    """The fields of the bus that go before the environment: those of the files that the
    environment does not have, and the servers of `--nats`.

    Raises:
        ConfigError: a file names a field that does not exist.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for file in files:
        section = _section(file.keys.get(BUS_KEY))
        if section is None:
            raise ConfigError(
                f"{file.place(BUS_KEY)} must have fields as its keys, for example "
                f"`{BUS_KEY}: {{drain_grace: 10}}`"
            )
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
    """The settings of one node, layer by layer; each goes over those before."""

    def __init__(self, node: Node) -> None:
        self._actor = node.actor
        self._service = node.actor.__dynbus_service__
        self._origins: dict[str, str] = {}
        self._arguments = Section({}, "")

    def take_section(self, section: Any, place: str) -> None:
        """Take what a file has under the node's key."""
        given = _section(section)
        if given is None:
            raise ConfigError(f"{place} must have constructor arguments as its keys")
        given.pop(CLASS_KEY, None)
        service_place = f"{place}.{SERVICE_KEY}"
        service = _section(given.pop(SERVICE_KEY, None))
        if service is None:
            raise ConfigError(f"{service_place} must be a mapping, for example {{{WORKERS}: 2}}")
        if self._is_short_for_service(WORKERS) and WORKERS in given:
            self.take_service({WORKERS: given.pop(WORKERS)}, lambda key: f"{place}.{key}")
        guides = _section(service.pop(GUIDES_KEY, None))
        if guides is None:
            raise ConfigError(
                f"{service_place}.{GUIDES_KEY} must be a mapping, for example {{namespace: prod}}"
            )
        self.take_service(guides, lambda key: f"{service_place}.{GUIDES_KEY}.{key}")
        self.take_service(service, lambda key: f"{service_place}.{key}")
        for key in list(given):
            name = self._read_from_file(key)
            if name is not None:
                if name in given:
                    raise ConfigError(f"{place}.{key} and {name} are both there: give one of them")
                self._add_layer(
                    entry_at([name], _content(given.pop(key), f"{place}.{key}"), f"{place}.{key}")
                )
        layer = entry_of(given, place)
        assert isinstance(layer, Section)
        self._add_layer(layer)

    def take_text(self, key: str, text: str, source: str) -> None:
        """Take a value that was given by its dotted key."""
        path = key.split(".")
        if not all(path):
            raise ConfigError(f"{source}: a part of the key is empty")
        if len(path) > MAX_DEPTH:
            raise ConfigError(f"{source}: the key has more than {MAX_DEPTH} parts")
        if not is_text(text):
            raise ConfigError(f"{source}: the value is not UTF-8")
        if key == CLASS_KEY:
            raise ConfigError(
                f"{source}: only the YAML file gives a node its class: NAME: {{class: {text}}}"
            )
        if path[0] == SERVICE_KEY:
            if len(path) == 1:
                raise ConfigError(f"{source}: give one of its keys: {source}.{WORKERS}=2")
            member = path[2:] if path[1] == GUIDES_KEY and len(path) > 2 else path[1:]
            self.take_service({".".join(member): Text(text)}, lambda _: source)
        elif self._is_short_for_service(key):
            self.take_service({key: Text(text)}, lambda _: source)
        elif len(path) == 1 and (name := self._read_from_file(key)) is not None:
            self._add_layer(entry_at([name], _content(text, source), source))
        else:
            is_extra = bool(extra_keys(self._actor, {path[0]: None}))
            value = read_text(text, source) if is_extra else Text(text)
            self._add_layer(entry_at(path, value, source))

    def take_service(self, given: Mapping[str, Any], source: Callable[[str], str]) -> None:
        """Take values of `ServiceArgs` by key."""
        self._service = self._service.overridden(given, source)
        for key, value in given.items():
            members = mapping(value) or {}
            for path in [f"{key}.{member}" for member in members] or [key]:
                self._origins[f"{SERVICE_KEY}.{path}"] = source(path)

    def settings(self, called: str) -> NodeSettings:
        """All of it, checked."""
        whole = self._arguments
        for name, entry in self._arguments.entries.items():
            default = default_mapping(self._actor, name) if isinstance(entry, Section) else None
            if default is not None:
                whole = over_default(entry_at([name], default, "constructor"), whole)
        from_where = sources(whole)
        arguments = settled(self._actor, plain(whole), from_where)
        for name, value in arguments.items():
            try:
                msgspec.json.encode(None if isinstance(value, Text) else value)
            except (ValueError, RecursionError) as error:  # a lone half of a surrogate pair
                raise ConfigError(
                    f"{from_where[name]} cannot be written as JSON: {error}"
                ) from None
        built = build_arguments(self._actor, arguments, from_where, node=called)
        if self._service.workers:
            try:
                load_options(self._actor, built)
            except ConfigError as error:
                raise ConfigError(f"{called}: {error}") from error
        absent = [name for name in defaults(self._actor) if name not in arguments]
        origins = from_where | dict.fromkeys(absent, "constructor") | self._origins
        return NodeSettings(arguments, self._service, origins)

    def _add_layer(self, layer: Section) -> None:
        self._arguments = merge(self._arguments, layer)

    def _is_short_for_service(self, key: str) -> bool:
        return key == WORKERS and WORKERS not in parameters_of(self._actor)

    def _read_from_file(self, key: str) -> str | None:
        """The argument whose value a key reads from a file; None for any other key."""
        name = key.removesuffix(FILE_SUFFIX)
        taken = parameters_of(self._actor)
        if not name or name == key or key in taken:
            return None
        return name if name in taken or extra_keys(self._actor, {name: None}) else None


def _section(value: Any) -> dict[str, Any] | None:
    """A copy of a mapping; nothing is an empty one, and None anything else."""
    return {} if value is None else mapping(value)


def _content(path: Any, source: str) -> str:
    """The content of a file, without the end of its last line.

    Raises:
        ConfigError: it cannot be read as a short text.
    """
    remedy = "give the path of a file that holds the value"
    if not isinstance(path, str) or not is_text(path) or "\0" in path:
        raise ConfigError(f"{source} = {shown(path)!a}: {remedy}")
    try:
        # A pipe without a writer would keep us waiting.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigError(f"{source} = {path}: it is no regular file: {remedy}")
            data = file.read(MAX_SECRET_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{source} = {path}: {error.strerror}: {remedy}") from None
    if len(data) > MAX_SECRET_BYTES:
        raise ConfigError(f"{source} = {path}: it is larger than {MAX_SECRET_BYTES} bytes")
    try:
        return data.decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        raise ConfigError(f"{source} = {path}: it is not UTF-8") from None
