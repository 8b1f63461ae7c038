"""What instances say to each other when one fetches a prefix from another."""

from __future__ import annotations

import msgspec

from dynbus.transfer import Ticket


class LendRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """The question for the blocks of a prefix.

    Attributes:
        token_ids: of the prefix: whole blocks, from the beginning of the prompt on. Only tokens
            that are the same have the same blocks, whatever their hashes are.
        start: how many of these tokens the reader has already; whole blocks.
        seconds: for how long the blocks are wanted at most.
        lora_name, cache_salt: of the request, without which the blocks are others.
        model: the fingerprint of the reader's, which has to be the same; empty where it has none.
    """

    token_ids: list[int]
    seconds: float
    start: int = 0
    lora_name: str | None = None
    cache_salt: str | None = None
    model: str = ""


class Lent(msgspec.Struct, frozen=True, omit_defaults=True):
    """Blocks that stay where they are until the call ends, or the lease.

    Attributes:
        tokens: of the prefix that are there, from the beginning of the prompt on.
        ticket: for those from `start` on; None where there are none.
    """

    tokens: int
    ticket: Ticket | None = None
