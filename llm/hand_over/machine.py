"""`HandOver`: the states of a request whose prompt's blocks come from elsewhere, and what follows
from events.

`HandOver` is told what has happened and answers what is to be done; it has no I/O and no clock.
These are its promises, whatever comes in whatever order:

- the request has exactly one first token: that of the source, shown at most once, or the one that
  the own engine draws;
- the engine is told of no token of the prompt whose bytes were not settled;
- the engine goes on exactly once, unless the request has ended before;
- the blocks are released, once, when nothing can write into them any more.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal, TypeAlias

from dynbus.llm.engine.interface import ANY_TOKENS
from dynbus.llm.generation import Generated

from .messages import Prefilled

Reason = Literal[
    "",
    "cached",
    "own_job",
    "no_instances",
    "refused",
    "prefill_lost",
    "bad_answer",
    "lease_lost",
    "damaged",
    "quarantined",
    "transfer_failed",
    "too_slow",
    "queue_failed",
]
"""The reason why a prompt that was to come from elsewhere is computed here; empty where it came."""


class Phase(Enum):
    """The phase of a request.

    `FALLING_BACK` is `DECODING` of a request that computes what it lacks of its prompt itself.
    """

    RESERVING = "reserving"
    QUEUED = "queued"
    PREFILLING = "prefilling"
    READING = "reading"
    SETTLING = "settling"
    DECODING = "decoding"
    FALLING_BACK = "falling back"
    ENDED = "ended"


WAITS = frozenset({Phase.RESERVING, Phase.QUEUED, Phase.PREFILLING, Phase.READING, Phase.SETTLING})
"""The phases in which the engine waits for what is delivered."""


@dataclass(frozen=True, slots=True)
class Enqueue:
    """Put a job for the rest of the prompt into the work queue."""

    cached: int


@dataclass(frozen=True, slots=True)
class Call:
    """Ask an instance for the blocks from this token on; any where it is empty."""

    instance: str
    cached: int


@dataclass(frozen=True, slots=True)
class Read:
    """Read what an item tells of into the blocks that are held for it."""

    part: int
    item: Prefilled


@dataclass(frozen=True, slots=True)
class Settle:
    """Ask whether the lease of a part has held until now."""

    part: int


@dataclass(frozen=True, slots=True)
class Show:
    """Send the first token, at once."""

    first: Generated


@dataclass(frozen=True, slots=True)
class Deliver:
    """Let the engine go on: so many tokens of the prompt have come, and are proven."""

    computed: int
    first: Generated | None


@dataclass(frozen=True, slots=True)
class EndCall:
    """Leave the source: what it holds for the request is free."""


@dataclass(frozen=True, slots=True)
class Abandon:
    """Give up the transfer of a part, and say when nothing of it can arrive any more."""

    part: int


@dataclass(frozen=True, slots=True)
class Release:
    """End the hold of the blocks."""


Action: TypeAlias = Enqueue | Call | Read | Settle | Show | Deliver | EndCall | Abandon | Release


@dataclass(slots=True)
class _Part:
    """Blocks that come together.

    Attributes:
        stop: behind the last token in them.
        is_left: whether its transfer was given up.
        is_quiet: whether nothing of it can arrive any more.
    """

    stop: int
    is_left: bool = False
    is_read: bool = False
    is_settled: bool = False
    is_quiet: bool = False


class HandOver:
    """One request whose prompt's blocks come from elsewhere; the engine reserves blocks for it.

    Args:
        tokens: of the prompt that are wanted, from the first on: all of one that is computed.
        is_computed: whether the source computes the prompt, and draws the first token. Otherwise it
            lends what it has of it, which may be less than is wanted.
        has_tickets: whether parts come with tickets. Otherwise all is one part, which can be read
            when the first token is there.
        queued: whether a prefill instance takes the job out of the work queue, in place of being
            chosen.
        vocabulary: of the own model; token ids are below it.

    Attributes:
        reason: why the prompt is computed here after all; empty where it is not.
        detail: the same for people.
        cached: tokens of the prompt that were here already.
        settled: tokens of the prompt that are here and proven, from the first on.
    """

    def __init__(
        self,
        tokens: int,
        *,
        is_computed: bool = True,
        has_tickets: bool = True,
        queued: bool = False,
        vocabulary: int = ANY_TOKENS,
    ) -> None:
        self.phase = Phase.RESERVING
        self.reason: Reason = ""
        self.detail = ""
        self.cached = self.settled = 0
        self.first: Generated | None = None
        self._tokens = tokens
        self._is_computed = is_computed
        self._has_tickets = has_tickets
        self._queued = queued
        self._vocabulary = vocabulary
        self._parts: list[_Part] = []
        self._offered = 0
        self._calls = self._leaves = False
        self._holds = True
        self._has_ended = False

    def __repr__(self) -> str:
        return f"<HandOver [{self.phase.value}, {self.settled}/{self._tokens} settled]>"

    @property
    def waits(self) -> bool:
        """True if the engine waits for blocks that are delivered."""
        return self.phase in WAITS

    @property
    def outcome(self) -> str:
        """The outcome: empty where the prompt came, the reason, or `cancelled`."""
        has_come = self.first is not None or self.phase is Phase.DECODING
        return self.reason or ("" if has_come else "cancelled")

    def reserved(self, cached: int, *, is_worth: bool = True) -> list[Action]:
        """The blocks are there.

        Args:
            cached: tokens of the prompt that are in them.
            is_worth: whether the rest is enough to come from elsewhere.
        """
        if self.phase is not Phase.RESERVING:
            return []
        self.cached = self.settled = self._offered = cached
        if not is_worth:
            return self.fall_back("cached", f"{cached} tokens are in the cache")
        self.phase = Phase.QUEUED
        if self._queued:
            return [Enqueue(cached)]
        return self._call("")

    def offered(self, instance: str) -> list[Action]:
        """A prefill instance has taken the job; it is not needed where nothing is to be done."""
        if self.phase is not Phase.QUEUED or not self._queued or self._calls:
            return []
        return self._call(instance)

    def _call(self, instance: str) -> list[Action]:
        self._calls = True
        return [Call(instance, self.cached)]

    def came(self, item: Prefilled) -> list[Action]:
        """The source says how far it is."""
        if self.phase not in (Phase.QUEUED, Phase.PREFILLING) or not self._calls:
            return []
        wrong = self._wrong_in(item)
        if wrong:
            return self.fall_back("bad_answer", wrong)
        self.phase = Phase.PREFILLING
        actions: list[Action] = []
        if item.first is not None:
            # Before all else: somebody waits for it.
            self.first = item.first
            actions.append(Show(item.first))
        if item.first is not None or not self._is_computed:
            self.phase = Phase.READING
        if self._has_blocks(item):
            self._offered = item.computed
            self._parts.append(_Part(item.computed))
            actions.append(Read(len(self._parts) - 1, item))
        return actions + self._advance()

    def _has_blocks(self, item: Prefilled) -> bool:
        """True if an item comes with blocks to read."""
        return item.ticket is not None or not (self._has_tickets or item.first is None)

    def _wrong_in(self, item: Prefilled) -> str:
        """The fault of an item; empty where it has none."""
        reached = self._offered
        if self._has_blocks(item):
            if item.start != reached or not reached < item.computed:
                return f"tokens {item.start} to {item.computed} came after {reached}"
            reached = item.computed
        if not reached <= item.computed <= self._tokens:
            return f"{item.computed} tokens are said to be computed of {self._tokens}"
        if item.first is not None:
            if reached != self._tokens:
                return f"only {reached} tokens came of {self._tokens}"
            if len(item.first.token_ids) != 1 or item.first.finish_reason == "cancelled":
                return "the first token is not one"
            if not 0 <= item.first.token_ids[0] < self._vocabulary:
                return (
                    f"the first token is {item.first.token_ids[0]}, and the model here has "
                    f"{self._vocabulary} tokens"
                )
        return ""

    def read(self, part: int) -> list[Action]:
        """The bytes of a part have arrived; nothing more of it will."""
        one = self._parts[part]
        if one.is_quiet:
            return []
        one.is_quiet = True
        if not self.waits:
            return self._release_if_quiet()
        one.is_read = True
        return [Settle(part), *self._advance()]

    def quiet(self, part: int) -> list[Action]:
        """Nothing of a part can arrive any more."""
        self._parts[part].is_quiet = True
        return self._release_if_quiet()

    def answered(self, part: int, *, held: bool) -> list[Action]:
        """The lease of a part has held until it was read, or it has not."""
        if not self.waits:
            return []
        one = self._parts[part]
        if not one.is_read:
            return self.fall_back("bad_answer", "a lease is settled whose blocks were not read")
        if not held:
            return self.fall_back("lease_lost", "the blocks were not held until they were read")
        one.is_settled = True
        for each in self._parts:
            if not each.is_settled:
                break
            self.settled = each.stop
        return self._advance()

    def call_ended(self, reason: Reason = "", detail: str = "") -> list[Action]:
        """The source says nothing more.

        Args:
            reason: why, where it has not ended well.
        """
        if not self._calls:
            return []
        self._calls = False
        actions: list[Action] = []
        if self.phase in (Phase.QUEUED, Phase.PREFILLING):
            actions = self.fall_back(reason or "bad_answer", detail or "its answer is not complete")
        elif self.waits and reason:
            # A source that is gone settles no lease.
            actions = self.fall_back(reason, detail)
        return actions + self._end_if_done()

    def fall_back(self, reason: Reason, detail: str) -> list[Action]:
        """Have the engine compute what has not come; nothing where it does not wait any more."""
        if not self.waits:
            return []
        self.phase = Phase.FALLING_BACK
        self.reason, self.detail = reason, detail
        # What is read now is not waited for: the engine takes no more than is proven.
        return [Deliver(self.settled, self.first), *self._leave()]

    def ended(self) -> list[Action]:
        """The request has ended: it is complete, was cancelled, or has failed."""
        if self._has_ended:
            return []
        self._has_ended = True
        if self.waits:
            # The engine has forgotten it: it goes on nowhere.
            self.phase = Phase.FALLING_BACK
        return [*self._leave(), *self._end_if_done()]

    def _advance(self) -> list[Action]:
        """Go on to what the last item and the reads that are over allow."""
        if self.phase is Phase.READING and all(one.is_read for one in self._parts):
            self.phase = Phase.SETTLING
        if self.phase is Phase.SETTLING and self.settled == self._offered:
            self.phase = Phase.DECODING
            return [Deliver(self.settled, self.first), *self._leave()]
        return []

    def _leave(self) -> list[Action]:
        """Have nothing more to do with the source."""
        actions: list[Action] = []
        if self._calls and not self._leaves:
            self._leaves = True
            actions.append(EndCall())
        for at, part in enumerate(self._parts):
            if not part.is_quiet and not part.is_left:
                part.is_left = True
                actions.append(Abandon(at))
        return actions + self._release_if_quiet()

    def _release_if_quiet(self) -> list[Action]:
        if self.waits or not self._holds or not all(one.is_quiet for one in self._parts):
            return []
        self._holds = False
        return [Release(), *self._end_if_done()]

    def _end_if_done(self) -> list[Action]:
        if self._has_ended and not self._holds and not self._calls:
            self.phase = Phase.ENDED
        return []
