"""The nodes of a run that differ from their files and settings, for a run that reloads.

This decides only; `commands/reload.py` watches the files, plans and carries out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

import msgspec

from .plan import Plan, PlannedNode


class Outdated:
    """The part of a run that has to be replaced until it is as its newest plan says.

    No node is forgotten before it has been replaced.

    Args:
        plan: what the run was started by; without nodes where that could not be loaded.

    Attributes:
        plan: the newest.
        nodes: how many instances each outdated node is to have, by address and dependencies
            first; None for as many as it has.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.nodes: dict[str, int | None] = {}
        self._resized: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<Outdated {', '.join(self.nodes) or 'none'}>"

    def add_plan(
        self,
        plan: Plan,
        changed: Collection[str],
        loaded: Mapping[str, Collection[str]],
        failed: Collection[str] = (),
    ) -> None:
        """A plan was made after files had changed.

        Args:
            changed: all that have changed since the plan before was asked for.
            loaded: the files that the instances of a node have loaded, by its address; a node
                that is not in there is outdated when any file has changed.
            failed: addresses of nodes of which an instance is gone for good.
        """
        before, self.plan, files = self.plan, plan, set(changed)
        known = {node.address: node for node in before.nodes}
        anew = _concerns_all(before, plan)
        outdated: dict[str, int | None] = {}
        for node in plan.nodes:
            address, former = node.address, known.get(node.address)
            if former is None or former.service.workers != node.service.workers:
                self._resized[address] = node.service.workers
            if (
                address in self.nodes
                or former is None
                or anew
                or address in failed
                or not _is_same(former, node)
                or not files.isdisjoint(loaded.get(address, files))
            ):
                outdated[address] = self._resized.get(address)
        self.nodes = outdated
        addresses = {node.address for node in plan.nodes}
        self._resized = {a: count for a, count in self._resized.items() if a in addresses}

    @property
    def resized(self) -> dict[str, int]:
        """The new numbers of instances of nodes of which nothing else has changed, by address."""
        return {a: count for a, count in self._resized.items() if a not in self.nodes}

    def done(self, address: str) -> None:
        """A node has been replaced, or has its number of instances."""
        self.nodes.pop(address, None)
        self._resized.pop(address, None)


def _concerns_all(one: Plan, other: Plan) -> bool:
    """True if a change between two settings concerns every process."""
    if (one.path, one.bus) != (other.path, other.bus):
        return True
    # By which all of them find the instances of a class.
    before, after = one.addresses, other.addresses
    return any(before[actor] != after[actor] for actor in before.keys() & after.keys())


def _is_same(one: PlannedNode, other: PlannedNode) -> bool:
    """True if the process of an instance would get the same settings from both."""
    return _without_place(one) == _without_place(other)


def _without_place(node: PlannedNode) -> PlannedNode:
    """A node without what its instances are not told: how many there are, and when they end."""
    service = dataclasses.replace(node.service, workers=0)
    return msgspec.structs.replace(node, service=service, depth=0)
