"""`dynbus record` and `dynbus replay`: a namespace's flight in a file, read and run again."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import click

from dynbus.bus import exit_codes
from dynbus.bus.commands.terminal import terminal

if TYPE_CHECKING:
    from dynbus.bus.commands.server import Server
    from dynbus.bus.flight import Entry, Event, SampledTimes

ENTRY_POINTS: Final = "dynbus.replay"
"""The group of classes, `ReplayPart`s, each of which runs a part of a flight again."""
FLEETS: Final = "dynbus.fleets"
"""The group of the class, a `FleetSimulator`, that has such a trace on a simulated fleet."""
TRAFFIC: Final = "dynbus.traffic"
"""The group of the class, a `TrafficReader`, that has requests of a flight as a trace."""
READ_SECONDS: Final = 600.0
MOST_ADDED: Final = 100_000
MOST_SECONDS: Final = 1e9
LATEST_EVENT: Final = 60.0
"""Seconds for which an event may be recorded later than others of its time: recorders send four
times a second, and clocks of hosts differ by less."""


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

    def load(self) -> Mapping[str, float]:
        """The load of each place, as the last record has left it."""
        ...

    def to_json(self) -> Mapping[str, Any]:
        """The outcome as plain values."""
        ...

    def lines(self) -> Sequence[str]:
        """The outcome for people."""
        ...

    def bars(self) -> Iterable[tuple[str, float, str]]:
        """A plot of what was done on record, and is done now: see `Terminal.print_bars`."""
        ...

    def print_state(self) -> None:
        """Print the state that the last record has led to."""
        ...

    def print_request(self) -> None:
        """Print what was decided for the request that is asked for."""
        ...


class FleetOnRecord(Protocol):
    """The instances that requests of a flight could go to.

    Attributes:
        target: `namespace.component`.
        began: Unix seconds of the first request.
        block_size: tokens of a block.
        blocks, max_batched_tokens: of an instance; None where it did not say.
        policy: of its router; empty where it has no name.
        offered: the instances, and Unix seconds from which on these were offered.
    """

    @property
    def target(self) -> str: ...
    @property
    def began(self) -> float: ...
    @property
    def block_size(self) -> int: ...
    @property
    def blocks(self) -> int | None: ...
    @property
    def max_batched_tokens(self) -> int | None: ...
    @property
    def policy(self) -> str: ...
    @property
    def offered(self) -> Sequence[tuple[float, Sequence[str]]]: ...


class FleetChanges(NamedTuple):
    """The ways in which a simulated fleet is another one than that on record.

    Attributes:
        added: instances more than on record, at all times.
        kills: instances, and the Unix seconds at which each dies; another is started for it.
        scales: components, and Unix seconds from which on these have so many instances, whatever
            was on record.
        policy: of the router; empty for that on record.
        cold_start: seconds until an instance serves that is started.
    """

    added: int
    kills: Sequence[tuple[str, float]]
    scales: Sequence[tuple[str, float, int]]
    policy: str
    cold_start: float


class FleetSimulator(Protocol):
    """The requests of a flight on a simulated fleet, as it was on record and as it might have been.

    It is made with the requests, a line for each as `TrafficReader` has them, the fleet, the
    changes, and a file of `dynbus profile` with the times of its engines; None for others.
    """

    def __init__(
        self,
        lines: Iterable[str],
        fleet: FleetOnRecord,
        changes: FleetChanges,
        profile: Path | None,
    ) -> None: ...

    def to_json(self) -> Any:
        """The figures of both sides as plain values."""
        ...

    def print_sides(self, plot: Path | None) -> None:
        """Print the figures of both sides, and plot them, in a terminal or as SVG."""
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

    def fleet(self) -> FleetOnRecord:
        """The instances that the requests could go to."""
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

    from dynbus.bus.errors import ConfigError
    from dynbus.bus.flight import FlightHead, write_flight

    now = time.time()
    first = 0.0 if since is None else terminal.parse_time(since, "--from")(now)
    last = now if until is None else terminal.parse_time(until, "--until")(now)
    if last <= first:
        raise click.UsageError("--until is not behind --from")
    if file.exists():
        # To read a day takes minutes.
        raise ConfigError(f"{file} is there already: choose another name, or remove it")

    async def read() -> list[bytes]:
        async with terminal.server(terminal.settings(nats), "dynbus-record") as server:
            return await _read(server, namespace, first, last)

    messages = asyncio.run(read())
    head = FlightHead(namespace, first, last, metadata.version("dynbus"))
    count = write_flight(file, head, messages)
    terminal.notice(f"{file}: {count} messages, {file.stat().st_size} bytes")


@record.command(epilog=exit_codes.GENERAL)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--request", metavar="ID", help="Only what happened to the request of this id or digest."
)
@terminal.json_option
def show(file: Path, request: str | None, as_json: bool) -> None:
    """Print what happened in FILE, in the order of time.

    That is: instances that were ready, drained, stopped, broken or lost, calls that waited, were
    refused, tried again or moved to another instance, hand-overs of blocks and damaged ones, and
    requests of front ends that were held or have ended. With --json there is one object in each
    line.
    """
    from dynbus.bus.flight import SampledTimes, digest_of_request, read_flight

    sampled = SampledTimes()
    wanted = None if request is None else {digest_of_request(request), request.lower()}
    for at, event in events_of(_watched(read_flight(file).entries, sampled)):
        if wanted is not None and event.request not in wanted:
            continue
        row = {
            **event.details,
            "time": terminal.utc_time(at),
            "what": event.what,
            "who": event.who,
            **({"request": event.request} if event.request else {}),
        }
        if as_json:
            terminal.print_json(row, indent=0)
            continue
        head = " ".join(str(row.pop(name)) for name in ("time", "what", "who"))
        rest = (f"{name}={_value(value)}" for name, value in row.items())
        click.echo(terminal.printable(" ".join([head, *rest])))
    _tell_sampled(sampled)


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
    reader, sampled = _read_traffic(file, target)
    for line in reader.lines():
        click.echo(line)
    _tell_left_out(reader, sampled)


def _read_traffic(file: Path, target: str) -> tuple[TrafficReader, SampledTimes]:
    from dynbus.bus.flight import SampledTimes, read_flight

    sampled = SampledTimes()
    reader: TrafficReader = _installed(TRAFFIC, "reads the requests of routers")(target)
    for entry in _watched(read_flight(file).entries, sampled):
        reader.take(entry)
    return reader, sampled


def _tell_left_out(reader: TrafficReader, sampled: SampledTimes) -> None:
    for why, count in reader.left_out.items():
        terminal.notice(f"{count} requests are left out: {why}")
    _tell_sampled(sampled)


def _watched(entries: Iterable[Entry], sampled: SampledTimes) -> Iterator[Entry]:
    """The same records, and what they say of shares."""
    for entry in entries:
        sampled.take(entry)
        yield entry


def _tell_sampled(sampled: SampledTimes) -> None:
    """Say when a share of the requests alone was recorded."""
    for line in sampled_lines(sampled):
        terminal.notice(line)


def sampled_lines(sampled: SampledTimes) -> list[str]:
    """The times in which a share of the requests alone was recorded, for people."""
    return [
        f"1 of {one.one_in} requests is on record from {terminal.utc_time(one.since)} to "
        f"{terminal.utc_time(one.until)}"
        for one in sampled.times
    ]


def _installed(group: str, what: str) -> Any:
    """The class of a group of entry points.

    Raises:
        ConfigError: there is none.
    """
    from dynbus.bus.errors import ConfigError

    known = list(metadata.entry_points(group=group))
    if not known:
        raise ConfigError(f"nothing is installed here that {what}")
    return known[0].load()


def events_of(entries: Iterable[Entry]) -> Iterator[tuple[float, Event]]:
    """All events, and the gaps in what was recorded, each with its Unix seconds, in their order.

    One that comes later than `LATEST_EVENT` after others of its time is behind these: a day is not
    held in memory.
    """
    waiting: list[tuple[float, int, Event]] = []
    latest = -math.inf
    for number, (at, event) in enumerate(_as_recorded(entries)):
        heapq.heappush(waiting, (at, number, event))
        latest = max(latest, at)
        while waiting[0][0] < latest - LATEST_EVENT:
            yield waiting[0][0], heapq.heappop(waiting)[2]
    while waiting:
        yield waiting[0][0], heapq.heappop(waiting)[2]


def _as_recorded(entries: Iterable[Entry]) -> Iterator[tuple[float, Event]]:
    """The same in the order in which they were recorded."""
    import msgspec

    from dynbus.bus.flight import EVENT, Event, decode_event

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
            yield entry.time, gap
        if event is not None:
            yield entry.time, event


def _value(value: object) -> str:
    """A value of a detail; in quotes where it would be taken for several."""
    text = str(value)
    return repr(text) if " " in text or "=" in text else text


async def _read(server: Server, namespace: str, first: float, last: float) -> list[bytes]:
    from dynbus.bus.errors import ConfigError
    from dynbus.bus.flight import flight_stream, message_at
    from dynbus.bus.records.reading import read_until
    from dynbus.bus.transport import NoStream, StoredMessage

    messages: list[bytes] = []

    def take(message: StoredMessage) -> bool:
        if message.time > last:
            return True
        if message.time >= first and message_at(message.subject, namespace, message.data):
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
@click.option(
    "--request",
    metavar="ID",
    default="",
    help="Print why the request of this id or digest went where.",
)
@click.option(
    "--add-instances",
    "added",
    type=click.IntRange(1, MOST_ADDED),
    default=None,
    metavar="N",
    help="Simulate a fleet of N instances more.",
)
@click.option(
    "--kill",
    "kills",
    multiple=True,
    metavar="INSTANCE@TIME",
    help="Simulate that this instance dies then. Repeatable.",
)
@click.option(
    "--scale",
    "scales",
    multiple=True,
    metavar="COMPONENT=N@TIME",
    help="Simulate N instances from then on. Repeatable.",
)
@click.option(
    "--cold-start",
    type=terminal.number(0, MOST_SECONDS),
    default=0.0,
    show_default=True,
    metavar="SECONDS",
    help="Until a simulated instance serves that is started.",
)
@click.option(
    "--profile",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Simulated engines take the time of this one, of dynbus profile.",
)
@click.option(
    "--target", metavar="NS.COMPONENT", default="", help="Whose requests are simulated, of several."
)
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=terminal.check_plot,
    help="Of simulated fleets, write the times to the first token as an SVG image; - prints the "
    "plot where no terminal shows it, that of --set as well.",
)
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
    added: int | None,
    kills: Sequence[str],
    scales: Sequence[str],
    cold_start: float,
    profile: Path | None,
    target: str,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Make the decisions in FILE again, by the objects that made them.

    Without --set each is to come out as it did: what does not is named. With --set the same
    requests are decided otherwise, while all else happens as on record: what engines found in their
    caches and when they were done is not simulated.

    With --add-instances, --kill or --scale engines are simulated, twice: as many as on record, and
    with these changes; a policy of --set is that of the second. TIME is like that of --at.

    \b
    dynbus replay incident.flight
    dynbus replay incident.flight --kill 4bd07a91c2e6f835@2026-11-28T16:00Z --cold-start 45
    dynbus replay incident.flight --scale Engine=12@2026-11-28T16:00Z --profile engine.json
    dynbus replay incident.flight --set policy=dynamo --set temperature=0.2
    dynbus replay incident.flight --at 2026-11-28T16:00Z --request ID
    """
    import time

    from dynbus.bus.flight import SampledTimes, read_flight

    sampled = SampledTimes()
    changed = dict(settings_of(settings))
    if added or kills or scales:
        if at is not None or request or set(changed) - {"policy"}:
            raise click.UsageError(
                "with --add-instances, --kill and --scale engines are simulated: leave --at, "
                "--request, and --set of all but the policy out"
            )
        policy = changed.get("policy", "")
        changes = FleetChanges(added or 0, _kills(kills), _scales(scales), policy, cold_start)
        if as_json and plot is not None:
            raise click.UsageError("--json prints numbers alone: leave --plot out")
        _replay_fleet(file, target, changes, profile, plot, as_json=as_json)
        return
    if profile is not None or target or cold_start:
        raise click.UsageError(
            "--profile, --target and --cold-start are for simulated engines: give --add-instances, "
            "--kill or --scale as well"
        )
    if plot is not None and plot != terminal.TO_TERMINAL:
        raise click.UsageError(
            f"--plot {plot}: only simulated fleets are drawn as SVG, with --add-instances, --kill "
            "or --scale: give - for the terminal"
        )
    end = math.inf if at is None else terminal.parse_time(at, "--at")(time.time())
    parts: list[ReplayPart] = [
        one.load()(changed, request) for one in metadata.entry_points(group=ENTRY_POINTS)
    ]
    for entry in _watched(read_flight(file).entries, sampled):
        if entry.time <= end:
            for part in parts:
                part.take(entry)
    if as_json:
        outcome: dict[str, Any] = {part.title: part.to_json() for part in parts}
        terminal.print_json({**outcome, "sampled": [one._asdict() for one in sampled.times]})
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
            if changed:
                terminal.print_bars(
                    "Requests, on record and now", part.bars(), always=plot == terminal.TO_TERMINAL
                )
    if not as_json:
        _tell_sampled(sampled)
    if not changed and not all(part.is_as_recorded for part in parts):
        ctx.exit(exit_codes.FAILURE)


