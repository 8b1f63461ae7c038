"""`dynbus topic`: events of topics, and the groups that hear them."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import click

from dynbus.bus import exit_codes

from .listing import pages
from .terminal import terminal

if TYPE_CHECKING:
    from dynbus.bus.nats.connection import NatsConnection
    from dynbus.bus.topics import Event, GroupPlace, TopicConfig, TopicStream

T = TypeVar("T")

FOR_EVER: Final = 100 * 365 * 24 * 3600.0
"""Seconds, where a stream says that it has no limit."""
PUBLISH_TIMEOUT: Final = 5.0


class GroupRow(NamedTuple):
    """A group of a topic, by its name."""

    group: str
    place: GroupPlace


class TopicRow(NamedTuple):
    """A topic.

    Attributes:
        size: bytes of its events.
        retain: seconds for which they are kept; None for no limit.
    """

    topic: TopicConfig
    events: int
    size: int
    retain: float | None
    groups: list[GroupRow]


topic_argument = click.argument("name", metavar="NAMESPACE.TOPIC")
group_argument = click.argument("group", metavar="GROUP")


@click.group(epilog=exit_codes.GENERAL)
def topic() -> None:
    """Look after topics and their groups.

    \b
    dynbus topic ls desk
    dynbus topic tail desk.conversation.closed --from 1h
    dynbus topic publish desk.conversation.closed '{"number": 7}' --key c7
    dynbus topic replay desk.conversation.closed billing --from 2h
    """


def parse_topic(text: str) -> TopicConfig:
    """Read NAMESPACE.TOPIC.

    Raises:
        ConfigError: it names no topic.
    """
    from dynbus.bus.errors import ConfigError
    from dynbus.bus.protocol.names import check_token, check_topic
    from dynbus.bus.topics import TopicConfig

    namespace, dot, name = text.partition(".")
    if not dot:
        raise ConfigError(f"{text!r} is no topic: write namespace.topic")
    return TopicConfig(check_token("namespace", namespace), check_topic(name), None)


# What there is -----------------------------------------------------------------------------------


@topic.command()
@click.argument("where", metavar="NAMESPACE[.TOPIC]")
@terminal.json_option
@terminal.nats_option
def ls(where: str, as_json: bool, nats: str | None) -> None:
    """List topics that keep their events, and their groups.

    \b
    EVENTS   that are kept
    BYTES    of these
    KEPT     for how long
    WAITING  events that the group has not had yet
    HELD     events with a member, or given back and to be tried again
    METHOD   whose instances are the group
    """
    from dynbus.bus.protocol.names import check_token

    namespace, _, name = where.partition(".")
    check_token("namespace", namespace)
    if name:
        parse_topic(where)
    rows = _run(nats, lambda connection: list_topics(connection, namespace, name))
    if as_json:
        terminal.print_json([topic_json(row) for row in rows])
    elif not rows:
        terminal.notice(f"{where} has no topic that keeps events")
    else:
        terminal.print_table(
            ("TOPIC", "EVENTS", "BYTES", "KEPT", "GROUP", "WAITING", "HELD", "METHOD"),
            [cells for row in rows for cells in _cells(row)],
        )


async def list_topics(connection: NatsConnection, namespace: str, name: str = "") -> list[TopicRow]:
    """The topics of a namespace that keep their events, or the one of a name.

    Raises:
        PermissionDenied, Unavailable: the server does not tell.
    """
    from dynbus.bus.transport import NoStream

    rows: list[TopicRow] = []
    for topic in await _kept_topics(connection, namespace):
        if name in ("", topic.name):
            with suppress(NoStream):  # deleted meanwhile
                rows.append(await _row(connection, topic))
    return rows


async def _kept_topics(connection: NatsConnection, namespace: str) -> list[TopicConfig]:
    """The topics of a namespace that keep their events, by name."""
    from dynbus.bus.protocol.names import topic_of_stream
    from dynbus.bus.topics import TopicConfig

    asked = {"subject": f"{namespace}._topic.>"}
    names = [
        topic_of_stream(stream)
        async for page in pages(connection.jetstream, "STREAM.NAMES", asked)
        for stream in page["streams"] or ()
    ]
    return [TopicConfig(*one, None) for one in sorted(filter(None, names))]


async def _near(connection: NatsConnection, topic: TopicConfig) -> str:
    """The topic that keeps events and was maybe meant, as a remark; nothing where none is near."""
    from dynbus.bus.config import suggestion
    from dynbus.bus.errors import PermissionDenied

    known: list[TopicConfig] = []
    with suppress(PermissionDenied):
        known = await _kept_topics(connection, topic.namespace)
    return suggestion(str(topic), [str(one) for one in known])


async def _row(connection: NatsConnection, topic: TopicConfig) -> TopicRow:
    from dynbus.bus.topics import find_group

    jetstream = connection.jetstream
    names: set[str] = set()
    async for page in pages(jetstream, f"CONSUMER.NAMES.{topic.stream}", {}):
        names.update(one.partition("+")[0] for one in page["consumers"] or ())
    groups: list[GroupRow] = []
    for name in sorted(names):
        place = await find_group(jetstream, topic.stream, name)
        # Instances that hear the topic for themselves read it by consumers that say nothing.
        if place is not None and place.handler:
            groups.append(GroupRow(name, place))
    info = await jetstream.stream_info(topic.stream)
    limits = (await jetstream.stream_config(topic.stream)).limits
    return TopicRow(topic, info.messages, info.size, limits.max_age, groups)


def topic_json(row: TopicRow) -> dict[str, Any]:
    """A topic with its groups, for programs."""
    return {
        "topic": str(row.topic),
        "events": row.events,
        "bytes": row.size,
        "retain": row.retain,
        "groups": [
            {
                "group": group,
                "method": place.handler,
                "ordered": place.ordered,
                "waiting": place.waiting,
                "held": place.held,
            }
            for group, place in row.groups
        ],
    }


def _cells(row: TopicRow) -> list[tuple[str, ...]]:
    kept = "for ever" if row.retain is None else terminal.duration(row.retain)
    of_topic = (terminal.plain(str(row.topic)), str(row.events), str(row.size), kept)
    of_groups = [
        (
            terminal.plain(group),
            str(place.waiting),
            str(place.held),
            terminal.plain(place.handler),
        )
        for group, place in row.groups
    ]
    first, *others = of_groups or [("-", "-", "-", "-")]
    return [(*of_topic, *first), *(("", "", "", "", *cells) for cells in others)]


# Events ------------------------------------------------------------------------------------------


@topic.command()
@topic_argument
@click.option("--from", "since", metavar="TIME", help=f"Show kept events too: {terminal.TIMES}")
@click.option("--count", type=click.IntRange(min=1), help="End after so many events.")
@terminal.json_option
@terminal.nats_option
def tail(name: str, since: str | None, count: int | None, as_json: bool, nats: str | None) -> None:
    """Show events as they are published.

    One line for each: its time where it is kept, its key and what it says. Ctrl-C ends it.
    """
    wanted = parse_topic(name)
    begin = None if since is None else terminal.parse_time(since, "--from")

    async def show(connection: NatsConnection) -> None:
        shown = 0
        async with aclosing(follow(connection, wanted, begin)) as events:
            async for event in events:
                _show(event, as_json)
                shown += 1
                if shown == count:
                    return

    _run(nats, show)


def _show(event: Event, as_json: bool) -> None:
    text = event.data.decode("utf-8", "replace")
    at = "-"
    if event.time:
        at = datetime.fromtimestamp(event.time, UTC).isoformat(timespec="milliseconds")
    if as_json:
        terminal.print_json(
            {
                "id": event.event_id,
                "key": event.key,
                "time": event.time,
                "headers": dict(event.headers),
                "data": text,
            },
            indent=0,
        )
    else:
        click.echo(f"{at} {terminal.printable(event.key)} {terminal.printable(text)}")


async def follow(
    connection: NatsConnection, topic: TopicConfig, begin: Callable[[float], float] | None
) -> AsyncGenerator[Event]:
    """The events of a topic from now on, or from a time on; it has no end.

    Args:
        begin: tells the time, of the server's time now; None for events that are published later.

    Raises:
        ConfigError: they are not kept, and kept ones are asked for.
        PermissionDenied, Unavailable: the server does not tell.
    """
    import asyncio

    from dynbus.bus.errors import ConfigError

    heard: asyncio.Queue[Event] = asyncio.Queue()
    stream, now = await _as_it_is(connection, topic)
    if stream.config.retain is None:
        if begin is not None:
            raise ConfigError(
                f"no event of {topic} is kept, so there are none of before: leave --from out"
            )
        near = await _near(connection, topic)
        terminal.notice(f"no stream keeps {topic}{near}: waiting for what is published from now on")
    since = None if begin is None else begin(now)
    listening = await stream.listen(heard.put_nowait, since)
    try:
        while True:
            yield await heard.get()
    finally:
        await listening.stop()


async def _as_it_is(connection: NatsConnection, topic: TopicConfig) -> tuple[TopicStream, float]:
    """The events of a topic, as kept as they are, and the server's time in Unix seconds; 0 where
    they are not kept.

    Raises:
        PermissionDenied, Unavailable: the server does not tell.
    """
    from dynbus.bus.topics import TopicStream
    from dynbus.bus.transport import NoStream

    try:
        info = await connection.jetstream.stream_info(topic.stream)
        limits = (await connection.jetstream.stream_config(topic.stream)).limits
    except NoStream:
        return TopicStream(connection, topic, lambda _: ""), 0.0
    kept = topic._replace(retain=limits.max_age or FOR_EVER)
    return TopicStream(connection, kept, lambda _: ""), info.now


@topic.command()
@topic_argument
@click.argument("event", metavar="JSON")
@click.option("--key", default="", help="What the event is about: those of a key have an order.")
@terminal.nats_option
def publish(name: str, event: str, key: str, nats: str | None) -> None:
    """Publish an event.

    It is JSON, and nothing more is checked: a group has what is not of its type as a dead letter.
    Where no stream keeps the topic, those hear it who listen.
    """
    import msgspec

    from dynbus.bus.errors import InvalidRequest
    from dynbus.bus.protocol.random_ids import random_id

    wanted = parse_topic(name)
    data = event.encode()
    try:
        msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"{event[:80]!r} is no JSON: {error}", started=False) from None
    event_id = random_id()

    async def send(connection: NatsConnection) -> bool:
        stream, _ = await _as_it_is(connection, wanted)
        await stream.publish(data, key, event_id, {}, PUBLISH_TIMEOUT)
        is_kept = stream.config.retain is not None
        if not is_kept:
            await connection.barrier()
        return is_kept

    is_kept = _run(nats, send)
    click.echo(f"published: {event_id if is_kept else wanted}")
    if not is_kept:
        terminal.notice(f"no stream keeps {wanted}: those hear it who listen")


# Groups ------------------------------------------------------------------------------------------


@topic.command()
@topic_argument
@group_argument
@click.option(
    "--from", "since", metavar="TIME", required=True, help=f"Since when: {terminal.TIMES}"
)
@click.option("--until", metavar="TIME", help="Until when; until now unless given.")
@click.option(
    "--of",
    "region",
    metavar="REGION",
    default="",
    help="Another region, whose events are given: those of the copy that is kept here.",
)
@terminal.nats_option
def replay(
    name: str, group: str, since: str, until: str | None, region: str, nats: str | None
) -> None:
    """Give a group events once more, or those of another region.

    Those that it has had come again, behind those that wait, in their order and under their ids; no
    other group gets them. Those that it has not had yet come in their turn.

    Which events of another region its group there has had is not known here: all since --from are
    given, under the ids that they have there. `dynbus setup --topic NAME --copies-of REGION` keeps
    the copies.
    """
    from dynbus.bus import topics

    wanted = parse_topic(name)
    first = terminal.parse_time(since, "--from")
    last = None if until is None else terminal.parse_time(until, "--until")

    def left_out(sequence: int, why: str) -> None:
        terminal.notice(f"left out: the event with sequence {sequence}: {why}")

    async def give(connection: NatsConnection) -> tuple[int, str]:
        place = await _existing_group(connection, wanted, group)
        now = (await connection.jetstream.stream_info(wanted.stream)).now
        # The clock of another region may be ahead: what has been copied was published.
        end = math.inf if region else now
        age = await _age_of_copy(connection, wanted, region) if region else ""
        given = await topics.replay(
            connection.jetstream,
            wanted,
            group,
            place,
            since=first(now),
            until=end if last is None else last(now),
            region=region,
            on_left_out=left_out,
        )
        return given, age

    given, age = _run(nats, give)
    click.echo(f"replayed: {given} events to {group}")
    if age:
        terminal.notice(age)


async def _age_of_copy(connection: NatsConnection, topic: TopicConfig, region: str) -> str:
    """The words to an operator about what the copy of a region's topic is worth.

    Raises:
        ConfigError: there is none, or it is no region to have one of.
        Unavailable: the server does not answer.
    """
    from dynbus.bus.errors import ConfigError
    from dynbus.bus.protocol.names import check_other_region, copy_stream
    from dynbus.bus.transport import NoStream

    check_other_region(connection.region, region)
    try:
        info = await connection.jetstream.stream_info(copy_stream(topic.stream, region))
    except NoStream:
        raise ConfigError(
            f"no copy of {topic} of region {region} is kept here: dynbus setup {topic.namespace} "
            f"--topic {topic.name} --copies-of {region} makes it, while that region is there"
        ) from None
    if info.silent is None:
        return (
            f"the server here has not heard of region {region} since it began: how old the copy is "
            "is not known"
        )
    return (
        f"the copy heard of region {region} {info.silent:.0f} s ago: what was published there in "
        "the moments before and had not been sent is on its disks alone"
    )


@topic.command()
@topic_argument
@group_argument
@click.option("--yes", is_flag=True, help="Do not ask.")
@terminal.nats_option
def forget(name: str, group: str, yes: bool, nats: str | None) -> None:
    """Drop the place of a group.

    Another method may have the group then, or the same one with another `ordered`. A group that is
    joined again begins where its `from_` says.
    """
    from dynbus.bus.topics import forget_group

    wanted = parse_topic(name)

    # Before it is asked, so that nobody confirms what cannot be done.
    _run(nats, lambda connection: _existing_group(connection, wanted, group))
    if not yes:
        click.confirm(f"Drop the place of {group} in {name}?", abort=True)
    _run(nats, lambda connection: forget_group(connection.jetstream, wanted, group))
    click.echo(f"forgotten: {group} of {name}")


async def _existing_group(connection: NatsConnection, topic: TopicConfig, group: str) -> GroupPlace:
    from dynbus.bus.config import suggestion
    from dynbus.bus.errors import ConfigError
    from dynbus.bus.protocol.names import check_token
    from dynbus.bus.topics import find_group
    from dynbus.bus.transport import NoStream

    check_token("group", group)
    place = await find_group(connection.jetstream, topic.stream, group)
    if place is not None:
        return place
    try:
        known = [one.group for one in (await _row(connection, topic)).groups]
    except NoStream:
        raise ConfigError(
            f"no stream keeps {topic}{await _near(connection, topic)}, so it has no group: "
            f"dynbus topic ls {topic.namespace} names those that are kept"
        ) from None
    raise ConfigError(
        f"{topic} has no group {group!r}{suggestion(group, known)}: dynbus topic ls {topic} names "
        "them"
    )


def _run(nats: str | None, work: Callable[[NatsConnection], Awaitable[T]]) -> T:
    return terminal.at_server(nats, "dynbus-topic", work)
