"""Profiles of KV caches in the metadata of instances, and the check that they fit together."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dynbus import ConfigError, Instance, NoInstances
from dynbus.kvrouter.radix.index import Rank
from dynbus.spi import suggestion

logger = logging.getLogger(__name__)

BLOCK_SIZE_KEY: Final = "kv_block_size"
TOTAL_BLOCKS_KEY: Final = "kv_total_blocks"
MAX_BATCHED_TOKENS_KEY: Final = "kv_max_batched_tokens"
DP_SIZE_KEY: Final = "kv_dp_size"
EVENTS_KEY: Final = "kv_events"
FETCHES_KEY: Final = "kv_fetches"
MODEL_KEY: Final = "model_fingerprint"
LENDS_KEY: Final = "lend_blocks"
ROUTES_KEY: Final = "routes_instances"
CONTEXT_KEY: Final = "context_length"
"""These four without the prefix of the others: routers that do not know them refuse none of it."""
TOKENIZER_KEY: Final = "kv_tokenizer_id"
TAGS_KEY: Final = "kv_tags"
LORAS_KEY: Final = "kv_loras"

PROFILE_KEYS: Final = (
    BLOCK_SIZE_KEY,
    TOTAL_BLOCKS_KEY,
    MAX_BATCHED_TOKENS_KEY,
    DP_SIZE_KEY,
    EVENTS_KEY,
    FETCHES_KEY,
    TOKENIZER_KEY,
    TAGS_KEY,
    LORAS_KEY,
)
KEY_PREFIX: Final = "kv_"
"""Keys that begin so are routing's: one that it does not know is a mistake."""

MAX_DP_SIZE: Final = 1024


@dataclass(frozen=True, slots=True)
class InstanceProfile:
    """An instance as routing sees it.

    Attributes:
        block_size: tokens of a block; None when it does not say.
        total_blocks: blocks of device memory of each rank; None when it does not say.
        max_batched_tokens: tokens that a rank computes in one step; None when it does not say.
        ranks: its data-parallel ranks, one at least.
        has_events: whether it publishes what its cache holds.
        fetches: whether it fetches blocks from others that say the same, and gives them its own.
        lends: blocks that it gives to others at a time, at most; None when it does not say.
        model: the fingerprint of its model, without which its blocks are of no use; empty when it
            does not say.
        tokenizer_id: empty when it does not say.
        zone: where it is; empty when it does not say.
        region: another region, where it is; empty for the router's own.
        routes: how many instances it forwards to, each with its part of the total and of the load;
            1 for an instance that computes itself, 0 for a router that has none at present.
    """

    instance: str
    block_size: int | None
    total_blocks: int | None
    max_batched_tokens: int | None
    ranks: tuple[Rank, ...]
    has_events: bool
    fetches: bool
    lends: int | None
    model: str
    tokenizer_id: str
    tags: frozenset[str]
    loras: frozenset[str]
    zone: str = ""
    region: str = ""
    routes: int = 1

    @property
    def stands_for(self) -> int:
        """The instances among which what is told of it is divided: itself, or those behind it."""
        return max(1, self.routes)


