"""vLLM's own connector as a reader of parts: prefill engines compute prompts, and decode engines
read them.

A prefill engine computes a prompt and its first token, which is sent at once. The decode engine
asks it to hand over the KV cache, reads that by vLLM's own connector, draws the first token once
more, and goes on. The call to the prefill engine is open until then: whatever ends it before has
the decode engine compute the prompt itself.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import ClassVar, Final, Protocol

import anyio
import msgspec

from dynbus import (
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    DynbusError,
    InvalidRequest,
    NoInstances,
    Runtime,
    call_options,
)
from dynbus.kvrouter import REQUIRED_KEY, KvRouter, open_router
from dynbus.llm.disaggregated.choosing import FIELDS, PrefillChoice
from dynbus.llm.disaggregated.remote_prefill import RemotePrefill
from dynbus.llm.disaggregated.settings import DisaggregationSettings, follow_settings
from dynbus.llm.engine.runner import EngineRunner
from dynbus.llm.hand_over.messages import Prefilled, PrefillRequest
from dynbus.llm.hand_over.observing import HandOverEvents, HandOverFigures, TransferSpans
from dynbus.llm.hand_over.part_reader import Part
from dynbus.llm.hand_over.sink import Limits, Origin, Sink
from dynbus.spi import ComponentName, InstanceName, describe_exception
from dynbus.transfer import LeaseLost

from .engine import ConnectorTicket, VllmEngine, drawn_alike
from .handing_over import HandedOver, HandOver, KvIdentity

logger = logging.getLogger(__name__)

PREFILL_TIMEOUT: Final = 60.0
"""Seconds within which a prompt is computed elsewhere; then it is computed here."""
HAND_OVER_TIMEOUT: Final = 2.0
"""Seconds within which a prefill engine answers what is not computing."""
LEASE_MARGIN: Final = 0.2
"""The part of the time for which blocks are held in which nothing is read any more."""


class PrefillClient(Protocol):
    """The endpoints of a prefill engine."""

    def prefill(self, request: PrefillRequest, /) -> AsyncGenerator[Prefilled, None]: ...
    async def hand_over(self, request: HandOver, /) -> HandedOver: ...
    async def give_back(self, request: HandOver, /) -> None: ...
    async def kv_identity(self) -> KvIdentity: ...


@asynccontextmanager
async def remote_prefill(
    runtime: Runtime,
    own: InstanceName,
    prefill: ComponentName,
    client: Callable[[KvRouter | None], PrefillClient],
    engine: VllmEngine,
    runner: EngineRunner,
    identity: KvIdentity,
    settings: DisaggregationSettings,
    figures: HandOverFigures,
) -> AsyncGenerator[Sink]:
    """Have prompts computed by the instances of a component while the block runs.

    Args:
        own: the decode instance.
        prefill: the component of the prefill engines.
        client: makes a client of theirs, with a router or without one.
        settings: what holds where the record of the own component says nothing.
    """
    component = ComponentName(own.namespace, own.component)
    async with (
        open_router(runtime, str(prefill), fields=FIELDS) as router,
        follow_settings(runtime.bus, component, settings) as live,
    ):
        choice = PrefillChoice(
            router, lambda: runtime.known_instances(prefill), runner, live, forms=True
        )
        engines = PrefillEngines(
            runtime, prefill, client(router), client(None), engine, identity, figures
        )
        spans = TransferSpans(runtime.bus.telemetry, own)
        prefill_elsewhere = RemotePrefill(choice, engines, spans)
        events = HandOverEvents(runtime.bus, own)
        yield Sink(runner, runtime.background, spans, prefill_elsewhere, events=events)


class PrefillEngines(Origin):
    """The prefill engines of a component, and vLLM's connector to them: a `PartReader` as well.

    Args:
        routed, direct: clients of theirs, by the router and by an instance's id.
        identity: of the own engine.
    """

    has_tickets: ClassVar[bool] = False

    def __init__(
        self,
        runtime: Runtime,
        component: ComponentName,
        routed: PrefillClient,
        direct: PrefillClient,
        engine: VllmEngine,
        identity: KvIdentity,
        figures: HandOverFigures,
    ) -> None:
        # The connector's own times are shorter than the last one: those of its leases.
        self.limits = Limits(2 * PREFILL_TIMEOUT, PREFILL_TIMEOUT, PREFILL_TIMEOUT)
        self.reader = self
        self.figures = figures
        self.engine = engine
        self.direct = direct
        self._runtime = runtime
        self._component = component
        self._routed = routed
        self._identity = identity
        self._compared: set[str] = set()

    def __repr__(self) -> str:
        return f"<PrefillEngines {self._component}>"

    async def ask(self, request: PrefillRequest, instance: str) -> AsyncGenerator[Prefilled, None]:
        """See `Origin.ask`."""
        alike = drawn_alike(request.request, seed_of(request.hand_over), self.engine)
        wanted = msgspec.structs.replace(alike, max_tokens=1, stream=True)
        stream = self._call_readable(PrefillRequest(request.hand_over, wanted))
        async with aclosing(stream):
            try:
                async for item in stream:
                    yield item
            except NoInstances as error:
                await self._say_what_differs(error)
                raise
        raise LeaseLost("it is held no longer")

    def _call_readable(self, request: PrefillRequest) -> AsyncGenerator[Prefilled, None]:
        """The call of an engine whose blocks can be read here."""
        with call_options(metadata={REQUIRED_KEY: self._identity.tag}, retries=1):
            return self._routed.prefill(request)

    def start(self, part: Part, deadline: float) -> _Reading:
        """See `PartReader.start`."""
        return _Reading(self, part)

    async def settled(self, part: Part) -> bool:
        """See `PartReader.settled`: the own engine's connector has taken none that came late."""
        return True

    async def _say_what_differs(self, error: NoInstances) -> None:
        """Say once of each prefill engine why it cannot be asked."""
        instances = set(self._runtime.instance_ids(str(self._component))) - self._compared
        self._compared |= instances
        for instance in sorted(instances):
            why = ""
            try:
                with anyio.move_on_after(HAND_OVER_TIMEOUT), call_options(instance=instance):
                    why = "; ".join(self._identity.differences(await self.direct.kv_identity()))
            except InvalidRequest as refusal:
                why = refusal.message
            except DynbusError:
                self._compared.discard(instance)
                continue
            logger.error(
                "%s@%s cannot compute prompts for this engine: %s",
                self._component,
                instance,
                why or error.message,
            )