def _replay_fleet(
    file: Path,
    target: str,
    changes: FleetChanges,
    profile: Path | None,
    plot: Path | None,
    *,
    as_json: bool,
) -> None:
    from dynbus.bus.errors import ConfigError

    simulator = _installed(FLEETS, "simulates engines")
    reader, sampled = _read_traffic(file, target)
    try:
        sides: FleetSimulator = simulator(reader.lines(), reader.fleet(), changes, profile)
    except ValueError as error:
        raise ConfigError(f"{file} cannot be simulated so: {error}") from None
    if as_json:
        terminal.print_json(sides.to_json())
    else:
        try:
            sides.print_sides(plot)
        except OSError as error:
            raise ConfigError(f"--plot {plot} cannot be written: {error}") from None
    _tell_left_out(reader, sampled)


def _kills(given: Sequence[str]) -> list[tuple[str, float]]:
    return [_timed(text, "--kill", "INSTANCE@TIME") for text in given]


def _scales(given: Sequence[str]) -> list[tuple[str, float, int]]:
    scales: list[tuple[str, float, int]] = []
    for text in given:
        what, at = _timed(text, "--scale", "COMPONENT=N@TIME")
        component, _, count = what.partition("=")
        is_number = count.isdecimal() and len(count) <= len(str(MOST_ADDED))
        if not (component and is_number and int(count) <= MOST_ADDED):
            raise click.UsageError(
                f"--scale {text!r}: write COMPONENT=N@TIME, with up to {MOST_ADDED:,} instances"
            )
        scales.append((component, at, int(count)))
    return scales


def _timed(text: str, option: str, form: str) -> tuple[str, float]:
    """The parts of WHAT@TIME.

    Raises:
        UsageError: it is none.
    """
    import time

    what, at, when = text.partition("@")
    if not (what and at and when):
        raise click.UsageError(f"{option} {text!r}: write {form}")
    moment = terminal.parse_time(when, option)(time.time())
    if not math.isfinite(moment):
        raise click.UsageError(f"{option} {text!r}: give one time")
    return what, moment


def settings_of(given: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The names and values of `--set`.

    Raises:
        UsageError: one has no value.
    """
    for text in given:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise click.UsageError(f"--set {text!r}: write NAME=VALUE")
        yield name, value
