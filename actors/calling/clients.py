"""Clients: typed ones that look like the actor, and untyped ones for any endpoint."""

from __future__ import annotations

from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Mapping,
    Sequence,
)
from dataclasses import replace
from datetime import datetime
from functools import partial
from inspect import Parameter
from typing import Any, Final, Generic, NoReturn, TypeVar, Unpack, cast, overload
from weakref import WeakKeyDictionary

from dynbus.actors.declaring.actor import DeclaredActor
from dynbus.actors.declaring.brief_repr import brief_repr
from dynbus.actors.declaring.codec import AnyCodec, Misfit
from dynbus.actors.declaring.durable import DurableOptions, JobHandle, order_key_of
from dynbus.actors.declaring.handlers import HandlerSpec
from dynbus.actors.declaring.json_object import decode_json, decode_json_items, encode_json
from dynbus.actors.declaring.resume import (
    REPLAY,
    ClientResume,
    checked_client_resume,
    checked_limit,
)
from dynbus.actors.middleware.passing import (
    Kind,
    Middleware,
    MiddlewareCall,
    around_items,
    around_results,
    pass_items,
    pass_result,
)
from dynbus.bus.config import suggestion
from dynbus.bus.context import Context
from dynbus.bus.errors import ConfigError, InvalidRequest
from dynbus.bus.protocol.names import ComponentName, EndpointName, check_token

from .broadcast import Broadcast, call_each
from .client_side import ClientSide
from .continuation import Replay, Restarting, Resume, resume_by
from .invocation import Invocation, Terms
from .jobs import BusJob, JobRequest, Submission
from .options import (
    NONE,
    CallOptions,
    ClientOptions,
    checked_options,
    client_options,
    combined,
    current_options,
    inherited,
)
from .routing import Router, Routing, RoutingName, make_router
from .stream import Stream
from .stream_invocation import OfInvocation, StreamInvocation

WAIT_TIMEOUT: Final = 60.0
"""Seconds that `wait_for_instances` waits unless told."""


class Call(OfInvocation):
    """An untyped call: `await` it for a unary result, iterate over it for a stream.

    Nothing is sent before that. Awaiting a streaming endpoint gives the stream. A call is made
    once: a unary one that was awaited raises `RuntimeError` when it is awaited again.
    """

    def __init__(
        self,
        invocation: StreamInvocation,
        decode: Callable[[bytes], Any] = decode_json,
        decode_many: Callable[[Sequence[bytes]], list[Any]] = decode_json_items,
    ) -> None:
        self._invocation = invocation
        self._decode = decode
        self._decode_many = decode_many
        self._stream: Stream[Any] | None = None
        self._awaited = False

    def __repr__(self) -> str:
        return f"<Call {self._invocation.endpoint} {self.id}>"

    def __await__(self) -> Generator[Any, None, Any]:
        return self._result().__await__()

    def raw(self) -> Call:
        """The same call, whose result or items are the bytes that come, not decoded.

        It takes the place of this one.

        Raises:
            RuntimeError: this one was awaited already.
        """
        self._check_not_awaited()
        self._awaited = True
        return Call(self._invocation, bytes, list)

    def __aiter__(self) -> AsyncIterator[Any]:
        self._check_not_awaited()
        self._invocation.streaming = True
        return self._as_stream()

    async def aclose(self) -> None:
        """Cancel the call."""
        if self._stream is not None:
            await self._stream.aclose()
        self._invocation.abandon()

    def _as_stream(self) -> Stream[Any]:
        if self._stream is None:
            self._stream = Stream(self._invocation, self._decode, self._decode_many)
        return self._stream

    async def _result(self) -> Any:
        invocation = self._invocation
        if invocation.streaming is None:
            await invocation.learn_kind()
        if invocation.streaming:
            return self._as_stream()
        self._check_not_awaited()
        self._awaited = True
        return await invocation.unary(self._decode)

    def _check_not_awaited(self) -> None:
        if self._awaited:
            raise RuntimeError(
                f"{self!r} was awaited already and is not sent twice: make another call"
            )


