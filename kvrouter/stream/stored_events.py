"""Whose a stored message of events is, and whether it counts, before it is applied."""

from __future__ import annotations

from typing import Final, NamedTuple

from dynbus.bus.protocol import headers
from dynbus.bus.protocol.names import TOKEN
from dynbus.bus.transport import StoredMessage
from dynbus.kvrouter.events import HEADER
from dynbus.kvrouter.radix.index import Applied, RadixIndex, Rank, Verdict

from .awareness import decode_awareness, encode_awareness
from .epochs import latest_epoch

_TOKENS: Final = 5


class MessageHeader(NamedTuple):
    """Whose a message says that it is, and where it stands among the rank's others."""

    dp_rank: int
    event_epoch: int
    first_id: int


def read_header(data: bytes) -> MessageHeader:
    """The header of a message that is as long as `HEADER` at least."""
    _, _, dp_rank, _, event_epoch, first_id, *_ = HEADER.unpack_from(data)
    return MessageHeader(dp_rank, event_epoch, first_id)


def subject_rank(subject: str) -> Rank | None:
    """The rank that a subject of events names; None if it names none."""
    tokens = subject.split(".")
    if len(tokens) != _TOKENS or not TOKEN.fullmatch(tokens[3]):
        return None
    dp_rank = int(tokens[4]) if tokens[4].isascii() and tokens[4].isdecimal() else -1
    return Rank(tokens[3], dp_rank) if tokens[4] == str(dp_rank) else None


def why_refused(message: StoredMessage, rank: Rank) -> str:
    """Why a message on the subject of `rank` does not count; empty when it does.

    A function of the stored message alone, so that every index that follows refuses the same.
    """
    if len(message.data) < HEADER.size:
        return "a message that is shorter than a header"
    header = read_header(message.data)
    if header.dp_rank != rank.dp_rank:
        # Whoever may publish here speaks for this subject's rank alone.
        return f"a message of rank {header.dp_rank}"
    ahead = header.event_epoch - latest_epoch(message.time)
    if ahead > 0:
        return (
            f"an epoch {ahead / 1e9:.0f} s further ahead of the server's clock than is allowed: "
            "set the clock of its machine"
        )
    return ""


def rank_of(message: StoredMessage) -> Rank | None:
    """The rank that a message's subject names, if the message may speak for it."""
    rank = subject_rank(message.subject)
    return None if rank is None or why_refused(message, rank) else rank


def forget_future(index: RadixIndex, rank: Rank, message: StoredMessage) -> None:
    """Forget a rank's instance if its epoch is one that no message can have any longer, and
    `message` has a lower one: the clock of the server was set back since.

    Nothing that the rank says would count otherwise, until the clock is there again.
    """
    state = index.ranks.get(rank)
    if state is None or state.event_epoch <= latest_epoch(message.time):
        return
    if read_header(message.data).event_epoch < state.event_epoch:
        index.remove_instance(rank.instance)


def apply_message(index: RadixIndex, rank: Rank, message: StoredMessage) -> Applied:
    """Apply a message that counts, with what it says of how far it can be relied on."""
    applied = index.apply(rank.instance, message.data)
    state = index.ranks.get(rank)
    if state is not None and applied.verdict not in _UNUSED:
        said = decode_awareness(message.headers.get(headers.KV_AWARENESS, ""))
        state.stated = encode_awareness(said)
    return applied


_UNUSED: Final = (Verdict.DUPLICATE, Verdict.STALE, Verdict.MALFORMED)
