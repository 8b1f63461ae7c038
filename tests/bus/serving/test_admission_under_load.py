"""What a handler gets done does not fall when more is asked of it, however long its calls take."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Final

import pytest

from .virtual_handler import REFUSED, Load, VirtualHandler

CONCURRENCY: Final = 8
MEAN: Final = 0.2
CAPACITY: Final = CONCURRENCY / MEAN
DEADLINE: Final = 2.0
WARM_UP: Final = 10.0
MEASURED: Final = 30.0

Draw = Callable[[Random], float]


def short_and_long(short_share: float) -> Draw:
    """Durations of which the long are fifty times the short."""
    short = MEAN / (short_share + 50 * (1 - short_share))
    return lambda chance: short if chance.random() < short_share else 50 * short


DURATIONS: Final[dict[str, Draw]] = {
    "constant": lambda _: MEAN,
    "exponential": lambda chance: chance.expovariate(1 / MEAN),
    "1 to 50, even": lambda chance: chance.uniform(MEAN / 25.5, 50 * MEAN / 25.5),
    "1 to 50, even in their logarithm": lambda chance: MEAN / 12.526 * 50 ** chance.random(),
    "1 or 50, mostly long": short_and_long(0.1),
    "1 or 50": short_and_long(0.5),
    "1 or 50, mostly short": short_and_long(0.75),
}


def bear(load: float, durations: str, clients: int = 1) -> Load:
    """What comes of so many times the capacity, after a while of the same."""
    chance = Random(7)
    handler = VirtualHandler(lambda _: DURATIONS[durations](chance), CONCURRENCY)
    rate = load * CAPACITY
    handler.load(rate, WARM_UP, allowed=DEADLINE, clients=clients, chance=chance)
    return handler.load(rate, MEASURED, allowed=DEADLINE, clients=clients, chance=chance)


@pytest.mark.parametrize("durations", DURATIONS)
@pytest.mark.parametrize("load", [1.5, pytest.param(5.0, marks=pytest.mark.nightly), 20.0])
@pytest.mark.parametrize("clients", [1, 50])
def test_as_much_is_done_in_time_however_much_is_asked(
    durations: str, load: float, clients: int
) -> None:
    done_per_second, ended = bear(load, durations, clients)

    assert done_per_second >= 0.9 * CAPACITY
    # What begins is done, and what is not done has not waited until its deadline to hear so.
    assert ended["cut"] <= 0.05 * ended["done"]
    # Clients with fewer calls overtake those with more, which nobody knows beforehand.
    assert ended["expired"] <= (0.0 if clients == 1 else 0.05) * ended.total()


@pytest.mark.parametrize("durations", ["constant", "exponential", "1 to 50, even", "1 or 50"])
def test_nothing_is_refused_below_the_capacity(durations: str) -> None:
    done_per_second, ended = bear(0.9, durations)

    assert [ended[reason] for reason in REFUSED] == [0, 0, 0]
    assert done_per_second >= 0.95 * 0.9 * CAPACITY


@pytest.mark.parametrize(("before", "after"), [(0.2, 1.0), (1.0, 0.05), (0.2, 0.05)])
def test_a_handler_that_becomes_slower_or_faster_is_soon_used_to_the_full_again(
    before: float, after: float
) -> None:
    handler = VirtualHandler(lambda now: before if now < 10.0 else after, CONCURRENCY)
    handler.load(200.0, 18.0, allowed=DEADLINE, chance=Random(7))

    done_per_second, _ = handler.load(200.0, 10.0, allowed=DEADLINE, chance=Random(8))

    assert done_per_second >= 0.9 * CONCURRENCY / after


def test_a_handler_whose_every_call_was_too_long_is_found_out_when_it_recovers() -> None:
    handler = VirtualHandler(lambda now: 3.0 if 10.0 < now < 30.0 else 0.2, CONCURRENCY)
    handler.load(200.0, 34.0, allowed=DEADLINE, chance=Random(7))

    done_per_second, _ = handler.load(200.0, 10.0, allowed=DEADLINE, chance=Random(8))

    assert done_per_second >= 0.9 * CAPACITY
