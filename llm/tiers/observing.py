"""Blocks that are kept and fetched, as operators see them: status and metrics."""

from __future__ import annotations

from typing import Final

from dynbus.llm.hand_over.source import Source
from dynbus.llm.instance_watch import InstanceWatch
from dynbus.spi import Bus, InstanceName, Metrics, Readings
from dynbus.transfer import ChecksumMismatch

from .fetching import PrefixFetcher
from .host_store import HostStore

STATUS_KEY: Final = "kv_tiers"


class TierWatch(InstanceWatch):
    """Shows a host store and an instance's fetches to operators, while in the `async with`.

    Args:
        store, fetcher, source: None for what the instance does not have.
    """

    def __init__(
        self,
        bus: Bus,
        name: InstanceName,
        store: HostStore | None,
        fetcher: PrefixFetcher | None,
        source: Source | None,
    ) -> None:
        super().__init__(bus, name, "tiers", _readings)
        self._store, self._fetcher, self._lends = store, fetcher, source
        self._damaged = 0

    def look(self) -> None:
        """Show how it is now."""
        self.show(STATUS_KEY, self._text())
        moved: dict[str, int] = {}
        if self._store is not None:
            kept = self._store.statistics
            self.put("blocks", kept.blocks)
            moved |= {"kept": kept.kept, "brought": kept.brought}
            self.put("damaged", kept.damaged)
            self._record(kept.damaged)
            self.put("sessions", kept.sessions)
        if self._fetcher is not None:
            fetched = self._fetcher.statistics
            moved["fetched"] = fetched.blocks
            self.put_by("fetches", "dynbus.result", fetched.results)
            self.put("bytes", fetched.bytes)
            self.put("seconds", fetched.seconds)
        if self._lends is not None:
            moved["lent"] = self._lends.lent_blocks
            self.put("loans", self._lends.loans)
        self.put_by("moved", "dynbus.kind", moved)

    def _record(self, damaged: int) -> None:
        """Have new damages of the host's blocks in the flight."""
        more, self._damaged = damaged - self._damaged, damaged
        if more:
            self.record("tier.damaged", blocks=more)

    def _text(self) -> str:
        parts: list[str] = []
        if self._store is not None:
            kept = self._store.statistics
            parts.append(
                "the host's blocks are not used any more"
                if kept.is_closed
                else f"{kept.blocks} of {kept.places} blocks on the host"
            )
            if kept.sessions and not kept.is_closed:
                named = "conversation" if kept.sessions == 1 else "conversations"
                parts.append(f"{kept.session_blocks} for {kept.sessions} {named}")
            if kept.damaged:
                parts.append(f"{kept.damaged} damaged there")
        if self._fetcher is not None and self._lends is not None:
            fetched = self._fetcher.statistics
            parts.append(f"{fetched.blocks} fetched, {self._lends.lent_blocks} lent")
            if damaged := fetched.results[ChecksumMismatch.code]:
                parts.append(f"{damaged} fetches damaged on the way")
        return ", ".join(parts)


def _readings(metrics: Metrics) -> dict[str, Readings]:
    """The measurements of tiers."""
    return {
        "blocks": metrics.gauge("tiers.host.blocks", "{block}", "Blocks kept on the host."),
        "damaged": metrics.counter(
            "tiers.host.damaged", "{block}", "Blocks on the host that were not what was kept."
        ),
        "sessions": metrics.gauge(
            "tiers.sessions", "{session}", "Conversations whose blocks are kept."
        ),
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
