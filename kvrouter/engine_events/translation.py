"""From what one rank of an engine says to our events, one event at a time.

Token ids become block hashes and are dropped. What later events leave out is read from the cache
that takes our events in: the salt of a sequence, and a block's hash when it is stored once more in
a lower tier without its tokens. Beside it is noted how often a tier has a block, where that is more
than once. Engines do not share equal blocks: one that was computed twice is stored twice under one
hash, and removed twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from dynbus.kvrouter.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Hashes,
    KvEvent,
    Tier,
)
from dynbus.kvrouter.hashing import hash_blocks, hash_seed
from dynbus.kvrouter.stream.cache_mirror import CacheMirror, Stretch

from .extra_keys import NO_EXTRA_KEYS, read_extra_keys
from .messages import (
    EngineCleared,
    EngineEvent,
    EngineRemoved,
    EngineStored,
    Quarantined,
    QuarantineReason,
)

YOUNG_PART: Final = 4
"""Of the blocks that are held one in so many must be evicted, all of them young and one after
the other, until nothing older is taken to be left."""

_MEDIA: Final[Mapping[str, Tier]] = {
    **dict.fromkeys(("GPU", "DEVICE", "CUDA", "HBM", "NPU", "XPU", "TPU"), Tier.DEVICE),
    **dict.fromkeys(("CPU", "CPU_PINNED", "CPU_TIER1", "HOST", "HOST_PINNED"), Tier.HOST),
    **dict.fromkeys(("CPU_TIER2", "DISK", "NVME", "SSD", "STORAGE"), Tier.DISK),
    **dict.fromkeys(("EXTERNAL", "NETWORK", "REMOTE", "SHARED"), Tier.EXTERNAL),
}

# Of these every token's KV is kept, so that a block tells that the prefix is there.
_PREFIX_KINDS: Final = frozenset({"full", "full_attention", "mla_attention", "sink_full_attention"})
_NO_KINDS: Final = frozenset({"", "unknown"})


@dataclass(frozen=True, slots=True)
class BlockSizeMismatch:
    """The engine's blocks are of another size than those that routers hash."""

    expected: int
    found: int

    def __str__(self) -> str:
        return (
            f"the engine's blocks have {self.found} tokens, but {self.expected} are configured: "
            "nothing that it holds can be found. Configure the block size that the engine has "
            "(vLLM: --block-size, times the context parallelism of its decode; SGLang: --page-size)"
        )


