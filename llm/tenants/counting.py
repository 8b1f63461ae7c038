"""`SharedCounts`: what tenants use at one front end, counted with what they use at all others."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Final

import anyio
import msgspec

from dynbus import DynbusError, Runtime
from dynbus.llm.openai.errors import RateLimited
from dynbus.spi import (
    NoStream,
    Openable,
    ServerClock,
    StreamConfig,
    StreamLimits,
    WrongLastSequence,
    monotonic,
    random_id,
    unix_time,
)

from .keys import tenant_token
from .ledger import Ledger, Statement
from .limits import BUDGET, CACHED, COMPLETION, PROMPT, UNKNOWN_COMPLETION, Limits, Quota
from .purse import LOOK_AGAIN, Purse, Shortage, Taken
from .usage import HOUR

logger = logging.getLogger(__name__)

COUNTS_BUCKET: Final = "dynbus_tenant_counts"

COUNTS_STREAM: Final = StreamConfig(
    name=f"KV_{COUNTS_BUCKET}",
    subjects=(f"$KV.{COUNTS_BUCKET}.*",),
    limits=StreamLimits(
        max_messages_per_subject=1,
        max_bytes=64 * 1024 * 1024,
        # Nothing that is older counts: it is of another month.
        max_age=32 * 24 * 3600.0,
        max_message_size=64 * 1024,
    ),
    description="dynbus: what tenants have used of their limits",
)

TELL_INTERVAL: Final = 1.0
"""Seconds after which others know what was used here, and may use what was not."""

ASK_TIMEOUT: Final = 0.5
"""Seconds that a request waits for JetStream, once: those after it go by what is known here."""

IDLE_SECONDS: Final = 30.0
"""Seconds without a request after which a front end has no part in a tenant's limits."""

TRIES: Final = 16
"""Writes of a ledger that other front ends may change at the same time."""

QUESTIONS: Final = 3
"""Questions for one request, where what it was to be given goes to others that came meanwhile, or
is of a minute that has ended."""

AT_A_TIME: Final = 8
"""Ledgers that are told at a time."""

CLOCK_AGE: Final = 60.0
"""Seconds after which the server is asked for its time again."""

_FEWER: Final = (
    f"ask for fewer max_tokens ({UNKNOWN_COMPLETION} count where a request says none, times n)"
)
_REMEDIES: Final = {
    PROMPT: "shorten the prompt",
    CACHED: "shorten the prompt",
    COMPLETION: _FEWER,
    BUDGET: _FEWER,
}
"""Ways in which a request takes less of a limit, by its name."""

_decoder: Final = msgspec.json.Decoder(Ledger)


def count_subject(name: str) -> str:
    """The subject of the ledger of a quota."""
    return f"$KV.{COUNTS_BUCKET}.{tenant_token(name)}"


