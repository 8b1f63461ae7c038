"""Messages between agents over the bus, for reads that the owner carries out as a push.

reader                                   source
  | -- Push: ticket, blocks, landing -->   |
  |                                        | checks the lease, writes
  | -- Here: what it waits for -------->   |
  | <-- Unknown: what never came ------    | what is over it answers once more
  | -- Stop: gives it up ------------->    |
  | <-- Pushed: whether all is there --    | once nothing more of it is sent
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
        seconds: after which nobody waits for it; the source waits no longer than its lease holds.
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
    """A reason for the server to say that nobody hears it any more, and a question to who does.

    Attributes:
        reader, epoch: as in `Push`; empty where nothing is asked.
        look: of the reader's, one more with each.
        numbers: of the transfers that it waits for.
    """

    reader: str = ""
    epoch: str = ""
    look: int = 0
    numbers: tuple[int, ...] = ()


class Unknown(msgspec.Struct, frozen=True, tag="unknown"):
    """The source has heard nothing of these transfers: what asked for them was lost.

    Attributes:
        look: which asked.
    """

    look: int
    numbers: tuple[int, ...]


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Gives up what `Push` asked for."""

    number: int
    reader: str
    epoch: str


class Pushed(msgspec.Struct, frozen=True, tag="pushed"):
    """Nothing more of it is sent.

    Attributes:
        bytes: how many were written.
        code, message: of the error that ended it; empty where all bytes are there.
        is_cut_off: some of it may be on its way still, until the reader's landing is destroyed.
    """

    number: int
    bytes: int = 0
    code: str = ""
    message: str = ""
    is_cut_off: bool = False


AgentMessage: TypeAlias = Push | Here | Unknown | Stop | Pushed

_decoder: Final[msgspec.msgpack.Decoder[AgentMessage]] = msgspec.msgpack.Decoder(AgentMessage)


def encode(message: AgentMessage) -> bytes:
    """The message in msgpack."""
    return msgspec.msgpack.encode(message)


def decode(data: bytes) -> AgentMessage:
    """The message in `data`.

    Raises:
        BadDescription: it is none, or says what cannot be.
    """
    try:
        message: AgentMessage = _decoder.decode(data)
        return message
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadDescription(f"this is not a message between agents: {error}") from error
