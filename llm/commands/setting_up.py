"""The work of `dynbus setup`: what is missing of streams and buckets is made, the rest is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final, NamedTuple

import msgspec

from dynbus import ConfigError, DynbusError, EndpointName, WorkQueueConfig
from dynbus.llm.needed_streams import abroad_streams, all_streams
from dynbus.spi import (
    JetStream,
    NeededStream,
    NoStream,
    check_token,
    terminal,
)

QUEUE_SETTINGS: Final[dict[str, Callable[[str], Any]]] = {
    "ack_wait": float,
    "max_jobs": int,
    "max_bytes": int,
    "ordered": lambda text: {"true": True, "false": False}[text],
}
"""The settings of the queue itself, of `WorkQueueConfig`; the rest is each taker's."""


class Status(StrEnum):
    """The outcome for a stream."""

    MADE = "made"
    MISSING = "missing"
    THERE = "there"
    DIFFERS = "differs"
    """It is there and works, with other limits than dynbus gives it."""
    REFUSED = "refused"


class Outcome(NamedTuple):
    """The outcome for one stream, and what is to be said of it."""

    stream: str
    status: Status
    text: str


TOPIC_SETTINGS: Final[dict[str, Callable[[str], Any]]] = {"retain": str, "max_bytes": int}
GROUP_SETTINGS: Final[dict[str, Callable[[str], Any]]] = {
    "topic": str,
    "group": str,
    "from": str,
    "ack_wait": QUEUE_SETTINGS["ack_wait"],
    "ordered": QUEUE_SETTINGS["ordered"],
}


def needed_in(
    namespace: str,
    queues: Sequence[str],
    topics: Sequence[str] = (),
    durable: Sequence[str] = (),
    groups: Sequence[str] = (),
    copied: Sequence[str] = (),
) -> list[NeededStream]:
    """The streams that the processes of a namespace need.

    Args:
        queues: its queues of jobs, as `read_queue` takes them.
        topics: those that keep their events, as `read_topic` takes them.
        durable: its durable handlers, as its queues.
        groups: those of its topics, as `read_group` takes them. A topic that is not among `topics`
            has no settings.
        copied: regions whose jobs of these durable handlers, and events of these topics, are
            copied.

    Raises:
        ConfigError: a name or a setting is not usable.
    """
    check_token("namespace", namespace)
    if copied and not durable and not topics:
        raise ConfigError(
            f"--copies-of {copied[0]} copies jobs of durable handlers and events of topics: name "
            "them, by --durable and --topic"
        )
    needed = [NeededStream(config) for config in all_streams(namespace)]
    for queue in queues:
        name, config = read_queue(namespace, queue)
        needed.append(NeededStream.of_queue(name, config))
    for handler in durable:
        name, config = read_queue(namespace, handler)
        needed += [NeededStream.of_queue(name, config), NeededStream.of_job_log(name)]
        for region in dict.fromkeys(copied):
            needed += NeededStream.of_copies(name, region)
    kept = {topic.partition(",")[0]: read_topic(namespace, topic) for topic in topics}
    needed += [one.topic_copy(region) for one in kept.values() for region in dict.fromkeys(copied)]
    for text in groups:
        group = read_group(namespace, text)
        stream = kept.get(group.topic) or read_topic(namespace, group.topic)
        kept[group.topic] = stream.with_group(
            (namespace, group.topic), group.name, group.handler, group.config, group.start
        )
        if group.config.ordered:
            needed.append(NeededStream.of_job_log(group.handler))
    return [*needed, *kept.values()]


def read_queue(namespace: str, text: str) -> tuple[EndpointName, WorkQueueConfig]:
    """A queue out of `COMPONENT.ENDPOINT`, with `,SETTING=VALUE` for each of its settings.

    Raises:
        ConfigError: it is none.
    """
    name, *settings = text.split(",")
    component, dot, endpoint = name.partition(".")
    if not dot:
        raise ConfigError(f"{text!r} is not a queue: write COMPONENT.ENDPOINT[,SETTING=VALUE]...")
    check_token("component", component)
    check_token("endpoint", endpoint)
    values = _read_settings(f"the queue {name}", settings, QUEUE_SETTINGS)
    return EndpointName(namespace, component, endpoint), WorkQueueConfig(**values).check()


def read_topic(namespace: str, text: str) -> NeededStream:
    """The stream of a topic out of `NAME`, with `,SETTING=VALUE` for each of its settings.

    Raises:
        ConfigError: it is none.
    """
    name, *settings = text.split(",")
    values = _read_settings(f"the topic {name}", settings, TOPIC_SETTINGS)
    return NeededStream.of_topic(namespace, name, **values)


