"""Happenings as tests make them."""

from __future__ import annotations

from dynbus.actors.dashboard.flight_view import FlightView
from dynbus.actors.dashboard.happenings import FlightReader, Happening

WHO = "llm.Engine"


def at(
    time: float, what: str, request: str = "", /, who: str = WHO, **details: object
) -> Happening:
    """Something that happened; details are not checked, as those of a hostile writer."""
    return Happening(time, what, who, request, details)  # type: ignore[arg-type]


def answered(time: float, request: str, /, **details: object) -> Happening:
    """A front end has told the end of a request."""
    details = {"status": 200, "model": "m", "end_ms": 1000.0, **details}
    return at(time, "request.ended", request, who="/v1/chat/completions", **details)


def moved_request(request: str = "r") -> list[Happening]:
    """A request that moved from `a` to `b`."""
    route = {"router": "x"}
    return [
        at(100.1, "route.asked", request, prompt_tokens=40, attempt=1, **route),
        at(100.2, "route.sent", request, instance="a/0", reason="lowest_cost", tokens=16, **route),
        at(100.3, "route.first", request, instance="a/0", seconds=0.2, **route),
        at(100.3, "route.reused", request, tokens=16, prompt_tokens=40, **route),
        at(100.5, "call.moved", request, attempt=1, instance="a", error="Draining"),
        at(100.5, "route.ended", request, instance="a/0", error="Draining", **route),
        at(100.5, "route.asked", request, prompt_tokens=44, attempt=2, **route),
        at(100.5, "route.sent", request, instance="b/0", reason="lowest_cost", attempt=2, **route),
        at(100.6, "route.first", request, instance="b/0", attempt=2, seconds=0.1, **route),
        at(100.9, "route.ended", request, instance="b/0", error="", attempt=2, **route),
        answered(
            101.0,
            request,
            prompt_tokens=40,
            completion_tokens=9,
            prepared_ms=50.0,
            sent_ms=100.0,
            first_token_ms=300.0,
            instances="a,b",
        ),
    ]


def view_of(happenings: list[Happening], **settings: float) -> FlightView:
    """A view that has taken these."""
    view = FlightView(reader=FlightReader([]), **settings)
    for one in happenings:
        view.happened(one)
    return view
