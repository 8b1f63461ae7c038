"""The graph of a run as text: a tree for a terminal, Mermaid for a page, DOT for Graphviz."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .plan import PlannedNode


def tree(nodes: Sequence[PlannedNode]) -> str:
    """The nodes that nobody calls, and below each what it calls.

    A node that several call is written out where it comes first, and named after that.
    """
    by_address = {node.address: node for node in nodes}
    called = {address for node in nodes for address in node.dependencies.values()}
    lines: list[str] = []
    written: set[str] = set()

    def tell(address: str, head: str, below: str) -> None:
        node = by_address[address]
        if address in written:
            lines.append(f"{head}{address} (see above)")
            return
        written.add(address)
        lines.append(f"{head}{_title(node)}{_endpoints(node)}")
        calls = called_by(node)
        below_it = len(calls) + len(node.uses)
        for number, dependency in enumerate((*calls, *node.uses), 1):
            branch, space = ("└── ", "    ") if number == below_it else ("├── ", "│   ")
            if number > len(calls):
                lines.append(f"{below}{branch}{dependency}")
            else:
                tell(dependency, below + branch, below + space)

    for node in nodes:
        if node.address not in called:
            tell(node.address, "", "")
    return "\n".join(lines)


def mermaid(nodes: Sequence[PlannedNode]) -> str:
    """A flowchart of Mermaid: an arrow goes from who calls to who is called."""
    names = _names(nodes)
    lines = ["flowchart LR"]
    lines += [f'    {names[node.address]}["{_title(node)}"]' for node in nodes]
    lines += [f'    {names[used]}(["{used}"])' for used in _used(nodes)]
    lines += [f"    {names[a]} --> {names[b]}" for a, b in _edges(nodes)]
    return "\n".join(lines)


def dot(nodes: Sequence[PlannedNode]) -> str:
    """A graph in the language of Graphviz: an arrow goes from who calls to who is called."""
    names = _names(nodes)
    lines = ["digraph run {", "    rankdir=LR", '    node [shape=box, fontname="sans-serif"]']
    lines += [f'    {names[node.address]} [label="{_title(node)}"]' for node in nodes]
    lines += [f'    {names[used]} [label="{used}", shape=ellipse]' for used in _used(nodes)]
    lines += [f"    {names[a]} -> {names[b]}" for a, b in _edges(nodes)]
    return "\n".join([*lines, "}"])


def called_by(node: PlannedNode) -> list[str]:
    """The addresses that a node calls, each once."""
    return list(dict.fromkeys(node.dependencies.values()))


def _title(node: PlannedNode) -> str:
    workers = node.service.workers
    if workers == 0:
        return f"{node.address} (runs elsewhere)"
    name = node.actor.rpartition(":")[2]
    runs = "" if name == node.address.rpartition(".")[2] else f" ({name})"
    times = "" if workers == 1 else f" x{workers}"
    needs = str(node.service.resources)
    return f"{node.address}{runs}{times}{f': {needs}' if needs else ''}"


def _endpoints(node: PlannedNode) -> str:
    names = [f"{name}*" if kind == "stream" else name for name, kind in node.endpoints.items()]
    return f"  ({', '.join(names)})" if names else ""


def _names(nodes: Sequence[PlannedNode]) -> Mapping[str, str]:
    """A short name for each node and each thing used: their own have characters that mean
    something."""
    named = [*(node.address for node in nodes), *_used(nodes)]
    return {name: f"n{number}" for number, name in enumerate(named)}


def _used(nodes: Sequence[PlannedNode]) -> list[str]:
    """The dependencies of nodes that are no nodes, each once."""
    return list(dict.fromkeys(used for node in nodes for used in node.uses))


def _edges(nodes: Sequence[PlannedNode]) -> list[tuple[str, str]]:
    return [(node.address, name) for node in nodes for name in (*called_by(node), *node.uses)]
