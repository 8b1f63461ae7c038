"""The JetStream streams and buckets that a namespace needs, of all that dynbus has."""

from __future__ import annotations

from dynbus.kvrouter import kv_streams
from dynbus.spi import NeededStream, StreamConfig
from dynbus.transfer import AGENTS_STREAM, DESCRIPTIONS

from .batches.store import FILES, RECORDS_STREAM
from .disaggregated.settings import SETTINGS_STREAM
from .models.artefacts import ARTEFACTS_STREAM
from .models.names import NAMES_STREAM
from .models.records import ABROAD_CARDS_STREAM, CARDS_STREAM
from .responses.store import RESPONSES
from .resumable.store import LOGS_STREAM
from .tenants.counting import COUNTS_STREAM
from .tenants.recording import USAGE_STREAM
from .tenants.records import KEYS_STREAM


def abroad_streams(region: str) -> list[NeededStream]:
    """The streams in which a region keeps what others say of themselves.

    Args:
        region: that of the servers; empty for none, which needs no such streams.
    """
    return [*NeededStream.of_region(region), NeededStream(ABROAD_CARDS_STREAM)] if region else []


def all_streams(namespace: str) -> list[StreamConfig]:
    """The streams that the processes of a namespace need, but for its queues of jobs, which have
    names of their own."""
    return [
        *NeededStream.of_kernel(namespace),
        *kv_streams(namespace),
        AGENTS_STREAM,
        DESCRIPTIONS.stream,
        CARDS_STREAM,
        NAMES_STREAM,
        ARTEFACTS_STREAM,
        SETTINGS_STREAM,
        LOGS_STREAM,
        KEYS_STREAM,
        COUNTS_STREAM,
        USAGE_STREAM,
        RECORDS_STREAM,
        FILES.stream,
        RESPONSES.stream,
    ]
