"""YAML as it is committed: keys in the order in which they were given, texts of several lines as
such, without anchors."""

from __future__ import annotations

from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):
    """Has no aliases, and a block for a text with lines."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    tag = "tag:yaml.org,2002:str"
    return dumper.represent_scalar(tag, text, style)  # pyright: ignore[reportUnknownMemberType]


_Dumper.add_representer(str, _text)


def yaml_text(*documents: Any) -> str:
    """The text of a file with these documents."""
    return "---\n".join(
        yaml.dump(  # pyright: ignore[reportUnknownMemberType]
            each, Dumper=_Dumper, sort_keys=False, width=100, allow_unicode=True
        )
        for each in documents
    )
