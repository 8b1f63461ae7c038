"""`@handler`: a method that the bus can call, and what is known of it."""

from __future__ import annotations

import inspect
import typing
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Collection,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final, Literal, TypeVar, overload
from weakref import ref

from dynbus.bus.errors import ConfigError, InvalidRequest
from dynbus.bus.protocol.endpoint import (
    ANYBODY,
    DEFAULT_CONCURRENCY,
    DEFAULT_IDLE_TIMEOUT,
    DEFAULT_QUEUE,
    DEFAULT_TIMEOUT,
    MAX_SECONDS,
)
from dynbus.bus.protocol.names import check_token

from . import batching
from .batching import BatchDeclared, BatchDecorator, Batching, Selector
from .codec import AnyCodec, Misfit, codec_for
from .durable import (
    DEFAULT_JOBS,
    DurableDecorator,
    DurableOptions,
    OrderDeclared,
    check_ordered_by,
    durable_options,
)
from .json_limits.raw_bytes import HoldsBytes
from .reply import PARAMETER as REPLY
from .reply import (
    HandlerDecorator,
    Replies,
    RepliesTo,
    StreamDecorator,
    is_reply,
    is_typed_as_reply,
    takes_reply,
)
from .resume import REPLAY, ResumeFunction, checked_limit, checked_resume, resume_method
from .schemas import HandlerSchemas, schemas_of
from .shapes import describe_request

A = TypeVar("A")
R = TypeVar("R")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

SPEC: Final = "__dynbus_handler__"
STREAM_TYPES: Final = (AsyncGenerator, AsyncIterator, AsyncIterable)


class BytesDeclared(ConfigError):
    """Raised for a handler whose request or result holds bytes that JSON would not carry."""


def resolve_annotations(
    function: Callable[..., Any], label: str, *, include_extras: bool = False
) -> dict[str, Any]:
    """The resolved annotations of a function, by parameter; `return` is that of its result.

    Args:
        label: how the message names the function.
        include_extras: whether what `Annotated` says beside a type is in it.

    Raises:
        ConfigError: one of them is a text that is no type here.
    """
    try:
        return typing.get_type_hints(function, include_extras=include_extras)
    except Exception as error:  # noqa: BLE001 - annotations written as text are code of users
        raise ConfigError(
            f"{label}: an annotation cannot be resolved: {type(error).__name__}: {error}"
        ) from None


