"""How much each instance may hold when not everything fits."""

from __future__ import annotations

from collections.abc import Collection


def fair_share(held: Collection[int], room: int) -> int:
    """The most that each of some may keep so that together they keep no more than `room`.

    Those that hold less keep all of it, and leave the rest of their share to the others.
    """
    left, most = room, 0
    for number, blocks in enumerate(sorted(held)):
        share = max(0, left) // (len(held) - number)
        if blocks > share:
            return share
        left -= blocks
        most = blocks
    return most
