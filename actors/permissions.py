"""The grants of actors: what their declarations need on the bus, and not more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from dynbus.actors.declaring.actor import DeclaredActor
from dynbus.bus.errors import ConfigError
from dynbus.bus.identity.grants import (
    Grant,
    calls,
    calls_all,
    finds_instances,
    hears_cancels,
    hears_replies,
    serves,
    submits,
    takes,
)
from dynbus.bus.protocol.names import ComponentName, EndpointName


def grants_of(
    address: ComponentName,
    actor: type[DeclaredActor],
    called: Mapping[ComponentName, type[DeclaredActor]],
    *,
    principal: str,
    namespaces: Sequence[str] = (),
) -> list[Grant]:
    """The grants of an instance: to be called, to call its dependencies, for its jobs and theirs,
    and what its class says besides.

    Args:
        called: the dependencies that it keeps, by their addresses.
        principal: the credential's name.
        namespaces: where it may find what it calls and does not name; its own unless given.

    Raises:
        ConfigError: it hears topics, for which there are no permissions yet.
    """
    if actor.__dynbus_subscriptions__:
        heard = ", ".join(one.topic.name for one in actor.__dynbus_subscriptions__.values())
        raise ConfigError(
            f"{address} hears the topics {heard}: there are no permissions for topics yet; run it "
            "with a credential of your own that may do more"
        )
    namespaces = namespaces or (address.namespace,)
    # Found too where nothing is called: a call that is not declared is refused at once then.
    grants = [hears_replies(principal), *serves(address), finds_instances()]
    for other in actor.__dynbus_also__(address):
        grants += serves(other) if isinstance(other, ComponentName) else [takes(other)]
    grants += [takes(queue) for queue in _queues(address, actor)]
    for place, dependency in sorted(called.items(), key=lambda each: each[0]):
        grants += _to_call(place, dependency)
    calls_all_of = namespaces if actor.__dynbus_calls_all__ or actor.__dynbus_uses__ else ()
    for namespace in calls_all_of:
        grants += [calls_all(namespace), hears_cancels(namespace)]
    grants += [Grant(*each) for each in actor.__dynbus_grants__(address, namespaces)]
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
        grants += _to_call(place, actor)
    return list(dict.fromkeys(grants))


def _to_call(address: ComponentName, actor: type[DeclaredActor]) -> Iterable[Grant]:
    handlers = actor.__dynbus_handlers__.values()
    # A durable one is called by way of its queue.
    if direct := sorted(spec.name for spec in handlers if spec.durable is None):
        yield calls(address, direct)
    for queue in _queues(address, actor):
        options = actor.__dynbus_handlers__[queue.endpoint].durable
        yield submits(queue, ordered=options is not None and options.ordered_by is not None)
    yield hears_cancels(address.namespace)


def _queues(address: ComponentName, actor: type[DeclaredActor]) -> list[EndpointName]:
    handlers = actor.__dynbus_handlers__.values()
    return [
        address.endpoint(name)
        for name in sorted(spec.name for spec in handlers if spec.durable is not None)
    ]