@dataclass(frozen=True)
class HandlerSpec:
    """One handler as its class declares it.

    Attributes:
        name: the endpoint.
        parameter: of the request; None for a handler without one.
        takes_context: whether it has a `context` parameter.
        takes_reply: whether it streams by a `reply` parameter in place of yielding.
        concurrency, queue, timeout, idle_timeout, idempotent, resume, migration_limit, durable:
            see `handler`.
        batch: how its calls go together; None where each runs alone. Its codecs are those of one
            request and one result all the same.
        allow: the users of the server that may call it; None for all that the server lets call.
    """

    function: Callable[..., Any]
    name: str
    streaming: bool
    parameter: inspect.Parameter | None
    takes_context: bool
    takes_reply: bool
    concurrency: int | None
    queue: int | None
    timeout: float | None
    idle_timeout: float | None
    idempotent: bool
    resume: str | None
    migration_limit: int
    durable: DurableOptions | None
    batch: Batching | None
    allow: frozenset[str] | None

    @classmethod
    def of(cls, method: Callable[..., Any]) -> HandlerSpec | None:
        """The specification that `@handler` has declared of a method; None for any other."""
        spec = getattr(method, SPEC, None)
        return spec if isinstance(spec, HandlerSpec) else None

    @property
    def owner(self) -> type[Any] | None:
        """The class that has it in its body; None before that is made, and once it is gone."""
        known: ref[type[Any]] | None = vars(self).get("_owner")
        return known() if known is not None else None

    def belongs_to(self, cls: type[Any]) -> None:
        """Say whose it is."""
        vars(self)["_owner"] = ref(cls)

    def mark(self, method: object) -> None:
        """Declare a method as this handler, in place of what it was."""
        setattr(method, SPEC, self)

    @cached_property
    def annotations(self) -> dict[str, Any]:
        """The resolved annotations.

        Raises:
            ConfigError: one of them is a text that is no type here.
        """
        return resolve_annotations(self.function, self.label)

    @property
    def kind(self) -> Literal["stream", "unary"]:
        """The kind of its results: one, or a stream."""
        return "stream" if self.streaming else "unary"

    @property
    def label(self) -> str:
        """The name of the handler in messages."""
        return self.function.__qualname__

    @cached_property
    def request_codec(self) -> AnyCodec | None:
        """Encodes requests; None for a handler without one."""
        if self.parameter is None:
            return None
        annotation = self.annotations[self.parameter.name]
        if self.batch is not None:
            annotation = batching.request_of(self.label, annotation)
        return self._codec(annotation, "the request")

    @cached_property
    def result_codec(self) -> AnyCodec:
        """Encodes results, for a stream its items."""
        annotation = self.annotations[REPLY if self.takes_reply else "return"]
        if self.streaming:
            arguments = typing.get_args(annotation)
            if not arguments:
                example = "reply: Reply[Word]" if self.takes_reply else "AsyncGenerator[Word, None]"
                raise ConfigError(f"{self.label}: annotate what it yields, for example {example}")
            annotation = arguments[0]
        if self.batch is not None:
            annotation = batching.result_of(self.label, annotation)
        return self._codec(annotation, "the result")

    @cached_property
    def schemas(self) -> HandlerSchemas:
        """The JSON schemas of request and result, and their hash."""
        has_default = self.default is not inspect.Parameter.empty
        return schemas_of(self.request_codec, self.result_codec, request_has_default=has_default)

    def _codec(self, annotation: Any, what: str) -> AnyCodec:
        try:
            return codec_for(annotation)
        except HoldsBytes as error:
            raise BytesDeclared(f"{self.label}: {what} cannot be sent: {error}") from None
        except TypeError as error:
            raise ConfigError(
                f"{self.label}: {what} of type {annotation!r} cannot be sent as JSON: {error}"
            ) from None

    @property
    def default(self) -> Any:
        """The request of a call that gives none; `inspect.Parameter.empty` without one."""
        return self.parameter.default if self.parameter is not None else inspect.Parameter.empty

    def resume_function(self, cls: type[Any]) -> ResumeFunction | None:
        """The function that makes the request that a stream goes on with; None where it is
        replayed, or not resumed at all.

        Args:
            cls: the class that has the handler.

        Raises:
            ConfigError: the class has no such method.
        """
        if self.resume is None or self.resume == REPLAY:
            return None
        takes_request = self.parameter is not None
        return resume_method(cls, self.resume, self.label, takes_request=takes_request)

    def request_decoder(self) -> Callable[[bytes], Any]:
        """The decoder of requests at an instance: bytes to request, None for a handler without one.

        No bytes are the handler's default, where it has one; so is null, unless it fits.

        What it returns raises `InvalidRequest` for bytes that do not fit.
        """
        codec = self.request_codec
        if codec is None:
            return self._decode_nothing
        decode = codec.decode
        has_default = self.default is not inspect.Parameter.empty
        # Made anew for each call, so that none sees what another did to it.
        default = codec.encode(self.default) if has_default else b""

        def decode_request(data: bytes) -> Any:
            try:
                return decode(data)
            except Misfit as error:
                if has_default and _is_nothing(data):
                    return decode(default)
                raise InvalidRequest(self._explain(codec, data, error)) from None

        return decode_request

    def _decode_nothing(self, data: bytes) -> None:
        if not _is_nothing(data):
            raise InvalidRequest(
                f"{self.label} takes no request, but {len(data)} bytes were sent: "
                "leave the body empty"
            )

    def _explain(self, codec: AnyCodec, data: bytes, error: Misfit) -> str:
        if not _is_nothing(data):
            return str(error)
        body = "null" if data.strip() else "empty"
        return f"{self.label} wants {describe_request(codec)}, but the body was {body}"

    def check(self) -> None:
        """Resolve all annotations now.

        Raises:
            ConfigError: one of them cannot be used.
        """
        if self.batch is not None:
            batching.check_parameter(self.label, self.parameter)
        codec, _ = self.request_codec, self.result_codec
        if self.durable is not None and self.durable.ordered_by is not None:
            if codec is None:
                raise OrderDeclared(
                    f"{self.label} takes no request, and has no field for ordered_by="
                    f"{self.durable.ordered_by!r}: leave it out"
                )
            check_ordered_by(self.label, self.durable.ordered_by, codec.annotation)
        if codec is not None and self.batch is not None:
            self.batch.check_fields(self.label, codec.annotation)
        if codec is None or self.default is inspect.Parameter.empty:
            return
        try:
            codec.encode(self.default)
        except Misfit as error:
            raise ConfigError(
                f"{self.label}: the default of the request does not fit its annotation: {error}"
            ) from None

    def check_declared(self) -> None:
        """Refuse now what no later definition can mend.

        Raises:
            BytesDeclared: the request or the result holds bytes.
            BatchDeclared: they are no lists, and it is called with a batch.
            OrderDeclared: the request lacks the field of its order.
        """
        try:
            # Of a copy, which keeps nothing: a name may be given to another class later.
            replace(self).check()
        except (BytesDeclared, OrderDeclared):
            raise
        except BatchDeclared:
            # Of a function without a class it is known only later which parameter is the request.
            if _is_in_class(self.function):
                raise
        except Exception:  # noqa: BLE001 - what it names may be defined later; `check` tells then
            return


