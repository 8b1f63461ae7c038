"""The versions of endpoints that run, as their instances tell them.

Callers are taken to be of the versions of the instances that they call.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, NamedTuple

import msgspec

from dynbus.bus.background import task_group
from dynbus.bus.commands.server import Server
from dynbus.bus.errors import ConfigError
from dynbus.bus.protocol import headers
from dynbus.bus.protocol.names import SCHEMA, ComponentName
from dynbus.bus.protocol.wire import InstanceRecord
from dynbus.bus.records.instance_records import read_instances
from dynbus.bus.transport import NoStream

from .endpoint_contract import EndpointContract

READ_SECONDS: Final = 3.0
"""Seconds within which all records must have been read."""
ANSWER_SECONDS: Final = 3.0


class RunningVersion(NamedTuple):
    """A version of a component of which instances run.

    Attributes:
        instances: their ids.
        contracts: by the subjects of the endpoints; those that the instances tell.
        unknown: why they are not all known; empty where they are.
    """

    address: ComponentName
    instances: tuple[str, ...]
    contracts: dict[str, EndpointContract]
    unknown: str = ""


async def running_versions(
    server: Server, addresses: Collection[ComponentName]
) -> list[RunningVersion]:
    """The versions that run of some components, each asked of one of its instances.

    Raises:
        PermissionDenied, Unavailable: the records cannot be read.
    """
    groups = [(address, group) for address in addresses for group in await _groups(server, address)]
    versions: dict[int, RunningVersion | None] = {}

    async def ask(number: int, address: ComponentName, group: list[InstanceRecord]) -> None:
        versions[number] = await _version(server, address, group)

    async with task_group() as tasks:
        for number, (address, group) in enumerate(groups):
            tasks.start_soon(ask, number, address, group)
    return [version for number in sorted(versions) if (version := versions[number]) is not None]


async def _groups(server: Server, address: ComponentName) -> list[list[InstanceRecord]]:
    """The instances of a component by what they announce; one that announces nothing is alone."""
    try:
        records = await read_instances(server.connection.jetstream, *address, timeout=READ_SECONDS)
    except NoStream:
        return []  # no instance has ever been started on this server
    groups: dict[object, list[InstanceRecord]] = {}
    for record in sorted(records, key=lambda one: one.started):
        announced = (tuple(sorted(record.schemas.items())), tuple(sorted(record.endpoints.items())))
        groups.setdefault(announced if record.schemas else record.name, []).append(record)
    return list(groups.values())


async def _version(
    server: Server, address: ComponentName, group: list[InstanceRecord]
) -> RunningVersion | None:
    """The version that the first of some equal instances tells; None where none is there."""
    names = tuple(record.instance_id for record in group)
    unknown = ""
    for record in group:
        subject = address.endpoint(SCHEMA).at(record.instance_id)
        answer = await server.request(subject, b"", seconds=ANSWER_SECONDS)
        if answer is None:
            unknown = f"{record.name} does not answer what it reads and writes"
        elif headers.SERVICE_ERROR in headers.decode(answer.headers):
            unknown = f"{record.name} does not tell what it reads and writes"
        elif not answer.found_nobody:
            try:
                contracts = _contracts(record, answer.data)
            except ConfigError as error:
                unknown = f"{record.name}: {error}"
            else:
                left_out = sorted(record.endpoints.keys() - {_endpoint(one) for one in contracts})
                unknown = (
                    f"{record.name} tells nothing of {', '.join(left_out)}" if left_out else ""
                )
                return RunningVersion(address, names, contracts, unknown)
    return RunningVersion(address, names, {}, unknown) if unknown else None


def _endpoint(subject: str) -> str:
    return subject.rpartition(".")[2]


def _contracts(record: InstanceRecord, data: bytes) -> dict[str, EndpointContract]:
    """The contracts in the answer of an instance.

    Raises:
        ConfigError: it is no answer.
    """
    try:
        answer = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ConfigError(f"its answer cannot be read: {error}") from None
    address = record.name.address
    return {
        f"{address}.{name}": EndpointContract.of_told(record.endpoints[name], bytes(one))
        for name, one in answer.items()
        if name in record.endpoints
    }
