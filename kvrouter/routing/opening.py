"""`open_router`: a `KvRouter` with all that it needs of a runtime."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

from dynbus.actors import Actor, Runtime
from dynbus.actors.declaring.actor import address_of
from dynbus.actors.declaring.brief_repr import brief_repr
from dynbus.bus.clock import monotonic
from dynbus.bus.errors import ConfigError
from dynbus.bus.protocol.names import check_token
from dynbus.kvrouter.stream.membership import live_instances
from dynbus.kvrouter.stream.warm_start import warm_follower

from .constraints import LoraMode
from .cost import CostFunction
from .observing import RouterWatch
from .request_fields import RequestFields
from .router import DEFAULT_POLICY, REUSED_FIELD, KvRouter
from .scheduling import SchedulerConfig


@asynccontextmanager
async def open_router(
    runtime: Runtime,
    target: type[Actor] | str,
    *,
    exact: bool = True,
    share: bool = True,
    policy: str | CostFunction = DEFAULT_POLICY,
    shadows: Mapping[str, str | CostFunction] | None = None,
    config: SchedulerConfig | None = None,
    fields: RequestFields | None = None,
    block_size: int | None = None,
    tokenizer_id: str = "",
    lora: LoraMode = "prefer",
    reused_field: str = REUSED_FIELD,
) -> AsyncGenerator[KvRouter]:
    """A router for the calls of one component, for as long as the `async with` lasts.

    Args:
        target: the actor, or `namespace.component`.
        exact: whether to follow the engines' events; False guesses from own decisions.
        share: whether to share the load with the component's other routers.
        policy, shadows, config, fields, block_size, tokenizer_id, lora, reused_field: see
            `KvRouter`.

    Raises:
        ConfigError: the target is none, a policy cannot be loaded, a value is not usable, or the
            stream of events has other settings.
        Unavailable: JetStream does not answer.
    """
    namespace, component = _address(target)
    runtime.discovery.begin()
    async with AsyncExitStack() as exits:
        follower = None
        if exact:
            follower = await exits.enter_async_context(warm_follower(runtime, namespace, component))
        router = KvRouter(
            follower=follower,
            connection=runtime.bus.data if share else None,
            policy=policy,
            shadows=shadows,
            config=config,
            fields=fields,
            block_size=block_size,
            tokenizer_id=tokenizer_id,
            lora=lora,
            reused_field=reused_field,
            target=f"{namespace}.{component}",
            instances=partial(live_instances, runtime, namespace, component),
            offered=lambda: runtime.discovery.view.instances(namespace, component, monotonic()),
        )
        await exits.enter_async_context(router)
        await exits.enter_async_context(RouterWatch(runtime.bus, namespace, component, router))
        yield router


def _address(target: Any) -> tuple[str, str]:
    """Namespace and component of what a router is opened for.

    Raises:
        ConfigError: it is no actor and no address.
    """
    name = target if isinstance(target, str) else ""
    if isinstance(target, type) and issubclass(target, Actor):
        name = str(address_of(target))
    if name.count(".") == 1 and not name.startswith("."):
        namespace, _, component = name.partition(".")
        return check_token("namespace", namespace), check_token("component", component)
    raise ConfigError(
        f"open_router(runtime, {brief_repr(target)}): give the class of the engine's actor, which "
        "has a namespace, or its address as 'namespace.component', for example 'llm.Engine'"
    )
