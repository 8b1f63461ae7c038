"""A peer is dead when it is silent, or provably absent; never because we were cut off."""

from __future__ import annotations

from dynbus.bus.liveness import (
    GONE_AFTER,
    HEARTBEAT_INTERVAL,
    RECONNECT_GRACE,
    SILENCE_LIMIT,
    PeerLiveness,
)


def test_a_dead_peer_is_noticed_within_a_second_and_a_half() -> None:
    assert SILENCE_LIMIT < 1.5
    assert GONE_AFTER < SILENCE_LIMIT


def test_several_heartbeats_may_be_lost() -> None:
    assert SILENCE_LIMIT >= 3 * HEARTBEAT_INTERVAL


def test_silence_beyond_the_limit_means_death() -> None:
    peer = PeerLiveness(10.0)

    assert not peer.is_gone(10.0 + SILENCE_LIMIT - 0.01)
    assert peer.is_gone(10.0 + SILENCE_LIMIT + 0.01)


def test_hearing_the_peer_starts_the_silence_anew() -> None:
    peer = PeerLiveness(10.0)

    peer.heard(11.0)

    assert not peer.is_gone(11.0 + SILENCE_LIMIT - 0.01)


def test_a_bounce_asks_for_one_ping() -> None:
    peer = PeerLiveness(10.0)

    assert peer.bounced()
    assert not peer.bounced()


def test_a_bounce_alone_is_not_believed() -> None:
    peer = PeerLiveness(10.0)

    peer.bounced()

    assert not peer.is_gone(10.0 + GONE_AFTER)


def test_a_bounced_ping_means_death_after_the_time_to_connect_again() -> None:
    peer = PeerLiveness(10.0)
    peer.bounced()

    peer.ping_bounced(10.1)

    assert not peer.is_gone(10.1 + GONE_AFTER - 0.01)
    assert peer.is_gone(10.1 + GONE_AFTER + 0.01)


def test_a_peer_that_is_heard_after_its_ping_bounced_is_alive() -> None:
    peer = PeerLiveness(10.0)
    peer.bounced()
    peer.ping_bounced(10.1)

    peer.heard(10.2)

    assert not peer.is_gone(10.1 + GONE_AFTER)
    assert peer.bounced()


def test_an_outage_of_ours_gives_the_peer_time() -> None:
    peer = PeerLiveness(10.0)
    peer.ping_bounced(10.1)

    peer.extend(20.0 + RECONNECT_GRACE)

    assert not peer.is_gone(20.0 + RECONNECT_GRACE + SILENCE_LIMIT - 0.01)
    assert peer.is_gone(20.0 + RECONNECT_GRACE + SILENCE_LIMIT + 0.01)


def test_a_bounce_during_that_time_counts_for_nothing() -> None:
    peer = PeerLiveness(10.0)
    peer.extend(20.0)

    peer.ping_bounced(15.0)

    assert not peer.is_gone(15.0 + GONE_AFTER)