def _is_nothing(data: bytes) -> bool:
    """True if a body is empty or null, by which untyped clients say that there is no request."""
    return data.strip() in (b"", b"null")


_UNSET: Any = object()
NO_OPTIONS: Final[Mapping[str, Any]] = MappingProxyType({})


@overload
def handler(function: RepliesTo[A, R, T], /) -> Callable[[A, R], AsyncGenerator[T, None]]: ...
@overload
def handler(function: Replies[A, T], /) -> Callable[[A], AsyncGenerator[T, None]]: ...
@overload
def handler(function: F, /) -> F: ...
@overload
def handler(
    *,
    name: str | None = None,
    concurrency: int | None = DEFAULT_CONCURRENCY,
    queue: int | None = DEFAULT_QUEUE,
    timeout: float | None = ...,
    idle_timeout: float | None = DEFAULT_IDLE_TIMEOUT,
    idempotent: bool = False,
    resume: None = None,
    migration_limit: int | None = None,
    allow: tuple[str, ...] | None = None,
) -> HandlerDecorator: ...
@overload
def handler(
    *,
    name: str | None = None,
    concurrency: int | None = DEFAULT_CONCURRENCY,
    queue: int | None = DEFAULT_QUEUE,
    timeout: float | None = ...,
    idle_timeout: float | None = DEFAULT_IDLE_TIMEOUT,
    idempotent: bool = False,
    resume: str,
    migration_limit: int | None = None,
    allow: tuple[str, ...] | None = None,
) -> StreamDecorator: ...
@overload
def handler(
    *,
    name: str | None = None,
    concurrency: int | None = DEFAULT_JOBS,
    timeout: float | None = None,
    durable: Literal[True],
    tries: int | None = None,
    backoff: float | None = None,
    ack_wait: float | None = None,
    max_age: float | None = None,
    result_age: float | None = None,
    ordered_by: str | None = None,
) -> DurableDecorator: ...
@overload
def handler(
    *,
    name: str | None = None,
    concurrency: int | None = batching.DEFAULT_CONCURRENCY,
    queue: int | None = DEFAULT_QUEUE,
    timeout: float | None = ...,
    idempotent: bool = False,
    batch: int,
    batch_wait: float | str | None = None,
    batch_key: Selector | None = None,
    batch_size_of: Selector | None = None,
    allow: tuple[str, ...] | None = None,
) -> BatchDecorator: ...


