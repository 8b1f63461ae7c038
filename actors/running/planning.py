"""Planning a run: loading its targets and checking every setting, before anything is started.

That imports the user's modules. A run whose instances have processes of their own has it done in
another one (`plan_elsewhere`), so that it stays small and holds none of their code.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple, TypeVar

import msgspec

from dynbus.actors.declaring.actor import address_of, full_name
from dynbus.actors.declaring.actor_config import ActorConfig
from dynbus.actors.declaring.arguments import Text
from dynbus.actors.declaring.schemas import encode_schemas
from dynbus.actors.declaring.service_args import ServiceArgs
from dynbus.actors.placing.allotment import (
    Allotment,
    Machine,
    NoRoom,
    Place,
    all_of,
    warnings_of,
)
from dynbus.actors.placing.machine import this_machine
from dynbus.actors.runtime import Actor
from dynbus.bus import exit_codes
from dynbus.bus.config import BusConfig, load_config
from dynbus.bus.errors import ConfigError
from dynbus.bus.identity.credentials import own_credentials
from dynbus.bus.protocol.names import ComponentName
from dynbus.bus.telemetry.logs import LogFormat, configure_logging

from .child_messages import WorkerSettings
from .child_process import arguments_of, guard_group, load_class
from .config_file import ConfigFile, read_files
from .configuration import (
    BusSettings,
    bus_settings,
    declared_nodes,
    misspelt_keys,
    misspelt_variables,
    node_settings,
)
from .graph import Node, addresses_of, dependency_depth
from .in_process import Assignment, Failure, failure_of, leave_within
from .loaded_files import loaded_files
from .loader import load_targets, reference
from .plan import Plan, PlannedNode, PlanRequest, by_class
from .processes import ForkProcess, ForkServer, exit_text

A = TypeVar("A")

READ_AT_START: Final = {"LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONHASHSEED", "PYTHONPATH"}
"""Variables that the process of an instance has read before it is told its own."""


class NotOnThisMachine(ConfigError):
    """Raised when a run is well, and this machine does not have what it needs."""


class PlanFailed(Exception):
    """Raised when a run cannot be planned.

    Attributes:
        failure: why, for the user.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


@dataclass(frozen=True)
class LoadedRun:
    """A run whose targets have been loaded into this process.

    Attributes:
        assignments: dependencies first.
        bus: fields of `BusConfig` for every process.
        config: the bus with them.
        warnings: what is probably a mistake and does not keep the run from starting.
        origins: of each assignment, where its values came from.
    """

    assignments: list[Assignment]
    bus: BusSettings
    config: BusConfig
    warnings: list[str]
    origins: list[Mapping[str, str]]

    @property
    def addresses(self) -> dict[str, list[str]]:
        """As of `Plan`; also where another process could not find the classes."""
        return by_class((full_name(each.actor), str(each.address)) for each in self.assignments)

    def plan(self) -> Plan:
        """The same without the classes.

        Raises:
            ConfigError: another process could not find one of them.
        """
        addresses = {Node(each.node, each.actor): each.address for each in self.assignments}
        return Plan(
            nodes=[planned(assignment, addresses) for assignment in self.assignments],
            path=list(sys.path),
            bus=self.bus.values,
            sources=self.bus.sources,
            warnings=self.warnings,
            files=loaded_files(),
        )

    def placed(self, environment: Mapping[str, str]) -> PlacedRun:
        """The places of its instances on this machine.

        Raises:
            NotOnThisMachine: the machine has too few GPUs, or no key for a node.
            ConfigError: a node sets the variable that names them.
        """
        for each in self.assignments:
            if each.service.workers:
                try:
                    own_credentials(self.config.credentials, [str(each.address)])
                except ConfigError as error:
                    raise NotOnThisMachine(str(error)) from None
        services = {str(each.address): each.service for each in self.assignments}
        wants_gpus = any(service.resources.gpu is not None for service in services.values())
        machine = this_machine(environment, with_gpus=wants_gpus)
        variable = machine.gpu_variable
        for address, service in services.items():
            if service.resources.gpu is not None and variable in service.environment:
                raise ConfigError(
                    f"{address} declares gpu {service.resources.gpu} and sets {variable} in its "
                    "environment: leave one of them out"
                )
        counts = [(address, each.resources, each.workers) for address, each in services.items()]
        try:
            places = Allotment(machine).allot_all(wanted for c in counts for wanted in all_of(*c))
        except NoRoom as error:
            raise NotOnThisMachine(str(error)) from None
        late = [
            f"{address} sets {name}, which only programs that it starts will notice: its own "
            "process runs already"
            for address, service in services.items()
            for name in sorted(READ_AT_START & service.environment.keys())
        ]
        return PlacedRun(machine, places, [*warnings_of(machine, counts, places), *late])

    def not_in_process(self) -> list[str]:
        """A warning for each actor that declares what only a process of its own can have."""
        return [
            f"--in-process: {each.address} runs without {' and '.join(left)}, for which it would "
            "need a process of its own"
            for each in self.assignments
            if (left := _declared(each.service))
        ]