class _Reading:
    """A prompt that the own engine reads: a `Moving` of which vLLM tells no sizes."""

    bytes = blocks = 0

    def __init__(self, engines: PrefillEngines, part: Part) -> None:
        self._engines = engines
        self._part = part
        self._began = time.monotonic()
        self._reads = False
        self._waits = anyio.CancelScope()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    async def result(self) -> None:
        part, engine = self._part, self._engines.engine
        try:
            with anyio.fail_after(HAND_OVER_TIMEOUT), call_options(instance=part.item.instance):
                handed_over = await self._engines.direct.hand_over(HandOver(part.hand_over))
        except (DynbusError, TimeoutError) as error:
            raise LeaseLost(f"it is not handed over: {describe_exception(error)}") from error
        # It is held for so long from later on.
        until = self._began + handed_over.seconds * (1.0 - LEASE_MARGIN)
        ticket = ConnectorTicket(handed_over.kv_transfer_params, until)
        self._reads = True
        engine.steps.read(part.name, ticket, seed_of(part.hand_over), part.shown)
        with self._waits, anyio.move_on_after(max(0.0, until - time.monotonic())) as waiting:
            if await engine.steps.own_output(part.name):
                return
        if waiting.cancelled_caught:
            raise DeadlineExceeded("it did not come in time")
        raise Cancelled("it is not read any more")

    def cancel(self) -> None:
        self._waits.cancel()

    async def quiet(self) -> None:
        """Wait until the own engine uses nothing of it, and give it back."""
        part = self._part
        try:
            if self._reads:
                with anyio.fail_after(PREFILL_TIMEOUT):
                    await self._engines.engine.aborted(part.name)
            with anyio.move_on_after(HAND_OVER_TIMEOUT), call_options(instance=part.item.instance):
                await self._engines.direct.give_back(HandOver(part.hand_over))
        except Exception as error:  # noqa: BLE001 - an engine that has failed, or does not answer
            # It is held no longer than its lease.
            logger.debug("%s: its prompt is not given back: %s", part.name, error)


def seed_of(hand_over: str) -> int:
    """The seed of the first token of both engines, unless the request says it."""
    return int.from_bytes(hashlib.sha256(hand_over.encode()).digest()[:8]) >> 2


def prefill_component(named: str, own: ComponentName) -> ComponentName:
    """The component of the prefill engines.

    Args:
        named: a node in the own namespace, or `namespace.component`.

    Raises:
        ConfigError: it is neither, or the decode engine itself.
    """
    component = ComponentName.parse(named) if "." in named else ComponentName(own.namespace, named)
    if component == own:
        raise ConfigError(
            f"prefill_node = {named!r} is the decode engine itself: name the node that runs with "
            "role=prefill"
        )
    return component