class EndpointClient:
    """An untyped client of one endpoint. `generate` routes by the client's own policy.

    Args:
        migration_limit, resume: see `EndpointAddress.client`.

    Raises:
        ConfigError: one of the two is not usable.
    """

    def __init__(
        self,
        side: ClientSide,
        endpoint: EndpointName,
        router: Router,
        options: CallOptions = NONE,
        migration_limit: int | None = None,
        resume: ClientResume | None = None,
    ) -> None:
        self.endpoint = endpoint
        self._side = side
        self._router = router
        self._options = options
        label = f"client of {endpoint}"
        if options.get("middleware"):
            raise ConfigError(
                f"{label}: an untyped client passes no middleware: give it to a typed one, "
                "runtime.client(Actor, middleware=...)"
            )
        self._given_resume: ClientResume | None = checked_client_resume(label, resume)
        self._terms = Terms(
            None,
            # The instance keeps the limit that its handler declares.
            timeout=None,
            migration_limit=checked_limit(label, migration_limit, resumes=resume is not None),
            resume=_resume_of_client(self._given_resume),
        )
        self._routers: dict[RoutingName, Router] = {}

    def __repr__(self) -> str:
        return f"<EndpointClient {self.endpoint} [{len(self.instance_ids())} instances]>"

    def generate(
        self,
        request: Any = None,
        *,
        routed_as: Any = None,
        after: Sequence[bytes] = (),
        restart: Callable[[], object] | None = None,
    ) -> Call:
        """Call the endpoint on the instance that the client's routing picks.

        Args:
            routed_as: what a router looks at in place of the request, such as the token ids of its
                text; None for the request itself.
            after: encoded items of the stream that came to somebody else before: what is left is
                asked for, as the client's `resume` says.
            restart: called where a stream is lost, as often as the client's `migration_limit` says:
                what came of it counts no more, and all of it comes again from another instance. For
                a reader that waits for the whole; the handler must be idempotent.

        Raises:
            ConfigError: there is something to go on after, and nothing says how.
        """
        return self._call(request, self._router, routed_as=routed_as, after=after, restart=restart)

    def random(self, request: Any = None) -> Call:
        """Call any instance."""
        return self._call(request, self._policy("random"))

    def round_robin(self, request: Any = None) -> Call:
        """Call the next instance in turn."""
        return self._call(request, self._policy("round_robin"))

    def least_loaded(self, request: Any = None) -> Call:
        """Call the instance with the fewest calls."""
        return self._call(request, self._policy("least_loaded"))

    def power_of_two(self, request: Any = None) -> Call:
        """Call the less loaded of two random instances."""
        return self._call(request, self._policy("power_of_two"))

    def local_first(self, request: Any = None) -> Call:
        """Call an instance of the own zone, unless those are full."""
        return self._call(request, self._policy("local_first"))

    def direct(self, request: Any, instance_id: str) -> Call:
        """Call this very instance."""
        check_token("instance", instance_id)
        return self._call(request, self._router, instance=instance_id)

    def instance_ids(self) -> list[str]:
        """The instances that are known now."""
        return self._side.known_ids(self.endpoint.component_name)

    async def wait_for_instances(
        self, timeout: float | None = WAIT_TIMEOUT, *, count: int = 1
    ) -> list[str]:
        """Wait until `count` instances are known; their ids.

        Args:
            timeout: seconds to wait; None waits for ever.

        Raises:
            NoInstances: there are not as many in time.
        """
        instances = await self._side.discovery.wait(self.endpoint, count, timeout)
        return [instance.id for instance in instances]

    def _policy(self, name: RoutingName) -> Router:
        router = self._routers.get(name)
        if router is None:
            router = self._routers[name] = make_router(name)
        return router

    def _with_options(self, options: CallOptions) -> EndpointClient:
        """This client with other options; both route in turn."""
        both = combined(options, self._options)
        made = EndpointClient(
            self._side,
            self.endpoint,
            self._router,
            both,
            self._terms.migration_limit,
            self._given_resume,
        )
        made._routers = self._routers
        return made

    def _call(
        self,
        request: Any,
        router: Router,
        *,
        instance: str = "",
        routed_as: Any = None,
        after: Sequence[bytes] = (),
        restart: Callable[[], object] | None = None,
    ) -> Call:
        terms = self._terms
        if restart is not None:
            terms = replace(terms, resume=partial(Restarting, drop=restart))
        options = combined(current_options(), self._options)
        if instance:
            options = combined({"instance": instance}, options)
        invocation = StreamInvocation(
            self._side,
            self.endpoint,
            router,
            request,
            encode_json(request),
            terms,
            routed_as=routed_as,
            after=after,
            options=options,
        )
        return Call(invocation)


def _resume_of_client(resume: ClientResume | None) -> Resume | None:
    """The rule by which streams of an untyped client go on, as it was given."""
    if not callable(resume):
        return Replay if resume == REPLAY else None
    return resume_by(
        resume,
        label=f"resume={brief_repr(resume)}",
        decode=decode_json,
        decode_many=decode_json_items,
        encode=encode_json,
    )


