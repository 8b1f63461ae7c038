"""`RouterActor`: KV-cache-aware routing for callers that cannot route by themselves."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec
from pydantic import BaseModel

from dynbus import (
    Actor,
    Arrival,
    ConfigError,
    DynbusError,
    EndpointClient,
    EndpointName,
    Option,
    Relay,
    Stream,
    context,
    handler,
    takes,
)
from dynbus.kvrouter.permissions import routing_grants
from dynbus.spi import (
    ComponentName,
    Endpoint,
    Grant,
    RelayedStream,
    ReplyPort,
    ResumeRule,
    monotonic,
)

from . import token_rule
from .config import RouterConfig
from .decision import newest, tell
from .policies import Policy
from .router import KvRouter, open_router


@dataclass(frozen=True)
class RouterActorOptions(RouterConfig):
    """The settings of a router, with what it forwards to."""

    target: Annotated[str, Option("the endpoint to forward to, as `namespace.component.endpoint`")]
    policies: Annotated[
        Sequence[str],
        Option(
            "those that `use_policy` may change to, beside the one at the start. Callers name one "
            "of them: nothing else is ever imported for them"
        ),
    ] = ()
    migration_limit: Annotated[
        int,
        Option(
            "how often a stream of tokens goes on with another instance when its own is lost, "
            "drains or raises `Migrate`, where its caller could go on with it as well; 0 for never",
            least=0,
        ),
    ] = ResumeRule.MIGRATION_LIMIT

    def load(self) -> None:
        """See `RouterConfig.load`; those that it may change to are imported as well."""
        super().load()
        for name in self.policies:
            Policy.of(name)


class _RestOfTokens(ResumeRule):
    """Streams of tokens go on whose caller could go on with them as well.

    An engine that drains leaves such a stream at once: it is for those who go on with it.
    """

    def __call__(self, request: Any, items: list[Any]) -> Any:
        return token_rule.resume(request, items)

    def applies(self, request: Any) -> bool:
        return context().continues and token_rule.can_resume(request)


class RouterActor(Actor, abstract=True):
    """Forwards streaming calls to the instance that suits each best: one hop, shared by all.

    A subclass gives it an address: `class Front(RouterActor, namespace="llm")`.

    Raises:
        ConfigError: a value is not usable.
    """

    __dynbus_calls_all__ = True

    @classmethod
    def __dynbus_grants__(cls, address: ComponentName, namespaces: Sequence[str]) -> list[Grant]:
        return [*super().__dynbus_grants__(address, namespaces), *routing_grants(namespaces)]

    @takes(RouterActorOptions)
    def __init__(self, options: RouterActorOptions) -> None:
        self._options = options
        self._target = EndpointName.parse(options.target)
        self._policies = {str(options.policy), *options.policies}
        self._exits = AsyncExitStack()
        self._router: KvRouter | None = None
        self._client: EndpointClient | None = None
        self._streams: Relay[ReplyPort, bytes] = Relay(self._deliver)

    async def on_start(self) -> None:
        """Open the router, and refuse instances that do not fit together."""
        namespace, component, _ = self._target
        runtime = self.runtime
        async with AsyncExitStack() as exits:
            self._router = router = await exits.enter_async_context(
                open_router(runtime, f"{namespace}.{component}", self._options)
            )
            # Its caller's deadline holds; there is none beside it.
            target = runtime.endpoint(self._target)
            self._client = await target.client(
                routing=router,
                timeout=None,
                migration_limit=self._options.migration_limit,
                resume=_RestOfTokens(),
            )
            known = runtime.discovery.view.everything()
            instances = [
                one
                for one in known
                if (one.record.namespace, one.record.component) == (namespace, component)
            ]
            if instances:
                router.check(instances)
            self._exits = exits.pop_all()

    async def on_stop(self) -> None:
        self._streams.close()
        await self._exits.aclose()

    # How long a call may wait for an item is the engine's to say, whose limits hold.
    @handler(idle_timeout=None)
    async def generate(self, request: dict[str, Any]) -> AsyncGenerator[Any, None]:
        """Give the items of the chosen instance, one by one."""
        reply = await self._call(request)
        if not isinstance(reply, Stream):
            yield msgspec.json.decode(reply)
            return
        async with aclosing(reply) as items:
            async for item in items:
                yield msgspec.json.decode(item)

    def __dynbus_endpoint__(self, endpoint: Endpoint) -> Endpoint:
        """Callers get `generate` as it is declared; what passes is read for its tokens alone."""
        if endpoint.name != "generate" or type(self).generate is not RouterActor.generate:
            return endpoint
        decode = endpoint.decode

        def undecoded(data: bytes) -> object:
            return msgspec.Raw(data) if data else decode(data)

        return replace(
            endpoint,
            decode=undecoded,
            invoke=self._relay,
            by_port=True,
        )

    async def _relay(self, request: msgspec.Raw, port: ReplyPort) -> None:
        """`generate`, with the request and the items passed on as they come."""
        reply = await self._call(request)
        if not isinstance(reply, Stream):
            port.push(reply)
            return
        with await self._streams.open(reply, key=port) as stream:
            await stream.ended()

    def _deliver(self, arrivals: list[Arrival[ReplyPort, bytes]]) -> None:
        for stream, items, _, _ in arrivals:
            port = stream.key
            try:
                for item in items:
                    port.push(item)
            except DynbusError as error:
                # It does not fit what its own reader takes: the others go on.
                port.fail(error)
            if port.ended:
                stream.cancel()
            elif port.paused and not stream.is_paused:
                stream.pause()
                self.runtime.bus.background.start(self._go_on, stream, name=f"relay {stream.id}")

    async def _go_on(self, stream: RelayedStream[ReplyPort]) -> None:
        """Let a stream go on when its reader has taken more."""
        try:
            await stream.key.writable()
        except DynbusError as error:
            stream.cancel(error)
        if stream.key.ended:
            stream.cancel()
        stream.resume()

    async def _call(self, request: Any) -> Stream[bytes] | bytes:
        if self._client is None:
            raise RuntimeError("the router was not started")
        reply: Stream[bytes] | bytes = await self._client.generate(request).raw()
        return reply

    @handler(idempotent=True)
    async def decisions(self, request: DecisionQuery) -> list[dict[str, Any]]:
        """The decisions for a request, one per attempt, while they are kept.

        Each as `Decision.as_dict` gives it, with `ago_s`: seconds since it was made.
        """
        router = self._router
        decisions = [] if router is None else router.decisions(request.request_id)
        return tell(newest(decisions), monotonic())

    @handler(idempotent=True)
    async def use_policy(self, request: PolicyChoice) -> PolicyChoice:
        """Decide by another of the configured policies from now on."""
        if request.policy not in self._policies:
            raise ConfigError(
                f"policy {request.policy!r} is not one that this router was started with: "
                f"{', '.join(sorted(self._policies))}"
            )
        if self._router is not None:
            self._router.use_policy(request.policy)
        return request

    @handler(idempotent=True)
    async def policy(self) -> PolicyReport:
        """The policy that decides now, and those that `use_policy` may change to."""
        if self._router is None:
            raise RuntimeError("the router was not started")
        return PolicyReport(policy=self._router.policy, policies=sorted(self._policies))


class DecisionQuery(BaseModel):
    """The request whose decisions are meant."""

    request_id: str


class PolicyChoice(BaseModel):
    """A policy by name."""

    policy: str


class PolicyReport(BaseModel):
    """The policy in force, and all that were configured."""

    policy: str
    policies: list[str]
