"""What engines reuse of prompts, compared with what they say that they hold.

An index can agree with every digest and still be wrong, when the instance itself is: it says
that it holds what it does not, or the other way round. Its own count of reused tokens tells.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from dynbus.kvrouter.radix.index import Rank

LEAST_REQUESTS: Final = 8
"""Requests before a mean says anything."""
MEMORY: Final = 16
"""The latest request counts for so much of the mean: one part in as many."""
LEAST_BLOCKS: Final = 2.0
"""Blocks per request that predictions may be wrong by. Engines compute the last block of a
prompt again although they hold it."""
LEAST_SHARE: Final = 0.25
"""Share of the tokens per request that predictions may be wrong by: caches change while a request
is on its way."""
FIRST_PATIENCE: Final = 30.0
MAX_PATIENCE: Final = 960.0
"""Seconds until a rank that is still wrong is asked again. Doubled each time: an answer costs all
that the rank holds."""


@dataclass(slots=True)
class _Record:
    """How the predictions for one rank fared.

    Attributes:
        error: mean tokens per request that were predicted and not reused; negative for more.
        tokens: mean tokens per request that were predicted or reused, whichever is more.
        since: of requests that were decided from then on.
        doubt: why it is doubted; empty for not.
    """

    requests: int = 0
    error: float = 0.0
    tokens: float = 0.0
    since: float = 0.0
    ask_at: float = 0.0
    patience: float = FIRST_PATIENCE
    doubt: str = ""


class ReuseWatch:
    """Finds ranks whose word on their cache is not what their engines reuse.

    Times are of one monotonic clock.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._records: dict[Rank, _Record] = {}

    def __repr__(self) -> str:
        return f"<ReuseWatch [{len(self.doubts())} of {len(self._records)} ranks doubted]>"

    def note(self, rank: Rank, told: int, predicted: int, reused: int, decided_at: float) -> str:
        """An engine has reused so many tokens of a prompt.

        Args:
            told: tokens that the rank itself had said it holds.
            predicted: these and those that own decisions let expect.
            decided_at: when both were looked up; later calls may come with earlier times.

        Returns:
            Why the rank is to be asked for a resync; empty when it is not.
        """
        record = self._records.setdefault(rank, _Record())
        if decided_at < record.since:
            return ""
        # Between what was told and what was guessed beside it nobody is wrong.
        error = told - reused if reused < told else min(0, predicted - reused)
        record.requests += 1
        weight = max(1 / record.requests, 1 / MEMORY)
        record.error += (error - record.error) * weight
        record.tokens += (max(told, reused) - record.tokens) * weight
        if record.requests < LEAST_REQUESTS:
            return ""
        allowed = max(LEAST_BLOCKS * self._block_size, LEAST_SHARE * record.tokens)
        if abs(record.error) <= allowed:
            record.doubt = ""
            record.patience = FIRST_PATIENCE
            return ""
        which = "fewer" if record.error > 0 else "more"
        record.doubt = (
            f"it reuses {abs(record.error):.0f} tokens {which} than it says that it holds, "
            f"of {record.tokens:.0f}"
        )
        if decided_at < record.ask_at:
            return ""
        return record.doubt

    def asked(self, rank: Rank, now: float) -> None:
        """A rank was asked for a resync: what was decided before says nothing any longer."""
        record = self._records.setdefault(rank, _Record())
        record.requests = 0
        record.error = record.tokens = 0.0
        record.since = now
        record.ask_at = now + record.patience
        record.patience = min(2 * record.patience, MAX_PATIENCE)

    def doubts(self) -> Mapping[Rank, str]:
        """Ranks that were found wrong and not yet right again, and how."""
        return {rank: record.doubt for rank, record in self._records.items() if record.doubt}

    def remove_instance(self, instance: str) -> None:
        """An instance is gone."""
        for rank in [rank for rank in self._records if rank.instance == instance]:
            del self._records[rank]
