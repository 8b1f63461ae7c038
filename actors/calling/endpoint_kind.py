"""Whether an endpoint answers once or with a stream, by the records of its instances."""

from __future__ import annotations

from collections.abc import Iterable

from dynbus.bus.errors import InvalidRequest
from dynbus.bus.protocol.names import EndpointName
from dynbus.bus.records.discovery import Instance


def kind_of(instance: Instance | None, endpoint: EndpointName) -> str | None:
    """`unary` or `stream`, as an instance's record says; None when it does not."""
    return instance.record.endpoints.get(endpoint.endpoint) if instance is not None else None


def first_kind(instances: Iterable[Instance], endpoint: EndpointName) -> str | None:
    """The kind that the first instance with the endpoint serves; None when none has it."""
    kinds = (kind_of(instance, endpoint) for instance in instances)
    return next((kind for kind in kinds if kind is not None), None)


def wrong_kind(
    instance: Instance,
    endpoint: EndpointName,
    *,
    streaming: bool,
    declared: bool,
    request_id: str,
) -> InvalidRequest | None:
    """Why an instance cannot take a call: its result would be lost, or never come; else None.

    Args:
        streaming: how the call is made.
        declared: whether the client's actor class says so, and not the way it is awaited.
    """
    kind = kind_of(instance, endpoint)
    wanted = "stream" if streaming else "unary"
    if kind == wanted:
        return None
    if kind is None:
        known = instance.record.endpoints
        if not known:
            return None
        message = (
            f"{endpoint.namespace}.{endpoint.component} has no endpoint "
            f"{endpoint.endpoint!r}; it has {', '.join(sorted(known))}"
        )
    elif declared:
        message = (
            f"{endpoint} is declared {wanted} by the client's actor class, "
            f"but instance {instance.id} serves it as {kind}"
        )
    elif streaming:
        message = f"{endpoint} answers once: await the call"
    else:
        message = f"{endpoint} answers with a stream: iterate over the call"
    return InvalidRequest(message, request_id=request_id, started=False)
