"""What agents say to each other over the bus, where one is to push what the other wants to read.

reader                                   source
  | -- Push: ticket, blocks, landing -->   |
  |                                        | checks the lease, writes
  | -- Stop: gives it up ------------->    |
  | <-- Pushed: whether all is there --    | once nothing of it is on its way
"""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

from .errors import BadDescription
from .leases import Ticket


class Push(msgspec.Struct, frozen=True, tag="push"):
    """Asks the source to write leased blocks into the reader's.

    Attributes:
        number: of the reader's transfer.
        reader: the name of the reader's agent.
        epoch: of that agent.
        landing: the envelope of what is to be written: see `descriptors`.
        seconds: after which nobody waits for it.
    """

    number: int
    reader: str
    epoch: str
    landing: bytes
    ticket: Ticket
    source_blocks: tuple[int, ...]
    reader_blocks: tuple[int, ...]
    tokens: int
    source_start: int
    reader_start: int
    seconds: float


class Here(msgspec.Struct, frozen=True, tag="here"):
    """Nothing but a reason for the server to say that nobody hears it any more."""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Gives up what `Push` asked for."""

    number: int
    reader: str
    epoch: str


class Pushed(msgspec.Struct, frozen=True, tag="pushed"):
    """Nothing of it is on its way any more.

    Attributes:
        bytes: how many were written.
        code, message: of the error that ended it; empty where all bytes are there.
    """

    number: int
    bytes: int = 0
    code: str = ""
    message: str = ""


Told: TypeAlias = Push | Here | Stop | Pushed

_decoder: Final[msgspec.msgpack.Decoder[Told]] = msgspec.msgpack.Decoder(Told)


def encode(message: Told) -> bytes:
    """The message in msgpack."""
    return msgspec.msgpack.encode(message)


def decode(data: bytes) -> Told:
    """The message in `data`.

    Raises:
        BadDescription: it is none, or says what cannot be.
    """
    try:
        told: Told = _decoder.decode(data)
        return told
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadDescription(f"this is not a message between agents: {error}") from error
