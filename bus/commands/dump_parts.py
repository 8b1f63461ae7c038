"""The parts of `dynbus dump`: the files in it, and the functions that collect them."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from importlib import metadata
from typing import Any, Final, NamedTuple

import anyio
import msgspec

from dynbus.bus.background import task_group
from dynbus.bus.clock import monotonic, unix_time
from dynbus.bus.config import BusConfig
from dynbus.bus.errors import DynbusError, PermissionDenied, describe_exception
from dynbus.bus.protocol.names import dead_letter_stream, queue_of_stream, topic_of_stream
from dynbus.bus.serving.services import MOST_REQUESTS
from dynbus.bus.telemetry.logs import redact_url
from dynbus.bus.telemetry.recent_log import MOST_RECORDS
from dynbus.bus.transport import Message

from .diagnosis import STREAMS, diagnose
from .fleet_diagnosis import diagnose_fleet
from .listing import API_SECONDS, pages
from .ps import requests_json
from .queue import QueueFilter, list_queues
from .queue_report import consumers_of
from .server import Server
from .survey import ANSWER_SECONDS, QUIET_SECONDS, STATS, InstanceReport, Survey, survey
from .topic import list_topics, topic_json
from .version import versions

ENTRY_POINTS: Final = "dynbus.dump"
"""The group of functions of other packages, `async (config: BusConfig) -> Any`, each of which gives
the contents of the file of its name; the first line of its docstring says what these are."""
SECONDS: Final = 25.0
"""Seconds for all of it, less those of the connection."""
AT_A_TIME: Final = 8
ASKED_AT_ONCE: Final = 50
"""Instances that send their logs at once, of some 50 kB each."""
LOG_SECONDS: Final = 15.0
"""Seconds after which no more instances are asked for their logs."""
_SERVER_FACTS: Final = ("server_name", "version", "cluster", "domain", "jetstream", "max_payload")

Collect = Callable[[], Awaitable[Any]]


class Part(NamedTuple):
    """A file of a dump.

    Attributes:
        about: its contents, in a phrase.
        missing: the reason for which it could not be had; empty where it could.
    """

    path: str
    about: str
    data: bytes
    missing: str = ""


class _Source(NamedTuple):
    path: str
    about: str
    collect: Collect


async def collect_parts(server: Server, seconds: float = SECONDS) -> list[Part]:
    """Collect what can be had within so many seconds; what cannot is a part that says why.

    Raises:
        PermissionDenied, Unavailable: nothing at all can be asked.
    """
    end = monotonic() + seconds
    limiter = anyio.CapacityLimiter(AT_A_TIME)
    parts: list[Part] = []

    async def run(source: _Source) -> None:
        async with limiter:
            parts.append(await _collect(source, max(0.0, end - monotonic()), seconds))

    looked = await survey(server, MOST_REQUESTS)
    streams: list[str] | DynbusError
    try:
        streams = await _stream_names(server)
    except DynbusError as error:
        streams = error
    async with task_group() as tasks:
        for source in _sources(server, looked, streams):
            tasks.start_soon(run, source)
    return sorted(parts)


async def _collect(source: _Source, left: float, seconds: float) -> Part:
    missing = f"it was not there within the {seconds:g} s for all of it"
    with anyio.move_on_after(left):
        try:
            return Part(source.path, source.about, _encode(await source.collect()))
        except DynbusError as error:
            missing = f"{error.code}: {error}"
        except Exception as error:  # noqa: BLE001 - whatever a part of others raises concerns it alone
            missing = describe_exception(error)
    missing = redact_url(missing)
    return Part(source.path, source.about, _encode({"missing": missing}), missing)


def _encode(value: Any) -> bytes:
    plain = msgspec.to_builtins(value, str_keys=True)
    return msgspec.json.format(msgspec.json.encode(_redacted(plain)), indent=2)


def _redacted(value: Any) -> Any:
    """Plain values without the credentials of URLs in them."""
    kind: object = value.__class__
    if kind is str:
        return redact_url(value)
    if kind is dict:
        return {_redacted(key): _redacted(one) for key, one in value.items()}
    return [_redacted(one) for one in value] if kind is list or kind is tuple else value


# Sources -----------------------------------------------------------------------------------


def _sources(server: Server, looked: Survey, streams: list[str] | DynbusError) -> Iterable[_Source]:
    rows = looked.rows
    yield _Source("versions.json", "versions here, and of the server", partial(_versions, server))
    about = "`dynbus doctor --all`: the server, and hosts by their instances"
    yield _Source("doctor.json", about, partial(_doctor, server.config))
    about = "`dynbus ps`: the instances"
    yield _Source("instances.json", about, partial(_instances, looked))
    about = "the oldest requests at each instance, and those that are held, by their ids"
    yield _Source("requests.json", about, partial(_requests, server, rows))
    about = "the last warnings and errors of each process with an instance"
    yield _Source("log.json", about, partial(_logs, server, rows))
    if isinstance(streams, DynbusError):
        about = "the streams of dynbus, which could not be listed"
        yield _Source("streams.json", about, partial(_raise, streams))
        streams = []
    for name in streams:
        about = "a stream and its consumers, as the server tells them"
        yield _Source(f"streams/{name}.json", about, partial(_stream, server, name))
    for namespace in sorted({row.namespace for row in rows} | set(_namespaces(streams))):
        about = "`dynbus queue ls`: the queues of a namespace"
        wanted = QueueFilter(namespace)
        yield _Source(f"queues/{namespace}.json", about, partial(_queues, server, wanted))
        about = "`dynbus topic ls`: the topics of a namespace"
        yield _Source(f"topics/{namespace}.json", about, partial(_topics, server, namespace))
    for entry_point in metadata.entry_points(group=ENTRY_POINTS):
        yield _of_package(entry_point, server.config)


def _namespaces(streams: Iterable[str]) -> Iterable[str]:
    dead = dead_letter_stream("")
    for stream in streams:
        if queue := queue_of_stream(stream):
            yield queue.namespace
        elif topic := topic_of_stream(stream):
            yield topic[0]
        elif stream.startswith(dead):
            yield stream.removeprefix(dead)


def _of_package(entry_point: metadata.EntryPoint, config: BusConfig) -> _Source:
    path = f"{entry_point.name}.json"
    try:
        collect = entry_point.load()
    except Exception as error:  # noqa: BLE001 - also of an extra that is not there
        return _Source(path, entry_point.value, partial(_raise, error))
    about = (inspect.getdoc(collect) or entry_point.value).partition("\n")[0].rstrip(".")
    return _Source(path, about, partial(collect, config))


async def _raise(error: Exception) -> None:
    raise error


async def _versions(server: Server) -> dict[str, Any]:
    info = server.connection.server_info
    return {
        "time": round(unix_time(), 3),
        "versions": versions(),
        "servers": server.config.servers,
        "server": {name: info[name] for name in _SERVER_FACTS if name in info},
    }


async def _doctor(config: BusConfig) -> list[dict[str, Any]]:
    checks = [*await diagnose(config), *await diagnose_fleet(config)]
    return [check._asdict() for check in checks]


async def _instances(looked: Survey) -> dict[str, Any]:
    now = unix_time()
    return {"notice": looked.notice, "instances": [row.to_json(now) for row in looked.rows]}


async def _requests(server: Server, rows: Sequence[InstanceReport]) -> list[dict[str, Any]]:
    _check_asked(server)
    return requests_json(rows)


def _check_asked(server: Server) -> None:
    if refusal := server.connection.refusal_of(STATS):
        raise PermissionDenied(f"instances cannot be asked: {refusal}")


async def _stream_names(server: Server) -> list[str]:
    names: list[str] = []
    async for page in pages(server.connection.jetstream, "STREAM.NAMES", {}):
        names += page["streams"] or ()
    return sorted(name for name in names if name.startswith(STREAMS))


async def _stream(server: Server, name: str) -> dict[str, Any]:
    jetstream = server.connection.jetstream
    stream = await jetstream.api(f"STREAM.INFO.{name}", {}, timeout=API_SECONDS)
    return {"stream": stream, "consumers": await consumers_of(jetstream, name)}


async def _queues(server: Server, wanted: QueueFilter) -> list[dict[str, Any]]:
    rows = await list_queues(server.connection.jetstream, wanted)
    return [row._asdict() for row in rows]


async def _topics(server: Server, namespace: str) -> list[dict[str, Any]]:
    return [topic_json(row) for row in await list_topics(server.connection, namespace)]


# Logs --------------------------------------------------------------------------------------


class _Log(msgspec.Struct, frozen=True):
    process: str
    records: list[dict[str, Any]]


class _Answer(msgspec.Struct, frozen=True):
    name: str
    id: str
    log: _Log


def _read_log(message: Message) -> _Answer | None:
    try:
        return msgspec.json.decode(message.data, type=_Answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None  # of an older instance, or the server's word that it is gone


async def _logs(server: Server, rows: Sequence[InstanceReport]) -> dict[str, Any]:
    """The records of each process once, with the instances in it."""
    _check_asked(server)
    question = msgspec.json.encode({"log": MOST_RECORDS})
    silent = {
        (f"{row.namespace}_{row.component}", row.instance_id): (
            f"{row.namespace}.{row.component}@{row.instance_id}"
        )
        for row in rows
    }
    processes: dict[str, dict[str, Any]] = {}
    services, begun = list(silent), monotonic()
    for first in range(0, len(services), ASKED_AT_ONCE):
        if monotonic() - begun > LOG_SECONDS:
            break
        subjects = [
            f"{STATS}.{name}.{one}" for name, one in services[first : first + ASKED_AT_ONCE]
        ]
        for answer in await server.ask(
            subjects, question, _read_log, seconds=ANSWER_SECONDS, quiet=QUIET_SECONDS
        ):
            label = silent.pop((answer.name, answer.id), None)
            if label is not None:
                process = processes.setdefault(
                    answer.log.process, {"instances": [], "records": answer.log.records}
                )
                process["instances"].append(label)
    return {"processes": processes, "without": sorted(silent.values())}