class Translation:
    """Translates the events of one rank.

    Args:
        block_size: tokens of a block, as routers hash them.
        lora_names: names of the adapters that the engine gives by number only.
        cache: what the rank holds; the events are taken in there.

    Attributes:
        cache: another one when it is known later which rank this is.
        mismatch: set by the first blocks of another size; nothing is translated from then on.
        filtered: events of KV-cache groups that tell nothing of a prefix, by their kind.
        unknown_parents: stored events that were left out, since nobody can say which prefix they
            go on.
        incomplete_blocks, unknown_media: how many there were.
        turned_over: hits were reported, and nothing but blocks that came since the latest
            `report_hits` was evicted for a while. Engines evict what was used the longest ago, so
            that what came before and was not used since is gone.
    """

    def __init__(
        self,
        block_size: int,
        *,
        lora_names: Mapping[int, str] | None = None,
        cache: CacheMirror | None = None,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size = {block_size}: a block has one token at least")
        self._block_size = block_size
        self._lora_names = lora_names or {}
        self.cache = CacheMirror() if cache is None else cache
        # How many copies a tier has of a block beyond the first.
        self._copies: dict[tuple[Tier, int], int] = {}
        self._prefix_group: int | None = None
        self._other_groups: dict[int, str] = {}
        self._nameless_groups: set[int] = set()
        self._size_seen = False
        self._are_hits_reported = False
        self._has_reports = False
        self._young_evictions = 0
        self.turned_over = False
        self.mismatch: BlockSizeMismatch | None = None
        self.filtered: Counter[str] = Counter()
        self.unknown_parents = 0
        self.incomplete_blocks = 0
        self.unknown_media = 0

    @property
    def without_prefix_group(self) -> bool:
        """True if all groups that were seen are of kinds that tell nothing of a prefix."""
        return bool(self.filtered) and not self._size_seen

    @property
    def unmodelled(self) -> str:
        """The groups that bound what can be reused besides the one that counts; empty for none."""
        if self.filtered and self._size_seen:
            return ", ".join(sorted(self.filtered))
        if len(self._nameless_groups) > 1:
            return f"{len(self._nameless_groups)} groups without a kind"
        return ""

    def forget(self) -> None:
        """Begin anew: the engine did, or it is not known any longer what it holds."""
        self._clear()
        self._size_seen = False
        self.mismatch = None

    def _clear(self) -> None:
        self.cache.clear()
        self._copies.clear()
        self._watch_evictions(are_hits_reported=False)

    def report_hits(self) -> None:
        """From now on the engine also reports blocks that it reuses, from the first of a sequence
        on. What it holds already counts no further copy in such an event."""
        self._watch_evictions(are_hits_reported=True)

    def _watch_evictions(self, *, are_hits_reported: bool) -> None:
        self.cache.generation += 1
        self._are_hits_reported = are_hits_reported
        self._young_evictions = 0
        self._has_reports = self.turned_over = False

    def translate(self, event: EngineEvent) -> list[KvEvent]:
        """Our events that say what the engine's does, as far as an index can follow them; none
        for one that is filtered.

        Raises:
            Quarantined: the event cannot be used.
        """
        if self.mismatch is not None:
            return []
        if isinstance(event, EngineCleared):
            self._clear()
            return [AllBlocksCleared()]
        if self._is_other_group(event):
            return []
        if isinstance(event, EngineRemoved):
            return self._removed(event)
        tier = self._tier(event.medium, event.remote)
        if not event.hashes:
            return []
        if not event.tokens:
            return self._stored_again(event, tier)
        return self._stored(event, tier)

    # Groups ---------------------------------------------------------------------------------

    def _is_other_group(self, event: EngineStored | EngineRemoved) -> bool:
        """True if the event is of a group other than the one that tells of prefixes.

        That is the first group of full attention. Hashes do not tell groups apart, and those
        of sliding windows and Mamba keep only the end of a sequence. Where the kind is not
        said, as older engines do not, everything counts.
        """
        kind = (event.kind or "").lower()
        if kind in _NO_KINDS and isinstance(event, EngineStored) and event.sliding_window:
            kind = "sliding_window"
        if kind in _NO_KINDS:
            # Removals name their group only: the kind is that of what was stored there.
            kind = "" if event.group is None else self._kind_of(event.group)
        elif kind in _PREFIX_KINDS:
            if event.group is not None and self._prefix_group is None:
                self._prefix_group = event.group
            if event.group == self._prefix_group or event.group is None:
                kind = ""
        if not kind:
            if event.group is not None and self._prefix_group is None:
                self._nameless_groups.add(event.group)
            return False
        if event.group is not None:
            self._other_groups[event.group] = kind
        self.filtered[kind] += 1
        return True

    def _kind_of(self, group: int) -> str:
        """The kind of a group that does not count; empty for one that does."""
        if self._prefix_group not in (None, group):
            return self._other_groups.get(group, "unknown")
        return self._other_groups.get(group, "")

    def _tier(self, medium: str | None, remote: bool) -> Tier:
        if remote:
            return Tier.EXTERNAL
        if medium is None:
            return Tier.DEVICE
        tier = _MEDIA.get(medium.upper())
        if tier is None:
            # A connector's own word: too far away is the harmless side to err on.
            self.unknown_media += 1
            return Tier.EXTERNAL
        return tier

    # Stored ---------------------------------------------------------------------------------

    def _stored(self, event: EngineStored, tier: Tier) -> list[KvEvent]:
        complete = self._complete_blocks(event, tier)
        if not complete:
            return []
        above = None
        if event.parent is not None:
            above = self.cache.stretch_of(event.parent)
            if above is None:
                self.unknown_parents += 1
                return []
        keys = NO_EXTRA_KEYS
        if event.extra_keys is not None:
            keys = read_extra_keys(
                event.extra_keys,
                lora_id=event.lora_id,
                lora_name=event.lora_name,
                begins=event.parent is None,
            )
        salt = event.salt or keys.salt
        if salt is None and above is not None:
            salt = above.salt
        hashes = event.hashes[:complete]
        block_hashes = hash_blocks(
            event.tokens[: 4 * self._block_size * complete],
            self._block_size,
            hash_seed(self._lora_name(event), salt),
            keys.multimodal,
        )
        is_report = self._are_hits_reported and event.parent is None
        return self._take_in(event.parent, hashes, block_hashes, tier, salt, is_report=is_report)

    def _complete_blocks(self, event: EngineStored, tier: Tier) -> int:
        """The number of the event's blocks that are complete; 0 with `mismatch` set if none can be.

        What the tokens say counts, not the engine's `block_size`: hybrid models report that of
        another group there.
        """
        blocks = len(event.hashes)
        tokens = len(event.tokens) // 4
        size = self._block_size
        if tokens == blocks * size:
            self._size_seen = True
            return blocks
        said = event.block_size or size
        if said == size and tokens > blocks * size and blocks > 1 and tokens % blocks == 0:
            said = tokens // blocks
        if said != size and tier != Tier.DEVICE:
            # Offloading may join blocks; those of the device are right nevertheless.
            raise Quarantined(
                QuarantineReason.BLOCK_SIZE,
                f"blocks of {said} tokens in tier {tier.name.lower()}, not of {size}",
            )
        if said != size and (blocks > 1 or said > size or not self._size_seen):
            self.mismatch = BlockSizeMismatch(size, said)
            self.cache.clear()
            return 0
        complete = tokens // size
        if not blocks - 1 <= complete <= blocks or tokens > blocks * size:
            raise Quarantined(
                QuarantineReason.BLOCK_COUNT, f"{tokens} token ids in {blocks} blocks of {size}"
            )
        self.incomplete_blocks += blocks - complete
        return complete

    def _stored_again(self, event: EngineStored, tier: Tier) -> list[KvEvent]:
        """Blocks without their tokens: those of a known sequence, copied to another tier."""
        runs: list[tuple[int | None, list[int], list[int]]] = []
        before: int | None = None
        for engine_hash in event.hashes:
            block = self.cache.find(engine_hash)
            if block is None:
                raise Quarantined(
                    QuarantineReason.UNKNOWN_BLOCK,
                    f"block {engine_hash:#x} comes without token ids, and was not seen before",
                )
            if not runs or block.parent != before:
                runs.append((block.parent, [], []))
            runs[-1][1].append(engine_hash)
            runs[-1][2].append(block.block_hash)
            before = engine_hash
        copied: list[KvEvent] = []
        for parent, hashes, block_hashes in runs:
            among = self.cache.stretch_of(hashes[0])
            salt = None if among is None else among.salt
            copied += self._take_in(parent, hashes, block_hashes, tier, salt)
        return copied

    def _lora_name(self, event: EngineStored) -> str | None:
        if event.lora_name or not event.lora_id:
            return event.lora_name
        if isinstance(event.lora_id, str):
            return event.lora_id
        # A name of its own keeps its blocks from those of the base model.
        return self._lora_names.get(event.lora_id, f"lora_id={event.lora_id}")

    def _take_in(
        self,
        parent: int | None,
        hashes: list[int],
        block_hashes: Hashes,
        tier: Tier,
        salt: str | None,
        *,
        is_report: bool = False,
    ) -> list[KvEvent]:
        """Take a chain into the cache; returns its event, where that has taken it.

        Args:
            is_report: blocks that are held already may be no further copies.
        """
        event = BlockStored(parent, hashes, block_hashes, tier)
        again = self.cache.store(event, salt=salt)
        if again is None:
            return []
        if again and is_report:
            # An engine that is too old to report hits does not come here, but for a copy.
            self._has_reports = True
        else:
            for engine_hash in again:
                key = tier, engine_hash
                self._copies[key] = self._copies.get(key, 0) + 1
        return [event]

    # Removed --------------------------------------------------------------------------------

    def _removed(self, event: EngineRemoved) -> list[KvEvent]:
        tier = self._tier(event.medium, event.remote)
        held = self.cache.held(tier)
        gone: list[int] = []
        for engine_hash in event.hashes:
            copies = self._copies.pop((tier, engine_hash), 0) if self._copies else 0
            if copies > 1:
                self._copies[tier, engine_hash] = copies - 1
            if copies:
                continue
            if tier == Tier.DEVICE:
                self._note_eviction(held.get(engine_hash), len(held))
            # One that is not known here may be known behind the sink.
            gone.append(engine_hash)
        if not gone:
            return []
        removed = BlockRemoved(gone, tier)
        self.cache.remove(removed)
        return [removed]

    def _note_eviction(self, among: Stretch | None, held: int) -> None:
        """Note that a block is gone.

        Args:
            among: which it was one of; None when it was not known.
            held: how many blocks the device has.
        """
        if among is None or among.generation < self.cache.generation:
            self._young_evictions = 0
            return
        # The old copy of a block that came again looks young too: so one alone says nothing.
        self._young_evictions += 1
        if self._has_reports and self._young_evictions > held // YOUNG_PART:
            self.turned_over = True
