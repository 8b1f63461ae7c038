"""What is written in one turn of the loop leaves together; much of it leaves early."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from dynbus.bus.nats.session import EARLY_WRITE_BYTES, NatsOutput, NatsSession


class RecordingSession:
    """Takes what an output hands over."""

    def __init__(self) -> None:
        self.taken: list[bytes] = []
        self.write_buffer_size = 0

    def write_now(self, data: bytes) -> None:
        self.taken.append(data)


def connected_output() -> tuple[NatsOutput, RecordingSession]:
    output = NatsOutput(asyncio.get_running_loop())
    session = RecordingSession()
    output.session = cast(NatsSession, session)
    return output, session


@pytest.mark.anyio
async def test_what_is_written_in_one_turn_leaves_in_one_piece_at_its_end() -> None:
    output, session = connected_output()

    output.write(b"one ")
    output.write(b"two")
    before = list(session.taken)
    await asyncio.sleep(0)

    assert before == []
    assert session.taken == [b"one two"]
    assert output.backlog == 0


@pytest.mark.anyio
async def test_a_large_piece_leaves_in_the_middle_of_the_turn() -> None:
    output, session = connected_output()

    output.write(b"a" * EARLY_WRITE_BYTES)

    assert [len(data) for data in session.taken] == [EARLY_WRITE_BYTES]


@pytest.mark.anyio
async def test_the_backlog_counts_what_waits_here_and_in_the_transport() -> None:
    output, session = connected_output()
    session.write_buffer_size = 100

    output.write(b"1234")

    assert output.backlog == 104


@pytest.mark.anyio
async def test_what_waited_for_an_ended_session_is_not_sent_to_the_next_one() -> None:
    output, session = connected_output()
    output.write(b"for the old session")

    output.clear()
    await asyncio.sleep(0)

    assert session.taken == []
    assert output.backlog == 0


@pytest.mark.anyio
async def test_what_is_written_right_before_a_flush_leaves_with_it() -> None:
    output, session = connected_output()

    output.before_flush(lambda: output.write(b"collected"))
    output.write(b"one ")
    await asyncio.sleep(0)

    assert session.taken == [b"one collected"]


@pytest.mark.anyio
async def test_who_cannot_write_before_a_flush_or_does_so_again_holds_nothing_up() -> None:
    output, session = connected_output()

    def again() -> None:
        output.write(b"first ")
        output.before_flush(lambda: output.write(b"second"))

    def fail() -> None:
        raise ValueError("nothing to write")

    output.before_flush(fail)
    output.before_flush(again)
    for _ in range(3):
        await asyncio.sleep(0)

    assert session.taken == [b"first ", b"second"]
