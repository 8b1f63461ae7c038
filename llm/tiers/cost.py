"""The cost of bringing the blocks of a prefix from elsewhere, and of computing them.

Rates are measured: each prefill, copy and transfer moves the estimate of its kind. Until there is a
first one, computing is taken to be fast and moving to be slow, so that blocks are moved only where
that is clearly better.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final, NamedTuple

WEIGHT: Final = 0.25
"""The weight of the latest measurement in an estimate."""
FIRST_PREFILL_RATE: Final = 5_000.0
"""Tokens a second that an engine is taken to compute until it has computed some."""
FIRST_COPY_RATE: Final = 2e9
"""Bytes a second of a copy in memory, until there was one."""
FIRST_TRANSFER_RATE: Final = 0.4e9
FIRST_LATENCY: Final = 0.1
"""The bytes a second and the seconds of a transfer from a peer that has sent nothing yet."""
LEAST_MEASURED_TOKENS: Final = 16
"""A step with fewer tokens of prompts says nothing of how fast prompts are computed."""
LEAST_MEASURED_BYTES: Final = 1 << 20
"""A transfer of fewer bytes says nothing of how fast bytes come."""
MARGIN: Final = 0.8
"""A prefix is fetched where that takes at most this part of the time of computing it."""
LEAST_BLOCKS: Final = 2
"""Fewer blocks than these are computed: to ask a peer for them is not worth a thought."""
MAX_PEERS: Final = 256
"""Peers whose rates are remembered; the one that was used the longest ago is forgotten first."""
FIRST_PAUSE: Final = 1.0
MAX_PAUSE: Final = 60.0
"""Seconds for which a peer that failed is not asked again; doubled with each failure in a row."""


@dataclass(slots=True)
class Estimate:
    """A mean in which the latest measurements count most.

    Attributes:
        value: the estimate; what it begins with until something was measured.
        measured: whether something was.
    """

    value: float
    measured: bool = False

    def note(self, value: float) -> None:
        """Take in a measurement."""
        self.value += (value - self.value) * (WEIGHT if self.measured else 1.0)
        self.measured = True


@dataclass(slots=True)
class PeerRates:
    """The speed of blocks from one peer.

    Attributes:
        latency: seconds of a transfer that do not depend on its size.
        seconds_per_byte: of the others.
        failures: in a row, the latest ones.
        paused_until: when it may be asked again, on the monotonic clock.
    """

    latency: Estimate = field(default_factory=lambda: Estimate(FIRST_LATENCY))
    seconds_per_byte: Estimate = field(default_factory=lambda: Estimate(1 / FIRST_TRANSFER_RATE))
    failures: int = 0
    paused_until: float = 0.0


class Verdict(NamedTuple):
    """The decision to bring a prefix or not, and the times expected of both.

    Attributes:
        compute_s, move_s: seconds that the two ways are taken to need.
        reason: why it is not, in a few words; empty where it is.
    """

    compute_s: float
    move_s: float
    reason: str = ""

    @property
    def moves(self) -> bool:
        """True if the blocks are to be brought."""
        return not self.reason


class Rates:
    """The measured rates of one engine and of its peers, and what follows from them.

    Args:
        block_size: tokens of a block.
        block_bytes: bytes of a block.
    """

    def __init__(self, block_size: int, block_bytes: int) -> None:
        self.block_size = block_size
        self.block_bytes = block_bytes
        self.prefill = Estimate(1 / FIRST_PREFILL_RATE)
        self.copy = Estimate(1 / FIRST_COPY_RATE)
        self._peers: OrderedDict[str, PeerRates] = OrderedDict()

    def __repr__(self) -> str:
        per_second = 1 / max(self.prefill.value, 1e-12)
        return f"<Rates [{per_second:.0f} tokens/s, {len(self._peers)} peers]>"

    def peer(self, name: str) -> PeerRates:
        """The rates of a peer."""
        rates = self._peers.setdefault(name, PeerRates())
        self._peers.move_to_end(name)
        while len(self._peers) > MAX_PEERS:
            self._peers.popitem(last=False)
        return rates

    # Measurements ---------------------------------------------------------------------

    def note_prefill(self, tokens: int, seconds: float) -> None:
        """A step that computed prompts took so long."""
        if tokens >= LEAST_MEASURED_TOKENS and seconds > 0.0:
            self.prefill.note(seconds / tokens)

    def note_copy(self, blocks: int, seconds: float) -> None:
        """So many blocks were copied in memory."""
        if blocks and seconds > 0.0:
            self.copy.note(seconds / (blocks * self.block_bytes))

    def note_transfer(self, peer: str, size: int, seconds: float, latency: float) -> None:
        """A peer sent `size` bytes in `seconds`, and to agree on that took `latency` seconds."""
        rates = self.peer(peer)
        rates.failures = 0
        rates.paused_until = 0.0
        rates.latency.note(latency)
        if size >= LEAST_MEASURED_BYTES and seconds > 0.0:
            rates.seconds_per_byte.note(seconds / size)

    def note_failure(self, peer: str, now: float) -> None:
        """A transfer from a peer has failed: it is left in peace for some time."""
        rates = self.peer(peer)
        rates.failures += 1
        rates.paused_until = now + min(MAX_PAUSE, FIRST_PAUSE * 2.0 ** (rates.failures - 1))

    # Decisions ------------------------------------------------------------------------

    def prefill_seconds(self, blocks: int) -> float:
        """Seconds that computing so many blocks takes."""
        return blocks * self.block_size * self.prefill.value

    def copies(self, blocks: int) -> bool:
        """True if blocks of the host store are copied back rather than computed."""
        return blocks * self.block_bytes * self.copy.value < self.prefill_seconds(blocks)

    def fetches(
        self,
        peer: str,
        blocks: int,
        *,
        now: float,
        deadline: float | None = None,
        running: int = 0,
    ) -> Verdict:
        """The decision to fetch blocks that a peer has, or to compute them.

        Args:
            blocks: of the prompt that the peer has and this engine has not.
            now, deadline: on one monotonic clock.
            running: transfers that run already, with which this one shares what there is.
        """
        rates = self.peer(peer)
        compute_s = self.prefill_seconds(blocks)
        size = blocks * self.block_bytes
        move_s = rates.latency.value + size * rates.seconds_per_byte.value * (1 + running)
        reason = ""
        if blocks < LEAST_BLOCKS:
            reason = f"{blocks} blocks are too few"
        elif now < rates.paused_until:
            reason = f"the peer failed, and is asked again in {rates.paused_until - now:.1f} s"
        elif deadline is not None and now + move_s + compute_s > deadline:
            # Should it fail, the time to compute is still needed.
            reason = "the deadline leaves no time to compute if it fails"
        elif move_s > MARGIN * compute_s:
            reason = "computing is as fast"
        return Verdict(compute_s, move_s, reason)
