"""The recipes of `docs/guides/clients.md`, as they are printed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

PAGE: Final = Path(__file__).parents[2] / "docs" / "guides" / "clients.md"
PRINTED_URL: Final = "http://127.0.0.1:8000"
"""The address of the front end in each recipe: a test has it at a free port."""

_RECIPE: Final = re.compile(
    r"^<!-- (?P<language>python|javascript|yaml): client (?P<name>[\w-]+) -->\n"
    r"```(?P=language)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


class Recipe(NamedTuple):
    """A recipe of the page."""

    language: str
    text: str

    def at(self, url: str) -> str:
        """The recipe for a front end at another address."""
        return self.text.replace(PRINTED_URL, url)


def _recipes() -> dict[str, Recipe]:
    found = _RECIPE.finditer(PAGE.read_text())
    return {each["name"]: Recipe(each["language"], each["text"]) for each in found}


RECIPES: Final[Mapping[str, Recipe]] = _recipes()
