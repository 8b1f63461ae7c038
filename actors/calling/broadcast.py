"""Broadcasts: one call of each instance of an actor, and what each of them answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import contextmanager
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import anyio

from dynbus.actors.declaring.actor import DeclaredActor
from dynbus.actors.declaring.brief_repr import brief_repr
from dynbus.actors.declaring.handlers import HandlerSpec
from dynbus.bus.config import suggestion
from dynbus.bus.errors import ConfigError, DynbusError

from .invocation import Invocation
from .options import CallOptions

A = TypeVar("A")
P = ParamSpec("P")
T = TypeVar("T")

CallEach = Callable[[str, tuple[Any, ...], dict[str, Any]], Coroutine[Any, Any, dict[str, Any]]]
"""Calls the handler of an attribute at each instance, with a request and its name."""


class Broadcast(Generic[A]):
    """The handlers of a client, each of which calls all instances.

    `await client.broadcast.reload(request)` gives a dict by instance id, of each instance its
    result or the `DynbusError` with which its call ended. Type checkers do not know attributes
    that change the type of each handler: they check `client.broadcast(Desk.reload, request)`, which
    does the same.

    Called are the instances that are known when it begins, also those that did not answer a moment
    ago, but for those that drain: without any the dict is empty, after the `wait` of the client.
    Each call is one of its own, with the options, metadata, middleware and the trace of any other,
    and all have one request id and deadline.
    """

    def __init__(self, actor: type[DeclaredActor], each: CallEach) -> None:
        self._actor = actor
        self._each = each

    def __repr__(self) -> str:
        return f"<Broadcast to {self._actor.__name__}>"

    async def __call__(
        self,
        handler: Callable[Concatenate[A, P], Coroutine[Any, Any, T]],
        /,
        *request: P.args,
        **named: P.kwargs,
    ) -> dict[str, T | DynbusError]:
        """Call a handler at each instance.

        Args:
            handler: of the class, such as `Desk.reload`.

        Raises:
            ConfigError: it is no handler of the class that returns one result, or the options
                choose an instance.
            InvalidRequest: the request does not fit.
            Unavailable: the instances cannot be read.
            DeadlineExceeded: they were not read in time.
        """
        spec = HandlerSpec.of(handler)
        names = [name for name, one in self._handlers.items() if spec and one.name == spec.name]
        owner = spec.owner if spec is not None else None
        if not names or owner is None or not issubclass(self._actor, owner):
            raise ConfigError(
                f"{brief_repr(handler)} is no handler of {self._actor.__name__}: give "
                f"{self._actor.__name__}.NAME, with one of {self._known}"
            )
        if refusal := self._refusal(names[0]):
            raise ConfigError(refusal)
        return await self._each(names[0], request, named)

    def __getattr__(
        self, name: str
    ) -> Callable[..., Coroutine[Any, Any, dict[str, Any | DynbusError]]]:
        if name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if refusal := self._refusal(name):
            raise AttributeError(refusal)

        async def call(*request: Any, **named: Any) -> dict[str, Any | DynbusError]:
            return await self._each(name, request, named)

        return call

    def _refusal(self, name: str) -> str:
        spec, label = self._handlers.get(name), f"{self._actor.__name__}.{name}"
        if spec is None:
            near = suggestion(name, self._handlers)
            return f"{label} is not a handler{near}; a broadcast has only: {self._known}"
        if spec.streaming:
            return (
                f"{label} streams, and a broadcast has one result of each instance: iterate over "
                f"with_options(client, instance=ID).{name}(...) for each of runtime.instance_ids"
            )
        if spec.durable is not None:
            return (
                f"{label} is durable, and its jobs are done once for all instances: write "
                f"client.{name}(...)"
            )
        return ""

    @property
    def _handlers(self) -> dict[str, HandlerSpec]:
        return self._actor.__dynbus_handlers__

    @property
    def _known(self) -> str:
        known = [name for name in self._handlers if not self._refusal(name)]
        return ", ".join(known) or "nothing, since no handler returns one result"


async def call_each(
    written: Invocation, call: Callable[[CallOptions], Awaitable[T]]
) -> dict[str, T | DynbusError]:
    """The answers of all instances to a call, by their ids.

    Args:
        written: the call as it is made, which is not sent itself.
        call: makes it with options that name an instance.

    Raises:
        ConfigError: the options of the call choose an instance.
        Unavailable, DeadlineExceeded, Cancelled: as of `Invocation.everyone`.
        Exception: what middleware raised that is no `DynbusError`; the other calls are cancelled.
    """
    chosen = written.options.get("instance")
    if chosen:
        raise ConfigError(
            f"instance={chosen!r} chooses one instance, and a broadcast calls all of "
            f"{written.endpoint}: leave it out"
        )
    answers: dict[str, T | DynbusError] = {}
    failures: list[Exception] = []
    with _observed(written) as note:
        instances = await written.everyone()
        note("dynbus.broadcast.instances", len(instances))

        async def ask(instance: str) -> None:
            try:
                options: CallOptions = {
                    "instance": instance,
                    "request_id": written.request_id,
                    "timeout": written.time_left(),
                }
                answers[instance] = await call(options)
            except DynbusError as error:
                answers[instance] = error
            except Exception as error:  # noqa: BLE001 - raised below, where it is no group's
                failures.append(error)
                tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            for instance in instances:
                tasks.start_soon(ask, instance)
        if failures:
            raise failures[0]
        errors = sum(isinstance(answer, DynbusError) for answer in answers.values())
        note("dynbus.broadcast.errors", errors)
    return {instance: answers[instance] for instance in instances}


@contextmanager
def _observed(written: Invocation) -> Generator[Callable[[str, int], None]]:
    """A span around the calls that are made inside; given is what sets an attribute of it."""
    telemetry = written.side.bus.telemetry
    if telemetry is None:
        yield lambda name, value: None
        return
    observation = telemetry.broadcast(
        written.endpoint, request_id=written.request_id, parent=written.parent
    )
    token = observation.activate()
    try:
        yield observation.note
    except BaseException as error:
        observation.end(error)
        raise
    finally:
        observation.deactivate(token)
    observation.end()
