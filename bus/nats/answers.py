"""Answers of the server that it stored itself, since a request named a stream's subject to be
answered at. No permission bounds where a request is answered.
"""

from __future__ import annotations

import re
from typing import Final

from dynbus.bus.protocol import headers as header_block

_OF_API: Final = b'{"type":"io.nats.jetstream.api.v'
_TO_A_PUBLISHER: Final = re.compile(
    rb'\{(?:"error":\{"code":\d+,.*\}, ?)?"stream": ?"(?:KV|OBJ|DYNBUS)_[^"]*", ?'
    rb'(?:"domain": ?"[^"]*", ?)?"seq": ?\d+[^{}]*\}'
)


def is_answer(block: bytes, data: bytes, *, of_readers: int = 0) -> bool:
    """True if a stored message is an answer of the server: one of the JetStream API, the word that
    something is stored, or a message of a stream.

    Args:
        block: its headers.
        of_readers: how often the server has named a stream in them for the one who reads it now.
    """
    return (
        data.startswith(_OF_API)
        or block.count(header_block.OF_STREAM) > of_readers
        or _TO_A_PUBLISHER.fullmatch(data) is not None
    )


def written(
    fields: dict[str, str], data: bytes, *, is_answer: bool
) -> tuple[dict[str, str], bytes]:
    """The headers and the data of a stored message. An answer of the server was not written by who
    may write there: it is empty, and its only header names a stream."""
    if is_answer:
        return {header_block.STREAM: fields.get(header_block.STREAM, "-")}, b""
    return fields, data
