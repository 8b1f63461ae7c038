"""The graph of a run: the nodes that it starts, and who calls whom.

A node is an actor class and the name that it has in the run. A class may stand under several
names. An edge goes from a node to one that it depends on; where a class has links, only the linked
of its dependencies are edges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple, TypeVar

from dynbus.actors.declaring.actor import DeclaredActor, Dependency, full_name, kept_dependencies
from dynbus.actors.runtime import Actor
from dynbus.bus.errors import ConfigError
from dynbus.bus.protocol.names import ComponentName

T = TypeVar("T")


class Node(NamedTuple):
    """An actor class under one of its names.

    Attributes:
        name: its component on the bus.
    """

    name: str
    actor: type[Actor]

    @classmethod
    def own(cls, actor: type[Actor]) -> Node:
        """The node that has the name of its class."""
        return cls(actor.__dynbus_component__, actor)

    @property
    def edges(self) -> dict[str, Node]:
        """The nodes that it calls, by the attributes of its class."""
        kept = kept_dependencies(self.actor)
        return {name: Node(each.node, each.actor) for name, each in kept.items()}


def with_dependencies(actors: Iterable[type[Actor]]) -> list[type[Actor]]:
    """The actors and all that they depend on, dependencies first, each once.

    Raises:
        ConfigError: a dependency is a name that does not exist, or actors depend on each other in a
            circle; the message has the path there.
    """
    ordered: dict[type[Actor], None] = {}
    path: list[type[Actor]] = []

    def visit(actor: type[Actor]) -> None:
        if actor in path:
            circle = _arrows([*path[path.index(actor) :], actor])
            raise ConfigError(
                f"{circle}: actors must not depend on each other in a circle; have one of them "
                "call runtime.client(...) instead, or leave a dependency out by link()"
            )
        if actor in ordered:
            return
        path.append(actor)
        for dependency in kept_dependencies(actor).values():
            visit(_called_actor(dependency, path))
        ordered[path.pop()] = None

    for actor in actors:
        visit(actor)
    return list(ordered)


def nodes_of(actors: Sequence[type[Actor]], declared: Sequence[Node] = ()) -> list[Node]:
    """The nodes of these actors and of all that they depend on, dependencies first, each once.

    An actor has a node of its own name when something depends on that, or when it has no node of
    another name.

    Raises:
        ConfigError: as of `with_dependencies`.
    """
    named = dict.fromkeys(declared)
    for actor in with_dependencies(actors):
        named |= dict.fromkeys(Node.own(actor).edges.values())
    ordered: dict[Node, None] = {}

    def visit(node: Node) -> None:
        if node in ordered:
            return
        for called in node.edges.values():
            visit(called)
        ordered[node] = None

    for actor in actors:
        for node in [node for node in named if node.actor is actor] or [Node.own(actor)]:
            visit(node)
    for node in declared:
        visit(node)
    return list(ordered)


def dependency_depth(actor: type[Actor]) -> int:
    """The length of the longest chain of dependencies below an actor; 0 without any.

    Raises:
        ConfigError: as of `with_dependencies`.
    """
    depths: dict[type[DeclaredActor], int] = {}
    for each in with_dependencies([actor]):
        below = kept_dependencies(each).values()
        depths[each] = max((depths[called.actor] + 1 for called in below), default=0)
    return depths[actor]


def dependents_first(items: Iterable[T], depth: Callable[[T], int]) -> list[list[T]]:
    """The items in the order of a drain: by depth, with what others depend on last."""
    ordered = sorted(items, key=depth, reverse=True)
    return [list(group) for _, group in groupby(ordered, depth)]


def addresses_of(
    namespaces: Mapping[Node, str], sources: Mapping[str, str]
) -> dict[Node, ComponentName]:
    """The addresses of a run's nodes on the bus.

    Args:
        namespaces: of all nodes of the run; empty where nothing says.
        sources: where a configuration file names nodes, for messages.

    Raises:
        ConfigError: a node has no namespace, or two have the same address; the message has the
            paths to them.
    """
    nodes: dict[ComponentName, Node] = {}
    for node, namespace in namespaces.items():
        if not namespace:
            name, way = node.actor.__name__, path_to(node, namespaces)
            raise ConfigError(
                f"{way}{': ' if way else ''}{name} has no namespace: write class "
                f'{name}(Actor, namespace="..."), or give the run one by --namespace NAME'
            )
        address = ComponentName(namespace, node.name)
        other = nodes.setdefault(address, node)
        if other is node:
            continue
        place = f"{sources[node.name]}: " if node.name in sources else ""
        paths = [way for each in (other, node) if (way := path_to(each, namespaces))]
        raise ConfigError(
            f"{place}{full_name(other.actor)} and {full_name(node.actor)} have the same address "
            f"{str(address)!r}: give one of them another component, another name by "
            "depends(..., node=...) or a key with `class` in the YAML file, or another namespace "
            f"by --{full_key(node)}.ServiceArgs.namespace=NAME"
            + (f" (they are needed by {' and '.join(paths)})" if paths else "")
        )
    return {node: address for address, node in nodes.items()}


def path_to(node: Node, nodes: Iterable[Node]) -> str:
    """The classes by which a run comes to a node, as `Front -> Router -> Engine`; empty where
    nobody calls it."""
    callers = {called: caller for caller in nodes for called in caller.edges.values()}
    path = [node.actor]
    while node in callers:
        node = callers[node]
        path.insert(0, node.actor)
    return _arrows(path) if len(path) > 1 else ""


def full_key(node: Node) -> str:
    """`module:NAME`, which means this node where others of its name are in the run."""
    actor = node.actor
    name = actor.__name__ if node.name == actor.__dynbus_component__ else node.name
    return f"{actor.__module__}:{name}"


def _called_actor(dependency: Dependency[Actor], path: Sequence[type[Actor]]) -> type[Actor]:
    try:
        return dependency.actor
    except ConfigError as error:
        raise ConfigError(f"{_arrows(path)} -> {dependency}: {error}") from error.__cause__


def _arrows(path: Sequence[type[Actor]]) -> str:
    return " -> ".join(actor.__name__ for actor in path)
