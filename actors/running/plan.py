"""The plan of a run, as data: it is read without the user's classes.

`planning.py` makes it, in a process of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from dynbus.actors.declaring.service_args import ServiceArgs
from dynbus.actors.placing.allotment import Machine

from .configuration import NodeOption


class PlanRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The choices of the user from which the plan of a run is made.

    Attributes:
        targets: as `dynbus run` takes them.
        config_files: YAML files, each before what overrides it.
        options: those of single actors.
        nats: the servers of `--nats`.
        namespace: that of `--namespace`; None for none.
    """

    targets: list[str]
    config_files: list[str] = []
    options: list[NodeOption] = []
    nats: str | None = None
    namespace: str | None = None


class PlannedNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node of a run.

    Attributes:
        address: `namespace.component`.
        actor: `module:Name` of its class.
        depth: how long the longest chain of dependencies below it is.
        dependencies: the addresses that it calls, by the attributes of its class. Where the class
            has links, those that they leave out are not among them.
        uses: what it depends on that is no node, such as `model NAME`.
        endpoints: `unary` or `stream`, by name.
        service: how it is served.
        values, texts: constructor arguments; the texts are still to be read.
    """

    address: str
    actor: str
    depth: int
    service: ServiceArgs = ServiceArgs()
    dependencies: dict[str, str] = {}
    uses: list[str] = []
    endpoints: dict[str, Literal["stream", "unary"]] = {}
    values: dict[str, Any] = {}
    texts: dict[str, str] = {}


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The nodes that a run starts, checked.

    Attributes:
        nodes: dependencies before what depends on them.
        path: the `sys.path` by which each process finds the classes.
        bus: fields of `BusConfig` for every process.
        sources: where they came from, for messages.
        warnings: what is probably a mistake and does not keep the run from starting.
        files: those of the user's that were loaded to find all this out, as real paths.
        machine: what the instances are placed on; nothing until that was looked at.
    """

    nodes: list[PlannedNode]
    path: list[str]
    bus: dict[str, Any]
    sources: dict[str, str]
    warnings: list[str]
    files: list[str] = []
    machine: Machine = Machine()

    @property
    def addresses(self) -> dict[str, list[str]]:
        """Those of the nodes of each class, by `module:Name`."""
        return by_class((node.actor, node.address) for node in self.nodes)


def by_class(nodes: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """The addresses of nodes by their classes, of pairs of both."""
    addresses: dict[str, list[str]] = {}
    for actor, address in nodes:
        addresses.setdefault(actor, []).append(address)
    return addresses
