"""Where a request has its token ids, and what else routing reads of it."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from pydantic import ConfigDict

from dynbus.actors.calling.routing import RouteRequest
from dynbus.actors.declaring.brief_repr import brief_repr
from dynbus.bus.errors import ConfigError, InvalidRequest

from .active_load import expected_tokens
from .cost import RequestShape


@dataclass(frozen=True, slots=True)
class RequestFields:
    """Names of attributes of a request, or keys of a mapping; dots lead into a field.

    Attributes:
        token_ids: integers, or bytes that hold them as little-endian u32.
        lora_name: the adapter; absent or empty for none.
        salt: what keeps the blocks of one tenant from those of others.
        expected_output_tokens: how long the output will be, or may be.

    Raises:
        ConfigError: a name is none.
    """

    # A name that is misspelt in a file would leave the default in force.
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    token_ids: str = "token_ids"
    lora_name: str = "lora_name"
    salt: str = "cache_salt"
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
        body = request.request
        tokens = field_of(body, self.token_ids)
        if tokens is None:
            raise InvalidRequest(
                f"{request.endpoint} is routed by token ids, and {brief_repr(body)} has no "
                f"{self.token_ids!r}: give fields=RequestFields(token_ids=...) to the router, or "
                'to a Router actor the field\'s name as fields={"token_ids": ...}',
                request_id=request.request_id,
                started=False,
            )
        if not _is_row(tokens):
            raise InvalidRequest(
                f"{request.endpoint}: {self.token_ids} of the request is {brief_repr(tokens)}: "
                "give one list or array of token ids",
                request_id=request.request_id,
                started=False,
            )
        lora_name = _text(request, self.lora_name, field_of(body, self.lora_name))
        salt = _text(request, self.salt, field_of(body, self.salt))
        expected = field_of(body, self.expected_output_tokens)
        if not isinstance(expected, int) or isinstance(expected, bool):
            expected = None
        try:
            shape = RequestShape.of(
                tokens,
                block_size,
                lora_name=lora_name,
                salt=salt,
                expected_output_tokens=expected_tokens(expected),
                priority=request.priority,
                metadata=request.metadata,
            )
        except (TypeError, ValueError) as error:
            raise InvalidRequest(
                f"{request.endpoint}: {self.token_ids} of the request: {error}",
                request_id=request.request_id,
                started=False,
            ) from None
        return shape, lora_name


def _is_row(tokens: Any) -> bool:
    """Whether this may be the token ids of one prompt, in their order."""
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
    """Whether a text can be hashed: one with half of a surrogate pair, as JSON may be, cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _text(request: RouteRequest, name: str, value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, str) or not (value.isascii() or _has_bytes(value)):
        raise InvalidRequest(
            f"{request.endpoint}: {name} of the request is {brief_repr(value)}, not a string",
            request_id=request.request_id,
            started=False,
        )
    return value
