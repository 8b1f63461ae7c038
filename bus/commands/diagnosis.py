"""The checks of `dynbus doctor`: functions from what was found to a verdict, and the finding."""

from __future__ import annotations

import importlib.util
import logging
import re
import resource
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any, Final, Literal, NamedTuple

import anyio

from dynbus.bus.clock import unix_time
from dynbus.bus.config import BusConfig
from dynbus.bus.errors import ConfigError, DynbusError, PermissionDenied, Unavailable
from dynbus.bus.extras import EXTRAS, has_extra, how_to_install
from dynbus.bus.nats.api_requests import unix_seconds
from dynbus.bus.nats.connection import NatsConnection
from dynbus.bus.nats.jetstream import SETUP, NatsJetStream
from dynbus.bus.nats.regions import KEEP_APART, count_keepers
from dynbus.bus.nats.server_process import Address, find_nats_server
from dynbus.bus.nats.stream_config import misfits, stream_request
from dynbus.bus.protocol.names import ABROAD, INSTANCES_BUCKET
from dynbus.bus.records.instance_records import INSTANCES_STREAM, MARKER_TTL
from dynbus.bus.records.instance_view import EXPIRY_GRACE
from dynbus.bus.telemetry.logs import redact_url
from dynbus.bus.transport import NoStream, StoredMessage, StreamConfig, StreamInfo

from .terminal import terminal

logger = logging.getLogger(__name__)

OLDEST_VERSION: Final = (2, 11, 0)
FAULTY_VERSIONS: Final[dict[tuple[int, ...], str]] = {(2, 14, 5): "it may deliver 10 to 18 s late"}
SMALLEST_PAYLOAD: Final = 64 * 1024
USUAL_PAYLOAD: Final = 1024 * 1024
SLOW_ROUND_TRIP: Final = 0.01
CLOCK_WARN: Final = 1.0
CLOCK_FAIL: Final = 10.0
EPOCH_SKEW: Final = 24 * 3600.0
FEW_DESCRIPTORS: Final = 1024
LEAST_FREE_STORAGE: Final = 1024 * 1024
SMALL_STORAGE: Final = 256 * 1024 * 1024
STREAMS: Final = ("KV_dynbus_", "OBJ_dynbus_", "OBJ_DYNBUS_", "DYNBUS_")
ROUND_TRIPS: Final = 21
API_SECONDS: Final = 5.0
REGION_SECONDS: Final = 1.0
LOOKS: Final = 3
LOOK_SECONDS: Final = 0.1

Status = Literal["ok", "warn", "fail", "unknown"]


class Check(NamedTuple):
    """A verdict.

    Attributes:
        status: `unknown` where the credential may not look.
        remedy: what to do; empty when nothing has to be done.
    """

    name: str
    status: Status
    found: str
    remedy: str = ""


async def diagnose(config: BusConfig) -> list[Check]:
    """Carry out every check that is possible; bounded by some seconds."""
    return [*await _check_server(config), *check_machine()]


# Verdicts ----------------------------------------------------------------------------------


