"""The retry policy of a call: another attempt now or after a pause (back-off), or its end.

A failed attempt is repeated by itself only when the request provably did not start, and the
error says that it is retryable: any other would come again from the next instance. Beyond that a
handler must be declared idempotent, or the caller must have given an idempotency key. A stream
that says how it goes on moves to another instance whenever its own is lost.
Nothing here waits, looks at a clock or draws a random number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from dynbus.bus.errors import (
    Draining,
    DynbusError,
    InvalidRequest,
    Migrate,
    NoInstances,
    Overloaded,
    StreamLost,
)

MAX_ATTEMPTS: Final = 8
DEFAULT_RETRIES: Final = 2
FIRST_BACKOFF: Final = 0.1
MAX_BACKOFF: Final = 2.0
MAX_EXCUSED: Final = 64
"""The number of times that a stream moves without a failure of an instance, beside its
`migration_limit`.
"""

MOVES_SPENT: Final = "which is its migration_limit"
"""The end of the message of a stream that may move no more."""


class FailedAttempt(NamedTuple):
    """The facts of an attempt that failed.

    Attributes:
        number: how many requests were sent or about to be, this one included.
        sent: whether this one was; False also when the instance's record rules the call out.
        routed: whether a router chose the instance; False when the caller named it, and when
            none was chosen.
        unreachable: whether nobody listens at the instance any longer.
        lost: whether the instance is there and says that the request never came.
        own: whether the error says something of this instance; that of a call which its handler
            made says it of another, and was tried elsewhere by that call.
        settling: whether we came or came back to the bus a moment ago, or it lost a server, so
            that instances may still be coming back too.
        others: whether there is another instance that was not tried, or may be in a moment.
        waits: whether the caller would wait on for an instance if there were none.
        cut_off: whether this process hears nobody, so that the loss says nothing of the instance.
    """

    error: DynbusError
    number: int
    sent: bool
    routed: bool
    unreachable: bool
    lost: bool
    own: bool
    settling: bool
    others: bool
    waits: bool
    cut_off: bool


# Not tuples: those are equal when their fields are.
@dataclass(frozen=True, slots=True)
class RetryNow:
    """Try again on another instance, at once.

    Attributes:
        counted: whether the attempt counts: one where nobody listens costs a round trip, and the
            deadline bounds those.
    """

    counted: bool = True


class PauseThenRetry(NamedTuple):
    """Try again on any instance after a pause.

    Attributes:
        backoff: seconds to pause at most; the pause is drawn from the upper half.
        least: seconds to pause in any case.
        counted: whether the attempt counts; otherwise it is made once more where it was.
    """

    backoff: float
    least: float = 0.0
    counted: bool = True


@dataclass(frozen=True, slots=True)
class Move:
    """Go on at another instance than this one; for a stream that goes on, once there is one."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The error is the call's.

    Attributes:
        why: what keeps a stream from going on that could.
    """

    why: str = ""


Decision = RetryNow | PauseThenRetry | Move | GiveUp


class RetryPolicy:
    """Decides for one call, over all its attempts, and says what it ends with.

    Args:
        idempotent: whether the call may be carried out twice.
        retries: how often it may be repeated; None for what is usual.
        migration_limit: how often it may move to another instance. What an instance that drains
            hands on, and what is lost while this process hears nobody, is not counted where the
            stream goes on.
        continues: whether it is a stream that can go on elsewhere. Any other call moves only where
            a handler or a drain asks for that, and begins again.

    Attributes:
        lost: how the last attempt ended that may have started; None where none has.
    """

    __slots__ = (
        "_continues",
        "_excused",
        "_idempotent",
        "_migration_limit",
        "_migrations",
        "_repeated",
        "_retries",
        "lost",
    )

    def __init__(
        self,
        *,
        idempotent: bool,
        retries: int | None,
        migration_limit: int,
        continues: bool = False,
    ) -> None:
        self.lost: DynbusError | None = None
        self._continues = continues
        self._idempotent = idempotent
        self._retries = retries
        self._migration_limit = migration_limit
        self._repeated = 0
        self._migrations = 0
        self._excused = 0

    def __repr__(self) -> str:
        return f"<RetryPolicy [{self._repeated} retries, {self._migrations} migrations]>"

    def note(self, error: DynbusError) -> None:
        """An attempt has ended so."""
        if error.started:
            self.lost = error

    def decide(self, failed: FailedAttempt) -> Decision:
        """The next step; to be asked once per failed attempt that delivered nothing, or of a stream
        that can go on."""
        error = failed.error
        if failed.unreachable and not error.started and failed.routed and failed.others:
            return RetryNow(counted=False)
        if failed.unreachable and not error.started and failed.settling:
            # Right after an outage an instance may be a moment later on the bus than we are.
            return PauseThenRetry(self._backoff(), counted=False)
        if self._continues and error.started and failed.own and error.is_loss:
            return self._move_on(failed)
        # Those that a stream moved for had begun; they are bounded by the limits.
        moved = self._migrations + self._excused if self._continues else 0
        if failed.number - moved >= MAX_ATTEMPTS or _is_final(failed):
            return GiveUp()
        refused = not error.started
        if failed.routed and refused and (failed.others or (failed.waits and is_away(failed))):
            return RetryNow()
        if failed.own and isinstance(error, Migrate | Draining) and self._may_migrate(failed):
            self._migrations += 1
            return Move()
        waits = bool(moved) and failed.routed and failed.waits and not failed.lost
        if not (self._may_repeat(failed) or (waits and refused)):
            return GiveUp()
        backoff = self._backoff()
        self._repeated += 1
        least = error.retry_after if isinstance(error, Overloaded) else 0.0
        return PauseThenRetry(backoff, least)

    def given_up(self, error: DynbusError, why: str, *, own: bool, delivered: bool) -> DynbusError:
        """The error of the call where no attempt follows one that ended with an error.

        Args:
            why: what keeps a stream from going on; empty for the error itself.
            own: see `FailedAttempt`.
            delivered: whether its reader has items.
        """
        if isinstance(error, StreamLost):
            error.retryable = self._idempotent or not delivered
        if not delivered or not (error.retryable or isinstance(error, StreamLost)):
            return error
        return self.stream_lost(error, why or error.message, own=own)

    def stream_lost(self, error: DynbusError, why: str, *, own: bool) -> StreamLost:
        """The error of a stream of which its reader has items, when it cannot go on; `given_up`
        says what of."""
        if not own:
            if isinstance(error, StreamLost):
                # It says what keeps that one from going on.
                error.retryable = self._idempotent
                return error
            why = "a call that its handler made was given up"
        lost = self.lost or error
        text = f"{lost.message or lost.code}; the stream cannot go on: {why}"
        failure = StreamLost(text, hop=lost.hop, request_id=lost.request_id)
        failure.retryable = self._idempotent
        failure.__cause__ = error
        return failure

    def _move_on(self, failed: FailedAttempt) -> Decision:
        if not failed.routed:
            return GiveUp("the caller named the instance")
        is_excused = failed.cut_off or isinstance(failed.error, Draining)
        if is_excused and self._excused < MAX_EXCUSED:
            # Instances that are replaced one after the other are no failures of this stream, nor
            # is our own server when it has lost all others.
            self._excused += 1
            return Move()
        limit = self._migration_limit
        if self._migrations >= limit:
            times = "once" if limit == 1 else f"{limit} times"
            return GiveUp(f"it moved {times}, {MOVES_SPENT}")
        self._migrations += 1
        return Move()

    def _may_migrate(self, failed: FailedAttempt) -> bool:
        return failed.others and self._migrations < self._migration_limit

    def _may_repeat(self, failed: FailedAttempt) -> bool:
        error = failed.error
        if error.started and not self._idempotent:
            return False
        allowed = self._retries
        if allowed is None:
            allowed = DEFAULT_RETRIES if self._idempotent or failed.lost else 0
        return self._repeated < allowed and not isinstance(error, InvalidRequest)

    def _backoff(self) -> float:
        return float(min(MAX_BACKOFF, FIRST_BACKOFF * 2**self._repeated))


def is_away(failed: FailedAttempt) -> bool:
    """True if an instance takes no more calls, so that it is not to be chosen again soon."""
    return failed.unreachable or (failed.own and isinstance(failed.error, Draining))


def _is_final(failed: FailedAttempt) -> bool:
    """True if another attempt would end in the same way."""
    error = failed.error
    if isinstance(error, NoInstances):
        return True
    if error.retryable or error.code == "UnknownOutcome":
        return False
    # An instance that serves the endpoint in the other kind is passed over, not asked.
    return failed.sent or not isinstance(error, InvalidRequest)
