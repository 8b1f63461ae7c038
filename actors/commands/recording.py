"""`dynbus record` and `dynbus replay`: a namespace's flight in a file, read and run again."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import click

from dynbus.bus import exit_codes
from dynbus.bus.commands.terminal import terminal

if TYPE_CHECKING:
    from dynbus.bus.commands.server import Server
    from dynbus.bus.flight import Entry, Event

ENTRY_POINTS: Final = "dynbus.replay"
"""The group of classes, `ReplayPart`s, each of which runs a part of a flight again."""
TRAFFIC: Final = "dynbus.traffic"
"""The group of the class, a `TrafficReader`, that has requests of a flight as a trace."""
READ_SECONDS: Final = 600.0


class ReplayPart(Protocol):
    """A part of a flight that is run again; it is made with the settings that are to be others, and
    the id of a request that is asked for.

    Attributes:
        title: of its lines.
    """

    title: str

    def __init__(self, settings: Mapping[str, str], request: str) -> None: ...

    def take(self, entry: Entry) -> None:
        """Take the next record; one that is of something else is passed over."""
        ...

    @property
    def is_as_recorded(self) -> bool:
        """True if all came out as on record, or is explained."""
        ...

    def to_json(self) -> Mapping[str, Any]:
        """The outcome as plain values."""
        ...

    def lines(self) -> Sequence[str]:
        """The outcome for people."""
        ...

    def print_state(self) -> None:
        """Print the state that the last record has led to."""
        ...

    def print_request(self) -> None:
        """Print what was decided for the request that is asked for."""
        ...


class TrafficReader(Protocol):
    """The requests of a flight; it is made with the `namespace.component` that they were for.

    Attributes:
        left_out: requests that cannot be read, by the reason.
    """

    left_out: Mapping[str, int]

    def __init__(self, target: str) -> None: ...

    def take(self, entry: Entry) -> None:
        """Take the next record; one that is of something else is passed over."""
        ...

    def lines(self) -> Iterator[str]:
        """The trace, a line for each request."""
        ...


@click.group()
def record() -> None:
    """Save and read what a namespace has recorded.

    Processes with `flight: true` under `bus:`, or DYNBUS_FLIGHT=true, record what happens to them,
    what routers decide, and all that it was decided by: requests by the hashes of their blocks,
    never by their text. The stream DYNBUS_FLIGHT_{namespace} keeps the last day of it, as far as
    256 MiB reach.

    \b
    dynbus record save incident.flight --namespace llm --from 2h
    dynbus record show incident.flight
    dynbus record trace incident.flight > trace.jsonl
    dynbus replay incident.flight
    """


@record.command(epilog=exit_codes.GENERAL)
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--namespace", metavar="NAME", required=True, help="Whose flight it is.")
@click.option("--from", "since", metavar="TIME", help=f"Since when: {terminal.TIMES}")
@click.option("--until", metavar="TIME", help="Until when; until now unless given.")
@terminal.nats_option
def save(
    file: Path, namespace: str, since: str | None, until: str | None, nats: str | None
) -> None:
    """Write a part of a namespace's flight into FILE, which must not be there yet.

    It has no prompt, no text of an answer, and no name but those of components, instances, models,
    zones and policies.
    """
    import asyncio
    import time

    from dynbus.bus.flight import FlightHead, write_flight

    now = time.time()
    first = 0.0 if since is None else terminal.parse_time(since, "--from")(now)
    last = now if until is None else terminal.parse_time(until, "--until")(now)
    if last <= first:
        raise click.UsageError("--until is not behind --from")

    async def read() -> list[bytes]:
        async with terminal.server(terminal.settings(nats), "dynbus-record") as server:
            return await _read(server, namespace, first, last)

    messages = asyncio.run(read())
    head = FlightHead(namespace, first, last, metadata.version("dynbus"))
    count = write_flight(file, head, messages)
    terminal.notice(f"{file}: {count} messages, {file.stat().st_size} bytes")


@record.command(epilog=exit_codes.GENERAL)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--request", metavar="ID", help="Only what happened to the request of this id.")
@terminal.json_option
def show(file: Path, request: str | None, as_json: bool) -> None:
    """Print what happened in FILE, in the order of time.

    That is: instances that were ready, drained, stopped, broken or lost, calls that were tried
    again or moved to another instance, and requests of front ends that have ended. With --json
    there is one object in each line.
    """
    import msgspec

    from dynbus.bus.flight import digest_of_request, read_flight

    wanted = None if request is None else digest_of_request(request)
    for at, event in _events(read_flight(file).entries):
        if wanted is not None and event.request != wanted:
            continue
        row = {
            **event.details,
            "time": terminal.utc_time(at),
            "what": event.what,
            "who": event.who,
            **({"request": event.request} if event.request else {}),
        }
        if as_json:
            click.echo(msgspec.json.encode(row))
            continue
        head = " ".join(str(row.pop(name)) for name in ("time", "what", "who"))
        rest = (f"{name}={_value(value)}" for name, value in row.items())
        click.echo(terminal.printable(" ".join([head, *rest])))


@record.command(epilog=exit_codes.GENERAL)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--target", metavar="NS.COMPONENT", default="", help="Whose requests, of several.")
def trace(file: Path, target: str) -> None:
    """Print the requests that routers were asked in FILE, as `dynbus lab replay` takes them.

    So the traffic of a day is played to other numbers of engines, and to other policies.

    \b
    dynbus record trace incident.flight > trace.jsonl
    dynbus lab replay trace.jsonl --instances 12 --policy kv,dynamo --plot ttft.svg
    """
    from dynbus.bus.errors import ConfigError
    from dynbus.bus.flight import read_flight

    known = list(metadata.entry_points(group=TRAFFIC))
    if not known:
        raise ConfigError("nothing is installed here that reads the requests of routers")
    reader: TrafficReader = known[0].load()(target)
    for entry in read_flight(file).entries:
        reader.take(entry)
    for line in reader.lines():
        click.echo(line)
    for why, count in reader.left_out.items():
        terminal.notice(f"{count} requests are left out: {why}")


def _events(entries: Iterable[Entry]) -> list[tuple[float, Event]]:
    """All events, and the gaps in what was recorded, each with its Unix seconds, in their order."""
    import msgspec

    from dynbus.bus.flight import EVENT, Event, decode_event

    events: list[tuple[float, Event]] = []
    for entry in entries:
        missing = entry.missing
        event: Event | None = None
        if entry.kind == EVENT:
            try:
                event = decode_event(entry.body)
            except msgspec.DecodeError:
                missing += 1
        if missing:
            gap = Event("records.missing", entry.recorder, "", {"count": missing})
            events.append((entry.time, gap))
        if event is not None:
            events.append((entry.time, event))
    return sorted(events, key=lambda each: each[0])


def _value(value: object) -> str:
    """A value of a detail; in quotes where it would be taken for several."""
    text = str(value)
    return repr(text) if " " in text or "=" in text else text


async def _read(server: Server, namespace: str, first: float, last: float) -> list[bytes]:
    from dynbus.bus.errors import ConfigError
    from dynbus.bus.flight import decode_message, flight_stream, flight_subject
    from dynbus.bus.records.reading import read_until
    from dynbus.bus.transport import NoStream, StoredMessage

    messages: list[bytes] = []

    def take(message: StoredMessage) -> bool:
        if message.time > last:
            return True
        # One that speaks for another recorder than its subject is forged.
        known = decode_message(message.data)
        is_own = known is not None and message.subject == flight_subject(namespace, known.recorder)
        if message.time >= first and is_own:
            messages.append(message.data)
        return False

    try:
        await read_until(
            server.connection.jetstream,
            flight_stream(namespace).name,
            take,
            timeout=READ_SECONDS,
        )
    except NoStream:
        raise ConfigError(
            f"nothing is recorded in {namespace}: set DYNBUS_FLIGHT=true where its routers are"
        ) from None
    return messages


@click.command(
    epilog=f"{exit_codes.GENERAL} 1: something came out otherwise than on record, and without "
    "--set."
)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--set",
    "settings",
    metavar="NAME=VALUE",
    multiple=True,
    help="Decide by another setting than on record, such as policy=dynamo. Repeatable.",
)
@click.option(
    "--at",
    metavar="TIME",
    help=f"Stop there, and print the load as routers knew it. {terminal.TIMES}",
)
@click.option("--request", metavar="ID", default="", help="Print why this request went where.")
@terminal.json_option
@click.pass_context
def replay(
    ctx: click.Context,
    /,
    *,
    file: Path,
    settings: Sequence[str],
    at: str | None,
    request: str,
    as_json: bool,
) -> None:
    """Make the decisions in FILE again, by the objects that made them.

    Without --set each is to come out as it did: what does not is named. With --set the same
    requests are decided otherwise, while all else happens as on record: what engines found in their
    caches and when they were done is not simulated.

    \b
    dynbus replay incident.flight
    dynbus replay incident.flight --set policy=dynamo --set temperature=0.2
    dynbus replay incident.flight --at 2026-11-28T16:00Z --request ID
    """
    import time

    from dynbus.bus.flight import read_flight

    changed = dict(_pairs(settings))
    end = math.inf if at is None else terminal.parse_time(at, "--at")(time.time())
    parts: list[ReplayPart] = [
        one.load()(changed, request) for one in metadata.entry_points(group=ENTRY_POINTS)
    ]
    for entry in read_flight(file).entries:
        if entry.time <= end:
            for part in parts:
                part.take(entry)
    if as_json:
        terminal.print_json({part.title: part.to_json() for part in parts})
    elif at is not None or request:
        for part in parts:
            if at is not None:
                part.print_state()
            if request:
                part.print_request()
    else:
        for part in parts:
            for line in part.lines():
                click.echo(terminal.printable(line))
    if not changed and not all(part.is_as_recorded for part in parts):
        ctx.exit(exit_codes.FAILURE)


def _pairs(given: Sequence[str]) -> Iterator[tuple[str, str]]:
    for text in given:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise click.UsageError(f"--set {text!r}: write NAME=VALUE")
        yield name, value
