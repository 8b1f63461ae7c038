"""The streams and buckets of a namespace, of all that dynbus has."""

from __future__ import annotations

from dynbus.bus.records.leases import INSTANCES_STREAM
from dynbus.bus.records.objects import bucket_stream
from dynbus.bus.transport import StreamConfig
from dynbus.bus.work_queue import HOLDERS_STREAM, dead_letter_config
from dynbus.kvrouter.stream import kv_streams
from dynbus.transfer.exchange import AGENTS_STREAM, DESCRIPTIONS

from .disaggregated.settings import SETTINGS_STREAM
from .models.artefacts import ARTEFACTS_STREAM
from .models.names import NAMES_STREAM
from .models.records import CARDS_STREAM
from .resumable.store import LOGS_STREAM


def all_streams(namespace: str) -> list[StreamConfig]:
    """What the processes of a namespace need, but for its queues of jobs, which have names of
    their own."""
    return [
        INSTANCES_STREAM,
        HOLDERS_STREAM,
        dead_letter_config(namespace),
        *kv_streams(namespace),
        AGENTS_STREAM,
        bucket_stream(DESCRIPTIONS),
        CARDS_STREAM,
        NAMES_STREAM,
        ARTEFACTS_STREAM,
        SETTINGS_STREAM,
        LOGS_STREAM,
    ]
