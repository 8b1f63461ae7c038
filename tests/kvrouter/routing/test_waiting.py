"""A queue by priority and arrival, with an end."""

from __future__ import annotations

import pytest

from dynbus.kvrouter.routing.waiting import WaitingQueue


def test_the_queue_serves_the_urgent_first_and_then_by_arrival() -> None:
    queue: WaitingQueue[str] = WaitingQueue(limit=4)
    places = [queue.push(name, priority) for name, priority in (("a", 0), ("b", 5), ("c", 0))]

    assert list(queue) == ["b", "a", "c"]
    assert queue.remove(places[1])
    assert not queue.remove(places[1])
    assert queue.has_before(0, lambda name: name == "c")
    assert not queue.has_before(0, lambda name: name == "b")
    assert not queue.has_before(1, lambda name: True)


def test_a_full_queue_takes_no_more() -> None:
    queue: WaitingQueue[str] = WaitingQueue(limit=1)
    queue.push("a", 0)

    with pytest.raises(OverflowError, match="1 requests wait"):
        queue.push("b", 9)
