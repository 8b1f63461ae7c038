"""Which instances there are: their records in the bucket, and what they answer to `$SRV.STATS`.

Either may be missing: a killed instance has a record until it expires, and a server without
JetStream has no records at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import msgspec

from dynbus.bus.background import task_group
from dynbus.bus.errors import DynbusError
from dynbus.bus.protocol.names import TOKEN, InstanceName
from dynbus.bus.protocol.wire import InstanceRecord
from dynbus.bus.records.leases import INSTANCES_STREAM, record_of
from dynbus.bus.records.reading import read_latest
from dynbus.bus.transport import NoStream

from .server import Server

ANSWER_SECONDS: Final = 1.0
"""Seconds that instances have to answer; above 100 of them they spread their answers over 0.25."""
QUIET_SECONDS: Final = 0.4
"""Seconds without a further answer after which nobody else is expected."""
READ_SECONDS: Final = 3.0
"""Seconds within which all records must have been read."""

NO_STATUS: Final[Mapping[str, str]] = MappingProxyType({})


class InstanceAnswer(NamedTuple):
    """What an instance said of itself.

    Attributes:
        started: Unix time.
        status: what its process says of how it is.
    """

    namespace: str
    component: str
    instance_id: str
    endpoints: tuple[str, ...]
    started: float
    running: int
    waiting: int
    draining: bool
    status: Mapping[str, str] = NO_STATUS


class Row(NamedTuple):
    """One instance as `dynbus ps` shows it.

    Attributes:
        state: serving, draining, silent or unlisted.
        started: Unix time; 0 when unknown.
        answers: whether `running` and `waiting` are known.
        metadata: what its record says; empty without one.
        status: what its process says of how it is; empty without an answer.
    """

    namespace: str
    component: str
    instance_id: str
    state: str
    started: float
    answers: bool
    running: int
    waiting: int
    endpoints: tuple[str, ...]
    address: str
    metadata: Mapping[str, str]
    status: Mapping[str, str] = NO_STATUS

    def to_json(self, now: float) -> dict[str, Any]:
        """The row for programs; `age` is in seconds."""
        fields = self._asdict() | {"status": dict(self.status)}
        fields["age"] = round(max(0.0, now - self.started), 1) if self.started else None
        if not self.answers:
            fields["running"] = fields["waiting"] = None
        del fields["answers"]
        return fields


class Survey(NamedTuple):
    """The instances, and what a user should know about how complete they are."""

    rows: list[Row]
    notice: str


async def survey(server: Server) -> Survey:
    """Ask the server and all instances, within bounded time.

    Raises:
        PermissionDenied, Unavailable: the server cannot be used.
    """
    notice = ""
    records: list[InstanceRecord] = []

    async def read_records() -> None:
        nonlocal notice, records
        try:
            records = await _read_records(server)
        except DynbusError as error:
            notice = f"the records cannot be read ({error}): only instances that answer are shown"

    async with task_group() as tasks:
        tasks.start_soon(read_records)
        answers = await server.ask(
            ("$SRV.STATS",),
            b"",
            lambda message: parse_answer(message.data),
            seconds=ANSWER_SECONDS,
            quiet=QUIET_SECONDS,
        )
    return Survey(join(records, answers), notice)


def join(records: Iterable[InstanceRecord], answers: Iterable[InstanceAnswer]) -> list[Row]:
    """Rows by component and start, out of what is listed and what answers."""
    by_key = {InstanceName(*one[:3]): one for one in answers}
    rows: list[Row] = []
    for record in records:
        key = record.name
        answer = by_key.pop(key, None)
        draining = record.draining or (answer is not None and answer.draining)
        state = "silent" if answer is None else "draining" if draining else "serving"
        rows.append(
            Row(
                *key,
                state,
                record.started,
                answer is not None,
                answer.running if answer is not None else 0,
                answer.waiting if answer is not None else 0,
                tuple(record.endpoints),
                record.address,
                record.metadata,
                answer.status if answer is not None else NO_STATUS,
            )
        )
    for key, answer in by_key.items():
        state = "draining" if answer.draining else "unlisted"
        load = (answer.running, answer.waiting)
        endpoints, status = answer.endpoints, answer.status
        row = Row(*key, state, answer.started, True, *load, endpoints, "", {}, status)
        rows.append(row)
    return sorted(rows, key=lambda row: (row.namespace, row.component, row.started))


def parse_answer(data: bytes) -> InstanceAnswer | None:
    """Read an answer to `$SRV.STATS`; None when it is not that of a dynbus instance."""
    try:
        found = msgspec.json.decode(data, type=_Stats)
        started = datetime.fromisoformat(found.started).timestamp()
    except (msgspec.DecodeError, ValueError, OverflowError, RecursionError):
        return None
    namespace = found.metadata.get("dynbus.namespace", "")
    component = found.name.removeprefix(f"{namespace}_")
    if component == found.name or not _are_names(namespace, component, found.id):
        return None
    return InstanceAnswer(
        namespace,
        component,
        found.id,
        tuple(endpoint.name for endpoint in found.endpoints),
        started,
        sum(endpoint.data.running for endpoint in found.endpoints),
        sum(endpoint.data.waiting for endpoint in found.endpoints),
        any(endpoint.data.draining for endpoint in found.endpoints),
        next((one.data.status for one in found.endpoints if one.data.status), NO_STATUS),
    )


def _are_names(*tokens: str) -> bool:
    return all(map(TOKEN.fullmatch, tokens))


class _Load(msgspec.Struct, frozen=True):
    running: int = 0
    waiting: int = 0
    draining: bool = False
    status: dict[str, str] = {}


class _Endpoint(msgspec.Struct, frozen=True):
    name: str
    data: _Load = _Load()


class _Stats(msgspec.Struct, frozen=True):
    name: str
    id: str
    started: str
    endpoints: list[_Endpoint]
    metadata: dict[str, str] = {}


async def _read_records(server: Server) -> list[InstanceRecord]:
    try:
        latest = await read_latest(
            server.connection.jetstream, INSTANCES_STREAM.name, timeout=READ_SECONDS
        )
    except NoStream:
        return []  # no instance has ever been started on this server
    records = map(record_of, latest.values())
    return [record for record in records if record is not None]
