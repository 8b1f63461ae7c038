"""Simulations find, by themselves, faults that the library had: each is put back, and a seed that
fails is looked for.

`-s` shows how many seeds and seconds each took.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, NamedTuple

import pytest

from dynbus.testing import Kind, Simulation, SimulationFailed, simulate

from . import former_faults as former
from .stories import calls, levels, light_load, long_calls, split_streams, streams

MOST_SECONDS: Final = 600.0


class Search(NamedTuple):
    """The search for a fault.

    Attributes:
        put_back: has the library have it again.
        story: in which it shows.
        faults: their weights; None for all that lose nothing that is stored.
        shows: a part of the failure's text.
    """

    put_back: Callable[[pytest.MonkeyPatch], None]
    story: Callable[[Simulation], Awaitable[object]]
    faults: Mapping[Kind, float] | None
    most_faults: int
    shows: str


SEARCHES: Final = {
    "death of healthy instances": Search(
        former.heartbeats_demanded_between_calls, light_load, {}, 0, "the instance is gone"
    ),
    "double effect": Search(former.request_taken_after_unknown, calls, None, 6, "bought 2 times"),
    "two servers": Search(
        former.connections_at_two_servers, split_streams, {Kind.SPLIT: 1.0}, 6, "stood still"
    ),
    "heartbeats without numbers": Search(
        former.heartbeats_without_numbers,
        long_calls,
        {Kind.LATE: 1.0},
        6,
        "the caller does not list the call any longer",
    ),
    "lost resume": Search(former.resume_lost, streams, None, 6, "stood still"),
    "hop": Search(former.hop_compared_wrongly, levels, {Kind.KILL: 1.0}, 12, "nothing happened"),
}


@pytest.mark.simulation
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", SEARCHES)
def test_a_fault_that_is_put_back_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    search = SEARCHES[name]
    search.put_back(monkeypatch)
    began = time.monotonic()
    seed, failed = 0, None

    while failed is None and time.monotonic() - began < MOST_SECONDS:
        try:
            simulate(
                search.story, seeds=[seed], faults=search.faults, most_faults=search.most_faults
            )
            seed += 1
        except SimulationFailed as error:
            failed = error

    assert failed is not None, f"{seed} seeds in {MOST_SECONDS:g} s did not show it"
    print(
        f"{name}: seed {failed.seed}, {time.monotonic() - began:.1f} s with its shortening, "
        f"{len(failed.plan)} of {len(failed.drawn)} faults are left"
    )
    # Several streams may fail at once.
    assert search.shows in "".join(traceback.format_exception(failed.cause))
