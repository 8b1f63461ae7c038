"""Damages that were found, as the log, events and `dynbus why` tell of them."""

from __future__ import annotations

from threading import Lock
from typing import Final, get_args

import msgspec

from dynbus import Topic

from .judging import Evidence, Measure

MAX_FINDINGS: Final = 64
"""Damages that an instance remembers."""
MAX_TOUCHED: Final = 512
"""Requests that are named of one damage."""


class KvDamage(msgspec.Struct, frozen=True):
    """A damage of an engine's KV cache.

    Attributes:
        instance: `namespace.component.id` of the instance whose engine it is.
        at: Unix seconds at which it was seen.
        evidence: what differed: `blocks` or the `logits` of an answer that was computed again, or
            the `checksum` of blocks that were moved.
        request_id: of the answer that was computed again; empty for a checksum.
        sources: who is blamed, for people.
        measures: what was done: `close_host`, `leave_instance`, `withdraw`, or `none` beside
            dropping the blocks.
        first, blocks: the place in the prompt of the first block that differed, and how many did.
        dropped: blocks that were forgotten, in all tiers, with those that followed them.
        requests: ids of the requests that have used the damaged blocks since they were there,
            oldest first.
        requests_left_out: how many more have.
    """

    instance: str
    at: float
    evidence: Evidence
    request_id: str
    sources: list[str]
    measures: list[Measure]
    first: int
    blocks: int
    dropped: int
    requests: list[str]
    requests_left_out: int = 0


def damages_in(namespace: str) -> Topic[KvDamage]:
    """The topic of the damages of the instances of a namespace; "" for that of who hears it."""
    return Topic("kv.damage", KvDamage, retain=None, namespace=namespace)


kv_damage: Final = damages_in("")
"""The topic of damages, in the namespace of the actor that hears it."""


class Findings:
    """The latest damages of one instance. Any thread may add to them and read them.

    Attributes:
        latest: oldest first.
        count: so far.
        counts: so far, by their evidence.
    """

    def __init__(self) -> None:
        self.latest: tuple[KvDamage, ...] = ()
        self.count = 0
        self.counts: dict[str, int] = dict.fromkeys(get_args(Evidence), 0)
        self._lock = Lock()

    def add(self, damage: KvDamage) -> None:
        """Remember a damage, and forget the oldest for it."""
        with self._lock:
            self.latest = (*self.latest[1 - MAX_FINDINGS :], damage)
            self.count += 1
            self.counts[damage.evidence] += 1

    def since(self, count: int) -> tuple[KvDamage, ...]:
        """Those after the first `count`, as far as they are remembered."""
        with self._lock:
            new = self.count - count
            return self.latest[-new:] if new > 0 else ()

    def of(self, request_id: str) -> list[KvDamage]:
        """Those that have touched a request."""
        return [each for each in self.latest if request_id in (each.request_id, *each.requests)]


def request_of(name: str) -> str:
    """The id of the request that an engine knows by a name: `id.number`."""
    before, _, _ = name.rpartition(".")
    return before or name
