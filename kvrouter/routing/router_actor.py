"""`RouterActor`: KV-cache-aware routing for callers that cannot route by themselves."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import replace
from typing import Any, Final

import anyio
import msgspec
from pydantic import BaseModel

from dynbus import (
    Actor,
    Arrival,
    ConfigError,
    DynbusError,
    EndpointClient,
    EndpointName,
    Instance,
    Relay,
    Route,
    RouteRequest,
    Runtime,
    Stream,
    context,
    handler,
    takes,
)
from dynbus.kvrouter.permissions import routing_grants
from dynbus.kvrouter.stream.membership import Group, better_group, free_group
from dynbus.spi import (
    ComponentName,
    Endpoint,
    Grant,
    RelayedStream,
    ReplyPort,
    ResumeRule,
    Work,
    monotonic,
)

from . import token_rule
from .config import RouterActorOptions, RouterConfig
from .decision import newest, tell
from .profiles import InstanceProfile, profile_of_router, read_profile
from .router import KvRouter, open_router

logger = logging.getLogger(__name__)

GROUP_KEY: Final = "routes_group"
"""The metadata of a router of a group: its number, and how many there are."""
INSTANCE_WAIT: Final = 2.0
"""Seconds that a call waits for an instance while there is none, as at front ends."""
SEES_OTHERS: Final = 2.0
"""Seconds that a router waits at its start for the others to be known."""
LOOK_INTERVAL: Final = 1.0
"""Seconds between two looks at what a router stands for."""
LOOKS: Final = 5
"""Looks in a row at which another group must have too few routers before one changes to it."""


class _RestOfTokens(ResumeRule):
    """Streams of tokens go on whose caller could go on with them as well.

    An engine that drains leaves such a stream at once: it is for those who go on with it.
    """

    def __call__(self, request: Any, items: list[Any]) -> Any:
        return token_rule.resume(request, items)

    def applies(self, request: Any) -> bool:
        return context().continues and token_rule.can_resume(request)


class _CurrentRouter:
    """The router in force, of one group; calls go by whichever is when they come."""

    route_timeout: float | None = None

    def __init__(self) -> None:
        self.router: KvRouter | None = None
        self._exits = AsyncExitStack()

    async def open(
        self, runtime: Runtime, target: EndpointName, options: RouterConfig, group: Group
    ) -> KvRouter:
        """Open the router of a group, and close the one before it, if there was one.

        Raises:
            DynbusError: see `open_router`.
        """
        async with AsyncExitStack() as exits:
            router = await exits.enter_async_context(
                open_router(
                    runtime,
                    f"{target.namespace}.{target.component}",
                    options,
                    group=group if group.of > 1 else None,
                )
            )
            before, self._exits = self._exits, exits.pop_all()
        if self.router is not None and self.router.policy != router.policy:
            router.use_policy(self.router.policy)
        self.router = router
        await before.aclose()
        return router

    async def close(self) -> None:
        await self._exits.aclose()

    async def route(self, request: RouteRequest, instances: Sequence[Instance]) -> Route:
        """See `KvRouter.route`."""
        assert self.router is not None, "it is opened before the first call"
        return await self.router.route(request, instances)


def _read_group(text: str) -> Group | None:
    number, _, count = text.partition("/")
    if not (number.isascii() and number.isdigit() and count.isascii() and count.isdigit()):
        return None
    return Group(int(number), int(count))


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
        self.assemble(options)

    def assemble(self, options: RouterActorOptions) -> None:
        """Make the parts of a router; for constructors of subclasses that take other options."""
        self._options = options
        self._target = EndpointName.parse(options.target)
        self._policies = {str(options.policy), *options.policies}
        self._current = _CurrentRouter()
        self._group = Group(0, 1)
        # Routers that were started with another number of groups, and named in the log.
        self._strangers: set[str] = set()
        self._grouping: Work | None = None
        self._client: EndpointClient | None = None
        self._streams: Relay[ReplyPort, bytes] = Relay(self._deliver)

    async def on_start(self) -> None:
        """Open the router, and refuse instances that do not fit together."""
        runtime = self.runtime
        # Its caller's deadline holds; there is none beside it.
        target = runtime.endpoint(self._target)
        self._client = await target.client(
            routing=self._current,
            timeout=None,
            wait=INSTANCE_WAIT,
            migration_limit=self._options.migration_limit,
            resume=_RestOfTokens(),
        )
        if self._options.groups > 1:
            # Without the others it begins with any group, and changes later.
            with anyio.move_on_after(SEES_OTHERS):
                await runtime.discovery.synchronized.wait()
        others = self._other_routers()
        self._group = free_group(others.values(), self._options.groups, self.worker_index)
        router = await self._current.open(runtime, self._target, self._options, self._group)
        try:
            if known := self._instances():
                router.check(known)
        except BaseException:
            await self._current.close()
            raise
        self._grouping = runtime.bus.background.start(
            self._keep_up, name=f"what {self.instance_id} stands for"
        )

    async def on_stop(self) -> None:
        if self._grouping is not None:
            await self._grouping.end()
        self._streams.close()
        await self._current.close()

    # The place of many instances ------------------------------------------------------------

    def instance_metadata(self) -> Mapping[str, str]:
        """The instances behind, for routers before this one, as those of front ends are."""
        behind: list[InstanceProfile] = []
        for one in self._instances():
            # One that does not fit gets no calls, and the router says why.
            with suppress(ConfigError):
                behind.append(read_profile(one.id, one.metadata))
        size = self._options.block_size or next((each.block_size for each in behind), None)
        routers = 1 + sum(group == self._group for group in self._other_routers().values())
        return {
            **super().instance_metadata(),
            **profile_of_router(behind, size, routers),
            GROUP_KEY: str(self._group),
        }

    def _instances(self) -> list[Instance]:
        """The instances that this router forwards to."""
        namespace, component, _ = self._target
        known = self.runtime.discovery.view.instances(namespace, component, monotonic())
        return [one for one in known if self._group.has(one.id)]

    def _other_routers(self) -> dict[str, Group]:
        """The groups of the other instances of this actor, by id.

        Those that were started with another number of groups have none of these.
        """
        name = self.__dynbus_instance__.name
        view = self.runtime.discovery.view
        known = view.instances(name.namespace, name.component, monotonic())
        groups: dict[str, Group] = {}
        for one in known:
            group = _read_group(one.metadata.get(GROUP_KEY, ""))
            if one.id == self.instance_id or group is None:
                continue
            if group.of == self._options.groups:
                groups[one.id] = group
            elif one.id not in self._strangers:
                self._strangers.add(one.id)
                logger.warning(
                    "%s has %d groups, and the router %s %d: start all with the same number",
                    *(self.instance_id, self._options.groups, one.id, group.of),
                )
        return groups

    async def _keep_up(self) -> None:
        """Say what this router stands for as that changes, and change to a group that lacks one."""
        instance = self.__dynbus_instance__
        said = self.instance_metadata()
        wished, trouble = 0, ""
        while True:
            await anyio.sleep(LOOK_INTERVAL)
            try:
                better = better_group(self._group, self.instance_id, self._other_routers())
                # The routers of a group are away for a moment while they are replaced.
                wished = 0 if better is None else wished + 1
                if better is not None and wished >= LOOKS:
                    logger.info("%s: group %s has too few routers", self.instance_id, better)
                    await self._current.open(self.runtime, self._target, self._options, better)
                    self._group, wished = better, 0
                if (says := self.instance_metadata()) != said:
                    await instance.renew_metadata()
                    said = says
                trouble = ""
            except DynbusError as error:
                if str(error) != trouble:
                    logger.warning("%s stands for what it said before: %s", self.instance_id, error)
                trouble = str(error)

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
        router = self._current.router
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
        if self._current.router is not None:
            self._current.router.use_policy(request.policy)
        return request

    @handler(idempotent=True)
    async def policy(self) -> PolicyReport:
        """The policy that decides now, and those that `use_policy` may change to."""
        if self._current.router is None:
            raise RuntimeError("the router was not started")
        return PolicyReport(policy=self._current.router.policy, policies=sorted(self._policies))


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
