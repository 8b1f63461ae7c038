"""Peers that fall silent together, which tells a lost server from a dead peer.

A server that has lost the others answers, and what others send does not come through it. One peer
that falls silent is most likely dead or frozen. When a second one does and nobody was heard since
the first, it is time to try another server. As long as nobody is heard there either, each further
one that falls silent says the same again. Without I/O or clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from .liveness import HEARTBEAT_INTERVAL

PEERS: Final = 2
"""Silent ones that speak against the server."""
REMEMBERED: Final = 10.0
"""Seconds for which the silence of one does, and a server that was left is blamed."""


class Unheard:
    """The peers that have fallen silent on one connection. Times are of one monotonic clock."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        self._blamed_at = -math.inf

    def __repr__(self) -> str:
        return f"<Unheard [{len(self._since)} peers]>"

    def note(self, silent: Mapping[str, float], heard_at: float, now: float) -> bool:
        """Peers were found silent; True when that is the server's doing, most likely.

        Args:
            silent: since when, by peer.
            heard_at: when anybody was last heard.
        """
        self._since |= silent
        # Beats of peers come within an interval of each other, and what is under way a bit later.
        least = max(heard_at - 2 * HEARTBEAT_INTERVAL, now - REMEMBERED)
        self._since = {peer: since for peer, since in self._since.items() if since >= least}
        if len(self._since) < (1 if self.hears_nobody(heard_at, now) else PEERS):
            return False
        self._since.clear()
        self._blamed_at = now
        return True

    def heard(self) -> bool:
        """Somebody is heard; True when nobody was since a server was left."""
        was_cut_off = self._blamed_at > -math.inf
        self._blamed_at = -math.inf
        return was_cut_off

    def hears_nobody(self, heard_at: float, now: float) -> bool:
        """True if the server caused a silence a while ago, and no peer was heard since.

        Args:
            heard_at: when anybody was last heard.
        """
        return heard_at <= self._blamed_at and now < self._blamed_at + REMEMBERED
