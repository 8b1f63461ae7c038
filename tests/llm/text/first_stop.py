"""What stop strings do, said plainly."""

from __future__ import annotations


def cut_at_first(text: str, stop: list[str]) -> str:
    """The text before the stop string that is complete first; of several the longest."""
    ends = [(text.find(string) + len(string), -len(string)) for string in stop if string in text]
    if not ends:
        return text
    end, length = min(ends)
    return text[: end + length]
