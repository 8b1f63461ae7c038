"""Moving KV blocks between instances: with NIXL, or a mover of one's own.

`Mover` is what a worker moves blocks by; `TransferAgent` is the one over NIXL.
`LeaseTable`, `Quarantine`, `plan` and the table of a transfer's states decide; `TransferAgent`,
`Link` and `Pushes` carry it out.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .agent import TransferAgent, TransferStatistics, open_agent
    from .checksums import Vouched, Wanted, compare, vouch, wanted
    from .config import TransferConfig
    from .errors import (
        BadDescription,
        ChecksumMismatch,
        InvalidTransfer,
        LayoutMismatch,
        LeaseLost,
        PeerRestarted,
        TransferError,
        TransferFailed,
    )
    from .exchange import AGENTS_STREAM, DESCRIPTIONS, transfer_grants
    from .layout import Axis, BlockLayout, KvMemory, Pieces, Region, check_convertible, copy, plan
    from .leases import Lease, LeaseTable, Ticket
    from .mover import Mover, Moving
    from .settling import Settled, Settlement, Settling
    from .transfers import Transfer

__all__ = [
    "AGENTS_STREAM",
    "DESCRIPTIONS",
    "Axis",
    "BadDescription",
    "BlockLayout",
    "ChecksumMismatch",
    "InvalidTransfer",
    "KvMemory",
    "LayoutMismatch",
    "Lease",
    "LeaseLost",
    "LeaseTable",
    "Mover",
    "Moving",
    "PeerRestarted",
    "Pieces",
    "Region",
    "Settled",
    "Settlement",
    "Settling",
    "Ticket",
    "Transfer",
    "TransferAgent",
    "TransferConfig",
    "TransferError",
    "TransferFailed",
    "TransferStatistics",
    "Vouched",
    "Wanted",
    "check_convertible",
    "compare",
    "copy",
    "open_agent",
    "plan",
    "transfer_grants",
    "vouch",
    "wanted",
]

if not TYPE_CHECKING:
    # To describe memory takes no NIXL.
    from dynbus.spi import how_to_install, lazy_exports

    try:
        import xxhash as _  # noqa: F401 - it comes with the extra, and takes no time
    except ImportError as error:
        raise ImportError(
            f"transfers take an extra: {how_to_install('transfer')} ({error})"
        ) from error

    __getattr__, __dir__ = lazy_exports(
        __name__,
        "errors",
        "config",
        "layout",
        "checksums",
        "leases",
        "mover",
        "settling",
        "exchange",
        "transfers",
        "agent",
    )
