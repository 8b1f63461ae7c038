"""The settings of a transfer agent."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, Literal

import msgspec

from dynbus import ConfigError

_SECONDS: Final = ("quiet_seconds", "idle_wait", "lookup_seconds")


class TransferConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of an agent's transfers; every figure has a default that suits KV blocks.

    Attributes:
        slice_bytes: a larger transfer is posted in slices of about so many bytes, so that others
            on its link, and a cancel, need not wait for all of it.
        slices_ahead: how many slices of a transfer are with NIXL at once.
        quiet_seconds: how long an abandoned transfer may take to end by itself. Then the link to
            its peer is destroyed, which ends it for certain, and is made again when it is needed.
        idle_wait: the longest time for which the progress thread of an idle agent sleeps.
        lookup_seconds: how long the description of a peer is waited for.
        reads: "direct" by this side, or "pushed" by the peer, which writes what this side wants to
            read. Where UCX has TCP alone, "auto" has them pushed: a READ is slower there, and one
            whose reader dies can take the process with it that it reads from.
        prepared: how many descriptors of one pair of memories are prepared in advance at most; 0
            for none. A pair that needs more is transferred without.
        ucx: settings of UCX for the agents of this process, without `UCX_`; values have no comma.
            What needs one is set in the environment, before the process starts.
    """

    slice_bytes: int = 64 * 2**20
    slices_ahead: int = 2
    quiet_seconds: float = 3.0
    idle_wait: float = 0.1
    lookup_seconds: float = 5.0
    reads: Literal["auto", "direct", "pushed"] = "auto"
    prepared: int = 262_144
    ucx: Mapping[str, str] = {}

    def __post_init__(self) -> None:
        for name in _SECONDS:
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"TransferConfig.{name} = {value:g}: choose more than 0 seconds")
        if self.slice_bytes < 2**16:
            raise ConfigError(
                f"TransferConfig.slice_bytes = {self.slice_bytes}: choose 65536 bytes or more"
            )
        if not 1 <= self.slices_ahead <= 64:
            raise ConfigError(
                f"TransferConfig.slices_ahead = {self.slices_ahead}: choose from 1 to 64"
            )
        if self.reads not in ("auto", "direct", "pushed"):
            raise ConfigError(
                f"TransferConfig.reads = {self.reads!r}: choose auto, direct or pushed"
            )
        if self.prepared < 0:
            raise ConfigError(f"TransferConfig.prepared = {self.prepared}: choose 0 or more")
        for key, value in self.ucx.items():
            if not key or "," in f"{key}{value}" or "=" in key or key.startswith("UCX_"):
                raise ConfigError(
                    f"TransferConfig.ucx has {key} = {value}: leave out the UCX_, and set values "
                    "with commas in the environment before the process starts"
                )
