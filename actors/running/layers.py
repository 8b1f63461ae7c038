"""Layers of configuration: later ones over earlier ones, each value with where it came from.

Mappings merge, key by key at any depth; everything else, lists too, is replaced whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from dynbus.actors.declaring.arguments import Text, read_text
from dynbus.bus.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Leaf:
    """A value that is no mapping.

    Attributes:
        source: where it came from, as its user names it.
    """

    value: Any
    source: str


@dataclass(frozen=True, slots=True)
class Section:
    """A mapping.

    Attributes:
        source: where the latest layer that has it came from.
    """

    entries: Mapping[str, Entry]
    source: str

    def get(self, path: Sequence[str]) -> Entry | None:
        """The entry at a path of keys; None for nothing."""
        entry: Entry | None = self
        for key in path:
            entry = entry.entries.get(key) if isinstance(entry, Section) else None
        return entry


Entry: TypeAlias = Leaf | Section


def entry_of(value: Any, source: str) -> Entry:
    """A value of a file, whose parts are named by their keys behind a dot."""
    if isinstance(value, dict):
        given = cast("dict[str, Any]", value)
        return Section(
            {key: entry_of(each, f"{source}.{key}") for key, each in given.items()}, source
        )
    return Leaf(value, source)


def entry_at(path: Sequence[str], value: Any, source: str) -> Section:
    """A single value of a command line or a variable, at its path of one key or more."""
    entry: Entry = _of_one_source(value, source)
    for key in reversed(path):
        entry = Section({key: entry}, source)
    return cast("Section", entry)


def merge(lower: Section, upper: Section) -> Section:
    """Both, where `upper` wins.

    Raises:
        ConfigError: one has a mapping where the other has something else. Null is nothing: it
            takes a mapping away.
    """
    return _merge(lower, upper, _of_one_kind)


def over_default(default: Section, given: Section) -> Section:
    """The value that is given over a default, which it may replace by anything."""
    return _merge(default, given, lambda lower, upper, key: upper)


def _merge(
    lower: Section, upper: Section, resolve: Callable[[Entry, Entry, str], Entry]
) -> Section:
    merged = dict(lower.entries)
    for key, entry in upper.entries.items():
        below = merged.get(key)
        if below is not None:
            below, entry = _as_mapping(below, entry), _as_mapping(entry, below)
            if isinstance(below, Section) and isinstance(entry, Section):
                entry = _merge(below, entry, resolve)
            else:
                entry = resolve(below, entry, key)
        merged[key] = entry
    return Section(merged, upper.source)


def _of_one_kind(lower: Entry, upper: Entry, key: str) -> Entry:
    """The upper of two of which at most one is a mapping.

    Raises:
        ConfigError: one is a mapping, and the other is something.
    """
    if isinstance(lower, Leaf) and isinstance(upper, Leaf):
        return upper
    if isinstance(upper, Leaf):
        # What a text of the command line is, and whether it fits, is known where it is read.
        if upper.value is None or isinstance(upper.value, Text):
            return upper
        raise ConfigError(
            f"{upper.source} is no mapping, and {lower.source} is one: give a mapping, or null, "
            "which takes that away"
        )
    assert isinstance(lower, Leaf)
    if lower.value is None:
        return upper
    raise ConfigError(
        f"{upper.source} is a mapping, and {lower.source} is none: give the same kind of value "
        "in both places"
    )


def _as_mapping(entry: Entry, beside: Entry) -> Entry:
    """A text as the mapping that it writes in JSON, where there is a mapping beside it."""
    if isinstance(beside, Section) and isinstance(entry, Leaf) and isinstance(entry.value, Text):
        value = read_text(entry.value, entry.source)
        if value is None or isinstance(value, dict):
            return _of_one_source(value, entry.source)
    return entry


def _of_one_source(value: Any, source: str) -> Entry:
    if isinstance(value, dict):
        given = cast("dict[str, Any]", value)
        return Section({key: _of_one_source(each, source) for key, each in given.items()}, source)
    return Leaf(value, source)


def plain(entry: Entry) -> Any:
    """The value without where it came from."""
    if isinstance(entry, Section):
        return {key: plain(each) for key, each in entry.entries.items()}
    return entry.value


def sources(entry: Entry, path: str | None = None) -> dict[str, str]:
    """The source of each value, by its dotted path; of mappings, those of their parts.

    A mapping has a source of its own too, which is that of the latest layer which has it.
    """
    sources_of = {} if path is None else {path: entry.source}
    if isinstance(entry, Section):
        for key, each in entry.entries.items():
            sources_of |= sources(each, key if path is None else f"{path}.{key}")
    return sources_of