class Namespace:
    """A namespace of the bus."""

    def __init__(self, side: ClientSide, name: str) -> None:
        self._side = side
        self.name = name

    def component(self, name: str) -> Component:
        return Component(self._side, self.name, check_token("component", name))


class Component:
    """One kind of actor in a namespace."""

    def __init__(self, side: ClientSide, namespace: str, name: str) -> None:
        self._side = side
        self.namespace = namespace
        self.name = name

    def endpoint(self, name: str) -> EndpointAddress:
        return EndpointAddress(self._side, EndpointName.of(self.namespace, self.name, name))


class EndpointAddress:
    """One endpoint of a component.

    Attributes:
        side: the process that would call it, or serves it.
    """

    def __init__(self, side: ClientSide, name: EndpointName) -> None:
        self.side = side
        self.name = name

    async def client(
        self,
        *,
        routing: Routing | None = None,
        migration_limit: int | None = None,
        resume: ClientResume | None = None,
        **options: Unpack[ClientOptions],
    ) -> EndpointClient:
        """An untyped client, once the instances that exist now are known.

        Args:
            routing: the name of a policy, or a `Router`; round robin unless given.
            migration_limit: how often a call may go to another instance; 3 with `resume`.
                Without, 0, and a call moves only before its first item, where a handler or a
                drain asks for that.
            resume: how a stream goes on at another instance when its own is lost, drains or asks
                for that. `"replay"` sends the same request again and compares; a function gets
                the request and the list of accepted items, both decoded, and returns the request
                to go on with, or None when nothing is left to come. See `handler`.
            options: `timeout`, `wait`, `priority`, `retries`, `metadata`, `middleware` and
                `spill` of every call of the client, see `call_options`.

        Raises:
            ConfigError: `routing`, `resume` or an option is not usable.
            Unavailable: the instances cannot be read.
        """
        own = client_options(options, f"client of {self.name}")
        self.side.bus.cancels.hear(self.name.namespace)
        self.side.discovery.begin()
        client = EndpointClient(
            self.side, self.name, self.side.router(routing), own, migration_limit, resume
        )
        await self.side.discovery.wait_synchronized(self.side.bus.config.connect_timeout)
        return client


class ActorClient:
    """The base of typed clients: one method per handler, and nothing else.

    The type checkers take it for the actor, so that they also let through what only an
    instance has: `on_start`, `on_stop`, `runtime`, fields. That is told here.
    """

    __slots__ = (
        "__weakref__",
        "_actor",
        "_address",
        "_around_items",
        "_around_results",
        "_endpoints",
        "_options",
        "_router",
        "_side",
    )

    _actor: type[DeclaredActor]
    _address: ComponentName
    _around_items: Sequence[Middleware]
    _around_results: Sequence[Middleware]
    _endpoints: Mapping[str, EndpointName]
    _options: CallOptions
    _router: Router
    _side: ClientSide

    def __init__(
        self,
        side: ClientSide,
        actor: type[DeclaredActor],
        address: ComponentName,
        endpoints: Mapping[str, EndpointName],
        router: Router,
        options: CallOptions,
    ) -> None:
        set_own = super().__setattr__
        set_own("_side", side)
        set_own("_actor", actor)
        set_own("_address", address)
        set_own("_endpoints", endpoints)
        set_own("_router", router)
        set_own("_options", options)
        middleware = options.get("middleware") or ()
        set_own("_around_items", around_items(middleware))
        set_own("_around_results", around_results(middleware))

    def __repr__(self) -> str:
        return f"<client of {self._address}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            # Asked for by copying and the like, maybe before there is an actor to name.
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise AttributeError(self._refusal(name))

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{self._refusal(name)}, and cannot be changed")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{self._refusal(name)}, and cannot be changed")

    def _with_options(self, options: CallOptions) -> ActorClient:
        """This client with other options; both route in turn."""
        return type(self)(
            self._side,
            self._actor,
            self._address,
            self._endpoints,
            self._router,
            combined(options, self._options),
        )

    @property
    def broadcast(self) -> Broadcast[Any]:
        return Broadcast(self._actor, self._call_each)

    async def _call_each(
        self, attribute: str, request: tuple[Any, ...], named: dict[str, Any]
    ) -> dict[str, Any]:
        method = getattr(type(self), attribute)
        written = method.__dynbus_invoke__(self, request, dict(named))
        return await call_each(
            written, lambda options: method(self, *request, _options=options, **named)
        )

    def _refusal(self, name: str) -> str:
        actor = self._actor
        handlers = ", ".join(actor.__dynbus_handlers__)
        if name in actor.__dynbus_handlers__:
            return f"{actor.__name__}.{name} is a handler; a client has only: {handlers}"
        where = (
            "; it stays in the actor's own process"
            if hasattr(actor, name)
            else suggestion(name, actor.__dynbus_handlers__)
        )
        return f"{actor.__name__}.{name} is not a handler{where}; a client has only: {handlers}"


