"""Every error of a transfer that a caller can see.

TransferError
├── InvalidTransfer     blocks, tokens or ranges are not usable as given  (the caller's fault)
├── LayoutMismatch      the two sides do not hold the same numbers      (the deployment's fault)
├── BadDescription      what a peer says of itself or its memory is not so  (the peer's fault)
├── PeerRestarted       the peer has another epoch than the ticket      (retryable elsewhere)
├── LeaseLost           the source does not vouch for the bytes any more  (compute them again)
├── ChecksumMismatch    the bytes that arrived are not those of the source
└── TransferFailed      the link, or NIXL, failed                       (retryable)

A time that is over is a `DeadlineExceeded`, and a NIXL that is not installed a `ConfigError`, as
everywhere on the bus.
"""

from __future__ import annotations

from dynbus import DynbusError


class TransferError(DynbusError):
    """Any failure of a transfer."""

    code = "TransferError"


class InvalidTransfer(TransferError, ValueError):
    """Raised when the blocks, tokens or ranges of a transfer are not usable as given."""

    code = "InvalidTransfer"


class LayoutMismatch(TransferError):
    """Raised when two layouts do not hold the same numbers, so that none can become the other."""

    code = "LayoutMismatch"


class BadDescription(TransferError, ValueError):
    """Raised when what a peer says of itself or of its memory is damaged, or cannot be true."""

    code = "BadDescription"


class PeerRestarted(TransferError):
    """Raised when the peer that a ticket is of is gone, and another has its name."""

    code = "PeerRestarted"


class LeaseLost(TransferError):
    """Raised when the source did not hold the blocks until they were read; none may be used."""

    code = "LeaseLost"


class ChecksumMismatch(TransferError):
    """Raised when the bytes that arrived are not those that the source has; none may be used."""

    code = "ChecksumMismatch"


class TransferFailed(TransferError):
    """Raised when the link to the peer, or NIXL itself, failed during a transfer."""

    code = "TransferFailed"
    retryable = True
