"""The configuration of a run in a YAML file or the JSON of `DYNBUS_CONFIG`, read as data alone.

No tags, no key twice, and bounded however it is written: in bytes, in values and in depth.
"""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, cast

import yaml

from dynbus.actors.declaring.actor_config import ActorConfig, configs
from dynbus.actors.declaring.arguments import DuplicateKey, parse_json
from dynbus.actors.declaring.service_args import SERVICE_KEY
from dynbus.bus.config import GRAPH_VARIABLE
from dynbus.bus.errors import ConfigError
from dynbus.bus.telemetry.logs import HIDDEN

MAX_FILE_BYTES: Final = 1024 * 1024
MAX_VARIABLE_BYTES: Final = 64 * 1024
MAX_VALUES: Final = 100_000
"""Values that a file may hold when its aliases are written out."""
MAX_DEPTH: Final = 32
"""Of mappings and lists within each other."""
GUIDES_VARIABLE: Final = "DYNAMO_SERVICE_CONFIG"
"""The name that the guides of Dynamo give the variable."""

_MERGE: Final = "tag:yaml.org,2002:merge"


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """The contents of one file or variable; without arguments, that there is none.

    Attributes:
        name: the file as its user wrote it, or the variable.
        keys: its top-level keys; all below are values of JSON.
    """

    name: str = ""
    keys: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def place(self, *keys: str) -> str:
        """The name of a value in messages: `config.yaml: Splitter.count`."""
        return f"{self.name}: {'.'.join(keys)}"


def read_files(paths: Sequence[str], environment: Mapping[str, str]) -> list[ConfigFile]:
    """The files of `dynbus run --file` and what the environment has for the whole graph, each
    before what overrides it.

    Raises:
        ConfigError: one of them cannot be used, or both variables are set.
    """
    files = [read_file(Path(path)) for path in paths]
    given = [name for name in (GRAPH_VARIABLE, GUIDES_VARIABLE) if environment.get(name)]
    if len(given) > 1:
        raise ConfigError(
            f"{GRAPH_VARIABLE} and {GUIDES_VARIABLE} are both set and mean the same: unset one"
        )
    return [*files, *(read_variable(name, environment[name]) for name in given)]


class ActorConfigs(Mapping[str, ActorConfig]):
    """The configurations of actors by the names of their nodes and classes, without the keys that
    say how an actor is served."""

    def __init__(self, configs: Mapping[str, ActorConfig]) -> None:
        self._configs = configs

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> ActorConfigs:
        """In a process of `dynbus run` the run's configuration of its actors; of others, and
        outside of a run, what the environment has for the whole graph.

        Raises:
            ConfigError: the environment's cannot be read.
        """
        sections: dict[str, Mapping[str, Any]] = {}
        for file in read_files([], environment):
            sections |= {name: mapping(section) or {} for name, section in file.keys.items()}
        return cls(
            {
                name: ActorConfig(name, {key: one[key] for key in one if key != SERVICE_KEY})
                for name, one in {**sections, **configs()}.items()
            }
        )

    def __getitem__(self, name: str) -> ActorConfig:
        return self._configs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._configs)

    def __len__(self) -> int:
        return len(self._configs)

    def of(self, name: str) -> ActorConfig:
        """The configuration of one actor, which is empty where there is none."""
        return self._configs.get(name) or ActorConfig(name, {})


def read_file(path: Path) -> ConfigFile:
    """Read a file of `dynbus run --file`.

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
    return _checked(str(path), loaded, "`Splitter: {separator: ','}`")


def read_variable(name: str, text: str) -> ConfigFile:
    """Read the JSON object of a variable, of the shape of the file.

    Raises:
        ConfigError: it is too large, has a key twice, or is no JSON object.
    """
    # What is no UTF-8 is kept by Python as surrogates.
    size = len(text.encode(errors="surrogateescape"))
    if size > MAX_VARIABLE_BYTES:
        raise ConfigError(
            f"{name} holds {size} bytes, of at most {MAX_VARIABLE_BYTES}: write a file, and give "
            "it by --file"
        )
    example = '{"Splitter": {"separator": ","}}'
    try:
        loaded: object = parse_json(text) if text.strip() else None
    except DuplicateKey as error:
        raise ConfigError(f"{name}: {error}") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ConfigError(
            f"{name} is no JSON: {where}: {error.msg}: write an object, for example {example}"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{name} is no JSON: {error}") from None
    except RecursionError:
        raise ConfigError(f"{name} is deeper than {MAX_DEPTH} mappings and lists") from None
    return _checked(name, loaded, example)


def mapping(value: Any) -> dict[str, Any] | None:
    """A copy of the value when it is a mapping, else None."""
    return dict(cast("dict[str, Any]", value)) if isinstance(value, dict) else None


def is_text(value: str) -> bool:
    """True if UTF-8 can encode it, which it cannot for halves of surrogate pairs."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _checked(name: str, loaded: object, example: str) -> ConfigFile:
    if loaded is None:
        return ConfigFile(name)
    if not isinstance(loaded, dict):
        raise ConfigError(
            f"{name} must have actor names as its top-level keys, for example {example}"
        )
    _check_size(name, cast("object", loaded))
    return ConfigFile(name, _plain(cast("object", loaded), name, ()))


def _plain(value: Any, name: str, path: tuple[str, ...]) -> Any:
    """The value with keys that are text, in the types of JSON."""
    place = f"{name}: {'.'.join(path)}" if path else name
    if len(path) > MAX_DEPTH:
        raise ConfigError(f"{place} lies deeper than {MAX_DEPTH} mappings and lists")
    if isinstance(value, dict):
        mapping_read: dict[str, Any] = {}
        for key, each in cast("dict[object, Any]", value).items():
            if isinstance(key, bool) or key is None:
                written = "null" if key is None else str(key).lower()
                raise ConfigError(
                    f"{place} has a key that YAML reads as {written}: write it in quotes"
                )
            if not is_text(str(key)):
                raise ConfigError(f"{place} has the key {key!a}, which is no whole text")
            if str(key) in mapping_read:
                raise ConfigError(f"{place}: the key {str(key)!r} is there twice")
            mapping_read[str(key)] = _plain(each, name, (*path, str(key)))
        return mapping_read
    if isinstance(value, list):
        elements = cast("list[object]", value)
        return [_plain(each, name, (*path, str(at))) for at, each in enumerate(elements)]
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{place} = {value}: write a finite number")
    if isinstance(value, str) and not is_text(value):
        raise ConfigError(f"{place} = {HIDDEN}: it is no whole text: half of a surrogate pair")
    return value.isoformat() if isinstance(value, date) else value


def _explain(path: Path, error: Exception) -> str:
    """A parser's message, with its place in the file in front."""
    if isinstance(error, yaml.reader.ReaderError):
        return f"{path}: it is not text: {error.reason}"
    mark: Any = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    problem = getattr(error, "problem", None) or str(error) or type(error).__name__
    where = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
    return f"{path}{where}: {' '.join(str(problem).split())}"


def _check_size(name: str, loaded: object) -> None:
    """Refuse what grows without end when it is written out: aliases within aliases."""
    count = 0
    open_values: list[Any] = [loaded]
    while open_values:
        value = open_values.pop()
        count += 1
        if count > MAX_VALUES:
            raise ConfigError(f"{name} holds more than {MAX_VALUES} values: its aliases multiply")
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
        merged: list[tuple[yaml.Node, yaml.Node]] = []
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
            merged += source.value
        return merged

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