class PlacedRun(NamedTuple):
    """The machine of a run, the places of its instances by label, and what is not in force."""

    machine: Machine
    places: dict[str, Place]
    warnings: list[str]


def load_run(request: PlanRequest, environment: Mapping[str, str]) -> LoadedRun:
    """Load the targets and check every setting.

    Raises:
        ConfigError: something is not usable; nothing has been started.
    """
    files = read_files(request.config_files, environment)
    # Before the targets: a mistake there is told before any code of a user's runs.
    bus, config = _bus(files, request, environment)
    declared = declared_nodes(files)
    nodes = load_targets(request.targets, declared)
    settings = node_settings(
        nodes,
        files=files,
        options=request.options,
        environment=environment,
        namespace=request.namespace,
    )
    addresses_of(
        {node: settings[node].service.namespace for node in nodes},
        {node.name: node.source for node in declared},
    )
    assignments = [
        Assignment(node.actor, settings[node].arguments, settings[node].service, node=node.name)
        for node in nodes
    ]
    if not any(assignment.service.workers for assignment in assignments):
        names = ", ".join(node.name for node in nodes)
        raise ConfigError(f"nothing to run: workers = 0 for {names}; set one of them to 1 or more")
    return LoadedRun(
        assignments,
        bus,
        config,
        [*misspelt_variables(nodes, environment), *misspelt_keys(settings)],
        [settings[node].origins for node in nodes],
    )


def plan_of_bus(request: PlanRequest, environment: Mapping[str, str]) -> Plan:
    """The plan of a run that has no nodes yet: its bus alone, without loading its targets.

    Raises:
        ConfigError: a setting of the bus is not usable.
    """
    bus, _ = _bus(read_files(request.config_files, environment), request, environment)
    return Plan(nodes=[], path=[], bus=bus.values, sources=bus.sources, warnings=[])


def planned(
    assignment: Assignment, addresses: Mapping[Node, ComponentName] = MappingProxyType({})
) -> PlannedNode:
    """An assignment without its class.

    Args:
        addresses: of the nodes of the run; others are where their classes say.

    Raises:
        ConfigError: another process could not find the class.
    """
    actor, given = assignment.actor, assignment.arguments
    return PlannedNode(
        address=str(assignment.address),
        actor=reference(actor),
        depth=dependency_depth(actor),
        service=assignment.service,
        dependencies={
            name: str(addresses.get(called) or address_of(called.actor, node=called.name))
            for name, called in Node(assignment.node, actor).edges.items()
        },
        uses=list(dict.fromkeys(map(str, actor.__dynbus_uses__.values()))),
        endpoints={spec.name: spec.kind for spec in actor.__dynbus_handlers__.values()},
        values={name: value for name, value in given.items() if not isinstance(value, Text)},
        texts={name: str(value) for name, value in given.items() if isinstance(value, Text)},
    )


def _declared(service: ServiceArgs) -> list[str]:
    resources, names = str(service.resources), ", ".join(sorted(service.environment))
    parts = [f"its resources ({resources})"] if resources else []
    return [*parts, f"its environment ({names})"] if names else parts


def _bus(
    files: Sequence[ConfigFile], request: PlanRequest, environment: Mapping[str, str]
) -> tuple[BusSettings, BusConfig]:
    settings = bus_settings(files, environment, nats=request.nats)
    return settings, load_config(settings.values, environment, sources=settings.sources)


# In a process of its own ----------------------------------------------------------------------


class MakePlan(msgspec.Struct, frozen=True, tag="plan"):
    """A task of the process that plans, in a line of JSON."""

    request: PlanRequest
    log_format: LogFormat | None
    log_level: str


class TellContracts(msgspec.Struct, frozen=True, tag="contracts"):
    """The other task of that process: load the classes of nodes as they are now, and tell what
    they read and write."""

    nodes: list[PlannedNode]
    settings: WorkerSettings


class PlanMade(msgspec.Struct, frozen=True, tag="made"):
    """The answer of that process."""

    plan: Plan


class EndpointTold(msgspec.Struct, frozen=True):
    """The contract of an endpoint: its kind, and the JSON of `encode_schemas`."""

    kind: str
    schemas: msgspec.Raw


