"""What was said of a request is remembered for that request alone, and not for ever."""

from __future__ import annotations

from dynbus.bus.serving.control import REMEMBERED_REQUESTS, RememberedRequests


def test_a_request_is_known_by_client_number_and_secret() -> None:
    remembered = RememberedRequests()

    remembered.add("c1", 7, b"secret")

    assert remembered.has("c1", 7, b"secret")
    assert not remembered.has("c2", 7, b"secret")
    assert not remembered.has("c1", 8, b"secret")
    assert not remembered.has("c1", 7, b"guess")
    assert repr(remembered) == "<RememberedRequests [1]>"


def test_nothing_is_known_before_it_was_said() -> None:
    assert not RememberedRequests().has("c1", 7, b"secret")


def test_the_oldest_requests_are_forgotten_first() -> None:
    remembered = RememberedRequests()

    for number in range(REMEMBERED_REQUESTS + 2):
        remembered.add("c1", number, b"secret")

    known = [n for n in range(REMEMBERED_REQUESTS + 2) if remembered.has("c1", n, b"secret")]
    assert known == list(range(2, REMEMBERED_REQUESTS + 2))
