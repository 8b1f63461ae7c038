"""The default resume of token endpoints: the rest of a request that an engine has broken off."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from dynbus.kvrouter import token_rule

from .generation import Generated, GenerateRequest


def resume(
    request: GenerateRequest, items: Sequence[Generated | dict[str, Any]]
) -> GenerateRequest | None:
    """The request that goes on with a stream; None where nothing is left to come.

    With the same seed every engine of the same model gives the rest that was to come.

    Args:
        request: the one that was sent first.
        items: all that have come of it, over all attempts.

    Raises:
        StreamLost: several of its continuations are unfinished, with which one request cannot go
            on: see `unfinished`. Or an item is of another request.
    """
    rest = token_rule.resume(msgspec.to_builtins(request), msgspec.to_builtins(items))
    return None if rest is None else msgspec.convert(rest, type(request))


def unfinished(
    request: GenerateRequest,
    items: Sequence[Generated | dict[str, Any]],
    *,
    eos_token_ids: Collection[int] = (),
    context_length: int | None = None,
) -> list[GenerateRequest]:
    """The requests that go on with the continuations that have more to come, by their index.

    Args:
        request, items: see `resume`.
        eos_token_ids: with which the model ends its text.
        context_length: the most tokens that a prompt and its output may have; None for unknown.

    Raises:
        StreamLost: an item is of another request.
    """
    left = token_rule.unfinished(
        msgspec.to_builtins(request),
        msgspec.to_builtins(items),
        eos_token_ids=eos_token_ids,
        context_length=context_length,
    )
    return [msgspec.convert(rest, type(request)) for rest in left]
