"""`Router`: KV-cache-aware routing as an actor, for callers that cannot route by themselves."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from functools import partial
from typing import Any, Final, cast

from pydantic import BaseModel

from dynbus.actors import Actor, handler
from dynbus.actors.calling.clients import EndpointClient
from dynbus.actors.calling.stream import Stream
from dynbus.actors.declaring.json_object import JsonObject
from dynbus.bus.clock import monotonic
from dynbus.bus.errors import ConfigError
from dynbus.bus.protocol.names import EndpointName

from .constraints import LoraMode
from .opening import open_router
from .request_fields import RequestFields
from .router import DEFAULT_POLICY, REUSED_FIELD, KvRouter
from .scheduling import SchedulerConfig
from .why import tell

DEFAULTS: Final = SchedulerConfig()


class Router(Actor, abstract=True):
    """Forwards streaming calls to the instance that suits each best: one hop, shared by all.

    A subclass gives it an address: `class Router(kvrouter.Router, namespace="llm")`.

    Args:
        target: the endpoint to forward to, as namespace.component.endpoint.
        policy: the cost function at the start.
        policies: those that `use_policy` may change to. Callers name one of them: nothing else
            is ever imported for them.
        shadows: policies that score every request and decide nothing.
        exact, share: see `open_router`.
        fields: see `RequestFields`; as text a JSON object, `{"token_ids": "prompt.ids"}`.
        block_size, tokenizer_id, lora, reused_field: see `KvRouter`.
        temperature, queue_threshold, queue_limit, session_ttl, session_overload,
            prediction_ttl, approximate_ttl, decisions, track_output: see `SchedulerConfig`.

    Raises:
        ConfigError: a value is not usable.
    """

    def __init__(
        self,
        target: str,
        policy: str = DEFAULT_POLICY,
        policies: Sequence[str] = (),
        shadows: Sequence[str] = (),
        exact: bool = True,
        share: bool = True,
        fields: RequestFields | None = None,
        block_size: int | None = None,
        tokenizer_id: str = "",
        lora: LoraMode = "prefer",
        reused_field: str = REUSED_FIELD,
        temperature: float = DEFAULTS.temperature,
        queue_threshold: float | None = DEFAULTS.queue_threshold,
        queue_limit: int = DEFAULTS.queue_limit,
        session_ttl: float = DEFAULTS.session_ttl,
        session_overload: float = DEFAULTS.session_overload,
        prediction_ttl: float = DEFAULTS.prediction_ttl,
        approximate_ttl: float | None = DEFAULTS.approximate_ttl,
        decisions: int = DEFAULTS.decisions,
        track_output: bool = DEFAULTS.track_output,
    ) -> None:
        self._target = EndpointName.parse(target)
        self._policies = {policy, *policies}
        config = SchedulerConfig(
            temperature=temperature,
            queue_threshold=queue_threshold,
            queue_limit=queue_limit,
            session_ttl=session_ttl,
            session_overload=session_overload,
            prediction_ttl=prediction_ttl,
            approximate_ttl=approximate_ttl,
            decisions=decisions,
            track_output=track_output,
        )
        self._open = partial(
            open_router,
            exact=exact,
            share=share,
            policy=policy,
            shadows={name: name for name in shadows},
            config=config,
            fields=fields,
            block_size=block_size,
            tokenizer_id=tokenizer_id,
            lora=lora,
            reused_field=reused_field,
        )
        self._exits = AsyncExitStack()
        self._router: KvRouter | None = None
        self._client: EndpointClient | None = None

    async def on_start(self) -> None:
        """Open the router, and refuse instances that do not fit together."""
        namespace, component, _ = self._target
        runtime = self.runtime
        async with AsyncExitStack() as exits:
            self._router = router = await exits.enter_async_context(
                self._open(runtime, f"{namespace}.{component}")
            )
            # Its caller's deadline holds; there is none beside it.
            self._client = await runtime.endpoint(self._target).client(routing=router, timeout=None)
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

    # How long a call may wait for an item is the engine's to say, whose limits hold.
    @handler(idle_timeout=None)
    async def generate(self, request: dict[str, Any]) -> AsyncGenerator[Any, None]:
        """What the chosen instance gives, item by item."""
        if self._client is None:
            raise RuntimeError("the router was not started")
        answer = await self._client.generate(request)
        if not isinstance(answer, Stream):
            yield _plain(answer)
            return
        stream: Stream[Any] = cast(Any, answer)
        async with aclosing(stream):
            async for item in stream:
                yield _plain(item)

    @handler
    async def decisions(self, request: DecisionQuery) -> list[dict[str, Any]]:
        """The decisions for a request, one per attempt, while they are kept; see `Answer`."""
        router = self._router
        found = [] if router is None else router.decisions(request.request_id)
        return tell(found, monotonic())

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

    @handler
    async def policy(self) -> PolicyReport:
        """The policy that decides now, and those that `use_policy` may change to."""
        if self._router is None:
            raise RuntimeError("the router was not started")
        return PolicyReport(policy=self._router.policy, policies=sorted(self._policies))


class DecisionQuery(BaseModel):
    """Which request is meant."""

    request_id: str


class PolicyChoice(BaseModel):
    """A policy by name."""

    policy: str


class PolicyReport(BaseModel):
    """The policy in force, and all that were configured."""

    policy: str
    policies: list[str]


def _plain(value: Any) -> Any:
    """A value of an untyped call as what a handler may yield."""
    if isinstance(value, JsonObject):
        return {key: _plain(field) for key, field in value.items()}
    if isinstance(value, tuple):
        return [_plain(element) for element in cast("Sequence[Any]", value)]
    return value
