"""A survey of instances: their records in the bucket, and their answers to `$SRV.STATS`.

Either may be missing: a killed instance has a record until it expires, and a server without
JetStream has no records at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from types import MappingProxyType
from typing import Annotated, Any, Final, NamedTuple

import msgspec

from dynbus.bus.background import task_group
from dynbus.bus.clock import monotonic, unix_time
from dynbus.bus.context import MAX_ID_LENGTH
from dynbus.bus.errors import DynbusError
from dynbus.bus.protocol.names import TOKEN, InstanceName
from dynbus.bus.protocol.wire import InstanceRecord
from dynbus.bus.records.abroad import Abroad, RegionAbroad, read_abroad
from dynbus.bus.records.instance_records import read_instances
from dynbus.bus.transport import NoStream

from .server import Server

ANSWER_SECONDS: Final = 1.0
"""Seconds that instances have to answer; above 100 of them they spread their answers over 0.25."""
STATS: Final = "$SRV.STATS"
QUIET_SECONDS: Final = 0.4
"""Seconds without a further answer after which nobody else is expected."""
READ_SECONDS: Final = 3.0
"""Seconds within which all records must have been read."""

# Each of a component's instances is asked, and none of them is to make much of a little: what is
# named once is shown with each request.
RequestId = Annotated[str, msgspec.Meta(max_length=MAX_ID_LENGTH)]
Name = Annotated[str, msgspec.Meta(max_length=256)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
MOST_AWAITED: Final = 64
"""Components that a held request may name."""
MOST_NAMED_REQUESTS: Final = 256
"""Requests that an answer may name in each place."""


class Counts(NamedTuple):
    """The counters of an instance since its start, and its present figures.

    Attributes:
        at: when it was asked, on the monotonic clock.
        streams: calls of streaming endpoints that run.
        items: those that streams have sent.
        seconds: that handlers ran, of the calls that are over.
        figures: what it says of itself, as `ProcessStatus.figures`.
    """

    at: float
    calls: int
    errors: int
    streams: int
    items: int
    seconds: float
    figures: Mapping[str, float]


class Request(NamedTuple):
    """A request that runs or waits at an instance.

    Attributes:
        age: seconds since it arrived there.
    """

    request_id: str
    endpoint: str
    age: float
    waits: bool


class HeldRequest(msgspec.Struct, frozen=True):
    """A request that no instance has: a process holds it until one of a component is there.

    Attributes:
        age: seconds since it is held.
        awaits: each of the components, `namespace.component`.
    """

    id: RequestId
    age: float
    awaits: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MOST_AWAITED)]


class Held(msgspec.Struct, frozen=True):
    """The oldest requests that a process holds.

    Attributes:
        process: the first digits of its client's id; several instances may be in it.
        count: how many it holds in all.
    """

    process: Name
    count: Count
    requests: Annotated[tuple[HeldRequest, ...], msgspec.Meta(max_length=MOST_NAMED_REQUESTS)]


NOTHING: Final[Mapping[str, str]] = MappingProxyType({})


class InstanceReport(NamedTuple):
    """One instance as `dynbus ps` shows it.

    Attributes:
        state: serving, draining, silent, unlisted, or unknown where it could not be asked.
        started: Unix time.
        answers: whether `running` and `waiting` are known.
        metadata: what its record says; empty without one.
        status: what its process says of how it is; empty without an answer.
        counts: None without an answer.
        schemas: the schema hash of each endpoint that its record tells.
        requests: the oldest ones that it has; None where it does not tell, or was not asked.
        zone, host: where it is, as its record says.
        version: of dynbus in its process; empty where it does not tell.
        clock: seconds by which its clock is ahead of this machine's, less what its answer took;
            None where it does not tell.
        region: the other region that it is in, as a copy of its record says; empty for that of the
            server that was asked.
        held: requests that its process holds; None where it does not tell, or was not asked.
    """

    namespace: str
    component: str
    instance_id: str
    state: str = "silent"
    started: float = 0.0
    answers: bool = False
    running: int = 0
    waiting: int = 0
    endpoints: tuple[str, ...] = ()
    address: str = ""
    metadata: Mapping[str, str] = NOTHING
    status: Mapping[str, str] = NOTHING
    counts: Counts | None = None
    schemas: Mapping[str, str] = NOTHING
    requests: tuple[Request, ...] | None = None
    zone: str = ""
    host: str = ""
    version: str = ""
    clock: float | None = None
    region: str = ""
    held: Held | None = None

    @classmethod
    def read(cls, data: bytes, now: float = 0.0) -> InstanceReport | None:
        """The answer of an instance to `$SRV.STATS`, as of one that no record lists; None when it
        is not a dynbus instance.

        Args:
            now: on the monotonic clock.
        """
        try:
            stats = msgspec.json.decode(data, type=_Stats)
            started = datetime.fromisoformat(stats.started).timestamp()
        except (msgspec.DecodeError, ValueError, OverflowError, RecursionError):
            return None
        namespace = stats.metadata.get("dynbus.namespace", "")
        component = stats.name.removeprefix(f"{namespace}_")
        if component == stats.name or not _are_names(namespace, component, stats.id):
            return None
        loads = [endpoint.data for endpoint in stats.endpoints]
        requests = [
            Request(each.id, endpoint.name, each.age, each.waits)
            for endpoint in stats.endpoints
            for each in endpoint.data.requests or ()
        ]
        return cls(
            namespace,
            component,
            stats.id,
            "draining" if any(load.draining for load in loads) else "unlisted",
            started,
            True,
            sum(load.running for load in loads),
            sum(load.waiting for load in loads),
            tuple(endpoint.name for endpoint in stats.endpoints),
            status=next((load.status for load in loads if load.status), NOTHING),
            counts=Counts(
                now,
                calls=sum(endpoint.num_requests for endpoint in stats.endpoints),
                errors=sum(endpoint.num_errors for endpoint in stats.endpoints),
                streams=sum(load.running for load in loads if load.items is not None),
                items=sum(load.items or 0 for load in loads),
                seconds=sum(endpoint.processing_time for endpoint in stats.endpoints) / 1e9,
                figures=next((load.figures for load in loads if load.figures), dict[str, float]()),
            ),
            requests=None if all(load.requests is None for load in loads) else tuple(requests),
            version=next((load.version for load in loads if load.version), ""),
            clock=next((load.time - unix_time() for load in loads if load.time), None),
            held=stats.held,
        )

    def to_json(self, now: float) -> dict[str, Any]:
        """The row for programs; `age` is in seconds."""
        fields = self._asdict()
        fields |= {"metadata": dict(self.metadata), "status": dict(self.status)}
        fields["schemas"] = dict(self.schemas)
        fields["age"] = round(max(0.0, now - self.started), 1) if self.started else None
        if not self.answers:
            fields["running"] = fields["waiting"] = None
        for name in ("answers", "counts", "requests", "held", "clock"):
            del fields[name]
        return fields


class Survey(NamedTuple):
    """The instances, and what a user should know about how complete they are.

    Attributes:
        region: that of the server that was asked; empty for none.
        abroad: the other regions of which anything was heard, and since when nothing.
    """

    rows: list[InstanceReport]
    notice: str
    region: str = ""
    abroad: tuple[RegionAbroad, ...] = ()


async def survey(server: Server, requests: int = 0) -> Survey:
    """Ask the server and all instances, within bounded time.

    Args:
        requests: how many of those that it has each instance is to name.

    Raises:
        PermissionDenied, Unavailable: the server cannot be used.
    """
    notice = ""
    records: list[tuple[str, InstanceRecord]] = []
    abroad = Abroad()

    async def read_records() -> None:
        nonlocal notice, records, abroad
        try:
            records = [("", record) for record in await _read_records(server)]
            abroad = await _read_abroad(server)
            records += abroad.records
        except DynbusError as error:
            notice = f"the records cannot be read ({error}): only instances that answer are shown"

    async with task_group() as tasks:
        tasks.start_soon(read_records)
        answers = await server.ask(
            (STATS,),
            msgspec.json.encode({"requests": requests}) if requests else b"",
            lambda message: InstanceReport.read(message.data, monotonic()),
            seconds=ANSWER_SECONDS,
            quiet=QUIET_SECONDS,
        )
    may_ask = not server.connection.refusal_of(STATS)
    if not may_ask:
        refused = "this credential may not ask instances: how they are is unknown"
        notice = f"{notice}; {refused}" if notice else refused
    rows = join(records, answers, may_ask=may_ask)
    return Survey(rows, notice, server.connection.region, abroad.regions)


def join(
    records: Iterable[tuple[str, InstanceRecord]],
    answers: Iterable[InstanceReport],
    *,
    may_ask: bool = True,
) -> list[InstanceReport]:
    """Rows by component and start, out of what is listed, each with its region, and what
    answers.

    Args:
        may_ask: whether one without an answer has kept it back.
    """
    unanswered = "silent" if may_ask else "unknown"
    rows = {InstanceName(*row[:3]): row for row in answers}
    for region, record in records:
        row = rows.get(record.name, InstanceReport(*record.name))
        draining = record.draining or row.state == "draining"
        rows[record.name] = row._replace(
            state=unanswered if not row.answers else "draining" if draining else "serving",
            started=record.started,
            endpoints=tuple(record.endpoints),
            address=record.address,
            metadata=record.metadata,
            schemas=record.schemas,
            zone=record.zone,
            host=record.host,
            region=region,
        )
    return sorted(rows.values(), key=lambda row: (row.namespace, row.component, row.started))


def _are_names(*tokens: str) -> bool:
    return all(map(TOKEN.fullmatch, tokens))


class _Request(msgspec.Struct, frozen=True):
    id: RequestId
    age: float = 0.0
    waits: bool = False


class _Load(msgspec.Struct, frozen=True):
    running: Count = 0
    waiting: Count = 0
    draining: bool = False
    items: Count | None = None
    status: dict[str, str] = {}
    figures: dict[str, float] = {}
    requests: Annotated[list[_Request], msgspec.Meta(max_length=MOST_NAMED_REQUESTS)] | None = None
    version: Name = ""
    time: float = 0.0


class _Endpoint(msgspec.Struct, frozen=True):
    name: Name
    num_requests: Count = 0
    num_errors: Count = 0
    processing_time: Count = 0
    data: _Load = _Load()


class _Stats(msgspec.Struct, frozen=True):
    name: str
    id: str
    started: str
    endpoints: list[_Endpoint]
    metadata: dict[str, str] = {}
    held: Held | None = None


async def _read_records(server: Server) -> list[InstanceRecord]:
    try:
        return await read_instances(server.connection.jetstream, timeout=READ_SECONDS)
    except NoStream:
        return []  # no instance has ever been started on this server


async def _read_abroad(server: Server) -> Abroad:
    connection = server.connection
    if not connection.region:
        return Abroad()
    try:
        return await read_abroad(connection.jetstream, connection.region, timeout=READ_SECONDS)
    except NoStream:
        return Abroad()  # nobody here has looked abroad yet
