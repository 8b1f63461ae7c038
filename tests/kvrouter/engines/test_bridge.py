"""A bridge's ranks: what is missing is asked for, what cannot be had voids what was known."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from dynbus.kvrouter.engines import BlockSizeMismatch, EngineBridge, QuarantineReason, RankStream
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

    assert (status.state, status.reason) == ("degraded", "no stream of an engine is read")


def test_a_rank_that_was_never_connected_is_degraded() -> None:
    bridge, _, _ = make()

    assert bridge.status().reason == "rank 0: not connected to the engine yet"


def test_a_rank_whose_engine_has_said_nothing_is_exact() -> None:
    bridge, _, _ = caught_up()

    assert bridge.status().state == "exact"


def test_messages_in_order_are_published_in_order() -> None:
    bridge, stream, sink = caught_up()

    assert all(stream.take(number, message(number + 1)) for number in range(3))
    assert sink.engine_hashes() == [1, 2, 3]
    assert bridge.status().events == {"stored": 3}
    assert bridge.status().state == "exact"


def test_a_first_message_that_is_number_zero_makes_a_rank_exact() -> None:
    bridge, stream, _ = make()
    stream.connected()
    stream.cannot_replay()

    assert bridge.status().state == "degraded"
    assert stream.take(0, message(1))
    assert bridge.status().state == "exact"


def test_a_gap_is_filled_by_a_replay() -> None:
    bridge, stream, sink = caught_up()
    messages = {number: message(number + 1) for number in range(5)}
    stream.take(0, messages[0])

    assert not stream.take(4, messages[4])
    replay(stream, messages)
    stream.skip_to(4, messages[4])

    assert sink.engine_hashes() == [1, 2, 3, 4, 5]
    status = bridge.status()
    assert (status.gaps, status.replayed, status.lost, status.resets) == (1, 4, 0, 0)
    assert status.state == "exact"


def test_messages_that_a_replay_brought_are_not_used_twice() -> None:
    _, stream, sink = caught_up()
    replay(stream, {number: message(number + 1) for number in range(3)})

    assert all(stream.take(number, message(number + 1)) for number in range(1, 4))
    assert sink.engine_hashes() == [1, 2, 3, 4]


def test_a_gap_that_cannot_be_filled_resets_the_rank_and_is_told() -> None:
    bridge, stream, sink = caught_up()
    stream.take(0, message(1))

    assert not stream.take(5, message(6))
    stream.fail_replay("nobody answers")
    stream.skip_to(5, message(6))

    assert (sink.resets, sink.engine_hashes()) == ([0], [6])
    status = bridge.status()
    assert (status.resets, status.lost) == (1, 4)
    assert status.reason is not None
    assert status.reason.startswith("rank 0: messages 1 to 4 of the engine are lost")


def test_what_a_replay_still_has_is_used_after_a_reset() -> None:
    _, stream, sink = caught_up()
    stream.take(0, message(1))

    stream.take(9, message(10))
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
    stream.take(7, message(8))
    stream.skip_to(7, message(8))

    assert bridge.status().state == "degraded"
    assert stream.take(8 if payload is CLEAR else 0, payload)
    assert bridge.status().state == "exact"


def test_numbers_that_go_back_are_a_restart() -> None:
    _, stream, sink = caught_up()
    stream.take(0, message(1))
    stream.take(1, message(2))

    assert stream.take(0, message(3))
    assert (sink.resets, sink.engine_hashes()) == ([0], [3])


def test_a_restart_in_the_middle_asks_for_what_came_before() -> None:
    _, stream, sink = caught_up()
    for number in range(5):
        stream.take(number, message(number + 1))

    assert not stream.take(2, message(103))
    replay(stream, {number: message(number + 101) for number in range(3)})
    stream.skip_to(2, message(103))

    assert (sink.resets, sink.engine_hashes()) == ([0], [101, 102, 103])


def test_another_engine_behind_a_new_connection_is_noticed_although_its_numbers_fit() -> None:
    _, stream, sink = caught_up()
    for number in range(3):
        stream.take(number, message(number + 1))

    stream.connected()
    replay(stream, {number: message(number + 1, ts=9.0) for number in range(4)})

    assert sink.resets == [0]


def test_an_engine_that_restarted_and_is_behind_is_asked_again_from_zero() -> None:
    bridge, stream, sink = caught_up()
    for number in range(9):
        stream.take(number, message(number + 1))
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
    stream.take(0, messages[0])
    stream.disconnected("there is no connection")

    assert bridge.status().reason == "rank 0: there is no connection"
    stream.connected()
    replay(stream, messages)

    assert (sink.resets, sink.engine_hashes()) == ([], [1, 2, 3, 4])
    assert bridge.status().state == "exact"


def test_a_new_connection_without_replay_voids_what_was_known() -> None:
    bridge, stream, sink = caught_up()
    stream.take(0, message(1))

    stream.connected()
    stream.cannot_replay()

    assert sink.resets == [0]
    assert bridge.status().state == "degraded"


# Ranks --------------------------------------------------------------------------------------


def test_the_ranks_of_an_engine_are_kept_apart() -> None:
    sink = RecordingSink()
    bridge = EngineBridge(sink, block_size=4)

    for rank in (0, 3):
        bridge.stream(rank).take(0, message(rank + 1))
    bridge.stream(3).take(0, message(9))

    assert (sink.engine_hashes(0), sink.engine_hashes(3), sink.resets) == ([1], [9], [3])


def test_the_rank_of_the_port_holds_against_the_one_in_the_batch() -> None:
    _, stream, sink = caught_up(2)

    stream.take(0, message(1))

    assert sink.engine_hashes(2) == [1]


def test_a_rank_that_is_not_given_is_that_of_the_first_batch() -> None:
    bridge, stream, sink = caught_up(None)

    stream.take(0, encode([1.5, [vllm()], 3]))
    stream.take(1, encode([1.5, [vllm()], 4]))

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

    stream.take(0, payload)

    status = bridge.status()
    assert status.quarantined == {reason: 1}
    assert status.reason == "rank 0: 1 of its events could not be used"


def test_a_type_that_is_not_known_leaves_a_rank_exact() -> None:
    bridge, stream, _ = caught_up()

    stream.take(0, encode([1.5, [["BlockPinned", [1]]], 0]))

    assert bridge.status().quarantined == {QuarantineReason.UNKNOWN_TYPE: 1}
    assert bridge.status().state == "exact"


def test_a_block_size_that_differs_is_told_once_and_nothing_is_published(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bridge, stream, sink = make(block_size=16)
    stream.connected()

    with caplog.at_level(logging.ERROR):
        for number in range(3):
            stream.take(number, encode([1.5, [vllm()], 0]))

    assert sink.ranks == {}
    assert len([one for one in caplog.records if one.levelno == logging.ERROR]) == 1
    status = bridge.status()
    assert status.block_size_mismatch == BlockSizeMismatch(16, 4)
    assert "have 4 tokens, but 16 are configured" in (status.reason or "")


def test_an_engine_that_restarts_with_the_right_block_size_is_read_again() -> None:
    bridge, stream, sink = caught_up()
    stream.take(0, encode([1.5, [vllm(token_ids=TOKENS * 2, block_size=8)], 0]))

    stream.take(0, encode([1.5, [vllm()], 0]))

    assert sink.ranks == {0: [stored()]}
    assert bridge.status().state == "exact"


def test_an_engine_without_a_group_of_full_attention_is_degraded() -> None:
    bridge, stream, _ = caught_up()

    stream.take(0, encode([1.5, [vllm(group_idx=0, kv_cache_spec_kind="mamba")], 0]))

    assert bridge.status().filtered == {"mamba": 1}
    assert "hold no whole prefix (mamba)" in (bridge.status().reason or "")


def test_the_same_reason_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    stream = EngineBridge(RecordingSink(), block_size=4, clock=clock).stream(0)

    for number, now in enumerate((100.0, 101.0, 159.0, 160.0)):
        clock.now = now
        stream.take(number, b"\xc1")

    assert len(caplog.records) == 2


def test_the_age_of_the_last_event_is_told() -> None:
    clock = Clock()
    bridge = EngineBridge(RecordingSink(), block_size=4, clock=clock)
    ages: list[Any] = [bridge.status().last_event_age]

    bridge.stream(0).take(0, message(A))
    clock.now += 7.0
    ages.append(bridge.status().last_event_age)

    assert ages == [None, 7.0]


def test_a_clear_is_published() -> None:
    _, stream, sink = caught_up()

    stream.take(0, CLEAR)

    assert sink.ranks == {0: [AllBlocksCleared()]}


def test_a_new_connection_whose_replay_fails_voids_what_was_known() -> None:
    bridge, stream, sink = caught_up()
    stream.take(0, message(1))

    stream.connected()
    stream.begin_replay()
    stream.fail_replay("nobody answers")

    assert sink.resets == [0]
    assert bridge.status().reason == "rank 0: forgotten: nobody answers"
