"""Lives of requests: the whole of one, whatever order it is told in, and a bounded number."""

from __future__ import annotations

from itertools import permutations
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from dynbus.actors.dashboard.happenings import Happening
from dynbus.actors.dashboard.lives import MOST_STEPS, Lives, picture

from .happened import answered, at, moved_request


def lives_of(happenings: list[Happening], **most: int) -> Lives:
    lives = Lives(**most)
    for one in happenings:
        lives.take(one)
    return lives


def test_a_picture_has_the_front_end_and_each_attempt_with_why_it_ended() -> None:
    life = lives_of(moved_request()).get("r")
    assert life is not None

    shown = picture(life, 200.0)

    front, first, second = shown["rows"]
    assert [bar["kind"] for bar in front["bars"]] == ["prepare", "queue", "prefill", "output"]
    assert [round(bar["to"], 3) for bar in front["bars"]] == [0.05, 0.1, 0.3, 1.0]
    assert first["label"] == "attempt 1 at llm.Engine a"
    assert first["note"] == "lowest cost, 16 tokens in its cache"
    assert first["error"] == "Draining"
    assert [(b["kind"], round(b["from"], 1), round(b["to"], 1)) for b in first["bars"]] == [
        ("queue", 0.1, 0.2),
        ("prefill", 0.2, 0.3),
        ("output", 0.3, 0.5),
    ]
    assert (second["label"], second["error"]) == ("attempt 2 at llm.Engine b", "")
    assert [mark["text"] for mark in shown["marks"]] == ["moved after attempt 1 at a: Draining"]
    assert (shown["state"], shown["moves"], shown["attempts"]) == ("well", 1, 2)
    assert (shown["prompt_tokens"], shown["cached_tokens"], shown["output_tokens"]) == (40, 16, 9)
    assert shown["instances"] == ["a", "b"]
    assert round(shown["length"], 6) == 1.0


@given(st.integers(0, 1000))
def test_recorders_may_tell_in_any_order(seed: int) -> None:
    """Each recorder's own order is kept; front ends, callers and routers are three."""
    told = moved_request()
    ways = [
        [one for one in told if one.what.partition(".")[0] == part]
        for part in ("route", "call", "request")
    ]
    draw, mixed = Random(seed), list[Happening]()
    while any(ways):
        mixed.append(draw.choice([way for way in ways if way]).pop(0))

    life, whole = lives_of(mixed).get("r"), lives_of(told).get("r")

    assert life is not None
    assert whole is not None
    for name in ("rows", "marks", "state", "began", "ended", "moves", "attempts", "first"):
        assert picture(life, 200.0).get(name) == picture(whole, 200.0).get(name)


def test_one_that_waits_or_is_refused_has_no_instance() -> None:
    waits = lives_of([at(1.0, "route.asked", "r", attempt=1)]).get("r")
    refused = lives_of(
        [
            at(1.0, "route.asked", "r", attempt=1),
            at(2.0, "route.refused", "r", attempt=1, error="Overloaded"),
        ]
    ).get("r")
    assert waits is not None
    assert refused is not None

    assert (waits.state(5.0), waits.seconds(5.0)) == ("open", 4.0)
    assert waits.state(5000.0) == "unknown"
    assert (refused.state(5.0), refused.error) == ("refused", "Overloaded")
    [row] = picture(refused, 5.0)["rows"]
    assert (row["label"], row["error"]) == ("attempt 1 at llm.Engine no instance", "Overloaded")
    assert [(bar["kind"], bar["to"]) for bar in row["bars"]] == [("queue", 1.0)]


def test_one_that_an_instance_refused_is_so_unless_another_one_takes_it() -> None:
    refused = at(
        1.5,
        "call.refused",
        "r",
        who="llm.Engine.generate@a",
        error="Overloaded",
        why="full",
        waited=0.25,
    )
    alone = lives_of([at(1.0, "route.asked", "r", attempt=1), refused]).get("r")
    taken = lives_of([refused, at(1.6, "route.sent", "r", attempt=2, instance="b/0")]).get("r")
    assert alone is not None
    assert taken is not None

    assert (alone.state(5.0), alone.error, alone.is_worth_keeping) == (
        "refused",
        "Overloaded",
        True,
    )
    [mark] = picture(alone, 5.0)["marks"]
    assert mark["text"] == "refused after 0.25 s at a: Overloaded, full"
    assert (taken.state(5.0), taken.error) == ("open", "")


