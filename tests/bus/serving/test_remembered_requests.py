"""What was said of a request is known for that very request, and one client costs no other."""

from __future__ import annotations

import pytest

from dynbus.bus.serving.remembered_requests import (
    CLIENTS,
    KEPT_SECONDS,
    REQUESTS_PER_CLIENT,
    RememberedRequests,
)


def test_a_request_is_known_by_its_client_number_and_secret() -> None:
    remembered = RememberedRequests()

    assert remembered.add("c1", 7, b"secret", 0.0)

    assert remembered.has("c1", 7, b"secret")
    assert not remembered.has("c2", 7, b"secret")
    assert not remembered.has("c1", 8, b"secret")
    assert not remembered.has("c1", 7, b"another")
    assert repr(remembered) == "<RememberedRequests [1 of 1 clients]>"


def test_nothing_is_known_at_first() -> None:
    assert not RememberedRequests().has("c1", 7, b"secret")


def test_the_oldest_of_a_client_are_forgotten() -> None:
    remembered = RememberedRequests()

    for number in range(REQUESTS_PER_CLIENT + 2):
        remembered.add("c1", number, b"secret", 0.0)

    known = [n for n in range(REQUESTS_PER_CLIENT + 2) if remembered.has("c1", n, b"secret")]
    assert known == list(range(2, REQUESTS_PER_CLIENT + 2))


def test_one_that_fails_closed_takes_all_older_requests_for_remembered() -> None:
    remembered = RememberedRequests(fails_closed=True)

    for number in range(10, 10 + REQUESTS_PER_CLIENT + 2):
        remembered.add("c1", number, b"secret", 0.0)

    assert all(remembered.has("c1", number, b"any") for number in range(12))
    assert not remembered.has("c1", 12, b"any")
    assert remembered.has("c1", 12, b"secret")
    assert not remembered.has("c1", 10 + REQUESTS_PER_CLIENT + 2, b"secret")
    assert not remembered.has("c2", 0, b"secret")


def test_a_client_with_many_pushes_out_nothing_of_others() -> None:
    remembered = RememberedRequests(fails_closed=True)
    remembered.add("c1", 7, b"secret", 0.0)

    for number in range(3 * REQUESTS_PER_CLIENT):
        remembered.add("c2", number, b"secret", 0.0)

    assert remembered.has("c1", 7, b"secret")


@pytest.mark.parametrize(("later", "has_room"), [(1.0, False), (KEPT_SECONDS + 1.0, True)])
def test_one_that_fails_closed_forgets_a_client_only_after_long(
    later: float, has_room: bool
) -> None:
    remembered = RememberedRequests(fails_closed=True)
    for client in range(CLIENTS):
        remembered.add(f"c{client}", 7, b"secret", 0.0)
    remembered.add("c0", 8, b"secret", later)

    assert remembered.add("one more", 7, b"secret", later) is has_room

    assert remembered.has("c0", 7, b"secret")
    assert remembered.has("c1", 7, b"secret") is not has_room
    assert remembered.has("one more", 7, b"secret") is has_room


def test_another_takes_a_new_client_for_the_one_that_was_silent_the_longest() -> None:
    remembered = RememberedRequests()
    for client in range(CLIENTS):
        remembered.add(f"c{client}", 7, b"secret", 0.0)
    remembered.add("c0", 8, b"secret", 1.0)

    assert remembered.add("one more", 7, b"secret", 1.0)

    assert remembered.has("c0", 7, b"secret")
    assert not remembered.has("c1", 7, b"secret")
