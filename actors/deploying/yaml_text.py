"""YAML as it is committed: keys in the order in which they were given, texts of several lines as
such."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):
    """Has no aliases, and a block for a text with lines."""

    def ignore_aliases(self, data: object) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    tag = "tag:yaml.org,2002:str"
    return dumper.represent_scalar(tag, text, style)  # pyright: ignore[reportUnknownMemberType]


_Dumper.add_representer(str, _text)


def yaml_text(documents: Iterable[Mapping[str, Any]], heading: str) -> str:
    """Documents of one file below a comment."""
    body = "---\n".join(
        yaml.dump(dict(each), Dumper=_Dumper, sort_keys=False, width=100, allow_unicode=True)
        for each in documents
    )
    return f"# {heading}\n{body}"
