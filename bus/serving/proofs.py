"""Proofs of who calls: the requests that wait until their client shows that it hears what is
answered to its principal.

The sender of a request chooses the subject at which it is answered, and so the principal that it
names. The server lets nobody but the users of that principal hear there. So the instance sends a
token to that subject, and a client that sends it back hears there. For a while its incarnation
stands for it then, which only the two know.

Nothing here knows of a connection or a clock.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

from dynbus.bus.errors import DynbusError, Overloaded, PermissionDenied
from dynbus.bus.protocol.endpoint import ANYBODY, allows
from dynbus.bus.protocol.names import ANONYMOUS

from .ledger import FramedCall, RemoteClient

HELD: Final = 1024
"""Requests that may wait. A client that is there answers within a round trip, so the oldest goes
first: those of clients that are not."""
HELD_SIZES: Final = 4
"""Requests of the largest size whose bytes may wait."""
SWEEPS: Final = 10
"""Sweeps after which a request is given up: 5 s in which the loop did run."""

PROVEN_SWEEPS: Final = 120
"""Sweeps for which a proof counts, a minute: the client's incarnation may have become known since,
and its credential been revoked."""

_TOKEN_BITS: Final = 62


class Held(NamedTuple):
    """A request that waits."""

    call: FramedCall
    data: bytes
    sweep: int


class Proofs:
    """The requests of one instance that wait for a proof of who calls, oldest first.

    Args:
        principal: of the instance. One without a principal has no user of the server, which keeps
            nobody from hearing what is answered to others, so there is no proof.
        max_request_bytes: bytes of the largest request.
    """

    def __init__(self, principal: str, max_request_bytes: int) -> None:
        self._has_users = principal != ANONYMOUS
        self._most_bytes = HELD_SIZES * max_request_bytes
        # By client's key and request number.
        self._held: dict[tuple[str, int], Held] = {}
        self._bytes = 0
        self._sweeps = 0

    def __repr__(self) -> str:
        return f"<Proofs [{len(self._held)} requests, {self._bytes} bytes wait]>"

    def refusal(self, principal: str, allowed: Collection[str]) -> DynbusError | None:
        """The reason why a principal may not call, whether it is proven or not; None if it may."""
        if principal == ANONYMOUS or not self._has_users:
            return self.of_nobody(allowed)
        if allows(allowed, principal):
            return None
        return PermissionDenied(
            f"{principal} may not call this: {_only(allowed)} may", started=False
        )

    def of_nobody(self, allowed: Collection[str]) -> DynbusError:
        """The refusal of a call of which nobody can prove whose it is."""
        text = f"the caller has no user of the server, and {_only(allowed)} may call this"
        if not self._has_users:
            text = (
                "the handler has allow=, and its instance has no user of the server, without which "
                "nobody can prove who calls: make users with `dynbus auth init`, or set "
                "DYNBUS_PRINCIPAL at both sides to try it without"
            )
        return PermissionDenied(text, started=False)

    def is_proven(self, client: RemoteClient) -> bool:
        """True if a client has proven of late whose it is."""
        return client.proven_at is not None and self._sweeps - client.proven_at < PROVEN_SWEEPS

    def hold(
        self, call: FramedCall, data: bytes
    ) -> tuple[bool, Sequence[tuple[FramedCall, DynbusError]]]:
        """Have a request wait.

        Returns:
            Whether its client is to be asked; and requests that are to be refused, since too many
            wait.
        """
        client = call.client
        is_first = not client.proof
        if is_first:
            client.proof = secrets.randbits(_TOKEN_BITS) or 1
        key = client.key, call.writer.number
        if key in self._held:
            # One that was given up: its client chooses the numbers, and may take one again.
            self._take(key)
        self._held[key] = Held(call, data, self._sweeps)
        self._bytes += len(data)
        refused: list[tuple[FramedCall, DynbusError]] = []
        while len(self._held) > HELD or self._bytes > self._most_bytes:
            oldest = self._take(next(iter(self._held)))
            text = "too many requests wait for a proof of who calls: send it again"
            refused.append((oldest.call, Overloaded(text, started=False)))
        return is_first, refused

    def proven(self, client: RemoteClient, token: int) -> list[Held]:
        """A client has answered with a token: its requests that wait, which may go on now.

        There are none where it was not asked with that, or has answered already.
        """
        if not token or token != client.proof:
            return []
        client.proof = 0
        client.proven_at = self._sweeps
        return [self._take(key) for key in list(self._held) if key[0] == client.key]

    def sweep(
        self, *, cut_off: bool
    ) -> tuple[list[RemoteClient], list[tuple[FramedCall, DynbusError]]]:
        """Count a sweep, unless nobody can answer because we are not connected.

        Returns:
            The clients that are to be asked again; and requests to refuse, which have waited too
            long.
        """
        if cut_off:
            return [], []
        # Not a time: while the loop is blocked no answer is read.
        self._sweeps += 1
        ask: dict[str, RemoteClient] = {}
        refused: list[tuple[FramedCall, DynbusError]] = []
        for key, held in list(self._held.items()):
            call = held.call
            if call.ended:
                self._take(key)
            elif self._sweeps - held.sweep > SWEEPS:
                self._take(key)
                text = f"nobody who hears the answers to {call.client.principal} made this call"
                refused.append((call, PermissionDenied(text, started=False)))
            else:
                ask[key[0]] = call.client
        return list(ask.values()), refused

    def _take(self, key: tuple[str, int]) -> Held:
        held = self._held.pop(key)
        self._bytes -= len(held.data)
        return held


def _only(allowed: Collection[str]) -> str:
    return "any user" if ANYBODY in allowed else f"only {' or '.join(sorted(allowed))}"
