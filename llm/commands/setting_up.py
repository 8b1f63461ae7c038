"""The work of `dynbus setup`: what is missing of streams and buckets is made, the rest is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final, NamedTuple

import msgspec

from dynbus import ConfigError, DynbusError, EndpointName, WorkQueueConfig
from dynbus.llm.needed_streams import all_streams
from dynbus.spi import (
    JetStream,
    NeededStream,
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


def needed_in(
    namespace: str,
    queues: Sequence[str],
    topics: Sequence[str] = (),
    durable: Sequence[str] = (),
) -> list[NeededStream]:
    """The streams that the processes of a namespace need.

    Args:
        queues: its queues of jobs, as `read_queue` takes them.
        topics: those that keep their events, as `read_topic` takes them.
        durable: its durable handlers, as its queues.

    Raises:
        ConfigError: a name or a setting is not usable.
    """
    check_token("namespace", namespace)
    needed = [NeededStream(config) for config in all_streams(namespace)]
    for queue in queues:
        name, config = read_queue(namespace, queue)
        needed.append(NeededStream.of_queue(name, config))
    for handler in durable:
        name, config = read_queue(namespace, handler)
        needed += [NeededStream.of_queue(name, config), NeededStream.of_job_log(name)]
    needed += [read_topic(namespace, topic) for topic in topics]
    return needed


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
        exists = await jetstream.has_stream(one.stream)
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


async def _differences(jetstream: JetStream, one: NeededStream) -> list[str]:
    """The differences of a stream, or of its consumers, from those that dynbus makes."""
    existing = await jetstream.stream_config(one.stream.name)
    listed = one.stream.differences(existing, "in_memory", "rollup", "marker_ttl")
    for consumer in one.consumers[:1]:
        has = (await jetstream.consumer_info(one.stream.name, consumer.name)).ack_wait
        if has != consumer.ack_wait:
            listed.append(f"ack_wait = {has}, not {consumer.ack_wait}")
    return listed


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
            return await set_up(server.connection.jetstream, needed, dry_run=dry_run)

    return asyncio.run(work())
