"""A remote is dead when it is silent, or provably absent; never because we were cut off."""

from __future__ import annotations

from dynbus.bus.protocol.liveness import (
    GONE_AFTER,
    HEARTBEAT_INTERVAL,
    RECONNECT_GRACE,
    SILENCE_LIMIT,
    RemoteLiveness,
)


def is_gone(remote: RemoteLiveness, now: float, due_since: float | None) -> bool:
    return remote.gone_at(due_since) <= now


def test_a_dead_remote_is_noticed_within_a_second_and_a_half() -> None:
    assert SILENCE_LIMIT < 1.5
    assert GONE_AFTER < SILENCE_LIMIT


def test_several_heartbeats_may_be_lost() -> None:
    assert SILENCE_LIMIT >= 3 * HEARTBEAT_INTERVAL


def test_silence_beyond_the_limit_means_death() -> None:
    remote = RemoteLiveness(10.0)

    assert not is_gone(remote, 10.0 + SILENCE_LIMIT - 0.01, due_since=10.0)
    assert is_gone(remote, 10.0 + SILENCE_LIMIT + 0.01, due_since=10.0)


def test_silence_counts_from_when_heartbeats_are_due() -> None:
    remote = RemoteLiveness(10.0)

    assert not is_gone(remote, 100.0 + SILENCE_LIMIT - 0.01, due_since=100.0)
    assert is_gone(remote, 100.0 + SILENCE_LIMIT + 0.01, due_since=100.0)


def test_a_remote_that_owes_no_heartbeats_may_be_silent() -> None:
    remote = RemoteLiveness(10.0)

    assert not is_gone(remote, 1000.0, due_since=None)


def test_hearing_the_remote_starts_the_silence_anew() -> None:
    remote = RemoteLiveness(10.0)

    remote.heard(11.0)

    assert not is_gone(remote, 11.0 + SILENCE_LIMIT - 0.01, due_since=10.0)


def test_results_are_a_sign_of_life() -> None:
    remote = RemoteLiveness(10.0)

    remote.heard_data(11.0)

    assert not is_gone(remote, 11.0 + SILENCE_LIMIT - 0.01, due_since=10.0)
    assert is_gone(remote, 11.0 + SILENCE_LIMIT + 0.01, due_since=10.0)


def test_a_bounce_asks_for_one_ping() -> None:
    remote = RemoteLiveness(10.0)

    assert remote.bounced()
    assert not remote.bounced()


def test_a_bounce_alone_is_not_believed() -> None:
    remote = RemoteLiveness(10.0)

    remote.bounced()

    assert not is_gone(remote, 10.0 + GONE_AFTER, due_since=10.0)


def test_a_bounced_ping_means_death_after_the_time_to_connect_again() -> None:
    remote = RemoteLiveness(10.0)
    remote.bounced()

    remote.ping_bounced(10.1)

    assert not is_gone(remote, 10.1 + GONE_AFTER - 0.01, due_since=10.0)
    assert is_gone(remote, 10.1 + GONE_AFTER + 0.01, due_since=10.0)


def test_a_remote_that_is_heard_after_its_ping_bounced_is_alive_and_has_returned() -> None:
    remote = RemoteLiveness(10.0)
    remote.bounced()
    remote.ping_bounced(10.1)

    assert remote.heard(10.2)

    assert not is_gone(remote, 10.1 + GONE_AFTER, due_since=10.0)
    assert not remote.heard(10.3)
    assert remote.bounced()


def test_results_that_arrived_before_the_bounce_say_nothing_against_it() -> None:
    remote = RemoteLiveness(10.0)
    remote.ping_bounced(10.3)

    remote.heard_data(10.2)

    assert is_gone(remote, 10.3 + GONE_AFTER + 0.01, due_since=10.0)


def test_an_outage_of_ours_gives_the_remote_time_and_no_more() -> None:
    remote = RemoteLiveness(10.0)
    remote.ping_bounced(10.1)

    remote.extend(20.0 + RECONNECT_GRACE)

    assert not is_gone(remote, 20.0 + RECONNECT_GRACE - 0.01, due_since=10.0)
    assert is_gone(remote, 20.0 + RECONNECT_GRACE + 0.01, due_since=10.0)


def test_a_remote_that_comes_back_in_that_time_is_alive() -> None:
    remote = RemoteLiveness(10.0)
    remote.extend(20.0 + RECONNECT_GRACE)
    remote.ping_bounced(20.1)

    remote.heard(23.0)

    assert not is_gone(remote, 20.0 + RECONNECT_GRACE + 0.01, due_since=10.0)


def test_one_that_bounced_all_that_time_is_gone_at_its_end() -> None:
    remote = RemoteLiveness(10.0)
    remote.extend(20.0)

    remote.ping_bounced(15.0)

    assert not is_gone(remote, 20.0 - 0.01, due_since=None)
    assert is_gone(remote, 20.0 + 0.01, due_since=None)


def test_a_bounce_beside_results_that_arrive_is_not_forgotten() -> None:
    liveness = RemoteLiveness(0.0)
    liveness.ping_bounced(1.0)
    liveness.bounced()
    liveness.heard_data(1.1)

    assert liveness.heard(1.2)
    assert not liveness.heard(1.3)


def test_a_heartbeat_is_news_unless_a_later_one_came_before() -> None:
    remote = RemoteLiveness(10.0)

    # Two of one number are two messages of one heartbeat.
    assert [remote.is_news(beat) for beat in (7, 8, 8, 7, 9, 8)] == [
        True,
        True,
        True,
        False,
        True,
        False,
    ]
