"""`open_router`: a `KvRouter` with all that it needs of a runtime."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

from dynbus.actors import Actor, Runtime
from dynbus.actors.actor import address_of

from .constraints import LoraMode
from .cost import CostFunction
from .observing import RouterWatch
from .request_fields import RequestFields
from .router import DEFAULT_POLICY, REUSED_FIELD, KvRouter
from .scheduling import SchedulerConfig
from .warm_start import warm_follower


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
        ConfigError: a policy cannot be loaded, or the stream of events has other settings.
        Unavailable: JetStream does not answer.
    """
    name = target if isinstance(target, str) else address_of(target)
    namespace, _, component = name.partition(".")
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
        )
        await exits.enter_async_context(router)
        await exits.enter_async_context(RouterWatch(runtime.bus, namespace, component, router))
        yield router