def handler(
    function: Any = None,
    /,
    *,
    name: str | None = None,
    concurrency: int | None = _UNSET,
    queue: int | None = DEFAULT_QUEUE,
    timeout: float | None = _UNSET,
    idle_timeout: float | None = DEFAULT_IDLE_TIMEOUT,
    idempotent: bool = False,
    resume: str | None = None,
    migration_limit: int | None = None,
    durable: bool = False,
    tries: int | None = None,
    backoff: float | None = None,
    ack_wait: float | None = None,
    max_age: float | None = None,
    result_age: float | None = None,
    ordered_by: str | None = None,
    batch: int | None = None,
    batch_wait: float | str | None = None,
    batch_key: Selector | None = None,
    batch_size_of: Selector | None = None,
    allow: tuple[str, ...] | None = None,
) -> Any:
    """Make an `async def` method of an `Actor` callable over the bus.

    It also gives options to a function that `Runtime.serve_endpoints` serves without a class.
    A method that yields streams its items; one that returns is unary. It takes one request
    (or none) and may take `context: Context | None = None` besides. One that takes
    `reply: Reply[Item]` and returns None is a stream of what is sent by that.

    Args:
        name: the endpoint; the method's name unless given.
        concurrency: calls that run in one instance at a time, 256 unless given; 1 makes a mailbox
            that serves in arrival order; None asks for no limit. With `batch`, batches that run at
            a time, 1 unless given.
        queue: calls that wait at most; further ones get `Overloaded`, and so do those that would
            probably not be done by their deadline.
        timeout: seconds for a whole call; 60 for unary handlers, none for streams.
        idle_timeout: seconds that a stream may be without an item.
        idempotent: whether a call whose outcome is unknown may be repeated elsewhere.
        resume: how a stream goes on at another instance when its own is lost, drains or raises
            `Migrate`: `"replay"` sends the same request again, compares the items with those that
            were delivered and goes on behind them. The name of a method of the class has that make
            the request to go on with, of the request and the list of items that were delivered;
            None ends the stream well. It is called at the caller, on the class: make it a
            `@staticmethod`. Without `resume` the stream ends in `StreamLost`.
        migration_limit: how often one call may move to another instance; 3 with `resume`. Without,
            0, and a call moves only before its first item, when the handler raises `Migrate` or
            its instance drains.
        durable: whether each call is a job: stored by the server before it counts, done by an
            instance that has time, and tried again until it is. Clients have `submit` beside the
            call, which submits and waits; `concurrency` are the jobs that an instance runs at a
            time (16), and `timeout` is none unless given.
        tries: how often a job is tried before it is a dead letter; 5 unless given.
        backoff: seconds before a job that failed is tried again, doubled for each failure; 0.5.
        ack_wait: seconds after which a job goes to another instance where its own is frozen or
            cut off; 30. One whose process is killed goes on about a second later.
        max_age: seconds after which a job is not begun any more but a dead letter; none.
        result_age: seconds for which the result of a job is kept, and its key known; a day.
        ordered_by: a field of the request, `"customer"` or `"order.customer"`: jobs with the same
            value are done in the order in which they were submitted, one at a time in the whole
            cluster. Values share 16 lanes, so one that is tried again has some others wait too.
        batch: calls that go together at most. The method takes the list of their requests and
            returns the list of their results, one for each, in order; an exception in the place of
            one is that caller's error. Callers see a call of one request with one result.
        batch_wait: how long a call waits for others, in seconds or as text such as `"5ms"`; 0
            unless given, so that those go together that came while the last batch ran. No call
            waits for others for more than half of its time.
        batch_key: a field of the request, or a function of it: only calls with the same value go
            together.
        batch_size_of: a field of the request, or a function of it, that says how large it is, such
            as its tokens: the metrics tell what share of a batch would be padding.
        allow: the users of the server that may call it, by name, such as `("billing",)`; `("*",)`
            for each of them. Others get `PermissionDenied`, and `context().principal` is the one
            who calls, proven.

    Raises:
        ConfigError: the method or an option is not usable; the message says what to do.
    """

    def decorate(method: F) -> F:
        spec = declare(
            method,
            name=name,
            concurrency=concurrency,
            queue=queue,
            timeout=timeout,
            idle_timeout=idle_timeout,
            idempotent=idempotent,
            resume=resume,
            migration_limit=migration_limit,
            durable=durable,
            job_options={
                "tries": tries,
                "backoff": backoff,
                "ack_wait": ack_wait,
                "max_age": max_age,
                "result_age": result_age,
                "ordered_by": ordered_by,
            },
            batch=batch,
            batch_wait=batch_wait,
            batch_key=batch_key,
            batch_size_of=batch_size_of,
            allow=allow,
        )
        if _is_in_class(method) and not inspect.signature(method).parameters:
            raise ConfigError(f"{spec.label} takes no self: a handler is a method of an Actor")
        if not _is_in_class(method) and spec.resume not in (None, REPLAY):
            raise ConfigError(
                f"{spec.label}: resume={spec.resume!r} names a method, and the handler has no "
                f'class: write resume="{REPLAY}", or give the function to its clients'
            )
        spec.check_declared()
        spec.mark(method)
        return method

    return decorate if function is None else decorate(function)


