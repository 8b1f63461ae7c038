"""Access of the commands of `dynbus kv` to the index and the instances."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Final, NamedTuple

from dynbus import ConfigError, Unavailable
from dynbus.kvrouter.names import kv_event_stream
from dynbus.kvrouter.routing.profiles import BLOCK_SIZE_KEY
from dynbus.kvrouter.stream.history import (
    NOW,
    PastIndex,
    Point,
    components_of,
    index_at,
    no_events,
)
from dynbus.kvrouter.stream.snapshots import SnapshotStore
from dynbus.spi import (
    InstanceName,
    JetStream,
    NoStream,
    check_token,
    read_instances,
    terminal,
)

from .component_filter import ComponentFilter

MAX_NAMED: Final = 10


class Where(NamedTuple):
    """The index that a command is about, and the form of its output.

    Attributes:
        component: None where all of the namespace are meant.
        timeout: seconds for reading.
    """

    jetstream: JetStream
    namespace: str
    component: str | None
    timeout: float
    as_json: bool


Report = Callable[[Where], Awaitable[None]]


def run(
    report: Report, wanted: ComponentFilter, *, timeout: float, as_json: bool, nats: str | None
) -> None:
    """Connect, print the report, and close the connection.

    Raises:
        ConfigError, NoHistory, NoStream, PermissionDenied, Unavailable: it cannot be told, and why.
    """
    config = terminal.settings(nats)
    for kind, name in zip(wanted._fields, wanted, strict=True):
        if name is not None:
            check_token(kind, name)

    async def tell() -> None:
        async with terminal.server(config, "dynbus-kv") as server:
            jetstream = server.connection.jetstream
            namespace = wanted.namespace or await _namespace(jetstream, wanted.component, timeout)
            await report(Where(jetstream, namespace, wanted.component, timeout, as_json))

    asyncio.run(tell())


async def _namespace(jetstream: JetStream, component: str | None, timeout: float) -> str:
    """The namespace that is meant where none is given: the only one with events.

    Raises:
        ConfigError: there is none, or there are several.
    """
    remedy = "give --namespace, or --component as namespace.component"
    namespaces = await namespaces_with_events(jetstream, component, timeout)
    if len(namespaces) == 1:
        return namespaces[0]
    named = f", of {', '.join(namespaces[:MAX_NAMED])}" if namespaces else ""
    what = "several namespaces have" if namespaces else "no namespace with an instance has"
    raise ConfigError(f"{what} KV events: {remedy}{named}")


async def namespaces_with_events(
    jetstream: JetStream, component: str | None, timeout: float
) -> list[str]:
    """The namespaces with instances that have a stream of events, by name."""
    announced = await _announced(jetstream, "*", component or "*", timeout)
    namespaces: list[str] = []
    for namespace in sorted({name.namespace for name in announced or ()}):
        with suppress(NoStream):
            await jetstream.stream_info(kv_event_stream(namespace))
            namespaces.append(namespace)
    return namespaces


async def component_of(at: Where) -> str:
    """The component that is meant.

    Raises:
        ConfigError: there are several, or the one that was given has no events.
        NoStream: there is no stream of events, or nothing in it.
    """
    namespace, asked = at.namespace, at.component
    components = await components_of(at.jetstream, namespace, timeout=at.timeout)
    if asked is None and len(components) == 1:
        return components[0]
    if asked in components:
        return asked
    if asked is not None or not components:
        # The stream may have outlived its messages, and snapshots may have, too.
        kept = {one.component for one in await SnapshotStore(at.jetstream, namespace).snapshots()}
        if asked in kept:
            return asked
        components = sorted(kept.union(components))
    if asked is None and len(components) == 1:
        return components[0]
    if not components:
        raise no_events(namespace)
    named = ", ".join(components[:MAX_NAMED])
    raise ConfigError(
        f"several components of {namespace} have events: give --component, of {named}"
        if asked is None
        else f"component {asked} of {namespace} has no KV events; those that have some: {named}"
    )


async def past_index(at: Where, component: str, point: Point = NOW) -> PastIndex:
    """The index at a point; what is missing of it is said on standard error."""
    past = await index_at(at.jetstream, at.namespace, component, point, timeout=at.timeout)
    if not past.is_whole:
        named = ", ".join(map(str, past.partial[:5]))
        terminal.notice(
            f"the stream begins at sequence {past.first_sequence}: nothing is known of what was "
            f"said before, so blocks may be missing{f' ({named})' if named else ''}"
        )
    return past


async def leases_of(at: Where, component: str) -> dict[str, Mapping[str, str]] | None:
    """The metadata of the instances with a lease; None when there are no leases to read."""
    metadata_by_name = await _announced(at.jetstream, at.namespace, component, at.timeout)
    if metadata_by_name is None:
        return None
    return {name.instance_id: metadata for name, metadata in metadata_by_name.items()}


async def _announced(
    jetstream: JetStream, namespace: str, component: str, timeout: float
) -> dict[InstanceName, Mapping[str, str]] | None:
    """The metadata of the instances with a lease; None when they cannot be read."""
    try:
        records = await read_instances(jetstream, namespace, component, timeout=timeout)
    except NoStream:
        return None
    except Unavailable as error:
        terminal.notice(f"{error}: which instances have a lease is not known")
        return None
    return {record.name: record.metadata for record in records}


def announced_block_sizes(leases: Mapping[str, Mapping[str, str]] | None) -> list[int]:
    """The block sizes that instances say, each once."""
    said = {metadata.get(BLOCK_SIZE_KEY, "") for metadata in (leases or {}).values()}
    return sorted({int(size) for size in said if size.isdecimal() and int(size)})
