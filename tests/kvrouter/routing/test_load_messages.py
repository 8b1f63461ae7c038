"""What routers say to each other is read as it was written, and what makes no sense is refused."""

from __future__ import annotations

import msgspec
import pytest

from dynbus.kvrouter.routing.shared_load import (
    VERSION,
    ActiveSet,
    Added,
    Ask,
    Change,
    Freed,
    Left,
    LoadChanges,
    LoadMessage,
    PrefillCompleted,
    decode_message,
    encode_message,
    split_changes,
)


def added(number: int, blocks: int) -> Added:
    return Added(number, "a", 0, blocks * 16, 0, None, bytes(8 * blocks))


@pytest.mark.parametrize(
    "message",
    [
        LoadChanges(VERSION, "r", 3, [added(1, 2), PrefillCompleted(1), Freed(1)]),
        ActiveSet(VERSION, "r", 3, 0, 1, [added(1, 2)]),
        Ask(VERSION, "r", ["other"]),
        Left(VERSION, "r"),
    ],
)
def test_a_message_is_read_as_it_was_written(message: LoadMessage) -> None:
    assert decode_message(encode_message(message)) == message


@pytest.mark.parametrize("data", [b"", b"\x00", b"\x95\xa1c\x02\xa1x\x00\x90", b"\xff" * 40])
def test_bytes_that_are_no_message_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="a message of version|not a message of routers' load"):
        decode_message(data)


@pytest.mark.parametrize(
    "forged",
    [
        ["a", 1, "a", 0, 2**62, 0, None, b""],
        ["a", 1, "a", 0, 16, -(2**62), None, b""],
        ["a", 1, "a", 0, 16, 0, 2**62, b""],
        ["a", 1, "a", -1, 16, 0, None, b""],
        ["a", 1, "a", 2**40, 16, 0, None, b""],
        ["a", -1, "a", 0, 16, 0, None, b""],
        ["a", 1, "a" * 1000, 0, 16, 0, None, b""],
    ],
)
def test_numbers_out_of_bounds_are_refused(forged: list[object]) -> None:
    with pytest.raises(ValueError, match="not a message of routers' load"):
        decode_message(msgspec.msgpack.encode(["c", VERSION, "forger", 0, [forged]]))


def test_changes_are_split_in_their_order_into_messages_that_fit() -> None:
    changes: list[Change] = [added(number, number % 90) for number in range(200)]
    changes += [Freed(number) for number in range(2000)]

    pieces = list(split_changes(changes, 4096))

    assert [change for piece in pieces for change in piece] == changes
    sizes = [len(encode_message(LoadChanges(VERSION, "r" * 63, 0, piece))) for piece in pieces]
    assert max(sizes) <= 4096
    assert len(pieces) < 100


def test_of_a_prompt_that_no_message_can_hold_the_beginning_is_said() -> None:
    blocks = b"".join(number.to_bytes(8, "little") for number in range(1000))
    long = msgspec.structs.replace(added(1, 1000), blocks=blocks)

    ((said,),) = split_changes([long], 4096)

    assert said.prompt_tokens == 16_000
    assert blocks.startswith(said.blocks)
    assert 2048 < len(said.blocks) < 4096
