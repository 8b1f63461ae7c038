"""Incomplete requests take a bounded space and time, and one client's are not those of others."""

from __future__ import annotations

from random import Random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dynbus.bus.protocol.wire import MAX_PARTS
from dynbus.bus.serving.partial_requests import (
    IDLE_SWEEPS,
    LARGEST,
    LARGEST_PER_CLIENT,
    PARTS_PER_CLIENT,
    REQUESTS,
    REQUESTS_PER_CLIENT,
    PartialRequest,
    PartialRequests,
)


@given(st.lists(st.binary(), min_size=1, max_size=20), st.randoms(use_true_random=False))
def test_parts_in_any_order_and_repeated_make_the_whole_once_all_are_there(
    parts: list[bytes], random: Random
) -> None:
    request = PartialRequest(len(parts))
    order = [*range(len(parts)), *range(len(parts))]
    random.shuffle(order)
    arrived: set[int] = set()

    for position in order:
        request.add(position + 1, len(parts), parts[position])
        arrived.add(position)

        assert request.size == sum(len(parts[one]) for one in arrived)
        assert request.whole() == (b"".join(parts) if len(arrived) == len(parts) else None)


def test_a_part_of_another_split_is_ignored() -> None:
    request = PartialRequest(2)
    request.add(1, 2, b"first")

    request.add(2, 3, b"second of three")

    assert request.whole() is None
    assert request.size == 5
    assert repr(request) == "<PartialRequest [1 of 2 parts]>"


def test_a_request_is_here_from_its_first_part_until_it_is_removed() -> None:
    requests = PartialRequests(1000)
    assert ("c1", 7) not in requests

    requests.add(("c1", 7), 1, 2, b"abc")

    assert ("c1", 7) in requests
    assert repr(requests) == "<PartialRequests [1 of 1 clients, 3 bytes]>"
    requests.remove(("c1", 7))
    requests.remove(("c1", 7))
    assert ("c1", 7) not in requests
    assert repr(requests) == "<PartialRequests [0 of 0 clients, 0 bytes]>"


def test_a_part_that_comes_again_is_not_counted_again() -> None:
    requests = PartialRequests(1000)

    for _ in range(3):
        requests.add(("c1", 7), 1, 2, b"abc")

    assert requests.size == 3


def test_a_client_may_have_so_many_bytes_here() -> None:
    requests = PartialRequests(1000)
    for number in range(2 * LARGEST_PER_CLIENT):
        requests.add(("c1", number), 1, 2, b"x" * 500)
    assert not requests.is_too_much("c1")

    requests.add(("c2", 1), 1, 2, b"x")
    requests.add(("c1", 99), 1, 2, b"x")

    assert requests.is_too_much("c1")
    assert not requests.is_too_much("c2")


def test_a_client_may_have_so_many_requests_here_however_small() -> None:
    requests = PartialRequests(1000)

    taken = 0
    while not requests.is_too_much("c1"):
        requests.add(("c1", taken), 1, 2, b"")
        taken += 1

    assert taken == REQUESTS_PER_CLIENT + 1


def test_a_client_may_have_so_many_parts_here_however_small() -> None:
    requests = PartialRequests(1000)

    for index in range(PARTS_PER_CLIENT):
        requests.add(("c1", index // (MAX_PARTS - 1)), index % (MAX_PARTS - 1) + 1, MAX_PARTS, b"")
    assert not requests.is_too_much("c1")
    requests.add(("c1", 99), 1, 2, b"")

    assert requests.is_too_much("c1")


def test_the_request_that_got_no_part_for_the_longest_gives_way() -> None:
    requests = PartialRequests(1000)
    for client in range(LARGEST):
        requests.add((f"c{client}", 1), 1, 3, b"x" * 900)
    requests.add(("c0", 1), 2, 3, b"x" * 100)
    assert requests.excess() is None

    requests.add(("late", 1), 1, 2, b"x" * 500)

    assert requests.excess() == ("c1", 1)
    requests.remove(("c1", 1))
    assert requests.excess() is None


def test_all_clients_together_may_have_so_many_requests() -> None:
    requests = PartialRequests(1000)
    for client in range(REQUESTS):
        requests.add((f"c{client}", 1), 1, 2, b"")
    assert requests.excess() is None

    requests.add(("late", 1), 1, 2, b"")

    assert requests.excess() == ("c0", 1)


def test_a_request_without_a_part_for_too_many_sweeps_is_given_up() -> None:
    requests = PartialRequests(1000)
    requests.add(("c1", 1), 1, 3, b"x")
    requests.add(("c1", 2), 1, 3, b"x")
    for _ in range(IDLE_SWEEPS - 1):
        assert requests.sweep() == []

    requests.add(("c1", 1), 2, 3, b"x")

    assert requests.sweep() == [("c1", 2)]
    assert requests.sweep() == [("c1", 2)]


keys = st.tuples(st.sampled_from(["c1", "c2", "c3"]), st.integers(1, 3))
steps: st.SearchStrategy[tuple[Any, ...]] = st.one_of(
    st.tuples(st.just("add"), keys, st.integers(1, 4), st.binary(max_size=9)),
    st.tuples(st.just("remove"), keys),
    st.tuples(st.just("sweep")),
)


@given(st.lists(steps, max_size=60))
def test_what_is_counted_is_what_is_here(taken: list[tuple[Any, ...]]) -> None:
    requests = PartialRequests(10**6)
    here: dict[tuple[str, int], dict[int, int]] = {}
    for step in taken:
        match step:
            case ("add", key, index, data):
                requests.add(key, index, 4, data)
                here.setdefault(key, {}).setdefault(index, len(data))
            case ("remove", key):
                requests.remove(key)
                here.pop(key, None)
            case _:
                requests.sweep()

    assert set(requests) == set(here)
    assert len(requests) == len(here)
    assert requests.size == sum(sum(parts.values()) for parts in here.values())
    clients = {client_id for client_id, _ in here}
    assert f"of {len(clients)} clients" in repr(requests)
