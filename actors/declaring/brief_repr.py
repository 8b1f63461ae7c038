"""Values of users as they are shown in messages."""

from __future__ import annotations

import reprlib
from typing import Any, Final

LENGTH: Final = 80
"""Characters at most."""


def brief_repr(value: Any) -> str:
    """`repr` in at most `LENGTH` characters, whatever the value is or its class does."""
    try:
        text = _brief.repr(value)
    except Exception:  # noqa: BLE001 - the class is the user's, and the message matters more
        text = f"a {type(value).__name__} that has no repr"
    return text if len(text) <= LENGTH else text[: LENGTH - 3] + "..."


def _make() -> reprlib.Repr:
    brief = reprlib.Repr()
    # More than is shown, so that the end is cut and not the middle.
    brief.maxstring = brief.maxlong = brief.maxother = 4 * LENGTH
    brief.maxdict = brief.maxlist = brief.maxtuple = LENGTH
    brief.maxset = brief.maxfrozenset = brief.maxdeque = brief.maxarray = LENGTH
    return brief


_brief: Final = _make()
