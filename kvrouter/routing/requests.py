"""The part of a call that routing reads: its token ids, and the wishes of its metadata."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal, cast

import msgspec
from pydantic import ConfigDict

from dynbus import ConfigError, InvalidRequest, RouteRequest
from dynbus.kvrouter.hashing import PlacedObject
from dynbus.spi import brief_repr, suggestion

from .active_load import expected_tokens
from .cost import RequestShape
from .profiles import InstanceProfile, split_words, unknown_key

SESSION_KEY: Final = "session"
"""The metadata key of a call that names its session."""
REQUIRED_KEY: Final = "kv_required_tags"
PREFERRED_KEY: Final = "kv_preferred_tags"
OUTPUT_KEY: Final = "kv_track_output"
DP_RANK_KEY: Final = "kv_dp_rank"
OVERLAP_KEY: Final = "kv_overlap_blocks"
PEER_KEY: Final = "kv_peer"
PEER_BLOCKS_KEY: Final = "kv_peer_blocks"
REQUEST_KEYS: Final = (REQUIRED_KEY, PREFERRED_KEY, OUTPUT_KEY)
"""The keys of a call's metadata that routing reads."""
ROUTED_KEYS: Final = (DP_RANK_KEY, OVERLAP_KEY, PEER_KEY, PEER_BLOCKS_KEY)
"""The keys that routing itself has added to the metadata of a call that was routed before: the
data-parallel rank that was chosen, how many blocks of the prompt it was taken to hold, and the
instance that holds more of them, with how many; empty and 0 for none.
"""


def routed_blocks(metadata: Mapping[str, str], key: str) -> int:
    """A number of blocks that routing has added to the metadata of a call; 0 for what is none."""
    text = metadata.get(key, "")
    return int(text) if text.isascii() and text.isdigit() else 0


_TAG_WITH_NUMBER: Final = re.compile(r".+[:*]\s*-?[\d.]+")

LoraMode = Literal["prefer", "require"]


@dataclass(frozen=True, slots=True)
class RequestFields:
    """Names of attributes of a request, or keys of a mapping; dots lead into a field.

    Attributes:
        token_ids: integers, or bytes that hold them as little-endian u32.
        lora_name: the adapter; absent or empty for none.
        salt: what keeps the blocks of one tenant from those of others.
        objects: the images and the like among the tokens: for each the engine's identifier of it,
            the place of its first token, and how many tokens stand for it. Absent or empty for
            none.
        expected_output_tokens: how long the output will be, or may be.

    Raises:
        ConfigError: a name is none.
    """

    # A name that is misspelt in a file would leave the default in force.
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    token_ids: str = "token_ids"
    lora_name: str = "lora_name"
    salt: str = "cache_salt"
    objects: str = "objects"
    expected_output_tokens: str = "max_tokens"

    def __post_init__(self) -> None:
        for name in self.__slots__:
            path: Any = getattr(self, name)
            if not isinstance(path, str) or not all(path.split(".")):
                raise ConfigError(
                    f"RequestFields({name}={path!r}): give the name of a field, or names with "
                    "dots between them, for example 'prompt.ids'"
                )

    def read(self, request: RouteRequest, block_size: int) -> tuple[RequestShape, str]:
        """The shape of a call's request, and the name of its adapter or "".

        Raises:
            InvalidRequest: it has no token ids, or a field of another kind.
        """
        body = _opened(request)
        tokens = field_of(body, self.token_ids)
        if tokens is None:
            raise _invalid(
                request,
                f" is routed by token ids, and {brief_repr(body)} has no {self.token_ids!r}: give "
                "fields=RequestFields(token_ids=...) to the router, or to a RouterActor the "
                'field\'s name as fields={"token_ids": ...}',
            )
        if not _is_row(tokens):
            raise _invalid(
                request,
                f": {self.token_ids} of the request is {brief_repr(tokens)}: give one list or "
                "array of token ids",
            )
        lora_name = _text(request, self.lora_name, field_of(body, self.lora_name))
        salt = _text(request, self.salt, field_of(body, self.salt))
        objects = _objects(request, self.objects, field_of(body, self.objects))
        expected = field_of(body, self.expected_output_tokens)
        if not isinstance(expected, int) or isinstance(expected, bool):
            expected = None
        try:
            shape = RequestShape.of(
                tokens,
                block_size,
                lora_name=lora_name,
                salt=salt,
                objects=objects,
                expected_output_tokens=expected_tokens(expected),
                priority=request.priority,
                metadata=request.metadata,
            )
        except (TypeError, ValueError) as error:
            raise _invalid(request, f": {self.token_ids} of the request: {error}") from None
        return shape, lora_name


