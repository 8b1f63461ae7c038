"""Messages between instances of which one goes on with a prompt that another computes or has."""

from __future__ import annotations

import msgspec

from dynbus.llm.generation import Generated, GenerateRequest
from dynbus.transfer import Ticket


class PrefillRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """A prompt to compute for another instance, which reads the blocks.

    Attributes:
        hand_over: its id; a new one for each attempt.
        request: whose prompt and first token are wanted.
        cached: tokens of the prompt, from the first on, that the reader has; they are not offered.
        model: the fingerprint of the reader's, which has to be the same; empty where it has none.
    """

    hand_over: str
    request: GenerateRequest
    cached: int = 0
    model: str = ""


class Prefilled(msgspec.Struct, frozen=True, omit_defaults=True):
    """The progress of a prompt's computation.

    Attributes:
        computed: tokens of the prompt, from the first on.
        instance: to which the leases are settled.
        ticket: of the blocks with the tokens from `start` to `computed`; None where none are new.
        start: the first token to be read; the ticket's first block has those before it too that
            share the block.
        first: the first token of the output, in the last item: its `finish_reason` is "stop" where
            it ends the output, else "length".
    """

    computed: int
    start: int = 0
    ticket: Ticket | None = None
    instance: str = ""
    first: Generated | None = None


class PrefillJob(msgspec.Struct, frozen=True, omit_defaults=True):
    """A prompt in the work queue. Its tokens stay with the decode instance until somebody takes it.

    Attributes:
        hand_over: the id of the job.
        instance: to which it is offered, at the decode side.
        tokens: of the prompt that are to be computed.
        model: the fingerprint of the decode side's; takers with another one leave it to others.
    """

    hand_over: str
    instance: str
    tokens: int = 0
    model: str = ""


class Offer(msgspec.Struct, frozen=True):
    """A prefill instance has taken a job, and can compute it now.

    Attributes:
        hand_over: the job's id.
        instance: of the prefill instance.
    """

    hand_over: str
    instance: str


class OfferAnswer(msgspec.Struct, frozen=True):
    """The outcome of a job.

    Attributes:
        done: whether the prompt was computed by whom offered it, and is handed over.
        reason: why not; the job is not needed any more all the same.
    """

    done: bool
    reason: str = ""


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
