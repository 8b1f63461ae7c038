"""What operators see of the blocks that are kept and fetched: status and metrics."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Final

import anyio

from dynbus.bus.background import Openable
from dynbus.bus.bus import Bus
from dynbus.bus.protocol.names import InstanceName
from dynbus.bus.telemetry.metrics import Labels, Metrics, Readings

from .fetching import PrefixFetcher
from .host_store import HostStore
from .lending import Lender

LOOK_INTERVAL: Final = 0.5
"""Seconds between two looks."""
STATUS_KEY: Final = "kv_tiers"


class TierWatch(Openable):
    """Shows a host store and an instance's fetches to operators, while in the `async with`.

    Args:
        store, fetcher, lender: None for what the instance does not have.
    """

    def __init__(
        self,
        bus: Bus,
        name: InstanceName,
        store: HostStore | None,
        fetcher: PrefixFetcher | None,
        lender: Lender | None,
    ) -> None:
        super().__init__(bus.background)
        namespace, component, instance_id = name
        # Beside that of the engine.
        self._name = f"{namespace}.{component}/{instance_id} tiers"
        self._bus = bus
        self._store, self._fetcher, self._lender = store, fetcher, lender
        self._labels: Labels = (("dynbus.namespace", namespace), ("dynbus.component", component))
        metrics = bus.telemetry.metrics if bus.telemetry is not None else None
        self._readings = {} if metrics is None else _readings(metrics)

    def __repr__(self) -> str:
        return f"<TierWatch {self._name}>"

    @asynccontextmanager
    async def _open(self) -> AsyncGenerator[None]:
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._run)
                yield
                tasks.cancel_scope.cancel()
            self.look()
        finally:
            self._bus.status.remove(self._name)
            for readings in self._readings.values():
                readings.remove(self._name)

    async def _run(self) -> None:
        while True:
            self.look()
            await anyio.sleep(LOOK_INTERVAL)

    def look(self) -> None:
        """Show how it is now."""
        self._bus.status.put(self._name, self._name, {STATUS_KEY: self._text()})
        if not self._readings:
            return
        labels = self._labels
        moved: dict[str, int] = {}
        if self._store is not None:
            kept = self._store.statistics
            self._put("blocks", {labels: kept.blocks})
            moved |= {"kept": kept.kept, "brought": kept.brought}
        if self._fetcher is not None:
            fetched = self._fetcher.statistics
            moved["fetched"] = fetched.blocks
            self._put(
                "fetches",
                {(*labels, ("dynbus.result", name)): n for name, n in fetched.results.items()},
            )
            self._put("bytes", {labels: fetched.bytes})
            self._put("seconds", {labels: fetched.seconds})
        if self._lender is not None:
            moved["lent"] = self._lender.lent_blocks
            self._put("loans", {labels: self._lender.loans})
        self._put("moved", {(*labels, ("dynbus.kind", kind)): n for kind, n in moved.items()})

    def _put(self, reading: str, values: dict[Labels, float]) -> None:
        self._readings[reading].put(self._name, values)

    def _text(self) -> str:
        told: list[str] = []
        if self._store is not None:
            kept = self._store.statistics
            told.append(f"{kept.blocks} of {kept.places} blocks on the host")
        if self._fetcher is not None and self._lender is not None:
            told.append(
                f"{self._fetcher.statistics.blocks} fetched, {self._lender.lent_blocks} lent"
            )
        return ", ".join(told)


def _readings(metrics: Metrics) -> dict[str, Readings]:
    """What is measured."""
    return {
        "blocks": metrics.gauge("tiers.host.blocks", "{block}", "Blocks kept on the host."),
        "moved": metrics.counter(
            "tiers.moved_blocks", "{block}", "Blocks moved between tiers and instances, by how."
        ),
        "fetches": metrics.counter(
            "tiers.fetches", "{fetch}", "Prefixes asked of peers, by what became of it."
        ),
        "bytes": metrics.counter("tiers.fetched", "By", "Bytes of blocks fetched from peers."),
        "seconds": metrics.counter(
            "tiers.fetch.time", "s", "Seconds of fetches that brought blocks."
        ),
        "loans": metrics.gauge("tiers.loans", "{loan}", "Prefixes that peers read now."),
    }
