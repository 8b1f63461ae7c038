"""Two replays of one flight, and the load of each over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dynbus.actors.dashboard.comparing import SAMPLES, Comparison, compare
from dynbus.bus.flight import Entry


class Part:
    """A part that counts what it takes, and doubles it by another setting."""

    title = "routing"
    is_as_recorded = True

    def __init__(self, settings: Mapping[str, str], request: str) -> None:
        self.factor = 2 if settings else 1
        self.count = 0

    def take(self, entry: Entry) -> None:
        self.count += 1

    def load(self) -> Mapping[str, float]:
        # The second place comes late.
        places = {"a": self.count * self.factor}
        return places if self.count < 3 else places | {"b": 1}

    def to_json(self) -> Mapping[str, Any]:
        return {"taken": self.count, "factor": self.factor}

    def bars(self) -> list[tuple[str, float, str]]:
        return []

    def lines(self) -> Sequence[str]:
        return []

    def print_state(self) -> None: ...

    def print_request(self) -> None: ...


def entry(time: float) -> Entry:
    return Entry("one", 0, 0, time, time, "event", msgspec.Raw(b"\xc0"))


def comparison() -> Comparison:
    return Comparison({"policy": "other"}, 0.0, 120.0, make=lambda settings: [Part(settings, "")])


def test_both_take_all_and_their_load_is_known_at_each_moment() -> None:
    records = [entry(0.5), entry(60.5), entry(90.0)]

    result = compare(comparison(), records, lambda: False)

    assert result is not None
    recorded, replayed = result["recorded"], result["replayed"]
    assert (result["since"], result["width"], result["settings"]) == (0.0, 1.0, {"policy": "other"})
    assert recorded["parts"] == {"routing": {"taken": 3, "factor": 1}}
    assert replayed["parts"] == {"routing": {"taken": 3, "factor": 2}}
    assert [len(loads) for loads in recorded["load"].values()] == [SAMPLES, SAMPLES]
    # The sample at 60 is before what happened at 60.5, and that at 61 behind it.
    assert [recorded["load"]["a"][at] for at in (0, 59, 60, 89, 90)] == [1, 1, 2, 2, 3]
    assert replayed["load"]["a"] == [2 * load for load in recorded["load"]["a"]]
    assert recorded["load"]["b"][88:92] == [0, 0, 1, 1]


def test_one_that_is_to_stop_stops_and_has_no_outcome() -> None:
    assert compare(comparison(), [entry(1.0)], lambda: True) is None
