"""Topics: events that are published once, heard by every instance, and once by each group."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import replace
from datetime import datetime
from functools import cached_property
from typing import Any, Final, Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary

import msgspec

from dynbus.actors.calling.jobs import call_headers
from dynbus.actors.calling.options import checked_options
from dynbus.actors.compatibility.schema_difference import Fit, compare
from dynbus.actors.declaring.actor import Subscription, mark
from dynbus.actors.declaring.brief_repr import brief_repr
from dynbus.actors.declaring.codec import AnyCodec, Misfit, codec_for
from dynbus.actors.declaring.durable import DEFAULT_JOBS, durable_options
from dynbus.actors.declaring.handlers import HandlerSpec, declare
from dynbus.actors.declaring.schemas import canonical_schema, schema_of
from dynbus.bus.bus import Bus, current_bus
from dynbus.bus.context import Context, current_instance
from dynbus.bus.errors import ConfigError, InvalidRequest
from dynbus.bus.protocol.names import check_token
from dynbus.bus.protocol.random_ids import random_id
from dynbus.bus.protocol.seconds import seconds_of
from dynbus.bus.topics import DEFAULT_MAX_BYTES, TopicConfig, TopicStream

E = TypeVar("E")
E_contra = TypeVar("E_contra", contravariant=True)
A_contra = TypeVar("A_contra", contravariant=True)
F = TypeVar("F")

PUBLISH_TIMEOUT: Final = 5.0
MAX_KEY: Final = 128


class HasBus(Protocol):
    """A runtime."""

    @property
    def bus(self) -> Bus: ...


class HearsEvent(Protocol[A_contra, E_contra]):
    """A method that takes an event."""

    def __call__(self, actor: A_contra, event: E_contra, /) -> Coroutine[Any, Any, None]: ...


class Topic(Generic[E]):
    """A kind of events, named where programs can import it:

        closed = Topic("conversation.closed", Closed, namespace="desk")

    Args:
        name: names with dots between.
        event: the type of its events.
        retain: how long they are kept for groups and replays, as seconds or text such as `"7d"`;
            None for events that only those hear who listen as they are published.
        namespace: where it is; that of the actor which publishes or hears it unless given.
        max_bytes: of the events that are kept: a publisher of more gets `Overloaded`, until the
            oldest are older than `retain`.

    Raises:
        ConfigError: a name, the time or the type is not usable.
    """

    def __init__(
        self,
        name: str,
        event: type[E],
        *,
        retain: float | str | None = "7d",
        namespace: str = "",
        max_bytes: int = DEFAULT_MAX_BYTES,
    ) -> None:
        self.namespace = check_token("namespace", namespace) if namespace else ""
        seconds = None if retain is None else seconds_of(retain, f"topic {name}: retain")
        self._config = TopicConfig("", name, seconds, max_bytes=max_bytes).check()
        self.name = name
        self.retain = seconds
        self._event = event
        # Made where it is used first: that there is no codec is said here.
        try:
            self._codec: AnyCodec = codec_for(event)
        except Exception as error:  # noqa: BLE001 - what users' types raise
            raise ConfigError(
                f"topic {name}: events of {event!r} cannot be JSON: {error}"
            ) from None
        self._streams: WeakKeyDictionary[Bus, dict[str, TopicStream]] = WeakKeyDictionary()

    def __repr__(self) -> str:
        return f"<Topic {self.name}>"

    async def publish(
        self,
        event: E,
        *,
        key: str = "",
        idempotency_key: str | None = None,
        runtime: HasBus | None = None,
    ) -> None:
        """Publish an event: one message, which reaches everybody who hears the topic, or nobody.

        On return the server has it, where the topic retains its events. The trace, the metadata
        and the priority of the running call go with it.

        Args:
            key: what it is about. 1 to 128 characters, or none.
            idempotency_key: names the event: another one that is published under this key within
                two minutes is left out. A step of a job gives one of its own. Nothing is left out
                of a topic that retains nothing.
            runtime: where nothing of an actor runs, such as in a program beside them.

        Raises:
            ConfigError: nobody knows where: there is no namespace, or no runtime; or the topic has
                events of another type; or `idempotency_key` is not usable.
            InvalidRequest: the event is not of the type, or the key is not usable.
            Overloaded: the topic is full; it says when to try again.
            PayloadTooLarge: the event does not fit into a message.
            Unavailable: the server did not confirm it in time; it may be there.
        """
        bus = current_bus() if runtime is None else runtime.bus
        if bus is None:
            raise ConfigError(f"{self.name}: no actor runs here: publish(event, runtime=runtime)")
        if not isinstance(key, str) or len(key) > MAX_KEY:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidRequest(
                f"{self.name}: key={key!r} is no text of {MAX_KEY} characters at most",
                started=False,
            )
        event_id = _event_id(idempotency_key)
        try:
            data = self._codec.encode(event)
        except Misfit as error:
            raise InvalidRequest(f"an event of {self.name}: {error}", started=False) from None
        fields = call_headers({}, Context.current())
        stream = self.stream_on(bus)
        await stream.publish(data, key, event_id, fields, PUBLISH_TIMEOUT)

    def stream_on(self, bus: Bus) -> TopicStream:
        """The events of the topic, on a bus."""
        config = self.config()
        streams = self._streams.setdefault(bus, {})
        stream = streams.get(config.namespace)
        if stream is None:
            made = TopicStream(bus.data, config, self.misfit, bus.telemetry)
            stream = streams[config.namespace] = made
        return stream

    def config(self, namespace: str = "") -> TopicConfig:
        """The topic, where it is.

        Args:
            namespace: of who asks; that of the running instance unless given.

        Raises:
            ConfigError: neither says it.
        """
        running = current_instance()
        where = self.namespace or namespace or (running.namespace if running else "")
        if not where:
            raise ConfigError(
                f'topic {self.name}: no actor runs here that says where it is: give Topic("'
                f'{self.name}", ..., namespace="...")'
            )
        return self._config._replace(namespace=where, schema=self._schema)

    @cached_property
    def _schema(self) -> str:
        schema = canonical_schema(schema_of(self._codec, written=True))
        return msgspec.json.encode(schema, order="sorted").decode() if schema else ""

    def misfit(self, kept: str) -> str:
        """The first thing that readers here cannot read of events that were written by a schema;
        empty where there is none."""
        if kept == self._schema:
            return ""
        own = canonical_schema(schema_of(self._codec))
        differences = compare(msgspec.json.decode(kept), own, "request")
        wrong = [str(one) for one in differences if one.verdict is Fit.INCOMPATIBLE]
        return wrong[0] if wrong else ""

    def check_method(self, spec: HandlerSpec) -> None:
        """Refuse a method that can read no event of the topic.

        A superclass passes, and so does a union or whatever else reads the events as they are
        written.

        Raises:
            ConfigError: its parameter has another type, or an annotation that is no type.
        """
        reader = spec.request_codec
        assert reader is not None, "a method that hears a topic takes the event"
        written = canonical_schema(schema_of(self._codec, written=True))
        read = canonical_schema(schema_of(reader))
        if not written or not read:  # such as bytes, which are passed on as they are
            return
        differences = compare(written, read, "request")
        if any(one.verdict is Fit.INCOMPATIBLE for one in differences):
            parameter = spec.parameter
            assert parameter is not None, "what has a codec has a parameter"
            event, other = _type_name(self._event), _type_name(reader.annotation)
            raise ConfigError(
                f"{spec.label} takes {other}, which reads no event of {self.name}, of {event}: "
                f"write `{parameter.name}: {event}`, or hear another topic"
            )


def subscribe(
    topic: Topic[E],
    *,
    group: str = "",
    from_: str | datetime = "new",
    ordered: bool = False,
    concurrency: int | None = None,
    timeout: float | None = None,
    tries: int | None = None,
    backoff: float | None = None,
    ack_wait: float | None = None,
    max_age: float | None = None,
) -> Callable[[HearsEvent[Any, E]], HearsEvent[Any, E]]:
    """Have a method of an `Actor` hear a topic.

    Every instance hears each event that is published while it runs, one after another. With a
    group one instance of the group does, whichever has time: the group has its place kept while
    nobody of it runs, and an event that failed is tried again and is a dead letter at last, as jobs
    are.

    Args:
        group: names the group; one method has it. The topic must retain its events.
        from_: where a group begins that is new: `"new"`, `"all"` that is kept, or a time with its
            zone.
        ordered: whether the group has the events of a key in order, one at a time, keys side by
            side. One that fails is tried again before the next of its key. Those without a key are
            of one.
        concurrency: events that an instance has at a time: 16 of a group, 1 without.
        timeout: seconds for one try; none unless given.
        tries, backoff, ack_wait, max_age: of a group, as `handler(durable=True)` has them.

    Raises:
        ConfigError: the method or an option is not usable, or the method's type cannot read the
            events; the message says what to do.
    """

    def decorate(method: HearsEvent[Any, E]) -> HearsEvent[Any, E]:
        function: Any = method
        label = getattr(function, "__qualname__", repr(function))
        options = {"tries": tries, "backoff": backoff, "ack_wait": ack_wait, "max_age": max_age}
        if HandlerSpec.of(function) is not None:
            raise ConfigError(f"{label} is a handler: have another method hear {topic.name}")
        if not group:
            if ordered or from_ != "new" or any(one is not None for one in options.values()):
                raise ConfigError(
                    f"{label}: ordered, from_, tries, backoff, ack_wait and max_age are for a "
                    "group: give one, @subscribe(topic, group=...)"
                )
        else:
            check_token("group", group)
            if topic.retain is None:
                raise ConfigError(
                    f"{label}: a group keeps its place in what is kept, and {topic.name} retains "
                    'nothing: give the topic retain="7d"'
                )
        _check_start(label, from_)
        default = DEFAULT_JOBS if group else 1
        spec = declare(function, name=None, concurrency=concurrency or default, timeout=timeout)
        if spec.streaming or spec.parameter is None:
            raise ConfigError(f"{label} must be async, take the event and return None")
        spec.check_declared()
        try:
            # Of a copy, which keeps nothing: a name may be given to another class later.
            reader = replace(spec).request_codec
        except Exception:  # noqa: BLE001 - what it names may be defined later; the start tells then
            reader = None
        if reader is not None:
            topic.check_method(replace(spec))
        kept = durable_options(label, True, options)
        assert kept is not None, "what is asked for as durable has options"
        handed_out = kept.queue._replace(ordered=ordered)
        mark(function, Subscription(spec, topic, group, handed_out, from_))
        return method

    return decorate


def _event_id(idempotency_key: str | None) -> str:
    if idempotency_key is None:
        return random_id()
    if not idempotency_key:
        raise ConfigError("idempotency_key='' names no event: give a key, or leave it out")
    checked_options({"idempotency_key": idempotency_key}, "publish(...)")
    return idempotency_key


def _type_name(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else brief_repr(annotation)


def _check_start(label: str, start: Any) -> None:
    if isinstance(start, datetime):
        if start.tzinfo is None:
            raise ConfigError(f"{label}: from_={start.isoformat()} has no time zone: give one")
    elif start not in ("new", "all"):
        raise ConfigError(f'{label}: from_={start!r}: give "new", "all" or a datetime')
