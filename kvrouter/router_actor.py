"""`Router`: KV-cache-aware routing as an actor, for callers that cannot route by themselves."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any, cast

from pydantic import BaseModel

from dynbus.actors import Actor, handler
from dynbus.actors.clients import EndpointClient
from dynbus.actors.json_object import JsonObject
from dynbus.bus.errors import ConfigError
from dynbus.bus.names import EndpointName

from .opening import open_router
from .router import DEFAULT_POLICY, REUSED_FIELD, KvRouter
from .scheduling import SchedulerConfig


class Router(Actor, abstract=True):
    """Forwards streaming calls to the instance that suits each best: one hop, shared by all.

    A subclass gives it an address: `class Router(kvrouter.Router, namespace="llm")`.

    Args:
        target: the endpoint to forward to, as namespace.component.endpoint.
        policy: the cost function at the start.
        policies: those that `use_policy` may change to. Callers name one of them: nothing else
            is ever imported for them.
        shadows: policies that score every request and decide nothing.
        exact: whether to follow the engines' events; False guesses from own decisions.
        temperature, queue_threshold: see `SchedulerConfig`.
        tokenizer_id: what makes the token ids; empty for no check.
        reused_field: see `KvRouter`.
    """

    def __init__(
        self,
        target: str,
        policy: str = DEFAULT_POLICY,
        policies: Sequence[str] = (),
        shadows: Sequence[str] = (),
        exact: bool = True,
        temperature: float = 0.0,
        queue_threshold: float | None = None,
        tokenizer_id: str = "",
        reused_field: str = REUSED_FIELD,
    ) -> None:
        self._target = EndpointName.parse(target)
        self._policy = policy
        self._policies = {policy, *policies}
        self._shadows = shadows
        self._exact = exact
        self._config = SchedulerConfig(temperature=temperature, queue_threshold=queue_threshold)
        self._tokenizer_id = tokenizer_id
        self._reused_field = reused_field
        self._exits = AsyncExitStack()
        self._router: KvRouter | None = None
        self._client: EndpointClient | None = None

    async def on_start(self) -> None:
        """Open the router, and refuse instances that do not fit together."""
        namespace, component, _ = self._target
        runtime = self.runtime
        async with AsyncExitStack() as exits:
            self._router = router = await exits.enter_async_context(
                open_router(
                    runtime,
                    f"{namespace}.{component}",
                    exact=self._exact,
                    policy=self._policy,
                    shadows={name: name for name in self._shadows},
                    config=self._config,
                    tokenizer_id=self._tokenizer_id,
                    reused_field=self._reused_field,
                )
            )
            self._client = await runtime.endpoint(self._target).client(routing=router)
            known = runtime.discovery.view.everything()
            found = [
                one
                for one in known
                if (one.record.namespace, one.record.component) == (namespace, component)
            ]
            if found:
                router.check(found)
            self._exits = exits.pop_all()

    async def on_stop(self) -> None:
        await self._exits.aclose()

    @handler
    async def generate(self, request: dict[str, Any]) -> AsyncGenerator[Any, None]:
        """What the chosen instance gives, item by item."""
        if self._client is None:
            raise RuntimeError("the router was not started")
        stream = await self._client.generate(request)
        async with aclosing(stream):
            async for item in stream:
                yield _plain(item)

    @handler
    async def decisions(self, request: DecisionQuery) -> list[dict[str, Any]]:
        """The decisions for a request, one per attempt, while they are kept."""
        router = self._router
        found = [] if router is None else router.decisions(request.request_id)
        return [decision.as_dict() for decision in found]

    @handler
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


class DecisionQuery(BaseModel):
    """Which request is meant."""

    request_id: str


class PolicyChoice(BaseModel):
    """A policy by name."""

    policy: str


def _plain(value: Any) -> Any:
    """A value of an untyped call as what a handler may yield."""
    if isinstance(value, JsonObject):
        return {key: _plain(field) for key, field in value.items()}
    if isinstance(value, tuple):
        return [_plain(element) for element in cast("Sequence[Any]", value)]
    return value
