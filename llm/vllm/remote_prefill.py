"""The decode side of disaggregated serving with vLLM: prompts that prefill engines compute.

A prefill engine computes a prompt and its first token, which is sent at once. The decode engine
asks it to hand over the KV cache, reads that by vLLM's own connector, draws the first token once
more, and goes on. The call to the prefill engine is open until then: whatever ends it before has
the decode engine compute the prompt itself.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Final, Protocol, TypeAlias

import anyio
import msgspec

from dynbus import (
    ComponentName,
    ConfigError,
    DynbusError,
    InstanceName,
    InvalidRequest,
    NoInstances,
    Reply,
    Runtime,
    call_options,
    context,
)
from dynbus.kvrouter import REQUIRED_KEY, KvRouter, open_router
from dynbus.llm.disaggregated.choosing import FIELDS, PrefillChoice
from dynbus.llm.disaggregated.hand_over import Reason
from dynbus.llm.disaggregated.messages import Prefilled, PrefillRequest
from dynbus.llm.disaggregated.observing import HandOverFigures, TransferSpans
from dynbus.llm.disaggregated.settings import DisaggregationSettings, follow_settings
from dynbus.llm.engine.requests import check_request
from dynbus.llm.engine.runner import EngineRunner
from dynbus.llm.generation import FinishReason, Generated, GenerateRequest
from dynbus.spi import describe_exception, random_id

from .engine import VllmEngine
from .handing_over import HandedOver, HandOver, KvIdentity
from .requests import ReadingRequest, sampling_params

logger = logging.getLogger(__name__)

PREFILL_TIMEOUT: Final = 60.0
"""Seconds within which a prompt is computed elsewhere; then it is computed here."""
HAND_OVER_TIMEOUT: Final = 2.0
"""Seconds within which a prefill engine answers what is not computing."""
LEASE_MARGIN: Final = 0.2
"""The part of the time for which blocks are held in which nothing is read any more."""

Decode: TypeAlias = Callable[[GenerateRequest], Awaitable[None]]
"""Gives a request to the own engine, and waits until its stream has ended."""


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
) -> AsyncGenerator[RemotePrefill]:
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
        choice = PrefillChoice(router, lambda: runtime.known_instances(prefill), runner, live)
        yield RemotePrefill(
            runtime, own, prefill, client, router, engine, choice, identity, figures
        )


class RemotePrefill:
    """Serves requests of a decode engine whose prompts other engines compute."""

    def __init__(
        self,
        runtime: Runtime,
        own: InstanceName,
        prefill: ComponentName,
        client: Callable[[KvRouter | None], PrefillClient],
        router: KvRouter,
        engine: VllmEngine,
        choice: PrefillChoice,
        identity: KvIdentity,
        figures: HandOverFigures,
    ) -> None:
        self._runtime = runtime
        self._prefill = prefill
        self._routed, self._direct = client(router), client(None)
        self._engine = engine
        self._choice = choice
        self._identity = identity
        self._figures = figures
        self._spans = TransferSpans(runtime.bus.telemetry, own)
        self._compared: set[str] = set()

    def __repr__(self) -> str:
        return f"<RemotePrefill by {self._prefill}>"

    # Where a prompt is computed -------------------------------------------------------

    def wants(self, request: GenerateRequest) -> bool:
        """Whether the prompt of a request is to be computed elsewhere."""
        reason = self._local_reason(request)
        if reason:
            self._figures.computed_here(reason)
        return not reason

    def _local_reason(self, request: GenerateRequest) -> str:
        """Why the prompt of a request is computed here; empty where it is not."""
        if request.n > 1:
            # What is computed is handed over once.
            return "several_continuations"
        if request.lora_name is not None:
            return "adapter"
        if request.structured is not None and request.generated:
            # It is made from its beginning.
            return "structured"
        try:
            check_request(request, self._engine.limits)
            sampling_params(request, 0, None)
        except Exception:  # noqa: BLE001 - the own engine refuses it, and says why
            return "refused"
        decision = self._choice.decide(request, self._choice.cached_tokens(context().metadata))
        logger.debug("%s", decision.describe())
        return "" if decision.remote else str(decision.reason)

    # One request ----------------------------------------------------------------------

    async def serve(
        self, name: str, request: GenerateRequest, reply: Reply[Generated], decode: Decode
    ) -> None:
        """Serve a request whose prompt is to be computed elsewhere, to its end.

        Args:
            name: of the request in the engine.
        """
        if not self._engine.is_cpu:
            request = _drawn_alike(request)
        attempt = _Attempt(self._figures)
        hand_over = f"{name}.{random_id()}"
        stopped = anyio.CancelScope()
        unlink = context().link(lambda _: stopped.cancel())
        came = None
        try:
            with stopped:
                came = await self._compute(hand_over, request, attempt)
            if stopped.cancelled_caught:
                reply.push(Generated([], request.index, finish_reason="cancelled"))
                reply.end()
                return
            unlink()
            if came is None:
                attempt.end("bad_answer")
                await decode(request)
                return
            instance, first, stream = came
            async with aclosing(stream):
                shown = None if request.structured is not None else first.token_ids[0]
                reason = self._ended_by(request, first)
                if reason is not None or shown is not None:
                    reply.push(Generated(first.token_ids, request.index, first.logprobs, reason))
                if reason is not None:
                    attempt.end("")
                    reply.end()
                    return
                reading = await self._take_over(hand_over, instance, request, shown)
                if reading.kv_transfer_params is None:
                    attempt.end("lease_lost")
                    await decode(reading)
                    return
                try:
                    async with anyio.create_task_group() as tasks:
                        # It begins when the engine has the request.
                        tasks.start_soon(self._follow_transfer, name, reading, stream, attempt)
                        await decode(reading)
                        tasks.cancel_scope.cancel()
                finally:
                    if not attempt.has_arrived:
                        self._later(self._abandon, name, hand_over, instance)
        finally:
            unlink()
            attempt.end("")

    def _ended_by(self, request: GenerateRequest, first: Generated) -> FinishReason | None:
        """Why the first token ends the output; None where it does not."""
        if first.finish_reason == "stop":
            return "stop"
        length = len(request.token_ids) + 1
        is_last = request.max_tokens == 1 or length >= self._engine.limits.context_length
        return "length" if is_last else None

    async def _compute(
        self, hand_over: str, request: GenerateRequest, attempt: _Attempt
    ) -> tuple[str, Generated, AsyncGenerator[Prefilled, None]] | None:
        """Have a prompt computed elsewhere; None where it has to be computed here."""
        wanted = msgspec.structs.replace(request, max_tokens=1, stream=True)
        with call_options(metadata={REQUIRED_KEY: self._identity.tag}, retries=1):
            stream = self._routed.prefill(PrefillRequest(hand_over, wanted))
        prompt = None
        try:
            with anyio.move_on_after(PREFILL_TIMEOUT):
                prompt = await anext(stream, None)
            if prompt is None:
                attempt.end("too_slow")
        except NoInstances as error:
            attempt.end("no_instances")
            await self._say_what_differs(error)
        except InvalidRequest as error:
            attempt.end("refused")
            logger.info("a prompt is computed here: %s", describe_exception(error))
        except DynbusError as error:
            attempt.end("prefill_lost")
            logger.info("a prompt is computed here: %s", describe_exception(error))
        finally:
            if prompt is None:
                with anyio.CancelScope(shield=True):
                    await stream.aclose()
        if prompt is None:
            return None
        if prompt.first is None or len(prompt.first.token_ids) != 1:
            attempt.end("bad_answer")
            await stream.aclose()
            return None
        return prompt.instance, prompt.first, stream

    async def _say_what_differs(self, error: NoInstances) -> None:
        """Say once of each prefill engine why it cannot be asked."""
        instances = set(self._runtime.instance_ids(str(self._prefill))) - self._compared
        self._compared |= instances
        for instance in sorted(instances):
            why = ""
            try:
                with anyio.move_on_after(HAND_OVER_TIMEOUT), call_options(instance=instance):
                    why = "; ".join(self._identity.differences(await self._direct.kv_identity()))
            except InvalidRequest as refusal:
                why = refusal.message
            except DynbusError:
                self._compared.discard(instance)
                continue
            logger.error(
                "%s@%s cannot compute prompts for this engine: %s",
                self._prefill,
                instance,
                why or error.message,
            )

    async def _take_over(
        self, hand_over: str, instance: str, request: GenerateRequest, shown: int | None
    ) -> ReadingRequest:
        """The request with what it is to read; without it where nobody hands it over."""
        asked = time.monotonic()
        given: HandedOver | None = None
        try:
            with anyio.move_on_after(HAND_OVER_TIMEOUT), call_options(instance=instance):
                given = await self._direct.hand_over(HandOver(hand_over))
        except DynbusError as error:
            logger.info("a prompt is computed here: %s", describe_exception(error))
        finally:
            if given is None:
                # It may have been handed over to nobody.
                self._later(self._give_back, hand_over, instance)
        fields = {name: getattr(request, name) for name in GenerateRequest.__struct_fields__}
        if given is None:
            return ReadingRequest(**fields, shown=shown)
        return ReadingRequest(
            **fields,
            kv_transfer_params=given.kv_transfer_params,
            # It is held for so long from later on.
            held_until=asked + given.seconds * (1.0 - LEASE_MARGIN),
            shown=shown,
        )

    def _later(self, function: Callable[..., Awaitable[None]], *args: str) -> None:
        self._runtime.background.start(function, *args, name="give back a prompt")

    async def _abandon(self, name: str, hand_over: str, instance: str) -> None:
        """Give back a prompt that the own engine was told to read: once it uses nothing of it."""
        try:
            with anyio.fail_after(PREFILL_TIMEOUT):
                await self._engine.aborted(name)
        except Exception as error:  # noqa: BLE001 - an engine that has failed, or does not answer
            logger.debug("%s: its prompt is left to its lease: %s", name, error)
            return
        await self._give_back(hand_over, instance)

    async def _give_back(self, hand_over: str, instance: str) -> None:
        try:
            with anyio.move_on_after(HAND_OVER_TIMEOUT), call_options(instance=instance):
                await self._direct.give_back(HandOver(hand_over))
        except DynbusError as error:
            # It is held no longer than its lease.
            logger.debug("a prompt was not given back: %s", describe_exception(error))

    async def _follow_transfer(
        self,
        name: str,
        request: ReadingRequest,
        stream: AsyncGenerator[Prefilled, None],
        attempt: _Attempt,
    ) -> None:
        """Have a prompt computed here when what was handed over does not come."""
        span = self._spans.begin()
        has_output = False
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._compute_when_lost, name, request, stream, attempt)
                has_output = await self._engine.own_output(name)
                tasks.cancel_scope.cancel()
            if has_output:
                attempt.arrived()
        finally:
            span.end(failed=attempt.detail)
            with anyio.CancelScope(shield=True):
                await stream.aclose()

    async def _compute_when_lost(
        self,
        name: str,
        request: ReadingRequest,
        stream: AsyncGenerator[Prefilled, None],
        attempt: _Attempt,
    ) -> None:
        reason: Reason = "too_slow"
        why = "it did not come in time"
        try:
            with anyio.move_on_after(max(0.0, request.held_until - time.monotonic())):
                async for _ in stream:
                    pass
                reason, why = "lease_lost", "it is held no longer"
        except DynbusError as error:
            reason, why = "prefill_lost", describe_exception(error)
        if self._engine.compute(name):
            attempt.end(reason, why)
            logger.warning("%s: the prompt is computed here after all: %s", name, why)


class _Attempt:
    """One request whose prompt was to be computed elsewhere, for operators.

    Attributes:
        detail: why it came to nothing; empty where it did not.
        has_arrived: whether the own engine has what was computed.
    """

    def __init__(self, figures: HandOverFigures) -> None:
        self.detail = ""
        self.has_arrived = False
        self._figures = figures
        self._is_open = True
        figures.began()

    def arrived(self) -> None:
        """The own engine goes on from what was computed, unless it was given up before."""
        self.has_arrived = self._is_open
        self.end("")

    def end(self, reason: Reason, detail: str = "") -> None:
        """It is over; the first time counts."""
        if self._is_open:
            self._is_open = False
            self.detail = detail or reason
            self._figures.ended(reason)


def _drawn_alike(request: GenerateRequest) -> GenerateRequest:
    """The request with a seed, where engines would draw different first tokens without one.

    On CPUs it has none: vLLM fails there with a seeded request whose prompt takes several steps.
    """
    sampling = request.sampling
    if sampling.temperature == 0 or sampling.seed is not None:
        return request
    seeded = msgspec.structs.replace(sampling, seed=secrets.randbits(62))
    return msgspec.structs.replace(request, sampling=seeded)


def prefill_component(named: str, own: ComponentName) -> ComponentName:
    """The component of the prefill engines.

    Args:
        named: a node in the own namespace, or `namespace.component`.

    Raises:
        ConfigError: it is neither, or the decode engine itself.
    """
    found = ComponentName.parse(named) if "." in named else ComponentName(own.namespace, named)
    if found == own:
        raise ConfigError(
            f"prefill_node = {named!r} is the decode engine itself: name the node that runs with "
            "role=prefill"
        )
    return found
