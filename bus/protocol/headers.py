"""Headers of NATS messages: the names of dynbus's own, and blocks, written strictly and read
tolerantly.

A header of requests is written in `calling/caller.py`, read in `serving/requests.py`, and described
by `actors/documents/asyncapi.py`.

Reading never raises: a block that is not one, or a line that is not `Key: value`, is left
out. The client library's own reader costs more than the rest of a request together.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Final
from urllib.parse import quote, unquote

from dynbus.bus.errors import ConfigError

PREAMBLE: Final = b"NATS/1.0"

REQUEST_ID: Final = "Dynbus-Request-Id"
FRAMES: Final = "Dynbus-Frames"
DEADLINE: Final = "Dynbus-Deadline"
ATTEMPT: Final = "Dynbus-Attempt"
PART: Final = "Dynbus-Part"
CANCEL: Final = "Dynbus-Cancel"
CONTINUES: Final = "Dynbus-Continues"
METADATA: Final = "Dynbus-Metadata"
PRIORITY: Final = "Dynbus-Priority"
IDEMPOTENCY_KEY: Final = "Dynbus-Idempotency-Key"
JOB: Final = "Dynbus-Job"
JOB_AGE: Final = "Dynbus-Job-Age"
JOB_DELAY: Final = "Dynbus-Job-Delay"
JOB_BEGINS: Final = "Dynbus-Job-Begins"
KEYED: Final = "Dynbus-Keyed"
JOB_END: Final = "Dynbus-Job-End"
JOB_TRIES: Final = "Dynbus-Job-Tries"
JOB_WRITER: Final = "Dynbus-Job-Writer"
DEAD_REASON: Final = "Dynbus-Dead-Reason"
DEAD_ERROR: Final = "Dynbus-Dead-Error"
DEAD_TRIES: Final = "Dynbus-Dead-Tries"
DEAD_QUEUED: Final = "Dynbus-Dead-Queued"
DEAD_LOST: Final = "Dynbus-Dead-Lost"
DEAD_LANE: Final = "Dynbus-Dead-Lane"
DEAD_GROUP: Final = "Dynbus-Dead-Group"
TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"
BAGGAGE: Final = "baggage"
SERVICE_ERROR: Final = "Nats-Service-Error"
SERVICE_ERROR_CODE: Final = "Nats-Service-Error-Code"
ERROR: Final = "Dynbus-Error"

MESSAGE_ID: Final = "Nats-Msg-Id"
EXPECTED_LAST_SUBJECT_SEQUENCE: Final = "Nats-Expected-Last-Subject-Sequence"
EXPECTED_LAST_SUBJECT: Final = "Nats-Expected-Last-Subject-Sequence-Subject"
EXPECTED_STREAM: Final = "Nats-Expected-Stream"
TTL: Final = "Nats-TTL"
ROLLUP: Final = "Nats-Rollup"
MARKER_REASON: Final = "Nats-Marker-Reason"
KV_OPERATION: Final = "KV-Operation"

STREAM: Final = "Nats-Stream"
OF_STREAM: Final = f"\r\n{STREAM}: ".encode()
"""In the block of what the server sends out of a stream to whom a request names."""

NO_RESPONDERS: Final = "503"
NOBODY: Final = PREAMBLE + b" " + NO_RESPONDERS.encode()
"""The beginning of the header block by which the server says that a subject has no subscriber."""

_PRINTABLE: Final = "".join(map(chr, range(ord(" "), ord("~") + 1)))

# Few names are ever written, each very often.
_is_key = lru_cache(1024)(re.compile(r"[!-9;-~]+").fullmatch)


def encode(fields: Mapping[str, str]) -> bytes:
    """Write a header block.

    Raises:
        ConfigError: a key or a value has a character that a header cannot carry.
    """
    return f"NATS/1.0\r\n{encode_lines(fields)}\r\n".encode("ascii")


def encode_lines(fields: Mapping[str, str]) -> str:
    """The lines of a header block for `fields`.

    Raises:
        ConfigError: a key or a value has a character that a header cannot carry.
    """
    lines: list[str] = []
    for key, value in fields.items():
        if not _is_key(key):
            raise ConfigError(f"header name {key!r} may hold printable ASCII without ':' only")
        if not (value.isascii() and value.isprintable()):
            raise ConfigError(f"header {key} may hold printable ASCII only, got {value!r}")
        lines.append(f"{key}: {value}\r\n")
    return "".join(lines)


def decode(block: bytes) -> dict[str, str]:
    """Read a header block; the last of repeated keys wins, malformed lines are left out."""
    fields: dict[str, str] = {}
    if not block:
        return fields
    for line in block.decode("utf-8", "replace").split("\r\n"):
        key, colon, value = line.partition(":")
        if colon and key:
            fields[key] = value.strip()
    return fields


def carried(fields: Mapping[str, str]) -> dict[str, str]:
    """Fields that were read, as a copy of their message can carry them: what is no printable ASCII
    is percent-encoded.
    """
    in_names = _PRINTABLE.replace(" ", "").replace(":", "")
    return {
        quote(name, safe=in_names): quote(value, safe=_PRINTABLE) for name, value in fields.items()
    }


def status(block: bytes) -> str:
    """The three digits of a status line (`NATS/1.0 503`), or an empty string."""
    if block.startswith(PREAMBLE + b" "):
        return block[9:12].decode("ascii", "replace")
    return ""


def encode_metadata(metadata: Mapping[str, str]) -> str:
    """Metadata as one header value: `key=value` pairs, percent-encoded, joined by commas.

    Raises:
        ConfigError: a key or a value has a lone surrogate, which no encoding can carry.
    """
    try:
        return ",".join(
            f"{quote(key, safe='')}={quote(value, safe='')}" for key, value in metadata.items()
        )
    except UnicodeEncodeError as error:
        raise ConfigError(f"metadata cannot be encoded: {error.object!r} is no text") from None


def decode_metadata(value: str) -> dict[str, str]:
    """The inverse of `encode_metadata`; pairs without `=` are left out."""
    pairs = (pair.partition("=") for pair in value.split(","))
    return {unquote(key): unquote(text) for key, equals, text in pairs if equals}