def profile_of_router(
    instances: Sequence[InstanceProfile], block_size: int | None, routers: int = 1
) -> dict[str, str]:
    """The metadata of a router in the place of the instances that it forwards to.

    Args:
        routers: that forward to the same ones, each of which stands for as many of them.
    """
    totals = [one.total_blocks * len(one.ranks) for one in instances if one.total_blocks]
    stated = {
        BLOCK_SIZE_KEY: "" if block_size is None else str(block_size),
        ROUTES_KEY: str(-(-len(instances) // routers)),
        LORAS_KEY: ",".join(sorted({name for one in instances for name in one.loras})),
        TAGS_KEY: ",".join(sorted({tag for one in instances for tag in one.tags})),
    }
    if len(totals) == len(instances) > 0:
        stated[TOTAL_BLOCKS_KEY] = str(max(1, sum(totals) // routers))
    return {key: text for key, text in stated.items() if text}


def read_profile(
    instance: str, metadata: Mapping[str, str], zone: str = "", region: str = ""
) -> InstanceProfile:
    """The profile of an instance, from its metadata, the zone that its record tells, and the region
    that it was heard from.

    Raises:
        ConfigError: a value is not what its key is for, or a `kv_` key is none of those known.
    """
    unknown = unknown_key(metadata, PROFILE_KEYS)
    if unknown is not None:
        near = suggestion(unknown, PROFILE_KEYS)
        raise ConfigError(
            f"instance {instance} announces {unknown}, which is not a key of routing{near}: "
            f"the keys are {', '.join(PROFILE_KEYS)}"
        )
    dp_size = _number(instance, metadata, DP_SIZE_KEY) or 1
    if dp_size > MAX_DP_SIZE:
        raise ConfigError(
            f"instance {instance} announces {DP_SIZE_KEY} = {dp_size}: set {MAX_DP_SIZE} at most"
        )
    return InstanceProfile(
        instance,
        _number(instance, metadata, BLOCK_SIZE_KEY),
        _number(instance, metadata, TOTAL_BLOCKS_KEY),
        _number(instance, metadata, MAX_BATCHED_TOKENS_KEY),
        tuple(Rank(instance, rank) for rank in range(dp_size)),
        _is_true(instance, metadata, EVENTS_KEY),
        _is_true(instance, metadata, FETCHES_KEY),
        _number(instance, metadata, LENDS_KEY),
        metadata.get(MODEL_KEY, ""),
        metadata.get(TOKENIZER_KEY, ""),
        split_words(metadata.get(TAGS_KEY, "")),
        split_words(metadata.get(LORAS_KEY, "")),
        zone,
        region,
        0 if metadata.get(ROUTES_KEY) == "0" else _number(instance, metadata, ROUTES_KEY) or 1,
    )


def _is_true(instance: str, metadata: Mapping[str, str], key: str) -> bool:
    text = metadata.get(key, "false").lower()
    if text not in ("true", "false"):
        raise ConfigError(f"instance {instance} announces {key} = {text!r}: set true or false")
    return text == "true"


def _number(instance: str, metadata: Mapping[str, str], key: str) -> int | None:
    text = metadata.get(key)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 15 and int(text) > 0):
        raise ConfigError(
            f"instance {instance} announces {key} = {text!r}: set a whole number of at least 1"
        )
    return int(text)


def unknown_key(metadata: Mapping[str, str], known: Collection[str]) -> str | None:
    """A key that begins with `kv_` and is none of the known ones; None when there is none."""
    for key in metadata:
        if key.startswith(KEY_PREFIX) and key not in known:
            return key
    return None


def split_words(text: str) -> frozenset[str]:
    """Words with commas between them."""
    return frozenset(filter(None, map(str.strip, text.split(","))))


GONE_AFTER: Final = 60.0
"""Seconds without being offered after which an instance is gone for good."""

SWEEP_INTERVAL: Final = 10.0


class Profiles:
    """Reads the profiles of instances as they are offered.

    The first instances must fit together. A later one that does not is left out, and why is
    logged once. Times are of one monotonic clock.

    Args:
        block_size: of the router; None for whatever the instances say.
        tokenizer_id: what makes the token ids of requests; empty for no check.
        needs_events: whether the router counts on events.
    """

    def __init__(self, *, block_size: int | None, tokenizer_id: str, needs_events: bool) -> None:
        self._given_block_size = block_size
        self._agreed: int | None = None
        self._tokenizer_id = tokenizer_id
        self._needs_events = needs_events
        self._read: dict[str, tuple[Mapping[str, str], InstanceProfile | ConfigError]] = {}
        self._offered_at: dict[str, float] = {}
        self._incarnations: dict[str, str] = {}
        self._restarted: set[str] = set()
        self._lenders: dict[str, str] = {}
        self._sweep_at = 0.0

    def __repr__(self) -> str:
        return f"<Profiles [{len(self._read)} instances, blocks of {self._agreed} tokens]>"

    @property
    def block_size(self) -> int:
        """The block size that the instances agree on.

        Raises:
            RuntimeError: there were none yet.
        """
        if self._agreed is None:
            raise RuntimeError("no instances were offered yet")
        return self._agreed

    def of(
        self, instances: Sequence[Instance], now: float
    ) -> tuple[Sequence[InstanceProfile], Mapping[str, str]]:
        """The profiles of instances, and by id why others of them are left out.

        Raises:
            ConfigError: none is left, and why.
            NoInstances: all are routers without instances, which have not said their block size.
        """
        if self._agreed is None:
            profiles = [read_profile(one.id, one.metadata) for one in instances]
            said = [profile for profile in profiles if profile.routes]
            if profiles and not said:
                raise NoInstances("no router has an instance to forward to", started=False)
            self._agreed = self.agree(said, self._given_block_size)
        usable: list[InstanceProfile] = []
        misfits: dict[str, str] = {}
        idle: list[InstanceProfile] = []
        for instance in instances:
            instance_id, metadata = instance.id, instance.metadata
            self._offered_at[instance_id] = now
            known = self._read.get(instance_id)
            if known is None or known[0] is not metadata:
                # A new record; as a rule it says again what the one before it said.
                self._note_incarnation(instance)
                same = known is not None and known[0] == metadata
                read = known[1] if known is not None and same else self._check(instance)
                known = self._read[instance_id] = (metadata, read)
            if not isinstance(known[1], InstanceProfile):
                misfits[instance_id] = str(known[1])
            elif known[1].routes:
                usable.append(known[1])
            else:
                idle.append(known[1])
        if not usable and idle:
            # They wait for instances, as who calls these directly does.
            return idle, misfits
        for router in idle:
            misfits[router.instance] = f"router {router.instance} has no instance to forward to"
        if not usable:
            raise ConfigError(next(iter(misfits.values())), started=False)
        return usable, misfits

    def restarted(self) -> set[str]:
        """Instances that began anew under their old id since this was asked the last time."""
        restarted, self._restarted = self._restarted, set()
        return restarted

    def gone(self, now: float) -> list[str]:
        """Instances that were not offered for long; they are forgotten by that."""
        if now < self._sweep_at:
            return []
        self._sweep_at = now + SWEEP_INTERVAL
        gone = [name for name, at in self._offered_at.items() if now - at > GONE_AFTER]
        self._lenders = {model: name for model, name in self._lenders.items() if name not in gone}
        for name in gone:
            del self._offered_at[name]
            self._read.pop(name, None)
            self._incarnations.pop(name, None)
        return gone

    def _note_incarnation(self, instance: Instance) -> None:
        incarnation = instance.record.incarnation
        before = self._incarnations.get(instance.id)
        if before is not None and before != incarnation:
            self._restarted.add(instance.id)
        self._incarnations[instance.id] = incarnation

    def agree(self, profiles: Iterable[InstanceProfile], block_size: int | None) -> int:
        """The block size that instances have, once they are found to fit together.

        Args:
            block_size: what it must be; None for whatever the instances say.

        Raises:
            ConfigError: they do not fit, and why: routing by prefix would never find one.
        """
        agreed, said_by = block_size, "the router"
        wanted = self._tokenizer_id
        for profile in profiles:
            size = profile.block_size
            if size is not None and agreed is not None and size != agreed:
                raise ConfigError(
                    f"block sizes differ: {said_by} has {agreed} tokens, instance "
                    f"{profile.instance} has {BLOCK_SIZE_KEY} = {size}, so no prefix would be "
                    "found there: start all engines with the same block size"
                )
            if size is not None and agreed is None:
                agreed, said_by = size, f"instance {profile.instance}"
            if wanted and not profile.tokenizer_id:
                raise ConfigError(
                    f"the router's token ids are of {wanted!r}, instance {profile.instance} "
                    f"does not announce its tokenizer: set {TOKENIZER_KEY} in its "
                    "instance_metadata(), or no tokenizer_id of the router"
                )
            if wanted and profile.tokenizer_id != wanted:
                raise ConfigError(
                    f"tokenizers differ: the router's token ids are of {wanted!r}, instance "
                    f"{profile.instance} has {TOKENIZER_KEY} = {profile.tokenizer_id!r}: use the "
                    "model's own tokenizer on both sides"
                )
            if self._needs_events and not profile.has_events:
                raise ConfigError(
                    f"instance {profile.instance} publishes no KV events ({EVENTS_KEY} is not "
                    "true) and the router follows events: open a KvEventPublisher in the engine "
                    f"and set {EVENTS_KEY} = true, or let the router guess from its own decisions "
                    "(open_router(..., exact=False); a RouterActor: exact=false)"
                )
        if agreed is None:
            raise ConfigError(
                f"no instance announces its block size: set {BLOCK_SIZE_KEY} in "
                "instance_metadata(), or block_size of the router"
            )
        return agreed

    def _check(self, instance: Instance) -> InstanceProfile | ConfigError:
        try:
            zone, region = instance.record.zone, instance.region
            profile = read_profile(instance.id, instance.metadata, zone, region)
            self.agree([profile], self._agreed)
        except ConfigError as error:
            logger.error("instance %s gets no calls: %s", instance.id, error)
            return error
        if profile.fetches and profile.model not in self._lenders:
            if self._lenders:
                logger.warning(
                    "instance %s computes another model than %s: neither is named to the other to "
                    "fetch prefixes from",
                    *(instance.id, ", ".join(self._lenders.values())),
                )
            self._lenders[profile.model] = instance.id
        return profile