A = TypeVar("A", bound=DeclaredActor)
C = TypeVar("C", bound=DeclaredActor | EndpointClient)
M = TypeVar("M", bound=Invocation | JobRequest)


def with_options(client: C, /, **options: Unpack[CallOptions]) -> C:
    """A client whose calls have these options, of the same type as `client`, which stays as it is.

    It routes together with `client`. Its options go before those that `client` has, and
    `call_options` around a call before both; metadata adds up, and so does middleware, of which
    that given here is outside. See `call_options` for what each option means.

    Raises:
        ConfigError: `client` is no client or dependency, there is no such option, or a value is
            not usable.
    """
    given: Any = client
    if not isinstance(given, ActorClient | EndpointClient):
        raise ConfigError(
            f"with_options({brief_repr(client)}): give a client, such as runtime.client(Other) "
            "or self.other of a dependency"
        )
    own = checked_options(options, "with_options(client, ...)")
    made = given._with_options(own)  # pyright: ignore[reportPrivateUsage]
    return cast(C, made)


def typed_client(
    side: ClientSide,
    actor: type[A],
    address: ComponentName,
    routing: Routing | None,
    options: CallOptions,
) -> A:
    """A client of the instances at `address`, with the methods of the handlers of `actor`.

    Raises:
        ConfigError: `routing` is not usable, or an annotation of a handler is not.
    """
    handlers = actor.__dynbus_handlers__.values()
    endpoints = {spec.name: address.endpoint(spec.name) for spec in handlers}
    made = client_class(actor)(side, actor, address, endpoints, side.router(routing), options)
    side.bus.cancels.hear(address.namespace)
    side.discovery.begin()
    return cast(A, made)


_classes: WeakKeyDictionary[type[DeclaredActor], type[ActorClient]] = WeakKeyDictionary()


def client_class(actor: type[DeclaredActor]) -> type[ActorClient]:
    """The class of typed clients of an actor; made once per actor class.

    Raises:
        ConfigError: an annotation of a handler cannot be used.
    """
    made = _classes.get(actor)
    if made is None:
        made = _classes[actor] = _make_client_class(actor)
    return made


def _make_client_class(actor: type[DeclaredActor]) -> type[ActorClient]:
    methods: dict[str, Any] = {}
    for attribute, spec in actor.__dynbus_handlers__.items():
        spec.check()
        if spec.durable is not None:
            methods[attribute] = DurableClientMethod(spec, spec.durable)
            continue
        make = _stream_method if spec.streaming else _unary_method
        terms = Terms(
            spec.streaming,
            spec.timeout,
            spec.idempotent,
            spec.migration_limit,
            _resume_of(actor, spec),
            spec.schemas.hash,
        )
        method = make(spec, terms)
        method.__name__ = attribute
        method.__qualname__ = f"{actor.__name__}.{attribute}"
        method.__doc__ = spec.function.__doc__
        method.submit = _refused_submit(spec)  # type: ignore[attr-defined]
        spec.mark(method)
        methods[attribute] = method
    return type(f"{actor.__name__}Client", (ActorClient,), {"__slots__": (), **methods})


def _resume_of(actor: type[DeclaredActor], spec: HandlerSpec) -> Resume | None:
    """The rule by which streams of a handler go on, as its class says."""
    function, codec = spec.resume_function(actor), spec.request_codec
    if function is None or codec is None:
        return Replay if spec.resume is not None else None
    return resume_by(
        function,
        label=f"{actor.__name__}.{spec.resume}",
        decode=codec.decode,
        decode_many=spec.result_codec.decode_many,
        encode=codec.encode,
    )


def _refused_submit(spec: HandlerSpec) -> Callable[..., NoReturn]:
    """The `submit` of a handler without jobs, which type checkers do not know."""
    remedy = "iterate over the call" if spec.streaming else "call it, or use @handler(durable=True)"

    def submit(*_: object, **__: object) -> NoReturn:
        raise ConfigError(f"{spec.label} is not durable, and has no jobs to submit: {remedy}")

    return submit


