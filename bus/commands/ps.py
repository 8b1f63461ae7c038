"""`dynbus ps`: the instances that are there, by their records and by their own answers, and what
they do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, get_args

import click

from dynbus.bus import exit_codes

from .rates import SortKey
from .terminal import terminal

if TYPE_CHECKING:
    from .survey import Held, HeldRequest, InstanceReport, Request, Survey

MOST_SHOWN: Final = 100
"""Requests in the table."""

_STYLES: Final = {
    "serving": "green",
    "draining": "yellow",
    "silent": "red",
    "unlisted": "yellow",
    "unknown": "dim",
}

_HELP: Final = """List the instances of all actors; front ends of `dynbus http` are dynbus.http.

    \b
    STATE  serving   it is listed and answers
           draining  it takes no more calls and finishes those it has
           silent    it is listed and does not answer: frozen, cut off or just killed
           unlisted  it answers and has no record: just starting, or no JetStream
           unknown   it is listed, and this credential may not ask it
    LOAD   calls that run / that wait
    ZONE   where it is, if any has a zone
    REGION the region whose servers it is at, where others are joined to this one
    STATUS what the instance's process says of how it is, if any says something

    With --hosts each host, as DYNBUS_HOST or its name says, with what it has.
    With --requests the oldest requests that run or wait at them, and those that front ends hold
    for models without an engine; `dynbus cancel` takes their ids.

    With --watch or --rates what they do:

    \b
    CALLS/S  calls that ended, of which ERRORS/S failed
    RUN      calls that run, of which STREAMS are streams; QUEUE: calls that wait
    ITEMS/S  items that streams sent; of an engine, the tokens that it made
    LATENCY  how long the calls that ended took, on average
    KV       how much of an engine's KV cache is in use
    HITS     how much of the prompts was in it

    Columns without room are left out. With --json --watch prints a line for each look.

    \b
    dynbus ps --namespace demo
    dynbus ps --watch --sort calls
    dynbus ps --requests --namespace demo
    dynbus ps --hosts
    dynbus ps --json | jq '.[] | select(.state == "silent")'
    """


@click.command(help=_HELP, epilog=exit_codes.GENERAL)
@click.option("--namespace", metavar="NAME", help="Only instances of this namespace.")
@click.option("--requests", is_flag=True, help="List requests at the instances, by their ids.")
@click.option("--hosts", is_flag=True, help="List the hosts, with what runs on each.")
@click.option("-w", "--watch", is_flag=True, help="Show what they do, again and again.")
@click.option("--rates", is_flag=True, help="Show it once, after one interval.")
@click.option(
    "-n",
    "--interval",
    type=terminal.number(0.2, 3600),
    metavar="SECONDS",
    help="Between two looks. Default: 1.",
)
@click.option(
    "--sort", type=click.Choice(get_args(SortKey)), help="What is highest first. Default: name."
)
@terminal.json_option
@terminal.nats_option
@click.pass_context
def ps(
    ctx: click.Context,
    /,
    *,
    namespace: str | None,
    requests: bool,
    hosts: bool,
    watch: bool,
    rates: bool,
    interval: float | None,
    sort: SortKey | None,
    as_json: bool,
    nats: str | None,
) -> None:
    if watch or rates:
        if requests or hosts or (watch and rates):
            raise click.UsageError("give one of --requests, --hosts, --watch and --rates")
        from .watching import watch as watch_instances

        code = watch_instances(
            terminal.settings(nats),
            namespace=namespace,
            interval=interval or 1.0,
            sort=sort or "name",
            once=rates,
            as_json=as_json,
        )
        ctx.exit(code)
    if interval is not None or sort is not None:
        raise click.UsageError("--interval and --sort are for --watch and --rates")
    if requests and hosts:
        raise click.UsageError("give one of --requests, --hosts, --watch and --rates")
    _list(namespace, as_json, nats, requests=requests, hosts=hosts)


def _list(
    namespace: str | None, as_json: bool, nats: str | None, *, requests: bool, hosts: bool
) -> None:
    import asyncio

    from dynbus.bus.clock import unix_time
    from dynbus.bus.records.abroad import HEARD_WITHIN
    from dynbus.bus.serving.services import MOST_REQUESTS

    from .survey import survey

    async def look() -> Survey:
        async with terminal.server(config, "dynbus-ps") as server:
            return await survey(server, MOST_REQUESTS if requests else 0)

    config = terminal.settings(nats)
    survey_result = asyncio.run(look())
    if survey_result.notice:
        terminal.notice(survey_result.notice)
    for region in survey_result.abroad:
        if region.silent > HEARD_WITHIN:
            silent = terminal.duration(region.silent)
            terminal.notice(f"region {region.name}: none of its instances was heard for {silent}")
    rows = [row for row in survey_result.rows if namespace in (None, row.namespace)]
    if requests:
        show_requests(survey_result.rows, namespace, as_json=as_json)
        return
    if hosts:
        show_hosts(rows, as_json=as_json)
        return
    now = unix_time()
    if as_json:
        terminal.print_json([row.to_json(now) for row in rows])
        return
    if not rows:
        terminal.notice("no instance" + (f" in {namespace}" if namespace else ""))
        return
    says = any(row.status for row in rows)
    has_zones = any(row.zone for row in rows)
    has_regions = bool(survey_result.abroad)
    columns = ("COMPONENT", "INSTANCE", "STATE", "AGE", "LOAD", "ENDPOINTS", "ADDRESS")
    terminal.print_table(
        (
            *columns,
            *(["ZONE"] if has_zones else []),
            *(["REGION"] if has_regions else []),
            *(["STATUS"] if says else []),
        ),
        [
            (
                terminal.plain(f"{row.namespace}.{row.component}"),
                terminal.plain(row.instance_id),
                f"[{_STYLES[row.state]}]{row.state}[/]",
                terminal.duration(now - row.started) if row.started else "-",
                f"{row.running}/{row.waiting}" if row.answers else "-",
                terminal.plain(", ".join(sorted(row.endpoints))),
                terminal.plain(row.address or "-"),
                *([terminal.plain(row.zone or "-")] if has_zones else []),
                *([terminal.plain(_region(row, survey_result))] if has_regions else []),
                *([_status(row.status)] if says else []),
            )
            for row in rows
        ],
    )


def _region(row: InstanceReport, looked: Survey) -> str:
    """The region of an instance; what no record lists may be in any."""
    return row.region or ("-" if row.state == "unlisted" else looked.region)


def show_hosts(rows: Sequence[InstanceReport], *, as_json: bool) -> None:
    """The hosts of instances, with what is on each; those without a record are on none."""
    hosts = [_host_json(host, of) for host, of in _by_host(rows)]
    if as_json:
        terminal.print_json(hosts)
    elif hosts:
        columns = ("HOST", "ZONE", "COMPONENTS", "INSTANCES", "LOAD", "NOT SERVING")
        terminal.print_table(
            columns,
            [
                (
                    terminal.plain(one["host"] or "-"),
                    terminal.plain(", ".join(one["zones"]) or "-"),
                    terminal.plain(", ".join(one["components"])),
                    str(one["instances"]),
                    f"{one['running']}/{one['waiting']}",
                    ", ".join(f"{count} {state}" for state, count in one["others"].items()) or "-",
                )
                for one in hosts
            ],
        )
    else:
        terminal.notice("no instance")


def _by_host(rows: Sequence[InstanceReport]) -> list[tuple[str, list[InstanceReport]]]:
    hosts: dict[str, list[InstanceReport]] = {}
    for row in rows:
        hosts.setdefault(row.host, []).append(row)
    return sorted(hosts.items())


def _host_json(host: str, rows: Sequence[InstanceReport]) -> dict[str, Any]:
    states = Counter(row.state for row in rows if row.state != "serving")
    return {
        "host": host,
        "zones": sorted({row.zone for row in rows} - {""}),
        "components": sorted({f"{row.namespace}.{row.component}" for row in rows}),
        "instances": len(rows),
        "running": sum(row.running for row in rows),
        "waiting": sum(row.waiting for row in rows),
        "others": dict(sorted(states.items())),
    }


def show_requests(
    rows: Sequence[InstanceReport], namespace: str | None = None, *, as_json: bool
) -> None:
    """The requests at instances, and those that are held for the first of them, the oldest
    first.

    Args:
        rows: all instances: those of other namespaces may hold requests for this one.
    """
    from dynbus.bus.serving.services import MOST_REQUESTS

    requests = requests_json(rows, namespace)
    left = sum(max(0, held.count - len(held.requests)) for held in _held(rows))
    rows = [row for row in rows if namespace in (None, row.namespace)]
    if as_json:
        terminal.print_json(requests)
    elif requests:
        terminal.print_table(
            ("REQUEST", "ENDPOINT", "INSTANCE", "STATE", "AGE"),
            [
                (
                    terminal.plain(each["request_id"]),
                    terminal.plain(f"{each['namespace']}.{each['component']}.{each['endpoint']}"),
                    terminal.plain(each["instance_id"] or "-"),
                    each["state"],
                    terminal.duration(each["age"]),
                )
                for each in requests[:MOST_SHOWN]
            ],
        )
    else:
        terminal.notice("no request runs or waits")
    left += 0 if as_json else max(0, len(requests) - MOST_SHOWN)
    for row in rows:
        # What others end meanwhile is not left out.
        if row.requests is not None and len(row.requests) >= MOST_REQUESTS:
            left += max(0, row.running + row.waiting - len(row.requests))
    if left:
        terminal.notice(f"{left} more are not shown: they began later")
    if untold := sum(row.requests is None for row in rows):
        whose = "1 instance" if untold == 1 else f"{untold} instances"
        terminal.notice(
            f"the requests of {whose} are not known: silent, or older than the question"
        )


def requests_json(
    rows: Sequence[InstanceReport], namespace: str | None = None
) -> list[dict[str, Any]]:
    """The requests that run or wait at instances of a namespace, or are held for them, the oldest
    first; for programs."""
    requests = [_request_json(row, each) for row in rows for each in row.requests or ()]
    for held in _held(rows):
        requests += [_held_json(one, of) for one in held.requests for of in one.awaits]
    requests.sort(key=lambda each: -each["age"])
    return [each for each in requests if namespace in (None, each["namespace"])]


def _held(rows: Sequence[InstanceReport]) -> Iterable[Held]:
    """The requests that processes hold; all instances of one tell of the same."""
    return {row.held.process: row.held for row in rows if row.held is not None}.values()


def _held_json(request: HeldRequest, component: str) -> dict[str, Any]:
    namespace, _, name = component.partition(".")
    return {
        "request_id": request.id,
        "namespace": namespace,
        "component": name,
        # Which one it will be sent to is not known yet.
        "endpoint": "*",
        "instance_id": "",
        "state": "held",
        "age": round(request.age, 1),
    }


def _request_json(row: InstanceReport, request: Request) -> dict[str, Any]:
    return {
        "request_id": request.request_id,
        "namespace": row.namespace,
        "component": row.component,
        "endpoint": request.endpoint,
        "instance_id": row.instance_id,
        "state": "waits" if request.waits else "runs",
        "age": round(request.age, 1),
    }


def _status(status: Mapping[str, str]) -> str:
    return "\n".join(terminal.plain(f"{key}={text}") for key, text in status.items()) or "-"
