"""The decisions of routers, made again from their tapes."""

from .replay import Compared, Replay, Replayed

__all__ = ["Compared", "Replay", "Replayed"]
