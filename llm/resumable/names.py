"""The names of resumable streams: their subjects, and the stream with their logs."""

from __future__ import annotations

from typing import Final

STREAMS: Final = "_streams"
STREAM_LOGS: Final = "DYNBUS_STREAMS"
"""The stream with the logs of resumable streams of front ends."""


def stream_log_subject(key: str) -> str:
    """The subject under which the log of one resumable stream is stored; `*` for any."""
    return f"{STREAMS}.log.{key}"


STREAM_LOGS_MARK: Final = f"{STREAMS}.log.mark"
"""The subject of the marker: it is stored after all that was stored before, and is of no stream."""


def stream_owner_subject(front_end: str) -> str:
    """The subject at which one front end is asked whether it goes on with a resumable stream."""
    return f"{STREAMS}.owner.{front_end}"
