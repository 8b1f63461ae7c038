"""The form of an output: what may be asked for, and the grammar that llguidance makes of it."""

from __future__ import annotations

from typing import Final

import msgspec

from .generation import StructuredOutput

MAX_CHARACTERS: Final = 256 << 10
"""Of a schema as JSON, of a regular expression, of a grammar, and of all choices together."""
MAX_CHOICES: Final = 4096
MAX_MARKER: Final = 64
"""Characters of each text around thinking."""

_KINDS: Final = ("json_schema", "regex", "choice", "grammar")


def check_structured(structured: StructuredOutput) -> None:
    """Check that exactly one form is given, and that it is not too large.

    Raises:
        ValueError: it is not so, and what to give.
    """
    given = [name for name in _KINDS if getattr(structured, name) is not None]
    if len(given) != 1:
        raise ValueError(
            f"structured has {' and '.join(given) or 'no form'}: give exactly one of "
            f"{', '.join(_KINDS)}"
        )
    (name,) = given
    value: object = getattr(structured, name)
    if structured.choice is not None and (
        not 1 <= len(structured.choice) <= MAX_CHOICES or not all(structured.choice)
    ):
        raise ValueError(f"choice: give 1 to {MAX_CHOICES} texts, none of them empty")
    try:
        size = len(value) if isinstance(value, str) else len(msgspec.json.encode(value))
    except RecursionError:
        raise ValueError(f"{name} is nested too deeply: flatten it, for example by $defs") from None
    if not size:
        raise ValueError(f"{name} is empty: give one, or leave it out")
    if size > MAX_CHARACTERS:
        raise ValueError(f"{name} has {size} characters: at most {MAX_CHARACTERS} are taken")
    thinking = structured.thinking
    if thinking is not None and not (
        0 < len(thinking.start) <= MAX_MARKER and 0 < len(thinking.end) <= MAX_MARKER
    ):
        raise ValueError(f"thinking: start and end have 1 to {MAX_MARKER} characters each")