class NodeContracts(msgspec.Struct, frozen=True):
    """The contracts of a node: of the endpoints that it serves, and of those that it calls, as it
    knows them, by their addresses."""

    serves: dict[str, EndpointTold]
    calls: dict[str, dict[str, EndpointTold]]


class ContractsTold(msgspec.Struct, frozen=True, tag="told"):
    """The answer to `TellContracts`, by the addresses of the nodes."""

    nodes: dict[str, NodeContracts]


class PlanRefused(msgspec.Struct, frozen=True, tag="refused"):
    """The answer of that process where the run cannot be planned; see `Failure`."""

    code: int
    message: str
    traceback: str


async def plan_elsewhere(forks: ForkServer, asked: MakePlan) -> Plan:
    """Have a process load the targets and make the plan; it ends afterwards.

    When this is cancelled, the process is killed.

    Raises:
        PlanFailed: the run cannot be planned, or the process ended before it had done so.
        OSError: no process could be made.
    """
    return (await _elsewhere(forks, asked, asked.request.targets, PlanMade)).plan


async def contracts_elsewhere(forks: ForkServer, asked: TellContracts) -> dict[str, NodeContracts]:
    """Have a process load the classes of nodes and tell what they read and write; it ends
    afterwards.

    When this is cancelled, the process is killed.

    Raises:
        PlanFailed: a class cannot be loaded, or the process ended before it had told.
        OSError: no process could be made.
    """
    names = [node.actor for node in asked.nodes]
    return (await _elsewhere(forks, asked, names, ContractsTold)).nodes


async def _elsewhere(
    forks: ForkServer, asked: MakePlan | TellContracts, loads: Sequence[str], answer: type[A]
) -> A:
    process, reader, writer = await forks.open(ForkProcess("planner"))
    try:
        writer.write(msgspec.json.encode(asked) + b"\n")
        try:
            line = await reader.readline()
        except ConnectionError:  # killed before it has read what it is asked
            line = b""
        if not line.endswith(b"\n"):
            text = f"the process that loads {', '.join(loads)} ended: "
            code = await process.wait()
            raise PlanFailed(Failure(exit_codes.START_FAILED, text + exit_text(code)))
    finally:
        writer.close()
        process.kill()
    reply = msgspec.json.decode(line, type=PlanMade | ContractsTold | PlanRefused)
    if isinstance(reply, PlanRefused):
        raise PlanFailed(Failure(reply.code, reply.message, reply.traceback))
    if not isinstance(reply, answer):
        raise TypeError(f"the process that plans was asked for another thing than {reply!r}")
    return reply


def main() -> None:
    """Plan the run that the socket of the command line asks for."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    # A module that is being imported may run for long, and start processes, when we are killed.
    guard_group(connection)
    with connection.makefile("rb") as lines:
        asked = msgspec.json.decode(lines.readline(), type=MakePlan | TellContracts)
    reply: PlanMade | ContractsTold | PlanRefused
    try:
        reply = _made(asked) if isinstance(asked, MakePlan) else _contracts_told(asked)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - told to the parent
        reply = PlanRefused(*failure_of(error))
    connection.sendall(msgspec.json.encode(reply) + b"\n")
    leave_within(exit_codes.OK)


def _made(asked: MakePlan) -> PlanMade:
    configure_logging(asked.log_format, asked.log_level)
    run = load_run(asked.request, os.environ)
    machine, _, warnings = run.placed(os.environ)
    plan = run.plan()
    return PlanMade(
        msgspec.structs.replace(plan, machine=machine, warnings=[*run.warnings, *warnings])
    )


def _contracts_told(asked: TellContracts) -> ContractsTold:
    configure_logging(asked.settings.log_format, asked.settings.log_level)
    sys.path[:] = asked.settings.path
    return ContractsTold({node.address: _contracts_of(node) for node in asked.nodes})


def _contracts_of(node: PlannedNode) -> NodeContracts:
    component = node.address.partition(".")[2]
    actor = load_class(node, ActorConfig(component, arguments_of(node)))
    called = Node(component, actor).edges
    return NodeContracts(
        _endpoints_told(actor),
        {
            node.dependencies[name]: _endpoints_told(one.actor)
            for name, one in called.items()
            if name in node.dependencies
        },
    )


def _endpoints_told(actor: type[Actor]) -> dict[str, EndpointTold]:
    return {
        spec.name: EndpointTold(
            spec.kind,
            msgspec.Raw(encode_schemas(spec.schemas, durable=spec.durable is not None)),
        )
        for spec in actor.__dynbus_handlers__.values()
    }
