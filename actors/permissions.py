"""The grants of actors: what their declarations need on the bus, and not more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from dynbus.actors.declaring.actor import DeclaredActor
from dynbus.bus.identity.grants import (
    Grant,
    calls,
    calls_all,
    finds_instances,
    hears_cancels,
    hears_events,
    hears_replies,
    publishes_events,
    serves,
    submits,
    takes,
    takes_events,
)
from dynbus.bus.protocol.endpoint import allows
from dynbus.bus.protocol.names import ComponentName, EndpointName
from dynbus.bus.topics import consumer_names


def grants_of(
    address: ComponentName,
    actor: type[DeclaredActor],
    called: Mapping[ComponentName, type[DeclaredActor]],
    *,
    principal: str,
    namespaces: Sequence[str] = (),
) -> list[Grant]:
    """The grants of an instance: to be called, to call its dependencies, for its jobs and theirs,
    for the topics that it hears and publishes, and what its class says besides.

    Args:
        called: the dependencies that it keeps, by their addresses.
        principal: the credential's name.
        namespaces: where it may find what it calls and does not name; its own unless given.
    """
    namespaces = namespaces or (address.namespace,)
    # Found too where nothing is called: a call that is not declared is refused at once then.
    grants = [hears_replies(principal), *serves(address), finds_instances()]
    grants.append(Grant.of_recording(address.namespace))
    for other in actor.__dynbus_also__(address):
        grants += serves(other) if isinstance(other, ComponentName) else [takes(other)]
    grants += [takes(queue) for queue in _queues(address, actor)]
    grants += _topics(address, actor)
    for place, dependency in sorted(called.items(), key=lambda each: each[0]):
        grants += _to_call(place, dependency, principal)
    calls_all_of = namespaces if actor.__dynbus_calls_all__ or actor.__dynbus_uses__ else ()
    for namespace in calls_all_of:
        recording = Grant.of_recording(namespace)
        grants += [calls_all(namespace), hears_cancels(namespace), recording]
    grants += actor.__dynbus_grants__(address, namespaces)
    return list(dict.fromkeys(grants))


def grants_of_client(
    called: Mapping[ComponentName, type[DeclaredActor]], *, principal: str
) -> list[Grant]:
    """The grants of a program that calls actors, and submits jobs to durable handlers of theirs.

    Args:
        called, principal: as of `grants_of`.
    """
    grants = [hears_replies(principal), finds_instances()]
    for place, actor in sorted(called.items(), key=lambda each: each[0]):
        grants += _to_call(place, actor, principal, untyped=True)
    return list(dict.fromkeys(grants))


def _to_call(
    address: ComponentName,
    actor: type[DeclaredActor],
    principal: str,
    *,
    untyped: bool = False,
) -> Iterable[Grant]:
    """The grants of a caller of an actor: for those of its handlers that it may call.

    Args:
        untyped: whether it may have no class of the actor, as `dynbus call`: then an instance
            submits the job of a durable handler. Others call that by way of its queue alone.
    """
    handlers = actor.__dynbus_handlers__.values()
    direct = sorted(
        spec.name
        for spec in handlers
        if (untyped or spec.durable is None) and allows(spec.allow, principal)
    )
    if direct:
        yield calls(address, direct)
    for queue in _queues(address, actor):
        options = actor.__dynbus_handlers__[queue.endpoint].durable
        yield submits(queue, ordered=options is not None and options.ordered_by is not None)
    yield hears_cancels(address.namespace)
    yield Grant.of_recording(address.namespace)


def _topics(address: ComponentName, actor: type[DeclaredActor]) -> Iterable[Grant]:
    for topic in actor.__dynbus_publishes__:
        config = topic.config(address.namespace)
        kept = config.retain is not None
        yield publishes_events(config.namespace, config.name, kept=kept)
    for heard in actor.__dynbus_subscriptions__.values():
        config = heard.topic.config(address.namespace)
        if not heard.group:
            kept = config.retain is not None
            yield hears_events(config.namespace, config.name, kept=kept)
            continue
        ordered = heard.options.ordered
        yield takes_events(
            config.namespace,
            config.name,
            heard.group,
            address.endpoint(heard.spec.name),
            consumer_names(heard.group, ordered=ordered),
            # The first of them tells.
            consumer_names(heard.group, ordered=not ordered)[:1],
            ordered=ordered,
        )


def _queues(address: ComponentName, actor: type[DeclaredActor]) -> list[EndpointName]:
    handlers = actor.__dynbus_handlers__.values()
    return [
        address.endpoint(name)
        for name in sorted(spec.name for spec in handlers if spec.durable is not None)
    ]
