"""The YAML file of a run, read as data alone: no tags, no key twice, bounded however it is written.

A message names the file and the line, or the file and the key.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, cast

import yaml

from dynbus.bus.errors import ConfigError

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
