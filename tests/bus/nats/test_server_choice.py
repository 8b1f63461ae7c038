"""All connections of a process are at one server, a near one, and leave a silent one together."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus.bus.nats.server_choice import (
    FOLLOW_PAUSE,
    SHUN_SECONDS,
    Plan,
    ServerAddress,
    ServerChoice,
    split_zone,
)

A, B, C = "nats://a:4222", "nats://b:4222", "nats://c:4222"

addresses = st.lists(
    st.builds("10.0.0.{}:4222".format, st.integers(1, 9)), min_size=1, max_size=6, unique=True
)


@dataclass(eq=False)
class Member:
    """A connection, as a choice sees it.

    Attributes:
        calls: how often it was told to follow.
    """

    choice: ServerChoice
    calls: int = field(default=0)

    def __post_init__(self) -> None:
        self.choice.register(self, self._follow)

    def _follow(self) -> None:
        self.calls += 1

    def go(self, url: str, *, server: str = "", plan: Plan | None = None, now: float = 0.0) -> bool:
        place = ServerAddress(url, server or url)
        return self.choice.arrive(self, place, plan or self.choice.plan(now), now)

    def is_astray(self, now: float = 0.0) -> bool:
        return self.choice.is_astray(self, now)


def first_of(choice: ServerChoice, now: float = 0.0) -> str:
    return choice.plan(now).urls[0]


# The order ---------------------------------------------------------------------------------


@given(addresses, addresses)
def test_every_server_is_tried_once(known: list[str], advertised: list[str]) -> None:
    choice = ServerChoice([f"nats://{address}" for address in known])

    choice.advertise(advertised)

    found = choice.plan(0.0).urls
    assert sorted(found) == sorted(f"nats://{address}" for address in {*known, *advertised})


def test_an_advertised_server_is_reached_as_the_first_one_is() -> None:
    choice = ServerChoice(["tls://me:secret@a:4222"])

    choice.advertise(["a:4222", "b:4222"])

    urls = sorted(choice.plan(0.0).urls)
    assert urls == ["tls://me:secret@a:4222", "tls://me:secret@b:4222"]


def test_the_order_of_servers_that_are_equally_far_is_random() -> None:
    choice = ServerChoice([f"nats://s{number}:4222" for number in range(6)])

    orders = {tuple(choice.plan(0.0).urls) for _ in range(50)}

    assert len(orders) > 1


def test_the_server_of_this_host_comes_first_then_those_of_the_zone() -> None:
    choice = ServerChoice(
        [f"{A}?zone=east", f"{B}?zone=west", C], zone="west", is_own=lambda host: host == "c"
    )

    assert choice.plan(0.0).urls == [C, B, A]


def test_an_advertised_server_of_this_host_comes_first() -> None:
    choice = ServerChoice([A, B], is_own=lambda host: host == "10.0.0.7")

    choice.advertise(["10.0.0.6:4222", "10.0.0.7:4222"])

    assert first_of(choice) == "nats://10.0.0.7:4222"


@pytest.mark.parametrize(
    ("server", "parts"),
    [
        ("nats://a:4222?zone=east", ("nats://a:4222", "east")),
        ("nats://me:secret@a:4222?zone=eu-1a", ("nats://me:secret@a:4222", "eu-1a")),
        ("nats://a:4222", ("nats://a:4222", "")),
    ],
)
def test_a_zone_is_read_off_the_url(server: str, parts: tuple[str, str]) -> None:
    assert split_zone(server) == parts


# One for all -------------------------------------------------------------------------------


def test_the_second_connection_goes_to_the_server_of_the_first() -> None:
    choice = ServerChoice([A, B, C], is_own=lambda host: host == "a")
    data = Member(choice)

    assert data.go(C)

    assert {first_of(choice) for _ in range(20)} == {C}


def test_of_two_that_looked_at_the_same_time_the_later_one_goes_on_to_the_server_of_the_other() -> (
    None
):
    choice = ServerChoice([A, B])
    data, control = Member(choice), Member(choice)
    plan = choice.plan(0.0)

    assert data.go(A, plan=plan)
    assert not control.go(B, plan=plan)
    assert first_of(choice) == A
    assert control.go(A)

    assert not data.is_astray()
    assert not control.is_astray()


def test_both_leave_a_silent_server_at_once_and_try_it_last() -> None:
    choice = ServerChoice([A, B, C], is_own=lambda host: host == "a")
    data, control = Member(choice), Member(choice)
    data.go(A)
    control.go(A)

    choice.leave(control, 0.0, shun=True)

    assert data.calls == 1
    assert data.is_astray()
    assert choice.plan(0.0).urls[-1] == A
    assert first_of(choice, SHUN_SECONDS + 1.0) == A


def test_a_connection_that_is_merely_reset_comes_back_to_the_server_of_the_other() -> None:
    choice = ServerChoice([A, B, C], is_own=lambda host: host == "a")
    data, control = Member(choice), Member(choice)
    data.go(B)
    control.go(B)

    choice.leave(control, 0.0, shun=False)

    assert data.calls == 0
    assert not data.is_astray()
    assert first_of(choice) == B


def test_a_server_that_both_have_lost_is_chosen_again_only_as_far_as_it_is_near() -> None:
    choice = ServerChoice([A, B], is_own=lambda host: host == "a")
    data, control = Member(choice), Member(choice)
    data.go(B)
    control.go(B)

    choice.leave(data, 0.0, shun=False)
    choice.leave(control, 0.0, shun=False)

    assert first_of(choice) == A


def test_the_other_one_follows_a_connection_that_cannot_reach_its_server() -> None:
    choice = ServerChoice([A, B])
    data, control = Member(choice), Member(choice)
    data.go(A)

    assert control.go(B)

    assert data.calls == 1
    assert data.is_astray()
    assert first_of(choice) == B


def test_two_that_can_each_reach_only_a_server_of_their_own_do_not_chase_each_other() -> None:
    choice = ServerChoice([A, B])
    data, control = Member(choice), Member(choice)
    data.go(A)
    control.go(B)
    choice.leave(data, 0.0, shun=False)

    assert data.go(A, now=1.0)
    soon = control.calls
    choice.leave(data, 2.0, shun=False)
    assert data.go(A, now=1.0 + FOLLOW_PAUSE)

    assert (soon, control.calls) == (0, 1)


def test_a_server_that_goes_away_is_left_by_each_in_its_time_and_chosen_by_none() -> None:
    choice = ServerChoice([A, B])
    data, control = Member(choice), Member(choice)
    data.go(A)
    control.go(A)

    choice.shun(data, 0.0)
    left_at_once = data.calls + control.calls
    choice.leave(data, 0.1, shun=True)

    assert left_at_once == 0
    assert choice.plan(0.1).urls == [B, A]
    assert control.is_astray(0.1)


def test_a_server_through_which_nobody_is_heard_is_left_by_both_although_it_answers() -> None:
    choice = ServerChoice([A, B])
    data, control = Member(choice), Member(choice)
    data.go(A)
    control.go(A)

    assert choice.abandon(control, 0.0)

    assert (data.calls, control.calls) == (1, 1)
    assert data.is_astray()
    assert control.is_astray()
    assert choice.plan(0.0).urls == [B, A]


@pytest.mark.parametrize("is_silent", [True, False])
def test_who_leaves_late_goes_where_the_other_one_has_gone_meanwhile(is_silent: bool) -> None:
    for _ in range(20):
        choice = ServerChoice([A, B, C])
        data, control = Member(choice), Member(choice)
        data.go(A)
        control.go(A)
        if is_silent:
            choice.leave(control, 0.0, shun=True)
        else:
            choice.abandon(control, 0.0)
            choice.leave(control, 0.0, shun=False)

        control.go(B)
        choice.leave(data, 0.0, shun=False)

        assert first_of(choice) == B


def test_the_only_server_is_not_left_as_long_as_it_answers() -> None:
    choice = ServerChoice([A, B])
    data = Member(choice)
    data.go(A)
    choice.abandon(data, 0.0)
    choice.leave(data, 0.0, shun=False)
    data.go(B, now=1.0)

    assert not choice.abandon(data, 2.0)
    assert not data.is_astray(2.0)
    assert choice.abandon(data, SHUN_SECONDS + 1.0)


def test_the_only_server_is_taken_again_as_soon_as_it_answers() -> None:
    choice = ServerChoice([A])
    data, control = Member(choice), Member(choice)
    data.go(A)
    control.go(A)
    choice.leave(control, 0.0, shun=True)
    choice.leave(data, 0.0, shun=False)

    assert data.go(A)
    assert control.go(A)

    assert not data.is_astray()
    assert not control.is_astray()
    assert not choice.has_other(data, 0.0)


# One address, many servers -----------------------------------------------------------------


def test_an_address_that_leads_to_another_server_is_left_for_those_that_are_advertised() -> None:
    choice = ServerChoice([A])
    data, control = Member(choice), Member(choice)
    data.go(A, server="one")
    choice.advertise(["10.0.0.1:4222", "10.0.0.2:4222"])

    assert not control.go(A, server="two")
    plan = choice.plan(0.0, {A})
    assert plan.urls[-1] == A
    assert control.go("nats://10.0.0.2:4222", server="two", plan=plan)

    assert data.is_astray()
    assert first_of(choice) == "nats://10.0.0.2:4222"


def test_where_every_address_was_tried_two_servers_are_better_than_none() -> None:
    choice = ServerChoice([A])
    data, control = Member(choice), Member(choice)
    data.go(A, server="one")
    plan = choice.plan(0.0, {A})

    assert choice.arrive(control, ServerAddress(A, "two"), plan, 0.0, is_last=True)

    assert data.calls == 0


def test_a_server_that_is_told_by_address_has_the_certificate_of_the_first() -> None:
    choice = ServerChoice(["tls://nats.example:4222", "tls://10.0.0.9:4222"])
    choice.advertise(["10.0.0.1:4222", "other.example:4222"])
    urls = sorted(choice.plan(0.0).urls)

    assert {url: choice.tls_name(url) for url in urls} == {
        "tls://10.0.0.1:4222": "nats.example",
        "tls://10.0.0.9:4222": None,
        "tls://nats.example:4222": None,
        "tls://other.example:4222": None,
    }
    assert ServerChoice(["tls://10.0.0.9:4222"]).tls_name("tls://10.0.0.1:4222") is None
