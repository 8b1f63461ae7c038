"""A remote is dead when it is silent, or provably absent; never because we were cut off."""

from __future__ import annotations

from dynbus.bus.liveness import (
    GONE_AFTER,
    HEARTBEAT_INTERVAL,
    RECONNECT_GRACE,
    SILENCE_LIMIT,
    RemoteLiveness,
)


def test_a_dead_remote_is_noticed_within_a_second_and_a_half() -> None:
    assert SILENCE_LIMIT < 1.5
    assert GONE_AFTER < SILENCE_LIMIT


def test_several_heartbeats_may_be_lost() -> None:
    assert SILENCE_LIMIT >= 3 * HEARTBEAT_INTERVAL


def test_silence_beyond_the_limit_means_death() -> None:
    remote = RemoteLiveness(10.0)

    assert not remote.is_gone(10.0 + SILENCE_LIMIT - 0.01)
    assert remote.is_gone(10.0 + SILENCE_LIMIT + 0.01)


def test_hearing_the_remote_starts_the_silence_anew() -> None:
    remote = RemoteLiveness(10.0)

    remote.heard(11.0)

    assert not remote.is_gone(11.0 + SILENCE_LIMIT - 0.01)


def test_a_bounce_asks_for_one_ping() -> None:
    remote = RemoteLiveness(10.0)

    assert remote.bounced()
    assert not remote.bounced()


def test_a_bounce_alone_is_not_believed() -> None:
    remote = RemoteLiveness(10.0)

    remote.bounced()

    assert not remote.is_gone(10.0 + GONE_AFTER)


def test_a_bounced_ping_means_death_after_the_time_to_connect_again() -> None:
    remote = RemoteLiveness(10.0)
    remote.bounced()

    remote.ping_bounced(10.1)

    assert not remote.is_gone(10.1 + GONE_AFTER - 0.01)
    assert remote.is_gone(10.1 + GONE_AFTER + 0.01)


def test_a_remote_that_is_heard_after_its_ping_bounced_is_alive() -> None:
    remote = RemoteLiveness(10.0)
    remote.bounced()
    remote.ping_bounced(10.1)

    remote.heard(10.2)

    assert not remote.is_gone(10.1 + GONE_AFTER)
    assert remote.bounced()


def test_an_outage_of_ours_gives_the_remote_time() -> None:
    remote = RemoteLiveness(10.0)
    remote.ping_bounced(10.1)

    remote.extend(20.0 + RECONNECT_GRACE)

    assert not remote.is_gone(20.0 + RECONNECT_GRACE + SILENCE_LIMIT - 0.01)
    assert remote.is_gone(20.0 + RECONNECT_GRACE + SILENCE_LIMIT + 0.01)


def test_a_bounce_during_that_time_counts_for_nothing() -> None:
    remote = RemoteLiveness(10.0)
    remote.extend(20.0)

    remote.ping_bounced(15.0)

    assert not remote.is_gone(15.0 + GONE_AFTER)