class NeededGroup(NamedTuple):
    """A group of a topic, and the method that takes its events."""

    topic: str
    name: str
    handler: EndpointName
    config: WorkQueueConfig
    start: str


def read_group(namespace: str, text: str) -> NeededGroup:
    """A group out of `COMPONENT.METHOD,topic=NAME,group=NAME`, with `,SETTING=VALUE` for each
    further setting.

    Args:
        namespace: of the topic, and of the method unless its own stands before it.

    Raises:
        ConfigError: it is none.
    """
    method, *settings = text.split(",")
    tokens = method.split(".")
    values = _read_settings(f"the group of {method}", settings, GROUP_SETTINGS)
    if len(tokens) not in (2, 3) or not values.get("topic") or not values.get("group"):
        raise ConfigError(
            f"{text!r} is not a group: write "
            "[NAMESPACE.]COMPONENT.METHOD,topic=NAME,group=NAME[,SETTING=VALUE]..."
        )
    handler = EndpointName.of(*([namespace, *tokens][-3:]))
    topic, name, start = values.pop("topic"), values.pop("group"), values.pop("from", "new")
    return NeededGroup(topic, name, handler, WorkQueueConfig(**values).check(), start)


def _read_settings(
    what: str, settings: Sequence[str], known: Mapping[str, Callable[[str], Any]]
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for setting in settings:
        key, _, value = setting.partition("=")
        if key not in known:
            raise ConfigError(f"{setting!r} is no setting of {what}: there are {', '.join(known)}")
        try:
            values[key] = known[key](value)
        except ValueError:
            raise ConfigError(f"{what}: {key} = {value!r} is not a number") from None
        except KeyError:
            raise ConfigError(f"{what}: {key} = {value!r} is not true or false") from None
    return values


async def set_up(
    jetstream: JetStream, needed: Sequence[NeededStream], *, dry_run: bool = False
) -> list[Outcome]:
    """Make what is missing, and give what is there the replicas that it lacks.

    Args:
        dry_run: only look.

    Raises:
        Unavailable: the server does not answer.
    """
    return [await _set_up(jetstream, one, dry_run) for one in needed]


async def _set_up(jetstream: JetStream, one: NeededStream, dry_run: bool) -> Outcome:
    name = one.stream.name
    try:
        exists = await jetstream.has_stream(one.stream) and await _has_consumers(jetstream, one)
        if not dry_run:
            await jetstream.ensure_stream(one.stream)
            for consumer in one.consumers:
                await jetstream.ensure_pull_consumer(name, consumer)
        elif not exists:
            return Outcome(name, Status.MISSING, one.stream.description.removeprefix("dynbus: "))
        listed = await _differences(jetstream, one)
    except DynbusError as error:
        if error.retryable:
            raise
        return Outcome(name, Status.REFUSED, str(error))
    if not exists:
        return Outcome(name, Status.MADE, one.stream.description.removeprefix("dynbus: "))
    if listed:
        return Outcome(name, Status.DIFFERS, "; ".join(listed))
    return Outcome(name, Status.THERE, one.stream.description.removeprefix("dynbus: "))


async def _has_consumers(jetstream: JetStream, one: NeededStream) -> bool:
    try:
        for consumer in one.consumers:
            await jetstream.consumer_info(one.stream.name, consumer.name)
    except NoStream:
        return False
    return True


async def _differences(jetstream: JetStream, one: NeededStream) -> list[str]:
    """The differences of a stream, or of its consumers, from those that dynbus makes."""
    existing = await jetstream.stream_config(one.stream.name)
    listed = one.stream.differences(existing, "in_memory", "rollup", "marker_ttl")
    for consumer in one.consumers:
        has = await jetstream.consumer_info(one.stream.name, consumer.name)
        if has.ack_wait != consumer.ack_wait:
            listed.append(f"ack_wait = {has.ack_wait}, not {consumer.ack_wait}")
        if has.description != consumer.description:
            listed.append(f"{consumer.name} is that of {has.description}")
    return list(dict.fromkeys(listed))


def run(
    needed: Sequence[NeededStream],
    *,
    nats: str | None,
    replicas: int | None,
    dry_run: bool,
) -> list[Outcome]:
    """Make streams at a server, or look for them.

    Raises:
        DynbusError: a setting is not usable, or the server cannot be reached.
    """
    config = terminal.settings(nats)
    if replicas is not None:
        config = msgspec.structs.replace(config, replicas=replicas)

    async def work() -> list[Outcome]:
        async with terminal.server(config, "dynbus-setup") as server:
            connection = server.connection
            abroad = abroad_streams(connection.region)
            for one in needed if not dry_run else ():
                await one.announce(connection)
            return await set_up(connection.jetstream, [*needed, *abroad], dry_run=dry_run)

    return asyncio.run(work())
