"""`open_router`: a `KvRouter` with all that it needs of a runtime."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Mapping
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, Final

from dynbus.actors import Actor, Runtime
from dynbus.actors.declaring.actor import address_of
from dynbus.actors.declaring.brief_repr import brief_repr
from dynbus.bus.clock import monotonic
from dynbus.bus.errors import ConfigError
from dynbus.bus.protocol.names import check_token
from dynbus.kvrouter.radix.kernel import is_compiled, load_compiled
from dynbus.kvrouter.stream.membership import live_instances
from dynbus.kvrouter.stream.warm_start import warm_follower

from .constraints import LoraMode
from .cost import CostFunction
from .observing import RouterWatch
from .request_fields import RequestFields
from .router import DEFAULT_POLICY, REUSED_FIELD, KvRouter
from .scheduling import SchedulerConfig

logger = logging.getLogger(__name__)

SLOW_KERNEL: Final = 1.0
"""Seconds after which the log says that a router waits for the kernel to be compiled."""


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

    With `exact` and Numba, the first one on a machine opens when the index's kernel is compiled,
    which takes half a minute or more.

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
            await _load_kernel(f"{namespace}.{component}")
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


async def _load_kernel(target: str) -> None:
    """Have the compiled kernel, where Numba is installed; the loop goes on meanwhile.

    Whoever waits may leave at any time. Compiling cannot be stopped, so it is done on a daemon
    thread: neither the loop's end nor that of the process waits for it.
    """
    loaded: Future[bool] = Future()
    threading.Thread(target=_load, args=(loaded,), name="dynbus-kernel", daemon=True).start()
    warning = asyncio.get_running_loop().call_later(SLOW_KERNEL, _warn, target)
    try:
        await asyncio.wrap_future(loaded)
    finally:
        warning.cancel()


def _warn(target: str) -> None:
    # It may be the loading that is slow.
    if not is_compiled():
        logger.warning(
            "the router to %s does not serve yet: it waits for the index's kernel, which is "
            "compiled once on a machine",
            target,
        )


def _load(loaded: Future[bool]) -> None:
    # From now on it cannot be cancelled, and so always takes a result.
    if not loaded.set_running_or_notify_cancel():
        return
    try:
        loaded.set_result(load_compiled())
    except BaseException as error:  # noqa: BLE001 - the opening raises it
        loaded.set_exception(error)


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
