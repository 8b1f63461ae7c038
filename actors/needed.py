"""The command by which an operator makes the streams that the actors of a graph need."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime

from dynbus.actors.declaring.actor import DeclaredActor, Subscription
from dynbus.bus.protocol.names import ComponentName, EndpointName
from dynbus.bus.topics import TopicConfig
from dynbus.bus.work_queue import WorkQueueConfig

Argument = tuple[str, str, str]
"""A namespace, an option of `dynbus setup` for it, and the option's value."""


def setup_commands(actors: Mapping[ComponentName, type[DeclaredActor]]) -> list[str]:
    """The commands of an operator, one for each namespace: with the durable handlers of actors,
    their topics, and their groups, as the actors declare them.

    Args:
        actors: by their addresses.
    """
    options: dict[str, dict[tuple[str, str], None]] = defaultdict(dict)
    for address, actor in sorted(actors.items()):
        options[address.namespace] |= {}
        for namespace, option, value in (
            *_queues(address, actor),
            *_topics(address, actor),
        ):
            options[namespace][option, value] = None
    return [
        shlex.join(["dynbus", "setup", namespace, *(word for pair in given for word in pair)])
        for namespace, given in sorted(options.items())
    ]


def _queues(address: ComponentName, actor: type[DeclaredActor]) -> Iterator[Argument]:
    for spec in actor.__dynbus_handlers__.values():
        if spec.durable is not None:
            name = f"{address.component}.{spec.name}"
            yield address.namespace, "--durable", _joined(name, _of_queue(spec.durable.queue))
    for queue in actor.__dynbus_also__(address):
        if isinstance(queue, EndpointName):
            yield queue.namespace, "--queue", f"{queue.component}.{queue.endpoint}"


def _topics(address: ComponentName, actor: type[DeclaredActor]) -> Iterator[Argument]:
    heard = list(actor.__dynbus_subscriptions__.values())
    for topic in (*actor.__dynbus_publishes__, *(one.topic for one in heard)):
        config = topic.config(address.namespace)
        if config.retain is not None:
            yield config.namespace, "--topic", _joined(config.name, _of_topic(config))
    for one in heard:
        if one.group:
            config = one.topic.config(address.namespace)
            method = address.endpoint(one.spec.name)
            own = method.namespace == config.namespace
            name = f"{method.component}.{method.endpoint}" if own else str(method)
            yield config.namespace, "--group", _joined(name, _of_group(config, one))


def _of_topic(config: TopicConfig) -> Iterator[tuple[str, object]]:
    yield "retain", f"{config.retain:.10g}s"
    if config.max_bytes != TopicConfig._field_defaults["max_bytes"]:
        yield "max_bytes", config.max_bytes


def _of_group(config: TopicConfig, one: Subscription) -> Iterator[tuple[str, object]]:
    yield "topic", config.name
    yield "group", one.group
    if one.start != "new":
        yield "from", one.start.isoformat() if isinstance(one.start, datetime) else one.start
    yield from _of_queue(one.options)


def _of_queue(config: WorkQueueConfig) -> Iterator[tuple[str, object]]:
    if config.ack_wait != WorkQueueConfig().ack_wait:
        yield "ack_wait", f"{config.ack_wait:.10g}"
    if config.ordered:
        yield "ordered", "true"


def _joined(name: str, settings: Iterable[tuple[str, object]]) -> str:
    return ",".join([name, *(f"{key}={value}" for key, value in settings)])