class DurableClientMethod:
    """A durable handler in the class of its clients."""

    def __init__(self, spec: HandlerSpec, options: DurableOptions) -> None:
        self.spec = spec
        self._options = options
        # A job is no call: nothing but its request and its options is known of it here.
        self._invoke = _invoker(spec, Terms(streaming=False), JobRequest)
        self.__name__ = spec.name
        self.__doc__ = spec.function.__doc__
        spec.mark(self)

    def __repr__(self) -> str:
        return f"<durable handler {self.spec.label}>"

    @overload
    def __get__(self, client: None, owner: type[Any]) -> DurableClientMethod: ...
    @overload
    def __get__(self, client: ActorClient, owner: type[Any]) -> BoundDurable: ...
    def __get__(
        self, client: ActorClient | None, owner: type[Any]
    ) -> DurableClientMethod | BoundDurable:
        return self if client is None else BoundDurable(self, client)

    async def passed(
        self,
        client: ActorClient,
        kind: Kind,
        request: tuple[Any, ...],
        named: dict[str, Any],
        work: Callable[[JobRequest], Awaitable[Any]],
    ) -> Any:
        """Pass a request through the client's middleware to `work` and return its result."""
        middleware = client._around_results  # pyright: ignore[reportPrivateUsage]
        if not middleware:
            return await work(self._invoke(client, request, named))
        outgoing = _Outgoing(client, self.spec, kind, self._invoke, request, named)
        return await pass_result(middleware, outgoing.call, lambda: work(outgoing.make()))

    async def submit(
        self, asked: JobRequest, when: Submission | None
    ) -> tuple[BusJob[Any], float | None]:
        """Have a job stored; its handle, and the seconds in which it is to end.

        Args:
            when: None for a call that waits for it, which does not begin after its own deadline.
        """
        left = asked.time_left
        if when is None:
            when = {"deadline": left}
        jobs = asked.side.jobs_of(asked.endpoint, self._options)
        path, codec = self._options.ordered_by, self.spec.request_codec
        order_key = None
        if path is not None and codec is not None:
            order_key = order_key_of(path, codec.decode(asked.data))
        job_id = await jobs.submit(
            asked.data,
            options=asked.options,
            parent=asked.parent,
            order_key=order_key,
            **when,
        )
        return BusJob(jobs, job_id, self.spec.result_codec.decode), left


class BoundDurable:
    """A durable handler of one client; see `DurableMethod`, whose type it has."""

    def __init__(self, method: DurableClientMethod, client: ActorClient) -> None:
        self._method = method
        self._client = client
        method.spec.mark(self)

    def __repr__(self) -> str:
        return f"<{self._method.spec.name} of {self._client!r}>"

    @property
    def __dynbus_result__(self) -> AnyCodec:
        return self._method.spec.result_codec

    async def __call__(self, *request: Any, **named: Any) -> Any:
        async def answered(asked: JobRequest) -> Any:
            job, left = await self._method.submit(asked, None)
            return await job.result(left)

        return await self._method.passed(self._client, "job", request, named, answered)

    async def submit(
        self,
        *request: Any,
        delay: float = 0.0,
        at: datetime | None = None,
        idempotency_key: str | None = None,
        deadline: float | None = None,
        priority: int | None = None,
        **named: Any,
    ) -> JobHandle[Any]:
        """Have a job stored; see `DurableMethod.submit`."""
        parameter = self._method.spec.parameter
        for name in named:
            if name != "context" and (parameter is None or name != parameter.name):
                known = ", ".join(Submission.__annotations__)
                raise TypeError(f"submit() has no option {name!r}: there are {known}")
        when: Submission = {
            "delay": delay,
            "at": at,
            "idempotency_key": idempotency_key,
            "deadline": deadline,
            "priority": priority,
        }

        async def submitted(asked: JobRequest) -> BusJob[Any]:
            return (await self._method.submit(asked, when))[0]

        job: JobHandle[Any] = await self._method.passed(
            self._client, "submit", request, named, submitted
        )
        return job


