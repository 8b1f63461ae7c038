"""What an instance says of its KV cache in its metadata, and whether instances fit together."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from dynbus.bus.config import suggestion
from dynbus.bus.errors import ConfigError
from dynbus.kvrouter.radix.index import Rank

BLOCK_SIZE_KEY: Final = "kv_block_size"
TOTAL_BLOCKS_KEY: Final = "kv_total_blocks"
MAX_BATCHED_TOKENS_KEY: Final = "kv_max_batched_tokens"
DP_SIZE_KEY: Final = "kv_dp_size"
EVENTS_KEY: Final = "kv_events"
TOKENIZER_KEY: Final = "kv_tokenizer_id"
TAGS_KEY: Final = "kv_tags"
LORAS_KEY: Final = "kv_loras"

PROFILE_KEYS: Final = (
    BLOCK_SIZE_KEY,
    TOTAL_BLOCKS_KEY,
    MAX_BATCHED_TOKENS_KEY,
    DP_SIZE_KEY,
    EVENTS_KEY,
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
        tokenizer_id: empty when it does not say.
    """

    instance: str
    block_size: int | None
    total_blocks: int | None
    max_batched_tokens: int | None
    ranks: tuple[Rank, ...]
    has_events: bool
    tokenizer_id: str
    tags: frozenset[str]
    loras: frozenset[str]


def read_profile(instance: str, metadata: Mapping[str, str]) -> InstanceProfile:
    """The profile of an instance, from its metadata.

    Raises:
        ConfigError: a value is not what its key is for, or a `kv_` key is none of those known.
    """
    unknown = unknown_key(metadata, PROFILE_KEYS)
    if unknown is not None:
        near = suggestion(unknown, PROFILE_KEYS)
        raise ConfigError(
            f"instance {instance} says {unknown}, which is unknown{near}: "
            f"there are {', '.join(PROFILE_KEYS)}"
        )
    dp_size = _number(instance, metadata, DP_SIZE_KEY) or 1
    if dp_size > MAX_DP_SIZE:
        raise ConfigError(
            f"instance {instance} says {DP_SIZE_KEY} = {dp_size}: {MAX_DP_SIZE} at most"
        )
    events = metadata.get(EVENTS_KEY, "false").lower()
    if events not in ("true", "false"):
        raise ConfigError(f"instance {instance} says {EVENTS_KEY} = {events!r}: true or false")
    return InstanceProfile(
        instance,
        _number(instance, metadata, BLOCK_SIZE_KEY),
        _number(instance, metadata, TOTAL_BLOCKS_KEY),
        _number(instance, metadata, MAX_BATCHED_TOKENS_KEY),
        tuple(Rank(instance, rank) for rank in range(dp_size)),
        events == "true",
        metadata.get(TOKENIZER_KEY, ""),
        split_words(metadata.get(TAGS_KEY, "")),
        split_words(metadata.get(LORAS_KEY, "")),
    )


def agreed_block_size(
    profiles: Iterable[InstanceProfile],
    *,
    block_size: int | None,
    tokenizer_id: str,
    needs_events: bool,
) -> int:
    """The block size that all instances have, once they are found to fit together.

    Args:
        block_size: what it must be; None for whatever the instances say.
        tokenizer_id: what makes the token ids of requests; empty for no check.
        needs_events: whether the router counts on events.

    Raises:
        ConfigError: they do not fit, and why: routing by prefix would never find one.
    """
    agreed, said_by = block_size, "the router"
    for profile in profiles:
        size = profile.block_size
        if size is not None and agreed is not None and size != agreed:
            raise ConfigError(
                f"block sizes differ: {said_by} has {agreed} tokens, instance "
                f"{profile.instance} has {BLOCK_SIZE_KEY} = {size}, so no prefix would be found "
                "there: start all engines with the same block size"
            )
        if size is not None and agreed is None:
            agreed, said_by = size, f"instance {profile.instance}"
        if tokenizer_id and not profile.tokenizer_id:
            raise ConfigError(
                f"the router's token ids are of {tokenizer_id!r}, instance {profile.instance} "
                f"does not say what its own are of: give {TOKENIZER_KEY} in its "
                "instance_metadata(), or no tokenizer_id to the router"
            )
        if tokenizer_id and profile.tokenizer_id != tokenizer_id:
            raise ConfigError(
                f"tokenizers differ: the router's token ids are of {tokenizer_id!r}, instance "
                f"{profile.instance} has {TOKENIZER_KEY} = {profile.tokenizer_id!r}: use the "
                "model's own tokenizer on both sides"
            )
        if needs_events and not profile.has_events:
            raise ConfigError(
                f"instance {profile.instance} publishes no KV events ({EVENTS_KEY} is not true) "
                "and the router follows events: open a KvEventPublisher in the engine and say "
                f"{EVENTS_KEY} = true, or let the router guess from its own decisions "
                "(open_router(..., exact=False); a Router actor: exact=false)"
            )
    if agreed is None:
        raise ConfigError(
            f"no instance says its block size: give {BLOCK_SIZE_KEY} in instance_metadata(), "
            "or block_size to the router"
        )
    return agreed


def _number(instance: str, metadata: Mapping[str, str], key: str) -> int | None:
    text = metadata.get(key)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 15 and int(text) > 0):
        raise ConfigError(f"instance {instance} says {key} = {text!r}: a number from 1 on")
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