def _objects(request: RouteRequest, name: str, value: Any) -> Sequence[PlacedObject]:
    """The images and the like of a request.

    Raises:
        InvalidRequest: the field has something else.
    """
    if not value:
        return ()
    try:
        return msgspec.convert(value, list[PlacedObject])
    except msgspec.ValidationError as error:
        text = f": {name} of the request, the images and the like in it: {error}"
        raise _invalid(request, text) from None


def _invalid(request: RouteRequest, text: str) -> InvalidRequest:
    """The error for a call that was not sent, with the name of its endpoint."""
    return InvalidRequest(f"{request.endpoint}{text}", request_id=request.request_id, started=False)


def _opened(request: RouteRequest) -> Any:
    """The request as an object, also where it is passed on as the JSON that came."""
    body = request.request
    if not isinstance(body, msgspec.Raw):
        return body
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _invalid(request, f": the request is not JSON: {error}") from None


def _is_row(tokens: Any) -> bool:
    """True if this may be the token ids of one prompt, in their order."""
    return (
        hasattr(tokens, "__len__")
        and not isinstance(tokens, (str, Set, Mapping))
        and getattr(tokens, "ndim", 1) == 1
    )


def field_of(value: Any, path: str) -> Any:
    """An attribute, or a mapping's value, by its dotted path; None when there is none."""
    for name in path.split("."):
        if isinstance(value, Mapping):
            value = cast(Mapping[str, Any], value).get(name)
        else:
            value = getattr(value, name, None)
        if value is None:
            return None
    return value


def _has_bytes(text: str) -> bool:
    """True if a text can be hashed: one with half of a surrogate pair, as JSON may be, cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _text(request: RouteRequest, name: str, value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, str) or not (value.isascii() or _has_bytes(value)):
        raise _invalid(request, f": {name} of the request is {brief_repr(value)}, not a string")
    return value


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
        """True if an instance may be excluded."""
        return bool(self.required) or (self.lora_required and bool(self.lora_name))

    def refusal(self, profile: InstanceProfile) -> str | None:
        """The reason for which an instance may not get the request; None when it may."""
        missing = self.required - profile.tags
        if missing:
            return f"lacks the tags {', '.join(sorted(missing))}"
        if self.lora_required and self.lora_name and self.lora_name not in profile.loras:
            return f"has not loaded the adapter {self.lora_name}"
        return None

    def multiplier(self, profile: InstanceProfile) -> float:
        """The factor of the cost of an instance: `exp(-tanh(sum of weights))`."""
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
    """True if a call's output is counted while it grows, from its metadata.

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
            f"metadata {unknown} is not a key of routing{suggestion(unknown, REQUEST_KEYS)}: its "
            f"keys are {', '.join(REQUEST_KEYS)}; keys of your own may not begin with kv_",
            started=False,
        )


def _weighted(item: str) -> tuple[str, float]:
    """A tag and its weight, of `tag` or `tag=number`."""
    tag, equals, text = map(str.strip, item.partition("="))
    if not equals and _TAG_WITH_NUMBER.fullmatch(tag):
        raise InvalidRequest(
            f"metadata {PREFERRED_KEY}: {item!r} has no weight: write tag=number; write "
            f"{tag}=1 for a tag that ends so",
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