class _Account:
    """A purse, and where its ledger was when it was last seen."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.purse = Purse(limits.counted)
        self.asking = asyncio.Lock()
        self.sequence = 0
        self.ledger = Ledger()


class SharedCounts(Openable):
    """The counts of a front end, while it is open.

    A request is counted here, against what this front end has leased. A ledger is asked where that
    does not do, and told once a second what became of it.
    """

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime.background)
        self._jetstream = runtime.bus.data.jetstream
        self._runtime = runtime
        self._me = random_id()
        self._accounts: dict[str, _Account] = {}
        self._clock = ServerClock()
        self._is_clock_set = False
        self._logged = ""

    def __repr__(self) -> str:
        return f"<SharedCounts of {len(self._accounts)} tenants>"

    @asynccontextmanager
    async def _open(self) -> AsyncGenerator[None]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._keep_telling)
            yield
            tasks.cancel_scope.cancel()
        with anyio.move_on_after(2 * ASK_TIMEOUT, shield=True):
            await self._tell(leaves=True)

    def now(self) -> float:
        """Unix seconds by the server's clock; by the own one until that is known."""
        return self._clock.unix(monotonic()) if self._is_clock_set else unix_time()

    def purse(self, name: str, limits: Limits) -> Purse:
        """The part of this front end in a quota, by its name."""
        return self._account(name, limits).purse

    def _account(self, name: str, limits: Limits) -> _Account:
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = _Account(limits)
        elif account.limits is not limits:
            account.limits = limits
            account.purse.change(limits.counted)
        return account

    async def take(self, quota: Quota, amounts: Mapping[str, int]) -> Taken:
        """Take amounts of a quota, which `Purse.settle` settles.

        Args:
            quota: with the limits as the request has found them; those that a later one has found
                count.

        Raises:
            RateLimited: there is not enough of one.
        """
        name = quota.name
        account = self._accounts.get(name) or self._account(name, quota.limits)
        purse = account.purse
        taken = purse.take(amounts, self.now())
        if taken is not None:
            return taken
        async with account.asking:
            # The request that asked before may have been given enough for this one too.
            taken = purse.take(amounts, self.now())
            for _ in range(QUESTIONS):
                if taken is not None or not purse.may_ask(amounts, self.now()):
                    break
                await self._ask(name, account, purse.state(amounts, self.now()))
                taken = purse.take(amounts, self.now())
        if taken is None:
            raise refusal(purse.shortages(amounts, self.now()), quota.whose)
        return taken

    async def look(self, quota: Quota) -> Purse:
        """The part of this front end in a quota, with what the others have used up to a second ago
        where the ledger answers."""
        account = self._account(quota.name, quota.limits)
        purse = account.purse
        # It is not left to the others meanwhile.
        purse.open += 1
        try:
            async with account.asking:
                if purse.limits and not purse.is_known(self.now()):
                    await self._ask(quota.name, account, purse.state({}, self.now()))
        finally:
            purse.open -= 1
        return purse

    # Ledgers -----------------------------------------------------------------------------------

    async def _ask(self, tenant: str, account: _Account, said: Statement) -> None:
        """State what a purse has used and needs; where that cannot be, it is cut off."""
        try:
            with anyio.fail_after(ASK_TIMEOUT):
                if self._clock.age(monotonic()) > CLOCK_AGE or not self._is_clock_set:
                    await self._read_clock()
                await self._write(tenant, account, said)
        except (DynbusError, TimeoutError) as error:
            account.purse.cut_off()
            self._log(f"{type(error).__name__}: {error}")
        else:
            self._log("")

    async def _write(self, tenant: str, account: _Account, said: Statement) -> None:
        subject, purse = count_subject(tenant), account.purse
        for _ in range(TRIES):
            if not account.sequence:
                await self._read(subject, account)
            now = self.now()
            ledger, part = account.ledger.settle(purse.limits, self._me, said, now)
            try:
                account.sequence = await self._jetstream.publish(
                    subject,
                    msgspec.json.encode(ledger),
                    timeout=ASK_TIMEOUT,
                    expected_last_subject_sequence=account.sequence,
                )
            except NoStream:
                await self._jetstream.ensure_stream(COUNTS_STREAM, timeout=ASK_TIMEOUT)
                account.sequence = 0
            except WrongLastSequence:
                await self._read(subject, account)
            else:
                account.ledger = ledger
                purse.accept(said, part, now)
                return
        raise DynbusError(f"other front ends changed {subject} {TRIES} times in a row")

    async def _read(self, subject: str, account: _Account) -> None:
        try:
            stored = await self._jetstream.last(COUNTS_STREAM.name, subject, timeout=ASK_TIMEOUT)
        except NoStream:
            stored = None
        account.sequence, account.ledger = 0, Ledger()
        if stored is None:
            return
        account.sequence = stored.sequence
        try:
            account.ledger = _decoder.decode(stored.data)
        except msgspec.DecodeError as error:
            # Counting begins anew: nobody else puts it right.
            logger.error("the ledger %s is none, and is begun again: %s", subject, error)

    async def _read_clock(self) -> None:
        try:
            info = await self._jetstream.stream_info(COUNTS_STREAM.name, timeout=ASK_TIMEOUT)
        except NoStream:
            await self._jetstream.ensure_stream(COUNTS_STREAM, timeout=ASK_TIMEOUT)
            info = await self._jetstream.stream_info(COUNTS_STREAM.name, timeout=ASK_TIMEOUT)
        self._clock.set(info.now, monotonic())
        if not self._is_clock_set:
            self._is_clock_set = True
            for account in self._accounts.values():
                account.purse.begin_anew()

    # Telling -----------------------------------------------------------------------------------

    async def _keep_telling(self) -> None:
        while True:
            await anyio.sleep(TELL_INTERVAL)
            await self._tell()

    async def _tell(self, *, leaves: bool = False) -> None:
        """Tell the ledgers of all purses that they concern."""
        limiter = anyio.Semaphore(AT_A_TIME)
        async with anyio.create_task_group() as tasks:
            for tenant, account in list(self._accounts.items()):
                if leaves or account.purse.is_due(self.now()) or self._is_idle(account):
                    tasks.start_soon(self._tell_one, tenant, account, leaves, limiter)

    def _is_idle(self, account: _Account) -> bool:
        purse = account.purse
        return not purse.open and self.now() - purse.taken_at > IDLE_SECONDS

    async def _tell_one(
        self, tenant: str, account: _Account, leaves: bool, limiter: anyio.Semaphore
    ) -> None:
        async with limiter, account.asking:
            leaves = leaves or self._is_idle(account)
            said = account.purse.state({}, self.now(), leaves=leaves)
            await self._ask(tenant, account, said)
            if leaves and not account.purse.open and not account.purse.is_cut_off:
                self._accounts.pop(tenant, None)

    def _log(self, problem: str) -> None:
        if problem == self._logged:
            return
        self._logged = problem
        if problem:
            logger.warning("tenants are counted at this front end alone for now: %s", problem)
        else:
            logger.info("tenants are counted with other front ends again")


def refusal(shortages: list[Shortage], whose: str) -> RateLimited:
    """The error for limits of which there is not enough.

    Args:
        whose: the limits are.
    """
    # None is left if another request has given something back just now.
    worst = max(shortages, key=lambda one: (one.is_final, one.retry_after), default=None)
    if worst is None:
        return RateLimited(f"the limits of {whose} are reached: ask again", retry_after=1.0)
    name, limit, left, after, amount, elsewhere = worst
    bound, takes = f"the limit {name}={limit} of {whose}", f"this request takes {amount}"
    remedy = _REMEDIES.get(name, "")
    if worst.is_final:
        ways = remedy or "ask an operator for a higher one"
        message = f"{takes}, and {bound} never leaves so much: {ways}"
    else:
        ways = f"ask again in {_wait_text(after)}" + (f", or {remedy}" if remedy else "")
        why = f"{bound} leaves {left}, and {takes}"
        if amount <= left + elsewhere:
            why += "; other front ends have more of it, or may have used that"
        message = f"{why}: {ways}"
    return RateLimited(
        message,
        retry_after=after,
        limit=name,
        # What other front ends give back is there soon.
        is_budget=name == BUDGET and (worst.is_final or after > LOOK_AGAIN),
        is_final=worst.is_final,
    )


def _wait_text(seconds: float) -> str:
    """Seconds in words, rounded up: nobody is to ask too early."""
    if seconds < 2 * HOUR:
        return f"{math.ceil(seconds)} s"
    return f"{math.ceil(seconds / HOUR * 10) / 10:.1f} h"
