"""Moving KV blocks between instances with NIXL.

`LeaseTable`, `Quarantine`, `plan` and the table of a transfer's states decide; `TransferAgent`,
`Link` and `Pushes` carry it out.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .agent import TransferAgent, open_agent
    from .checksums import compare, wanted
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
    from .exchange import AGENTS_STREAM, DESCRIPTIONS
    from .layout import Axis, BlockLayout, KvMemory, check_convertible, plan
    from .leases import LeaseTable, Ticket
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
    "LeaseLost",
    "LeaseTable",
    "PeerRestarted",
    "Settled",
    "Settlement",
    "Settling",
    "Ticket",
    "Transfer",
    "TransferAgent",
    "TransferError",
    "TransferFailed",
    "check_convertible",
    "compare",
    "open_agent",
    "plan",
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
        "layout",
        "checksums",
        "leases",
        "settling",
        "exchange",
        "transfers",
        "agent",
    )
