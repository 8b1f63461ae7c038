"""Reasoning before an answer, between the markers of a model."""

from __future__ import annotations

from typing import NamedTuple

from .delta import DeltaBuilder
from .incoming import IncomingText, Markers, Reading


class Thinking(NamedTuple):
    """The markers of reasoning.

    Attributes:
        start, end: the markers. The first is at the beginning of an output, or already in the
            prompt.
        always: whether outputs reason even where neither prompt nor output has the first.
    """

    start: str
    end: str
    always: bool = False


def read_reasoning(
    text: IncomingText,
    out: DeltaBuilder,
    thinking: Thinking,
    *,
    has_begun: bool,
    call_marker: str | None = None,
    form_sign: str = "",
) -> Reading[None]:
    """Read the reasoning at the beginning of an output, where there is any.

    White space around it is the format's and is dropped: templates write their own.

    Args:
        has_begun: whether the prompt began it.
        call_marker: begins a tool call, which ends the reasoning too where it is on a line of its
            own: models forget to end it.
        form_sign: the first character of the form that is enforced, if one is. An engine that knows
            nothing of reasoning enforces it from the start, whatever the prompt began.
    """
    text.keep()
    sign = yield from text.skip_space()
    if (yield from text.begins_with(thinking.start)):
        text.read(len(thinking.start))
    elif not has_begun or (sign and sign == form_sign):
        out.say(text.give_back())
        return
    text.let_go()
    yield from text.skip_space()
    call = f"\n{call_marker}\n"
    markers = Markers(thinking.end, call) if call_marker else Markers(thinking.end)
    space: list[str] = []
    while True:
        piece, marker = text.read_to_marker(markers)
        solid = piece.rstrip()
        if solid:
            out.reason("".join(space))
            out.reason(solid)
            space.clear()
        space.append(piece[len(solid) :])
        if marker or text.has_ended:
            break
        yield
    if marker == thinking.end:
        text.read(len(marker))
    yield from text.skip_space()