def spec_of(name: str, function: Callable[..., Any]) -> HandlerSpec:
    """The handler that an async function, or a method that is bound to its object, is by itself.

    Options that `@handler` gives it hold.

    Raises:
        ConfigError: it is not usable as a handler, or the name is not legal.
    """
    check_token("endpoint", name)
    declared = HandlerSpec.of(function) or declare(function, name=name)
    signature = inspect.signature(function)
    spec = replace(
        declared,
        name=name,
        function=function,
        parameter=_request_parameter(declared.label, list(signature.parameters.values())),
        takes_context="context" in signature.parameters,
    )
    spec.check()
    return spec


def declare(
    method: Callable[..., Any],
    *,
    name: str | None,
    concurrency: int | None = _UNSET,
    queue: int | None = DEFAULT_QUEUE,
    timeout: float | None = _UNSET,
    idle_timeout: float | None = DEFAULT_IDLE_TIMEOUT,
    idempotent: bool = False,
    resume: str | None = None,
    migration_limit: int | None = None,
    durable: bool = False,
    job_options: Mapping[str, Any] = NO_OPTIONS,
    batch: int | None = None,
    batch_wait: float | str | None = None,
    batch_key: Selector | None = None,
    batch_size_of: Selector | None = None,
    allow: tuple[str, ...] | None = None,
) -> HandlerSpec:
    """The handler that a method is; its first parameter is the actor."""
    yields = _check_kind(method)
    label = method.__qualname__
    signature = inspect.signature(method)
    replies = takes_reply(signature)
    streaming = yields or replies
    parameters = list(signature.parameters.values())[1:]
    request = _request_parameter(label, parameters)
    _check_return(label, signature, yields=yields, replies=replies)
    default = None if streaming or durable else DEFAULT_TIMEOUT
    if durable and streaming:
        raise ConfigError(f"{label} streams, and the result of a job is one: return it")
    if durable and batch is not None:
        raise ConfigError(f"{label} is durable, and jobs are done one by one: leave out batch=")
    if durable and allow is not None:
        raise ConfigError(
            f"{label} is durable, and a job is no call of somebody who can prove who it is: leave "
            "out allow=, and let those alone submit jobs whose users have that (dynbus auth add)"
        )
    batches = Batching.of(label, batch, batch_wait, batch_key, batch_size_of, streaming=streaming)
    if concurrency is _UNSET:
        concurrency = DEFAULT_JOBS if durable else DEFAULT_CONCURRENCY
        if batches is not None:
            concurrency = batching.DEFAULT_CONCURRENCY
    return HandlerSpec(
        function=method,
        name=check_token("endpoint", name if name is not None else method.__name__),
        streaming=streaming,
        parameter=request,
        takes_context=any(parameter.name == "context" for parameter in parameters),
        takes_reply=replies,
        concurrency=_check_limit(label, "concurrency", concurrency, 1),
        queue=_check_limit(label, "queue", queue, 0),
        timeout=_check_seconds(label, "timeout", default if timeout is _UNSET else timeout),
        idle_timeout=_check_seconds(label, "idle_timeout", idle_timeout),
        idempotent=idempotent,
        resume=checked_resume(label, resume, streaming=streaming),
        migration_limit=checked_limit(label, migration_limit, resumes=resume is not None),
        durable=durable_options(label, durable, job_options),
        batch=batches,
        allow=_check_allow(label, allow),
    )


