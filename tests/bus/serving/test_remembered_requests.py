"""What was said of a request is known for that very request, and one client costs no other."""

from __future__ import annotations

from dynbus.bus.serving.remembered_requests import (
    KEPT_SECONDS,
    REQUESTS,
    REQUESTS_PER_CLIENT,
    RememberedRequests,
)


def test_a_request_is_known_by_its_client_number_and_secret() -> None:
    remembered = RememberedRequests()

    remembered.add("c1", 7, b"secret", 0.0)

    assert remembered.has("c1", 7, b"secret")
    assert not remembered.has("c2", 7, b"secret")
    assert not remembered.has("c1", 8, b"secret")
    assert not remembered.has("c1", 7, b"another")
    assert repr(remembered) == "<RememberedRequests [1 of 1 clients]>"


def test_nothing_is_known_at_first() -> None:
    assert not RememberedRequests().has("c1", 7, b"secret")


def test_a_request_that_is_told_of_again_counts_once() -> None:
    remembered = RememberedRequests()

    remembered.add("c1", 7, b"secret", 0.0)
    remembered.add("c1", 7, b"secret", 1.0)

    assert repr(remembered) == "<RememberedRequests [1 of 1 clients]>"


def test_the_oldest_of_a_client_are_forgotten() -> None:
    remembered = RememberedRequests()

    for number in range(REQUESTS_PER_CLIENT + 2):
        remembered.add("c1", number, b"secret", 0.0)

    known = [n for n in range(REQUESTS_PER_CLIENT + 2) if remembered.has("c1", n, b"secret")]
    assert known == list(range(2, REQUESTS_PER_CLIENT + 2))


def test_a_client_with_many_pushes_out_nothing_of_others() -> None:
    remembered = RememberedRequests()
    remembered.add("c1", 7, b"secret", 0.0)

    for number in range(3 * REQUESTS):
        remembered.add("c2", number, b"secret", 0.0)

    assert remembered.has("c1", 7, b"secret")
    assert repr(remembered) == f"<RememberedRequests [{REQUESTS_PER_CLIENT + 1} of 2 clients]>"


def test_however_many_clients_there_are_the_memory_is_bounded() -> None:
    remembered = RememberedRequests()
    for client in range(REQUESTS):
        remembered.add(f"c{client}", 7, b"secret", 0.0)
    remembered.add("c0", 8, b"secret", 1.0)

    for client in range(REQUESTS, REQUESTS + 100):
        remembered.add(f"c{client}", 7, b"secret", 1.0)

    assert repr(remembered) == f"<RememberedRequests [{REQUESTS} of {REQUESTS - 1} clients]>"
    assert remembered.has("c0", 7, b"secret")
    assert not remembered.has("c1", 7, b"secret")
    assert remembered.has(f"c{REQUESTS + 99}", 7, b"secret")


def test_a_request_is_forgotten_after_a_while() -> None:
    remembered = RememberedRequests()
    remembered.add("c1", 7, b"secret", 0.0)
    remembered.add("c1", 8, b"secret", 1.0)
    remembered.add("c2", 7, b"secret", 1.0)

    remembered.forget_old(KEPT_SECONDS)

    assert not remembered.has("c1", 7, b"secret")
    assert remembered.has("c1", 8, b"secret")
    remembered.forget_old(KEPT_SECONDS + 1.0)
    assert repr(remembered) == "<RememberedRequests [0 of 0 clients]>"
