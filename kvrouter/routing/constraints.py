"""What the metadata of a call asks of routing: tags, an adapter, whether its output is counted."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from dynbus.bus.config import suggestion
from dynbus.bus.errors import InvalidRequest

from .profile import InstanceProfile, split_words, unknown_key

REQUIRED_KEY: Final = "kv_required_tags"
PREFERRED_KEY: Final = "kv_preferred_tags"
OUTPUT_KEY: Final = "kv_track_output"
DP_RANK_KEY: Final = "kv_dp_rank"
OVERLAP_KEY: Final = "kv_overlap_blocks"
REQUEST_KEYS: Final = (REQUIRED_KEY, PREFERRED_KEY, OUTPUT_KEY)
"""What the metadata of a call may say to routing."""
ROUTED_KEYS: Final = (DP_RANK_KEY, OVERLAP_KEY)
"""What routing itself has added to the metadata of a call that was routed before: the
data-parallel rank that was chosen, and how many blocks of the prompt it was taken to hold."""

_TAG_WITH_NUMBER: Final = re.compile(r".+[:*]\s*-?[\d.]+")

LoraMode = Literal["prefer", "require"]


@dataclass(frozen=True, slots=True)
class Constraints:
    """Tags and an adapter that instances must have, or had better have.

    Attributes:
        required: tags without which an instance gets nothing.
        preferred: tags with the weight of each; a negative one is better avoided.
        lora_name: the adapter of the request; empty for none.
        lora_required: whether only instances with the adapter may get it.
    """

    required: frozenset[str] = frozenset()
    preferred: Mapping[str, float] = field(default_factory=dict[str, float])
    lora_name: str = ""
    lora_required: bool = False

    def __bool__(self) -> bool:
        return bool(self.required or self.preferred or self.lora_name)

    @property
    def narrows(self) -> bool:
        """Whether an instance may be excluded."""
        return bool(self.required) or (self.lora_required and bool(self.lora_name))

    def refusal(self, profile: InstanceProfile) -> str | None:
        """Why an instance may not get the request; None when it may."""
        missing = self.required - profile.tags
        if missing:
            return f"lacks the tags {', '.join(sorted(missing))}"
        if self.lora_required and self.lora_name and self.lora_name not in profile.loras:
            return f"has not loaded the adapter {self.lora_name}"
        return None

    def multiplier(self, profile: InstanceProfile) -> float:
        """What the cost of an instance is multiplied by: `exp(-tanh(sum of weights))`."""
        total = sum(weight for tag, weight in self.preferred.items() if tag in profile.tags)
        if self.lora_name and self.lora_name in profile.loras:
            total += 1.0
        return math.exp(-math.tanh(total)) if total else 1.0


NO_CONSTRAINTS: Final = Constraints()


def read_constraints(
    metadata: Mapping[str, str], *, lora_name: str = "", lora: LoraMode = "prefer"
) -> Constraints:
    """The constraints of a call, from its metadata.

    `kv_required_tags` has tags with commas between, `kv_preferred_tags` the same with an
    optional weight each: `eu, fast=0.5`.

    Raises:
        InvalidRequest: a weight is no finite number, or a `kv_` key is none of those known.
    """
    if metadata:
        _check_keys(metadata)
    if not lora_name and REQUIRED_KEY not in metadata and PREFERRED_KEY not in metadata:
        return NO_CONSTRAINTS
    return Constraints(
        split_words(metadata.get(REQUIRED_KEY, "")),
        dict(map(_weighted, split_words(metadata.get(PREFERRED_KEY, "")))),
        lora_name,
        lora == "require",
    )


def read_track_output(metadata: Mapping[str, str], default: bool) -> bool:
    """Whether a call's output is counted while it grows, from its metadata.

    Raises:
        InvalidRequest: `kv_track_output` is neither true nor false.
    """
    text = metadata.get(OUTPUT_KEY)
    if text is None:
        return default
    if text not in ("true", "false"):
        raise InvalidRequest(f"metadata {OUTPUT_KEY} = {text!r}: give true or false", started=False)
    return text == "true"


def _check_keys(metadata: Mapping[str, str]) -> None:
    unknown = unknown_key(metadata, (*REQUEST_KEYS, *ROUTED_KEYS))
    if unknown is not None:
        raise InvalidRequest(
            f"metadata {unknown} is unknown to routing{suggestion(unknown, REQUEST_KEYS)}: there "
            f"are {', '.join(REQUEST_KEYS)}; give keys of your own names without kv_",
            started=False,
        )


def _weighted(item: str) -> tuple[str, float]:
    """A tag and its weight, of `tag` or `tag=number`."""
    tag, equals, text = map(str.strip, item.partition("="))
    if not equals and _TAG_WITH_NUMBER.fullmatch(tag):
        raise InvalidRequest(
            f"metadata {PREFERRED_KEY}: {item!r} has no weight: write tag=number; a tag that "
            f"really ends so is written {tag}=1",
            started=False,
        )
    try:
        weight = float(text) if equals else 1.0
    except ValueError:
        weight = math.nan
    if not tag or not math.isfinite(weight):
        raise InvalidRequest(
            f"metadata {PREFERRED_KEY}: the weight of {tag!r} is {text!r}, where a tag and a "
            "number belong: write tag or tag=number",
            started=False,
        )
    return tag, weight
