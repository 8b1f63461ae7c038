"""The checks of `dynbus doctor --all`: each server, and each host by what its instances say."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from dynbus.bus.background import task_group
from dynbus.bus.clock import unix_time
from dynbus.bus.config import BusConfig
from dynbus.bus.errors import DynbusError
from dynbus.bus.records.instance_records import INSTANCES_STREAM
from dynbus.bus.telemetry.logs import redact_url

from .diagnosis import Check, check_clock, check_round_trip, check_version, round_trip, unknown
from .server import Server, connected
from .survey import InstanceReport, survey

logger = logging.getLogger(__name__)

MOST_NAMED: Final = 5
"""Instances that a finding names; of more it gives the number."""


class ServerFacts(msgspec.Struct, frozen=True):
    """The facts about a server that was asked alone.

    Attributes:
        error: the reason for which it was not reached; empty where it was.
        round_trip: seconds.
    """

    url: str
    name: str = ""
    version: str = ""
    round_trip: float = 0.0
    error: str = ""


async def diagnose_fleet(config: BusConfig) -> list[Check]:
    """Ask each server alone, and all instances; bounded by some seconds.

    What cannot be asked is left out: `diagnose` says why.
    """
    try:
        async with connected(config, "dynbus-doctor") as server:
            facts = await _ask_servers(server.config, server.connection.server_urls)
            skew = await _skew(server)
            rows = (await survey(server)).rows
    except DynbusError as error:
        logger.debug("the fleet is not asked: %s", error)
        return []
    return [*check_servers(facts), *check_instances(rows, skew)]


# Verdicts ----------------------------------------------------------------------------------


def check_servers(facts: Sequence[ServerFacts]) -> list[Check]:
    """Check each server, and that all are of one version."""
    checks: list[Check] = []
    for one in facts:
        name = f"server {redact_url(one.url)}"
        if one.error:
            remedy = "start it, or name those alone that are to be there, in NATS_URL"
            checks.append(Check(name, "fail", one.error, remedy))
            continue
        place = f"{one.name}, {one.version}, {one.round_trip * 1000:.2f} ms away"
        wrong = [
            check
            for check in (check_version(one.version), check_round_trip(one.round_trip))
            if check.status != "ok"
        ]
        worst = min(wrong, key=lambda check: check.status, default=Check(name, "ok", place))
        checks.append(worst._replace(name=name, found=place))
    versions = Counter(one.version for one in facts if not one.error)
    if len(versions) > 1:
        remedy = "bring all to one, one server after the other"
        checks.append(Check("versions of servers", "warn", _counted(versions), remedy))
    return checks


def check_instances(rows: Sequence[InstanceReport], skew: float | None) -> list[Check]:
    """Check the hosts and the instances by what these say.

    Args:
        skew: seconds by which this machine's clock is ahead of the server's; None where that is not
            known.
    """
    hosts: dict[str, list[InstanceReport]] = defaultdict(list)
    for row in rows:
        hosts[row.host].append(row)
    checks = [_check_host(host, hosts[host], skew) for host in sorted(hosts) if host]
    silent = [f"{row.namespace}.{row.component}@{row.instance_id}" for row in rows if _is_lost(row)]
    if silent:
        remedy = "look at their processes: they are frozen, cut off, or gone for less than a lease"
        checks.append(Check("silent instances", "warn", _named(silent), remedy))
    if any(row.state == "unknown" for row in rows):
        checks.append(unknown("instances", "ask them how they are"))
    versions = Counter(row.version for row in rows if row.version)
    if len(versions) > 1:
        remedy = "finish the rollout"
        checks.append(Check("versions of dynbus", "warn", _counted(versions), remedy))
    elif versions:
        checks.append(Check("versions of dynbus", "ok", _counted(versions)))
    checks += _check_schemas(rows)
    return checks


def _is_lost(row: InstanceReport) -> bool:
    return row.state == "silent"


def _check_host(host: str, rows: Sequence[InstanceReport], skew: float | None) -> Check:
    name = f"host {host}"
    count = "1 instance" if len(rows) == 1 else f"{len(rows)} instances"
    # An answer takes some time: the quickest is the nearest to the truth.
    clocks = [row.clock for row in rows if row.clock is not None]
    if not clocks:
        return Check(name, "ok" if all(map(_is_lost, rows)) else "unknown", f"{count}, no clock")
    ahead = max(clocks) + (skew or 0.0)
    whose = "this machine" if skew is None else "the server"
    checked = check_clock(ahead)
    return checked._replace(name=name, found=f"{count}, clock {ahead:+.2f} s against {whose}")


def _check_schemas(rows: Iterable[InstanceReport]) -> list[Check]:
    """The endpoints of which instances have different schemas."""
    schemas: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        for endpoint, schema in row.schemas.items():
            schemas[f"{row.namespace}.{row.component}.{endpoint}"][schema] += 1
    differing = [
        f"{endpoint} ({_sizes(counts)})"
        for endpoint, counts in sorted(schemas.items())
        if len(counts) > 1
    ]
    if not differing:
        return [Check("schemas", "ok", "the instances of each component have the same")]
    remedy = "finish the rollout; `dynbus schema check TARGET --against running` says what differs"
    return [Check("schemas", "warn", f"instances differ: {_named(differing)}", remedy)]


def _sizes(counts: Counter[str]) -> str:
    return " and ".join(str(count) for _, count in counts.most_common())


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if names[MOST_NAMED:] else ""
    return f"{', '.join(names[:MOST_NAMED])}{more}"


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} of {name}" for name, count in sorted(counts.items()))


# Asking ------------------------------------------------------------------------------------


async def _skew(server: Server) -> float | None:
    """The seconds by which this machine's clock is ahead of the server's; None where it does not
    tell.
    """
    before = unix_time()
    try:
        info = await server.connection.jetstream.stream_info(INSTANCES_STREAM.name)
    except DynbusError as error:
        logger.debug("the server's time is not known: %s", error)
        return None
    # Its clock was read somewhere between the two readings of ours.
    return (before + unix_time()) / 2 - info.now


async def _ask_servers(config: BusConfig, urls: Sequence[str]) -> list[ServerFacts]:
    facts: dict[str, ServerFacts] = {}

    async def ask(url: str) -> None:
        try:
            alone = msgspec.structs.replace(config, servers=(url,))
            async with connected(alone, "dynbus-doctor") as server:
                info = server.connection.server_info
                facts[url] = ServerFacts(
                    url,
                    str(info.get("server_name", "")),
                    str(info.get("version", "")),
                    await round_trip(server.connection),
                )
        except DynbusError as error:
            facts[url] = ServerFacts(url, error=redact_url(str(error)))

    async with task_group() as tasks:
        for url in urls:
            tasks.start_soon(ask, url)
    return [facts[url] for url in urls]
