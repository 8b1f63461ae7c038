"""A bridge's ranks: what is missing is asked for, what cannot be had voids what was known."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from dynbus.kvrouter.engine_events import (
    BlockSizeMismatch,
    EngineBridge,
    QuarantineReason,
    RankStream,
)
from dynbus.kvrouter.events import AllBlocksCleared

from .frames import TOKENS, A, encode, stored, vllm
from .recording_sink import RecordingSink


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def message(engine_hash: int, *, ts: float = 1.5) -> bytes:
    """A batch that stores one block of its own."""
    event = vllm(block_hashes=[engine_hash], token_ids=[engine_hash] * 4)
    return encode([ts, [event], 0])


CLEAR = encode([1.5, [["AllBlocksCleared"]], 0])


def make(
    dp_rank: int | None = 0, *, block_size: int = 4
) -> tuple[EngineBridge, RankStream, RecordingSink]:
    sink = RecordingSink()
    bridge = EngineBridge(sink, block_size=block_size)
    return bridge, bridge.stream(dp_rank), sink


def caught_up(dp_rank: int | None = 0) -> tuple[EngineBridge, RankStream, RecordingSink]:
    """A stream that is connected to an engine which has said nothing yet."""
    bridge, stream, sink = make(dp_rank)
    stream.connected()
    stream.begin_replay()
    stream.end_replay()
    return bridge, stream, sink


def replay(stream: RankStream, messages: dict[int, bytes]) -> bool:
    first = stream.begin_replay()
    for number, payload in messages.items():
        if number >= first and not stream.take_replayed(number, payload):
            stream.skip_to(number, payload)
    return stream.end_replay()


def test_a_bridge_that_reads_nothing_says_so() -> None:
    status = EngineBridge(RecordingSink(), block_size=4).status()

    assert (status.state, status.reason) == ("degraded", "no engine is followed")


def test_a_rank_that_was_never_connected_is_degraded() -> None:
    bridge, _, _ = make()

    assert bridge.status().reason == "rank 0: not connected to the engine yet"


def test_a_rank_whose_engine_has_said_nothing_is_exact() -> None:
    bridge, _, _ = caught_up()

    assert bridge.status().state == "exact"


def test_messages_in_order_are_published_in_order() -> None:
    bridge, stream, sink = caught_up()

    assert all(stream.apply(number, message(number + 1)) for number in range(3))
    assert sink.engine_hashes() == [1, 2, 3]
    assert bridge.status().events == {"stored": 3}
    assert bridge.status().state == "exact"


def test_a_first_message_that_is_number_zero_makes_a_rank_exact() -> None:
    bridge, stream, _ = make()
    stream.connected()
    stream.cannot_replay()

    assert bridge.status().state == "degraded"
    assert stream.apply(0, message(1))
    assert bridge.status().state == "exact"


def test_a_gap_is_filled_by_a_replay() -> None:
    bridge, stream, sink = caught_up()
    messages = {number: message(number + 1) for number in range(5)}
    stream.apply(0, messages[0])

    assert not stream.apply(4, messages[4])
    replay(stream, messages)
    stream.skip_to(4, messages[4])

    assert sink.engine_hashes() == [1, 2, 3, 4, 5]
    status = bridge.status()
    assert (status.gaps, status.replayed, status.lost, status.resets) == (1, 4, 0, 0)
    assert status.state == "exact"


def test_messages_that_a_replay_brought_are_not_used_twice() -> None:
    _, stream, sink = caught_up()
    replay(stream, {number: message(number + 1) for number in range(3)})

    assert all(stream.apply(number, message(number + 1)) for number in range(1, 4))
    assert sink.engine_hashes() == [1, 2, 3, 4]


def test_a_gap_that_cannot_be_filled_resets_the_rank_and_is_told() -> None:
    bridge, stream, sink = caught_up()
    stream.apply(0, message(1))

    assert not stream.apply(5, message(6))
    stream.fail_replay("nobody answers")
    stream.skip_to(5, message(6))

    assert (sink.resets, sink.engine_hashes()) == ([0], [6])
    status = bridge.status()
    assert (status.resets, status.lost) == (1, 4)
    assert status.reason is not None
    assert status.reason.startswith("rank 0: messages 1 to 4 of the engine are lost")


def test_what_a_replay_still_has_is_used_after_a_reset() -> None:
    _, stream, sink = caught_up()
    stream.apply(0, message(1))

    stream.apply(9, message(10))
    replay(stream, {number: message(number + 1) for number in range(7, 10)})
    stream.skip_to(9, message(10))

    assert (sink.resets, sink.engine_hashes()) == ([0], [8, 9, 10])


def test_a_stream_joined_late_publishes_what_the_replay_has_and_says_what_it_has_not() -> None:
    bridge, stream, sink = make()
    stream.connected()

    replay(stream, {number: message(number + 1) for number in range(7, 9)})

    assert (sink.resets, sink.engine_hashes()) == ([], [8, 9])
    assert "messages 0 to 6 of the engine are lost" in (bridge.status().reason or "")


@pytest.mark.parametrize("payload", [CLEAR, message(1)], ids=["cleared", "restarted"])
def test_a_rank_is_exact_again_when_the_engine_begins_anew(payload: bytes) -> None:
    bridge, stream, _ = make()
    stream.connected()
    stream.apply(7, message(8))
    stream.skip_to(7, message(8))

    assert bridge.status().state == "degraded"
    assert stream.apply(8 if payload is CLEAR else 0, payload)
    assert bridge.status().state == "exact"


def test_numbers_that_go_back_are_a_restart() -> None:
    _, stream, sink = caught_up()
    stream.apply(0, message(1))
    stream.apply(1, message(2))

    assert stream.apply(0, message(3))
    assert (sink.resets, sink.engine_hashes()) == ([0], [3])


def test_a_restart_in_the_middle_asks_for_what_came_before() -> None:
    _, stream, sink = caught_up()
    for number in range(5):
        stream.apply(number, message(number + 1))

    assert not stream.apply(2, message(103))
    replay(stream, {number: message(number + 101) for number in range(3)})
    stream.skip_to(2, message(103))

    assert (sink.resets, sink.engine_hashes()) == ([0], [101, 102, 103])


def test_another_engine_behind_a_new_connection_is_noticed_although_its_numbers_fit() -> None:
    _, stream, sink = caught_up()
    for number in range(3):
        stream.apply(number, message(number + 1))

    stream.connected()
    replay(stream, {number: message(number + 1, ts=9.0) for number in range(4)})

    assert sink.resets == [0]


def test_an_engine_that_restarted_and_is_behind_is_asked_again_from_zero() -> None:
    bridge, stream, sink = caught_up()
    for number in range(9):
        stream.apply(number, message(number + 1))
    of_the_new_one = {0: message(101), 1: message(102)}

    stream.connected()
    again = replay(stream, of_the_new_one)
    replay(stream, of_the_new_one)

    assert again
    assert (sink.resets, sink.engine_hashes()) == ([0], [101, 102])
    assert bridge.status().state == "exact"


def test_the_same_engine_behind_a_new_connection_goes_on() -> None:
    bridge, stream, sink = caught_up()
    messages = {number: message(number + 1) for number in range(4)}
    stream.apply(0, messages[0])
    stream.disconnected("there is no connection")

    assert bridge.status().reason == "rank 0: there is no connection"
    stream.connected()
    replay(stream, messages)

    assert (sink.resets, sink.engine_hashes()) == ([], [1, 2, 3, 4])
    assert bridge.status().state == "exact"


def test_a_new_connection_without_replay_voids_what_was_known() -> None:
    bridge, stream, sink = caught_up()
    stream.apply(0, message(1))

    stream.connected()
    stream.cannot_replay()

    assert sink.resets == [0]
    assert bridge.status().state == "degraded"


# Ranks --------------------------------------------------------------------------------------


def test_the_ranks_of_an_engine_are_kept_apart() -> None:
    sink = RecordingSink()
    bridge = EngineBridge(sink, block_size=4)

    for rank in (0, 3):
        bridge.stream(rank).apply(0, message(rank + 1))
    bridge.stream(3).apply(0, message(9))

    assert (sink.engine_hashes(0), sink.engine_hashes(3), sink.resets) == ([1], [9], [3])


def test_the_rank_of_the_port_holds_against_the_one_in_the_batch() -> None:
    _, stream, sink = caught_up(2)

    stream.apply(0, message(1))

    assert sink.engine_hashes(2) == [1]


def test_a_rank_that_is_not_given_is_that_of_the_first_batch() -> None:
    bridge, stream, sink = caught_up(None)

    stream.apply(0, encode([1.5, [vllm()], 3]))
    stream.apply(1, encode([1.5, [vllm()], 4]))

    assert sink.ranks == {3: [stored()]}
    assert bridge.status().quarantined == {QuarantineReason.WRONG_RANK: 1}


@pytest.mark.parametrize("rank", [-1, 1 << 16])
def test_a_rank_that_does_not_fit_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=f"data-parallel rank {rank}"):
        EngineBridge(RecordingSink(), block_size=4).stream(rank)


# Quarantine and refusal ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"\xc1", QuarantineReason.MALFORMED),
        (encode([1.5, [["BlockRemoved", [None]], vllm()], 0]), QuarantineReason.BAD_HASH),
        (encode([1.5, [vllm(token_ids=TOKENS[:3]), vllm()], 0]), QuarantineReason.BLOCK_COUNT),
    ],
)
def test_an_event_that_could_not_be_used_makes_a_rank_degraded(
    payload: bytes, reason: QuarantineReason
) -> None:
    bridge, stream, _ = caught_up()

    stream.apply(0, payload)

    status = bridge.status()
    assert status.quarantined == {reason: 1}
    assert status.reason == "rank 0: 1 of its events could not be used"


def test_a_type_that_is_not_known_leaves_a_rank_exact() -> None:
    bridge, stream, _ = caught_up()

    stream.apply(0, encode([1.5, [["BlockPinned", [1]]], 0]))

    assert bridge.status().quarantined == {QuarantineReason.UNKNOWN_TYPE: 1}
    assert bridge.status().state == "exact"


def test_a_block_size_that_differs_is_told_once_and_nothing_is_published(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bridge, stream, sink = make(block_size=16)
    stream.connected()

    with caplog.at_level(logging.ERROR):
        for number in range(3):
            stream.apply(number, encode([1.5, [vllm()], 0]))

    assert sink.ranks == {}
    assert len([one for one in caplog.records if one.levelno == logging.ERROR]) == 1
    status = bridge.status()
    assert status.block_size_mismatch == BlockSizeMismatch(16, 4)
    assert "have 4 tokens, but 16 are configured" in (status.reason or "")


def test_an_engine_that_restarts_with_the_right_block_size_is_read_again() -> None:
    bridge, stream, sink = caught_up()
    stream.apply(0, encode([1.5, [vllm(token_ids=TOKENS * 2, block_size=8)], 0]))

    stream.apply(0, encode([1.5, [vllm()], 0]))

    assert sink.ranks == {0: [stored()]}
    assert bridge.status().state == "exact"


def test_an_engine_without_a_group_of_full_attention_is_degraded() -> None:
    bridge, stream, _ = caught_up()

    stream.apply(0, encode([1.5, [vllm(group_idx=0, kv_cache_spec_kind="mamba")], 0]))

    assert bridge.status().filtered == {"mamba": 1}
    assert "hold no whole prefix (mamba)" in (bridge.status().reason or "")


def test_the_same_reason_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    stream = EngineBridge(RecordingSink(), block_size=4, clock=clock).stream(0)

    for number, now in enumerate((100.0, 101.0, 159.0, 160.0)):
        clock.now = now
        stream.apply(number, b"\xc1")

    assert len(caplog.records) == 2


def test_the_age_of_the_last_event_is_told() -> None:
    clock = Clock()
    bridge = EngineBridge(RecordingSink(), block_size=4, clock=clock)
    ages: list[Any] = [bridge.status().last_event_age]

    bridge.stream(0).apply(0, message(A))
    clock.now += 7.0
    ages.append(bridge.status().last_event_age)

    assert ages == [None, 7.0]


def test_a_clear_is_published() -> None:
    _, stream, sink = caught_up()

    stream.apply(0, CLEAR)

    assert sink.ranks == {0: [AllBlocksCleared()]}


def test_a_new_connection_whose_replay_fails_voids_what_was_known() -> None:
    bridge, stream, sink = caught_up()
    stream.apply(0, message(1))

    stream.connected()
    stream.begin_replay()
    stream.fail_replay("nobody answers")

    assert sink.resets == [0]
    assert bridge.status().reason == "rank 0: forgotten: nobody answers"


# How far events can be relied on ------------------------------------------------------------


def test_a_sink_is_told_at_once_how_far_events_can_be_relied_on() -> None:
    _, stream, sink = make()

    stream.connected()
    replay(stream, {number: message(number + 1) for number in range(2)})

    assert sink.said == [
        (0, "degraded (not connected to the engine yet)"),
        (0, "degraded (the engine's earlier messages are being read)"),
        (0, "exact"),
    ]


def test_a_sink_is_told_nothing_twice() -> None:
    _, stream, sink = caught_up()
    told = len(sink.said)

    for number in range(3):
        stream.apply(number, message(number + 1))

    assert sink.said[told:] == []


def test_a_rank_that_is_known_late_takes_over_what_was_said_of_rank_0() -> None:
    _, stream, sink = caught_up(dp_rank=None)

    stream.apply(0, encode([1.5, [vllm(token_ids=TOKENS)], 3]))

    assert sink.said[-2:] == [(0, "exact"), (3, "exact")]


def test_a_rank_is_not_exact_before_its_replay_has_ended() -> None:
    bridge, stream, _ = make()
    stream.connected()

    stream.begin_replay()
    stream.take_replayed(0, message(1))
    first = bridge.status()
    stream.take_replayed(1, message(2))
    stream.end_replay()

    assert first.reason == "rank 0: the engine's earlier messages are being read"
    assert (first.state, bridge.status().state) == ("degraded", "exact")


def test_a_replay_that_stops_half_way_leaves_a_rank_degraded_until_the_rest_is_here() -> None:
    bridge, stream, _ = make()
    stream.connected()
    stream.begin_replay()
    stream.take_replayed(0, message(1))
    stream.fail_replay("it ceased")

    after_failure = bridge.status().reason
    stream.apply(1, message(2))

    assert after_failure == "rank 0: it ceased"
    assert bridge.status().state == "exact"


def test_a_gap_is_degraded_while_it_is_being_filled() -> None:
    bridge, stream, _ = caught_up()
    messages = {number: message(number + 1) for number in range(3)}
    stream.apply(0, messages[0])

    stream.apply(2, messages[2])
    in_between = bridge.status().state
    replay(stream, messages)
    stream.skip_to(2, messages[2])

    assert (in_between, bridge.status().state) == ("degraded", "exact")


def hybrid(*kinds: str) -> bytes:
    """A batch that stores the same blocks in a group of each kind."""
    return encode(
        [1.5, [vllm(group_idx=at, kv_cache_spec_kind=kind) for at, kind in enumerate(kinds)], 0]
    )


def test_an_engine_with_sliding_windows_beside_full_attention_is_approximate() -> None:
    bridge, stream, sink = caught_up()

    stream.apply(0, hybrid("full_attention", "sliding_window"))

    reason = "the engine reuses at most what is told: groups that are not modelled (sliding_window)"
    assert (bridge.status().state, bridge.status().reason) == ("approximate", f"rank 0: {reason}")
    assert sink.said[-1] == (0, f"approximate ({reason})")


def test_the_worst_rank_gives_the_level_of_a_bridge() -> None:
    bridge, stream, _ = caught_up()
    stream.apply(0, hybrid("full_attention", "mamba"))
    alone = bridge.status().state

    bridge.stream(1)

    assert (alone, bridge.status().state) == ("approximate", "degraded")


# Healing ------------------------------------------------------------------------------------


def late() -> tuple[EngineBridge, RankStream, RecordingSink]:
    """A bridge that came when the engine had published ten messages, without a replay."""
    bridge, stream, sink = make()
    stream.connected()
    stream.cannot_replay()
    stream.apply(10, message(11))
    stream.skip_to(10, message(11))
    return bridge, stream, sink


def test_reports_of_reused_blocks_are_asked_for_while_blocks_are_missing() -> None:
    bridge, _, _ = late()
    exact, _, _ = caught_up()

    assert (bridge.report_mode(), exact.report_mode()) == ("full", "incremental")


def test_reports_are_not_asked_for_without_a_connection() -> None:
    bridge, stream, _ = late()

    stream.disconnected("gone")

    assert bridge.report_mode() == "incremental"


def test_an_engine_that_evicts_what_came_since_reports_were_asked_for_is_exact_again() -> None:
    bridge, stream, sink = late()
    bridge.report_mode()

    stream.apply(11, message(11))
    stream.apply(12, message(12))
    stream.apply(13, encode([1.5, [["BlockRemoved", [11]]], 0]))
    before = bridge.status().state
    stream.apply(14, encode([1.5, [["BlockRemoved", [12]]], 0]))

    assert (before, bridge.status().state) == ("degraded", "exact")
    assert bridge.report_mode() == "incremental"
    assert sink.said[-1] == (0, "exact")


def test_an_engine_that_evicts_before_reports_were_asked_for_stays_degraded() -> None:
    bridge, stream, _ = late()

    stream.apply(11, message(12))
    stream.apply(12, encode([1.5, [["BlockRemoved", [12]]], 0]))

    assert bridge.status().state == "degraded"


def test_a_loss_after_a_recovery_is_recovered_from_by_what_comes_after_it() -> None:
    bridge, stream, _ = late()
    bridge.report_mode()
    for number, engine_hash in enumerate((11, 12, 13), 11):
        stream.apply(number, message(engine_hash))
    stream.apply(14, encode([1.5, [["BlockRemoved", [12]]], 0]))
    orphan = vllm(block_hashes=[90], parent_block_hash=99, token_ids=[9] * 4)

    stream.apply(15, encode([1.5, [orphan], 0]))
    lost_again, mode = bridge.status().reason, bridge.report_mode()
    stream.apply(16, message(11))
    stream.apply(17, encode([1.5, [["BlockRemoved", [13]]], 0]))
    by_old_blocks = bridge.status().state
    stream.apply(18, message(14))
    stream.apply(19, encode([1.5, [["BlockRemoved", [14]]], 0]))

    assert lost_again == "rank 0: 1 stored events continue unknown prefixes"
    assert mode == "full"
    assert (by_old_blocks, bridge.status().state) == ("degraded", "exact")


def test_blocks_of_an_engine_that_cannot_be_reached_expire() -> None:
    clock, sink = Clock(), RecordingSink()
    bridge = EngineBridge(sink, block_size=4, expire_after=30.0, clock=clock)
    stream = bridge.stream(0)
    stream.connected()
    stream.end_replay()
    stream.apply(0, message(1))

    stream.disconnected("no connection")
    clock.now += 29.0
    stream.disconnected("no connection")
    kept = list(sink.resets)
    clock.now += 2.0
    stream.disconnected("no connection")
    stream.disconnected("no connection")

    assert (kept, sink.resets) == ([], [0])
    assert bridge.status().reason == "rank 0: no connection"


def test_an_engine_that_is_back_in_time_keeps_its_blocks() -> None:
    clock, sink = Clock(), RecordingSink()
    bridge = EngineBridge(sink, block_size=4, expire_after=30.0, clock=clock)
    stream = bridge.stream(0)
    stream.connected()
    stream.end_replay()
    stream.apply(0, message(1))

    for _ in range(3):
        stream.disconnected("no connection")
        clock.now += 20.0
        stream.connected()
        replay(stream, {0: message(1)})

    assert (sink.resets, sink.engine_hashes()) == ([], [1])


def test_a_reset_that_an_idle_engine_has_not_published_can_be_told() -> None:
    bridge, stream, sink = caught_up()
    stream.apply(0, message(1))

    bridge.cleared()
    stream.apply(1, encode([1.5, [["AllBlocksCleared"], vllm(token_ids=TOKENS)], 0]))

    assert sink.ranks[0][1:] == [AllBlocksCleared(), AllBlocksCleared(), stored()]