def check_version(text: str) -> Check:
    """Check that the server is new enough."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", text)
    version = tuple(int(part) for part in match.groups()) if match else ()
    if version < OLDEST_VERSION:
        return Check(
            "server version", "fail", text, "2.11 or newer is needed: leases use message TTLs"
        )
    if version in FAULTY_VERSIONS:
        return Check("server version", "warn", text, f"{FAULTY_VERSIONS[version]}: use another")
    return Check("server version", "ok", text)


def check_payload(max_payload: int) -> Check:
    """Check that messages may be large enough."""
    text = f"{max_payload} bytes"
    if max_payload < SMALLEST_PAYLOAD:
        return Check(
            "max_payload", "fail", text, f"set max_payload to {USUAL_PAYLOAD} in the server's file"
        )
    if max_payload < USUAL_PAYLOAD:
        return Check(
            "max_payload", "warn", text, "works; larger items are split more, so 1MB is better"
        )
    return Check("max_payload", "ok", text)


def check_headers(supported: bool) -> Check:
    """Check that the server carries headers."""
    if supported:
        return Check("headers", "ok", "supported")
    return Check(
        "headers", "fail", "switched off", "remove no_header_support from the server's file"
    )


def check_round_trip(seconds: float) -> Check:
    """Check that the server is near."""
    text = f"{seconds * 1000:.2f} ms (median)"
    if seconds > SLOW_ROUND_TRIP:
        return Check("round trip", "warn", text, "every call takes two of these: move nearer")
    return Check("round trip", "ok", text)


def check_clock(skew: float) -> Check:
    """Check that this machine's clock agrees with the server's; `skew` is ours minus its."""
    text = f"{skew:+.3f} s against the server"
    remedy = f"set the clock with NTP: {_broken_by(abs(skew))}"
    if abs(skew) > CLOCK_FAIL:
        return Check("clock", "fail", text, remedy)
    if abs(skew) > CLOCK_WARN:
        return Check("clock", "warn", text, remedy)
    return Check("clock", "ok", text)


def _broken_by(skew: float) -> str:
    """The consequence of a clock that is wrong by so many seconds."""
    broken = (
        "ages and stalenesses that are shown, and the order of logs and traces, are wrong by that; "
        "deadlines, leases, jobs, resumable streams and files of models are not, they count from "
        "the server's time"
    )
    if skew > EPOCH_SKEW:
        broken += "; the KV-cache events of this machine's engines are refused"
    return broken


def check_limits(account: Mapping[str, Any]) -> Check:
    """Check that the account may store enough; takes the answer to `$JS.API.INFO`."""
    limits: Mapping[str, Any] = account.get("limits") or {}
    most = int(limits.get("max_storage", -1))
    used = int(account.get("storage", 0))
    streams = int(limits.get("max_streams", -1))
    text = f"{used} bytes used, limit {'none' if most < 0 else most}"
    if most == 0 or 0 <= most - used < LEAST_FREE_STORAGE:
        return Check("JetStream storage", "fail", text, "raise max_store, or free some")
    if 0 < most < SMALL_STORAGE or 0 <= streams < 10:
        return Check("JetStream storage", "warn", text, "raise max_store to 256MB or more")
    return Check("JetStream storage", "ok", text)


def check_bucket(config: Mapping[str, Any] | None) -> Check:
    """Check that the bucket of instances is as dynbus makes it; None when it does not exist."""
    name = "instances bucket"
    if config is None:
        text = "not there yet; `dynbus setup` makes it, or the first instance that may"
        return Check(name, "ok", text)
    needed = stream_request(INSTANCES_STREAM)
    wrong = misfits(config, INSTANCES_STREAM)
    wrong += [
        f"{key} = {config.get(key)}, not {needed[key]}"
        for key in ("max_msgs_per_subject", "allow_direct")
        if config.get(key) != needed[key]
    ]
    marker = int(config.get("subject_delete_marker_ttl") or 0) / 1e9
    if marker < MARKER_TTL:
        wrong.append(f"subject_delete_marker_ttl = {marker:g} s, less than {MARKER_TTL:g} s")
    if not wrong and config.get("storage") == "memory":
        return Check(
            name,
            "ok",
            "in the server's memory, since its disk was full; in files again after a restart",
        )
    if wrong:
        return Check(
            name,
            "fail",
            "; ".join(wrong),
            f"delete the stream {INSTANCES_STREAM.name}: running instances make it again",
        )
    return Check(name, "ok", "as dynbus makes it")


def check_records(records: Sequence[StoredMessage], now: float, lease_ttl: float) -> Check:
    """Check that each record of an instance is renewed.

    Args:
        now: Unix time of the server.
        lease_ttl: seconds for which a record lives that does not say it.
    """
    name = "instance records"
    keys = [
        record.subject.removeprefix(f"$KV.{INSTANCES_BUCKET}.")
        for record in records
        if not record.is_marker and now - record.time > (record.ttl or lease_ttl) + EXPIRY_GRACE
    ]
    if not keys:
        return Check(name, "ok", "none has outlived its lease")
    more = f" and {len(keys) - 5} more" if keys[5:] else ""
    return Check(
        name,
        "warn",
        f"not renewed, and not expired: {', '.join(keys[:5])}{more}",
        "a killed server may bring such records back, and callers pass over them: "
        f"nats kv purge {INSTANCES_BUCKET} KEY, or `dynbus run --fresh` for the embedded server",
    )


def check_store(stream: str, write_error: str) -> Check:
    """Check that a stream takes writes; `write_error` is empty when it does."""
    if write_error:
        return Check(
            f"stream {stream}",
            "fail",
            f"takes no writes: {write_error}",
            "make room on the server's disk and restart it, or delete the stream: it is made again",
        )
    return Check(f"stream {stream}", "ok", "takes writes")


def check_replicas(
    stream: str, replicas: int, wanted: int, *, in_cluster: bool, behind: Sequence[str] = ()
) -> Check:
    """Check that a stream outlives each single server of its cluster.

    Args:
        behind: the servers of those that are to keep it that have not all of it.
    """
    name = f"replicas of {stream}"
    if not in_cluster:
        return Check(name, "ok", "1: the server is no cluster")
    if behind:
        return Check(
            name,
            "fail",
            f"complete at {max(0, replicas - len(behind))} of {replicas} servers, and not at "
            f"{', '.join(behind)}",
            "wait while it is copied, and bring back a server that is away; one that never comes "
            "back is taken out of JetStream by a user of the role system",
        )
    text = f"kept by {replicas} of the cluster's servers"
    if replicas >= wanted:
        return Check(name, "ok", text)
    return Check(
        name,
        "warn",
        text,
        f"with {wanted} servers the process that uses it raises that, if it may: "
        f"nats stream edit {stream} --replicas {wanted}",
    )


def unknown(name: str, what: str = "look") -> Check:
    """The verdict on what the credential may not look at."""
    remedy = "nothing, or look with one that may, such as an operator's: DYNBUS_CREDENTIALS"
    return Check(name, "unknown", f"this credential may not {what}", remedy)


def check_regions(kept: Mapping[str, int]) -> Check:
    """Check that each stream is kept in one region; `kept` has the number of regions of each."""
    twice = [name for name, regions in kept.items() if regions > 1]
    if not twice:
        return Check("regions", "ok", "what is published is stored once")
    more = f" and {len(twice) - 5} more" if twice[5:] else ""
    return Check(
        "regions",
        "fail",
        f"two regions store what is published to {', '.join(twice[:5])}{more}",
        KEEP_APART,
    )


def check_descriptors(soft: int) -> Check:
    """Check that this process may open enough files."""
    if soft != resource.RLIM_INFINITY and soft < FEW_DESCRIPTORS:
        return Check("file descriptors", "warn", f"at most {soft}", "raise it: ulimit -n 4096")
    text = "no limit" if soft == resource.RLIM_INFINITY else f"at most {soft}"
    return Check("file descriptors", "ok", text)


def check_machine() -> list[Check]:
    """The checks that need no server."""
    checks = [check_descriptors(resource.getrlimit(resource.RLIMIT_NOFILE)[0])]
    if importlib.util.find_spec("uvloop") is not None:
        checks.append(Check("uvloop", "ok", "installed"))
    else:
        checks.append(Check("uvloop", "warn", "missing", "pip install uvloop: calls cost less"))
    try:
        checks.append(Check("embedded server", "ok", str(find_nats_server())))
    except ConfigError as error:
        checks.append(Check("embedded server", "warn", "missing", str(error)))
    present = list(filter(has_extra, EXTRAS))
    missing = [name for name in EXTRAS if name not in present]
    hint = f"when needed: {how_to_install(*missing)}" if missing else ""
    checks.append(Check("extras", "ok", ", ".join(present) or "none", hint))
    return checks


# The server --------------------------------------------------------------------------------


async def _check_server(config: BusConfig) -> list[Check]:
    url = redact_url(", ".join(config.servers))
    async with AsyncExitStack() as exits:
        try:
            server = await exits.enter_async_context(terminal.server(config, "dynbus-doctor"))
        except PermissionDenied as error:
            remedy = "give credentials in the URL, or DYNBUS_CREDENTIALS"
            return [Check("server", "fail", redact_url(str(error)), remedy)]
        except DynbusError as error:
            return [Check("server", "fail", redact_url(str(error)), _how_to_start(config))]
        connection = server.connection
        info = connection.server_info
        try:
            checks = [
                Check("server", "ok", f"{url} ({info.get('server_name', '')})"),
                check_version(str(info.get("version", ""))),
                check_headers(bool(info.get("headers"))),
                check_payload(connection.max_payload),
                check_round_trip(await round_trip(connection)),
            ]
            return checks + await _check_jetstream(connection, config)
        except DynbusError as error:
            remedy = "it does not answer in time: is it overloaded?"
            return [Check("server", "fail", str(error), remedy)]


def _how_to_start(config: BusConfig) -> str:
    with suppress(ConfigError):
        is_plain = not config.demands_tls and not config.servers[0].startswith("tls:")
        if is_plain and Address.parse(config.servers[0]).is_loopback:
            return "`dynbus run` starts one here by itself, or name another with --nats URL"
    return "is it running, and the URL right? Give another with --nats URL or NATS_URL"


async def round_trip(connection: NatsConnection) -> float:
    """The median of some questions to the server, in seconds.

    Raises:
        Unavailable: it does not answer.
    """
    times: list[float] = []
    for _ in range(ROUND_TRIPS):
        began = time.perf_counter()
        await connection.barrier()
        times.append(time.perf_counter() - began)
    return sorted(times)[len(times) // 2]


async def _check_jetstream(connection: NatsConnection, config: BusConfig) -> list[Check]:
    jetstream = connection.jetstream
    try:
        account = await jetstream.api("INFO", {}, timeout=API_SECONDS)
        checks = [Check("JetStream", "ok", "enabled"), check_limits(account)]
    except PermissionDenied:
        checks = [unknown("JetStream storage")]
    except DynbusError as error:
        remedy = "start the server with -js, or allow JetStream to the account"
        if connection.server_info.get("cluster") and isinstance(error, Unavailable):
            remedy = (
                "JetStream has no leader, or elects one for some seconds: start the servers of the "
                "cluster that are away, since more than half of them must be there"
            )
        return [Check("JetStream", "fail", str(error), remedy)]
    is_set_up = True
    try:
        bucket = await jetstream.api(
            f"STREAM.INFO.{INSTANCES_STREAM.name}", {}, timeout=API_SECONDS
        )
        checks.append(check_bucket(bucket["config"]))
        checks += await _check_records(jetstream, unix_seconds(str(bucket["ts"])), config.lease_ttl)
    except NoStream:
        is_set_up = False
        checks.append(check_bucket(None))
    except PermissionDenied:
        checks.append(unknown("instances bucket"))
    except DynbusError as error:
        checks.append(Check("instances bucket", "fail", str(error), "allow $JS.API to the account"))
    checks += await _check_streams(connection, config.replicas)
    return checks + await _check_writing(connection, is_set_up)


async def _check_records(jetstream: NatsJetStream, now: float, lease_ttl: float) -> list[Check]:
    try:
        records = await jetstream.read(INSTANCES_STREAM.name, timeout=API_SECONDS)
    except NoStream:
        return []
    except PermissionDenied:
        return [unknown("instance records")]
    except DynbusError as error:
        remedy = "its servers may be electing a leader: try again in 10 s"
        return [Check("instance records", "fail", str(error), remedy)]
    return [check_records(records, now, lease_ttl)]


async def _check_streams(connection: NatsConnection, replicas: int) -> list[Check]:
    """Check each stream of dynbus, as far as the account may look at it."""
    jetstream = connection.jetstream
    checks: list[Check] = []
    try:
        listed = await jetstream.api("STREAM.NAMES", {}, timeout=API_SECONDS)
        names = [name for name in listed.get("streams") or () if name.startswith(STREAMS)]
    except PermissionDenied:
        # A user that only serves or calls.
        names = [INSTANCES_STREAM.name]
        checks.append(unknown("streams", "list them"))
    except DynbusError:
        names = [INSTANCES_STREAM.name]
    checks.append(await _check_regions(connection, names))
    hidden = 0
    for name in names:
        try:
            info = await _settled_info(jetstream, name)
            checks.append(
                check_replicas(
                    name,
                    info.replicas,
                    replicas,
                    in_cluster=info.in_cluster,
                    behind=info.behind,
                )
            )
            checks.append(check_store(name, await jetstream.write_error(name, timeout=API_SECONDS)))
        except NoStream:
            continue
        except PermissionDenied:
            hidden += 1
        except DynbusError as error:
            remedy = "its servers may be electing a leader: try again in 10 s"
            checks.append(Check(f"stream {name}", "fail", str(error), remedy))
    if hidden:
        what = f"try whether {hidden} of {len(names)} streams take writes"
        checks.append(unknown("streams' writes", what))
    return checks


async def _settled_info(jetstream: NatsJetStream, stream: str) -> StreamInfo:
    """The contents of a stream, with the servers that were behind at each of some looks.

    A copy that is well is a message behind for moments while others write.
    """
    info = await jetstream.stream_info(stream, timeout=API_SECONDS)
    for _ in range(LOOKS - 1):
        if not info.behind:
            break
        await anyio.sleep(LOOK_SECONDS)
        again = await jetstream.stream_info(stream, timeout=API_SECONDS)
        info = again._replace(behind=tuple(one for one in again.behind if one in info.behind))
    return info


async def _check_regions(connection: NatsConnection, streams: Sequence[str]) -> Check:
    kept: dict[str, int] = {}
    refused: set[str] = set()

    async def count(stream: str) -> None:
        try:
            config = await connection.jetstream.stream_config(stream, timeout=API_SECONDS)
            for subject in config.subjects:
                # Buckets stay in their region, and what is said abroad, of instances and of models
                # (`_abroad_models.`), is for all of them.
                if not subject.startswith(("$", ABROAD)):
                    asked = subject.replace("*", "doctor")
                    kept[stream] = await count_keepers(
                        connection, asked, 1, API_SECONDS, others=REGION_SECONDS
                    )
                    if connection.refusal_of(asked):
                        refused.add(stream)
        except PermissionDenied:
            refused.add(stream)
        except DynbusError as error:
            logger.debug("regions of %s: %s", stream, error)

    async with anyio.create_task_group() as tasks:
        for stream in streams:
            tasks.start_soon(count, stream)
    verdict = check_regions(kept)
    if refused and verdict.status == "ok":
        what = f"ask who keeps what is published to {len(refused)} of {len(streams)} streams"
        return unknown(verdict.name, what)
    return verdict


async def _check_writing(connection: NatsConnection, is_set_up: bool) -> list[Check]:
    """Check that a stream can be made, and compare the server's clock with ours."""
    name = f"DYNBUS_DOCTOR_{secrets.token_hex(6)}"
    request = stream_request(StreamConfig(name, (f"{name}.x",), marker_ttl=1.0, in_memory=True))
    before = unix_time()
    began = time.perf_counter()
    try:
        made = await connection.jetstream.api(f"STREAM.CREATE.{name}", request, timeout=API_SECONDS)
        seconds = time.perf_counter() - began
        await connection.jetstream.delete_stream(name)
    except PermissionDenied:
        if is_set_up:
            return [Check("JetStream writes", "ok", "streams are made by operators")]
        text = "there is no bucket of instances, and these credentials may not make it"
        remedy = f"an operator makes all streams: {SETUP}; or allow the account to make streams"
        return [Check("JetStream writes", "fail", text, remedy)]
    except DynbusError as error:
        remedy = "allow the account to make streams with message TTLs"
        return [Check("JetStream writes", "fail", str(error), remedy)]
    checks = [Check("JetStream writes", "ok", f"a stream was made in {seconds * 1000:.1f} ms")]
    with suppress(KeyError, ValueError):
        # The server's clock was read somewhere between the two readings of ours.
        theirs = unix_seconds(str(made["created"]))
        checks.append(check_clock(before + seconds / 2 - theirs))
    return checks