def test_a_hand_over_has_a_row_with_the_wait_for_it_and_the_transfer() -> None:
    happened = at(
        101.0,
        "hand_over.done",
        "r",
        who="llm.Engine@a",
        kind="prefill",
        source="p",
        blocks=12,
        seconds=0.8,
        answered=0.1,
        read=0.7,
    )
    failed = at(
        102.0,
        "hand_over.failed",
        "r",
        who="llm.Engine@a",
        kind="cache",
        why="lease_lost",
        error="LeaseLost",
        computed_here=64,
        seconds=0.5,
    )
    life = lives_of([at(100.0, "route.asked", "r", attempt=1), happened, failed]).get("r")
    assert life is not None

    _, row, fault = picture(life, 110.0)["rows"]

    assert (row["label"], row["note"]) == ("hand-over from p to a", "its prompt, 12 blocks")
    assert [(bar["kind"], round(bar["from"], 3), round(bar["to"], 3)) for bar in row["bars"]] == [
        *(("queue", 0.2, 0.3), ("transfer", 0.3, 0.9)),
    ]
    assert fault["note"] == "from its cache, 64 tokens computed here"
    assert (fault["label"], fault["error"]) == (
        *("hand-over from no instance to a", "lease_lost, LeaseLost"),
    )


def test_one_that_was_held_shows_how_long_and_why_it_ended() -> None:
    ended = answered(
        10.0, "r", status=503, error="NoInstances", why="model", held_ms=900.0, end_ms=1000.0
    )
    life = lives_of([at(9.1, "request.held", "r", waiting=3), ended]).get("r")
    assert life is not None

    shown = picture(life, 20.0)

    [row] = shown["rows"]
    assert life.state(20.0) == "refused"
    assert (row["note"], row["error"]) == ("503 model", "NoInstances")
    assert [(bar["kind"], round(bar["to"], 3)) for bar in row["bars"]] == [
        *(("queue", 0.9), ("end", 1.0)),
    ]
    assert [mark["text"] for mark in shown["marks"]] == ["held, its model has no engine"]


def test_nonsense_makes_a_picture_as_well() -> None:
    hostile = [
        answered(10.0, "r", end_ms=float("nan"), status="x", first_token_ms=True, instances=7),
        at(11.0, "route.first", "r", attempt=10**400),
        at(12.0, "route.sent", "r", instance=5, reason=b"", attempt=float("inf")),
        at(9.0, "odd", "r"),
    ]
    for some in permutations(hostile):
        life = lives_of(list(some)).get("r")
        assert life is not None

        shown = picture(life, 20.0)

        assert shown["length"] > 0
        assert all(bar["to"] >= bar["from"] >= 0 for row in shown["rows"] for bar in row["bars"])


def test_of_many_the_latest_those_in_trouble_and_the_slowest_are_kept() -> None:
    told: list[Happening] = []
    for number in range(60):
        error = {"error": "Unavailable", "status": 503} if number == 3 else {}
        told.append(
            answered(100.0 + number, f"r{number}", end_ms=float(number == 5) * 9000, **error)
        )
    lives = lives_of(told, most=10, most_kept=2, most_slow=3)

    assert len(lives) == 10 + 1 + 3
    assert lives.forgotten == 60 - 14
    assert lives.get("r3") is not None
    assert lives.get("r30") is None
    assert [one.request for one in lives.listed("failed", 200.0, 5)] == ["r3"]
    assert lives.listed("slowest", 200.0, 1)[0].request == "r5"
    assert [one.request for one in lives.listed("latest", 200.0, 2)] == ["r59", "r58"]


def test_what_clients_asked_wrongly_is_refused_and_no_trouble_of_ours() -> None:
    lives = lives_of([answered(100.0, "r", status=400, error="InvalidRequest")])

    assert lives.listed("failed", 101.0, 5) == []
    [life] = lives.listed("latest", 101.0, 5)
    assert life.state(101.0) == "refused"


def test_a_request_whose_id_comes_again_and_again_stays_small() -> None:
    life = lives_of([answered(float(number), "r") for number in range(1000)]).get("r")

    assert life is not None
    assert len(life.steps) == MOST_STEPS
    assert (life.steps[0].time, life.steps[-1].time) == (0.0, 999.0)