def _unary_method(spec: HandlerSpec, terms: Terms) -> Callable[..., Any]:
    decode = spec.result_codec.decode
    invoke = _invoker(spec, terms, Invocation)

    async def call(
        self: ActorClient, *request: Any, _options: CallOptions = NONE, **named: Any
    ) -> Any:
        middleware = self._around_results  # pyright: ignore[reportPrivateUsage]
        if not middleware:
            return await invoke(self, request, named, _options).unary(decode)
        outgoing = _Outgoing(self, spec, "unary", invoke, request, named, _options)
        return await pass_result(middleware, outgoing.call, lambda: outgoing.make().unary(decode))

    # Read by steps of jobs, which store results.
    call.__dynbus_result__ = spec.result_codec  # type: ignore[attr-defined]
    # Used by broadcasts, which send the call to each instance.
    call.__dynbus_invoke__ = invoke  # type: ignore[attr-defined]
    return call


def _stream_method(spec: HandlerSpec, terms: Terms) -> Callable[..., Any]:
    decode, decode_many = spec.result_codec.decoder(), spec.result_codec.decode_many
    invoke = _invoker(spec, terms, StreamInvocation)

    def call(self: ActorClient, *request: Any, **named: Any) -> AsyncGenerator[Any, None]:
        middleware = self._around_items  # pyright: ignore[reportPrivateUsage]
        if not middleware:
            return Stream(invoke(self, request, named), decode, decode_many)
        outgoing = _Outgoing(self, spec, "stream", invoke, request, named)
        return pass_items(
            middleware, outgoing.call, lambda: Stream(outgoing.make(), decode, decode_many)
        )

    return call


class _Outgoing(Generic[M]):
    """A call on its way through a client's middleware.

    Raises:
        InvalidRequest: the request does not fit; no middleware sees it.
    """

    def __init__(
        self,
        client: ActorClient,
        spec: HandlerSpec,
        kind: Kind,
        invoke: Callable[..., M],
        request: tuple[Any, ...],
        named: dict[str, Any],
        options: CallOptions = NONE,
    ) -> None:
        self._client = client
        self._invoke = invoke
        self._options = options
        self._takes_request = spec.request_codec is not None
        self._parent: Context | None = named.get("context")
        invoke(client, request, named)
        own = client._options  # pyright: ignore[reportPrivateUsage]
        endpoint = client._endpoints[spec.name]  # pyright: ignore[reportPrivateUsage]
        given = next(iter((*request, *named.values())), spec.default)
        running = self._parent or Context.current()
        metadata, _ = inherited(combined(current_options(), own), running)
        self.call = MiddlewareCall(
            "client", kind, endpoint, given if self._takes_request else None, running, metadata
        )

    def make(self) -> M:
        """The call as it is now.

        Raises:
            ConfigError: its metadata is not usable.
            InvalidRequest: its request does not fit.
        """
        call, named = self.call, {} if self._parent is None else {"context": self._parent}
        options = checked_options({"metadata": call.metadata}, f"middleware of {call.endpoint}")
        request = (call.request,) if self._takes_request else ()
        return self._invoke(self._client, request, named, combined(options, self._options))


def _invoker(spec: HandlerSpec, terms: Terms, make: type[M]) -> Callable[..., M]:
    """The common first part of both kinds of method: bind, validate, and make the invocation."""
    name, codec = spec.name, spec.request_codec
    parameter = spec.parameter.name if spec.parameter is not None else ""
    default = spec.default
    has_default = default is not Parameter.empty

    def invoke(
        client: ActorClient,
        request: tuple[Any, ...],
        named: dict[str, Any],
        more: CallOptions = NONE,
    ) -> M:
        # A client's own attributes are private: every other name is a handler's.
        endpoint = client._endpoints[name]  # pyright: ignore[reportPrivateUsage]
        own = client._options  # pyright: ignore[reportPrivateUsage]
        options = combined(more, current_options()) if more else current_options()
        parent: Context | None = named.pop("context", None) if named else None
        if codec is None:
            if request or named:
                raise TypeError(f"{spec.label}() takes no request")
            value, data = None, b""
        else:
            if len(request) == 1 and not named:
                value = request[0]
            elif not request and list(named) == [parameter]:
                value = named[parameter]
            elif has_default and not request and not named:
                value = default
            else:
                raise TypeError(f"{spec.label}() takes one request, {parameter!r}")
            try:
                data = codec.encode(value)
            except Misfit as error:
                raise InvalidRequest(f"{endpoint}: {error}", started=False) from None
        return make(
            client._side,  # pyright: ignore[reportPrivateUsage]
            endpoint,
            client._router,  # pyright: ignore[reportPrivateUsage]
            value,
            data,
            terms,
            options=combined(options, own) if own else options,
            parent=parent,
        )

    return invoke