def _is_in_class(function: Callable[..., Any]) -> bool:
    return function.__qualname__.rpartition(".")[0].rpartition(".")[2] not in ("", "<locals>")


def _check_kind(method: Any) -> bool:
    label = getattr(method, "__qualname__", repr(method))
    if inspect.isasyncgenfunction(method):
        return True
    if inspect.iscoroutinefunction(method):
        return False
    if inspect.isgeneratorfunction(method):
        raise ConfigError(f"{label} is a plain generator: write `async def` and keep `yield`")
    raise ConfigError(
        f"{label} is not async: write `async def`, and run blocking work in a thread with "
        "`await anyio.to_thread.run_sync(...)`"
    )


def _request_parameter(
    label: str, parameters: Sequence[inspect.Parameter]
) -> inspect.Parameter | None:
    """The one of a handler's parameters that is neither context nor reply; None without one."""
    requests = [
        parameter
        for parameter in parameters
        if parameter.name != "context" and not is_reply(parameter)
    ]
    for parameter in requests:
        if is_typed_as_reply(parameter):
            raise ConfigError(f"{label}: its reply is called {parameter.name!r}: name it {REPLY!r}")
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            shown = parameter.replace(annotation=parameter.empty)
            raise ConfigError(
                f"{label} takes {shown}; a handler takes one request: put them into one model"
            )
    if len(requests) > 1:
        raise ConfigError(
            f"{label} takes {len(requests)} requests; a handler takes one: put them into one model"
        )
    for parameter in requests:
        if parameter.annotation is parameter.empty:
            raise ConfigError(
                f"{label}: annotate {parameter.name!r}, for example "
                f"{parameter.name}: Prompt (a pydantic model)"
            )
    return requests[0] if requests else None


def _check_return(label: str, signature: inspect.Signature, *, yields: bool, replies: bool) -> None:
    returns = signature.return_annotation
    if replies:
        if yields:
            raise ConfigError(f"{label} yields and takes a reply: send its items by one of the two")
        if returns not in (None, "None"):
            raise ConfigError(f"{label}: annotate -> None, since its items are sent by its reply")
        return
    if returns is signature.empty:
        example = "AsyncGenerator[Word, None]" if yields else "Word"
        raise ConfigError(f"{label}: annotate what it returns, for example -> {example}")
    text = returns if isinstance(returns, str) else getattr(returns, "__name__", str(returns))
    if not yields and text.partition("[")[0].rpartition(".")[2] in {
        kind.__name__ for kind in STREAM_TYPES
    }:
        raise ConfigError(f"{label} returns {text} but never yields: use `yield` for its items")


def _check_limit(label: str, option: str, value: Any, least: int) -> int | None:
    if value is not None and (type(value) is not int or value < least):
        raise ConfigError(
            f"{label}: {option}={value!r} must be {least} or more, or None for no limit"
        )
    return value


def _check_allow(label: str, allow: Any) -> frozenset[str] | None:
    if allow is None:
        return None
    if isinstance(allow, str) or not isinstance(allow, Collection) or not allow:
        raise ConfigError(
            f"{label}: allow={allow!r} must be the names of the users that may call it, such as "
            f'allow=("billing",), or ("{ANYBODY}",) for each user'
        )
    names = typing.cast("Collection[object]", allow)
    for name in names:
        if name != ANYBODY:
            check_token(f"{label}: the user in allow=", name)
    return frozenset(str(name) for name in names)


def _check_seconds(label: str, option: str, value: Any) -> float | None:
    if value is not None and not (isinstance(value, int | float) and 0 < value <= MAX_SECONDS):
        raise ConfigError(
            f"{label}: {option}={value!r} must be more than 0 and at most {MAX_SECONDS:g} "
            "seconds, or None for no limit"
        )
    return value
