"""The ledger of blocks: where each came from, and which requests have used it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Final, Literal, NamedTuple

from dynbus.llm.engine.interface import Came

MAX_USES: Final = 1 << 18
"""Blocks of requests that are remembered, each as often as a request has used it: 10 MB of them."""
MAX_BEGUN: Final = 4096
"""Requests without a token yet of which it is remembered where their blocks come from."""
KNOWN: Final = 4
"""Blocks whose source is remembered, for each one of the cache: some are on the host."""


class Source(NamedTuple):
    """The source of a block.

    Attributes:
        kind: `own` was computed by this instance.
        name: of `own` the request that computed it, of `instance` the id of that one; empty where
            it is not known.
    """

    kind: Literal["own", "host", "instance"]
    name: str = ""

    def __str__(self) -> str:
        match self.kind:
            case "own":
                return f"this instance, for {self.name}" if self.name else "this instance"
            case "host":
                return "the memory of the host"
            case "instance":
                return f"instance {self.name or 'unknown'}"


class _Kept(NamedTuple):
    at: int
    source: Source


class _Use(NamedTuple):
    at: int
    hashes: list[int]
    counted: int


class _Begun:
    """A request without a token yet: the sources of its first blocks; None for those that it
    computed."""

    __slots__ = ("hashes", "sources")

    def __init__(self, hashes: list[int]) -> None:
        self.hashes = hashes
        self.sources: list[Source | None] = []


class BlockLedger:
    """The sources of the blocks of a cache and their users, as far back as it has room.

    Args:
        blocks: of the cache.
    """

    def __init__(self, blocks: int) -> None:
        self._most_kept = KNOWN * blocks
        self._clock = self._uses_counted = 0
        self._kept: OrderedDict[int, _Kept] = OrderedDict()
        self._uses: OrderedDict[str, _Use] = OrderedDict()
        self._begun: OrderedDict[str, _Begun] = OrderedDict()

    def __repr__(self) -> str:
        return f"<BlockLedger [{len(self._kept)} blocks, {len(self._uses)} requests]>"

    def came(
        self,
        name: str,
        sequence_hashes: list[int],
        first: int,
        last: int,
        how: Came,
        source: str,
        stored: Collection[int],
    ) -> None:
        """Blocks of a request from `first` to before `last` are there: see `KvWitness.came`.

        Args:
            stored: the hashes of those that are in the cache from now on.
        """
        self._clock += 1
        of = _source(name, how, source)
        for sequence_hash in stored:
            self._kept[sequence_hash] = _Kept(self._clock, of)
            self._kept.move_to_end(sequence_hash)
        while len(self._kept) > self._most_kept:
            self._kept.popitem(last=False)
        if how != "computed":
            self._use(name, sequence_hashes, last)
        begun = self._begun.get(name)
        if how == "cached" and not first:
            self._begun.pop(name, None)
            begun = self._begun[name] = _Begun(sequence_hashes)
            if len(self._begun) > MAX_BEGUN:
                self._begun.popitem(last=False)
        if begun is None:
            return
        del begun.sources[first:]
        begun.sources += [None] * (first - len(begun.sources))
        if how == "cached":
            own = Source("own")
            kept = (self._kept.get(each) for each in sequence_hashes[first:last])
            begun.sources += [own if one is None else one.source for one in kept]
        else:
            begun.sources += [None if how == "computed" else of] * (last - first)

    def _use(self, name: str, hashes: list[int], blocks: int) -> None:
        before = self._uses.pop(name, None)
        self._uses_counted += blocks - (before.counted if before else 0)
        self._uses[name] = _Use(self._clock, hashes, blocks)
        while self._uses_counted > MAX_USES and len(self._uses) > 1:
            _, oldest = self._uses.popitem(last=False)
            self._uses_counted -= oldest.counted

    def begun(self, name: str) -> tuple[list[int], Sequence[Source | None]]:
        """The hashes of a request's blocks and their sources, None for those that it computed
        itself; that is forgotten then."""
        begun = self._begun.pop(name, None)
        return ([], ()) if begun is None else (begun.hashes, begun.sources)

    def source(self, sequence_hash: int) -> Source:
        """The source of a block that is cached; this instance where it is not remembered."""
        kept = self._kept.get(sequence_hash)
        return Source("own") if kept is None else kept.source

    def touched(self, sequence_hashes: Collection[int]) -> list[str]:
        """The requests and holds that have used any of these blocks since it was stored, oldest
        first; also those that computed one."""
        kept = {each: self._kept.get(each, _Kept(0, Source("own"))) for each in sequence_hashes}
        touched: dict[str, None] = dict.fromkeys(
            one.source.name for one in kept.values() if one.source.kind == "own" and one.source.name
        )
        for name, use in self._uses.items():
            shared = kept.keys() & set(use.hashes)
            if any(kept[each].at <= use.at for each in shared):
                touched[name] = None
        return list(touched)


def _source(name: str, how: Came, source: str) -> Source:
    if how == "moved":
        return Source("instance", source)
    return Source("host") if how == "host" else Source("own", name)
