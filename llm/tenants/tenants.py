"""`Tenants`: who may ask a front end, and what each may use."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from dynbus import DynbusError, PermissionDenied, Runtime, Unavailable
from dynbus.llm.following import follow
from dynbus.spi import Openable

from .counting import SharedCounts
from .keys import ALL_TENANTS, ApiKeys, KeyHolder
from .limits import Limits, Quota, quotas_of
from .records import KEYS_STREAM, TenantView

if TYPE_CHECKING:
    from .oidc import OidcTokens

logger = logging.getLogger(__name__)


class Tenants(Openable):
    """The tenants of a front end, while it is open.

    A file is looked at first, then the bus, then a provider of tokens.

    Args:
        file: of keys; None for none.
        from_bus: whether the bus has keys and limits.
        tokens: of a provider; None for none.

    Attributes:
        counts: what they use of their limits.

    Raises:
        ConfigError: the file cannot be used.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        file: Path | None = None,
        from_bus: bool = False,
        tokens: OidcTokens | None = None,
    ) -> None:
        super().__init__(runtime.background)
        self._runtime = runtime
        self._file = ApiKeys(file) if file is not None else None
        self._view = TenantView()
        self._from_bus = from_bus
        self._tokens = tokens
        self._caught_up = asyncio.Event()
        self._has_warned = False
        self._failure = "JetStream has not answered yet"
        self.counts = SharedCounts(runtime)

    def __repr__(self) -> str:
        return f"<Tenants [{self._file!r} | {self._view!r} | {self._tokens!r}]>"

    @property
    def problem(self) -> str:
        """The reason for which some keys may not be known; empty where all are."""
        if self._file is not None and self._file.problem:
            return self._file.problem
        if self._from_bus and not self._caught_up.is_set():
            return f"the keys on the bus cannot be read: {self._failure}"
        return ""

    async def holder_of(self, key: str) -> KeyHolder | None:
        """The holder of a key or a token; None for an unknown key.

        Raises:
            Unauthorized: it is a token that is refused.
            Unavailable: whether it is one is not known yet.
        """
        holder = self._file.holder_of(key) if self._file is not None else None
        if holder is None and self._from_bus:
            holder = self._view.holder_of(key)
        if holder is None and self._tokens is not None:
            holder = await self._tokens.holder_of(key)
        if holder is None and self._from_bus and not self._caught_up.is_set():
            raise Unavailable("the keys on the bus are not known yet: ask again", started=False)
        return holder

    def limits_of(self, tenant: str) -> Limits | None:
        """The limits of a tenant; None for none.

        Raises:
            Unavailable: the file states none of this tenant, and what the bus states is not known
                yet.
        """
        for name in (tenant, ALL_TENANTS):
            limits = self._file.limits_of(name) if self._file is not None else None
            if limits is None and self._from_bus:
                if not self._caught_up.is_set():
                    raise Unavailable(
                        f"the limits of {tenant} on the bus are not known yet: ask again",
                        started=False,
                    )
                limits = self._view.limits_of(name)
            if limits is not None:
                return limits
        return None

    def quotas_of(self, holder: KeyHolder) -> tuple[Quota, ...]:
        """The limits that hold for a key: its own, and those of its tenant.

        Raises:
            Unavailable: those of its tenant are not known yet.
        """
        limits = self.limits_of(holder.tenant)
        return quotas_of(holder.tenant, limits, holder.key, holder.limits)

    @asynccontextmanager
    async def _open(self) -> AsyncGenerator[None]:
        async with self.counts, anyio.create_task_group() as tasks:
            if self._from_bus:
                tasks.start_soon(self._follow)
                with anyio.move_on_after(self._runtime.bus.config.connect_timeout):
                    await self._caught_up.wait()
                if not self._caught_up.is_set():
                    logger.warning(
                        "%s; until they can, nobody is let in by them, and only tenants whose "
                        "limits are in the file of keys are answered",
                        self.problem,
                    )
                    self._has_warned = True
            yield
            tasks.cancel_scope.cancel()

    async def _follow(self) -> None:
        jetstream = self._runtime.bus.data.jetstream
        consume = partial(
            jetstream.consume,
            KEYS_STREAM.name,
            self._view.put,
            last_per_subject=True,
            on_restart=self._view.begin_reading,
            on_caught_up=self._end_reading,
        )
        await follow(jetstream, KEYS_STREAM, consume, self._failed, DynbusError)

    def _failed(self, error: DynbusError) -> None:
        is_refused = isinstance(error, PermissionDenied)
        self._failure = f"{error}: `dynbus setup` makes the bucket" if is_refused else str(error)

    def _end_reading(self) -> None:
        self._view.end_reading()
        self._caught_up.set()
        if self._has_warned:
            self._has_warned = False
            logger.info("the keys and limits on the bus are read")
