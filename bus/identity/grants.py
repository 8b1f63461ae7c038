"""The permissions of a credential, each part of them with what it is for.

This is where permissions are spelled: `dynbus auth` renders the server's configuration of it, or
the tokens of accounts, and `docs/permissions.md` is made of it. Packages above the kernel add what
is theirs, as data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from dynbus.bus.flight import flight_stream
from dynbus.bus.protocol.names import (
    ABROAD_STREAM_NAME,
    CANCEL,
    CONTROL,
    DEFAULT_REPLY_PREFIXES,
    HOLDERS_BUCKET,
    INSTANCES_BUCKET,
    REPLY_ROOT,
    RUN,
    SCHEMA,
    WOKEN,
    ComponentName,
    EndpointName,
    abroad_subject,
    dead_letter_stream,
    dead_letter_subject,
    event_subject,
    follow_subjects,
    group_subject,
    holder_subject,
    job_cancel_subject,
    job_log_stream,
    job_log_subject,
    look_up_subjects,
    read_one_subjects,
    read_subjects,
    topic_stream,
    topic_subject,
    work_stream,
    work_subject,
)

SERVICES: Final = ("PING", "INFO", "STATS")
_INSTANCES: Final = f"KV_{INSTANCES_BUCKET}"
_HOLDERS: Final = f"KV_{HOLDERS_BUCKET}"


class Grant(NamedTuple):
    """Subjects that a credential may use for one purpose.

    Attributes:
        purpose: a phrase, such as `calls hello.Greeter`.
        publish, subscribe: subjects, with wildcards.
    """

    purpose: str
    publish: tuple[str, ...] = ()
    subscribe: tuple[str, ...] = ()

    @classmethod
    def of_recording(cls, namespace: str) -> Grant:
        """The grant to record in the flight of a namespace."""
        stream = flight_stream(namespace)
        # No more than to see that it is there: operators read it.
        info = f"$JS.API.STREAM.INFO.{stream.name}"
        return cls(f"records the flight of {namespace}", (*stream.subjects, info))

    def may_publish(self, subject: str) -> bool:
        """True if it allows to publish to a subject."""
        return any(covers(one, subject) for one in self.publish)

    def may_subscribe(self, subject: str) -> bool:
        """True if it allows to subscribe to a subject, which may have wildcards."""
        return any(covers(one, subject) for one in self.subscribe)


def covers(wide: str, narrow: str) -> bool:
    """True if a user with the permission `wide` may use `narrow`, as nats-server finds it.

    It takes `>` for a token like any other: who may subscribe to `a.*` may subscribe to `a.>`. So
    what ends with `*` is given only where all that is below is meant.
    """
    wides, narrows = wide.split("."), narrow.split(".")
    for place, token in enumerate(wides):
        if token == ">":
            return len(narrows) > place
        if place >= len(narrows):
            return False
        if token not in ("*", narrows[place]):
            return False
    return len(wides) == len(narrows)


# Each process ------------------------------------------------------------------------------


def hears_replies(principal: str) -> Grant:
    """Replies, which only the credential of that name hears."""
    return Grant("hears its own replies", subscribe=(f"{REPLY_ROOT}.{principal}.>",))


def finds_instances() -> Grant:
    """The instances that there are, with what they announce, in other regions too."""
    return Grant(
        "finds instances",
        tuple(
            subject
            for stream in (_INSTANCES, ABROAD_STREAM_NAME)
            for subject in (*follow_subjects(stream), f"$JS.API.DIRECT.GET.{stream}")
        ),
    )


def hears_cancels(namespace: str) -> Grant:
    """Cancels of operators."""
    return Grant(f"hears cancels in {namespace}", subscribe=(f"{namespace}.{CANCEL}",))


def hears_operators(namespace: str) -> Grant:
    """The questions of operators to the runs of a namespace."""
    return Grant(f"hears operators of runs in {namespace}", subscribe=(f"{namespace}.{RUN}",))


def removes_servers() -> Grant:
    """The question by which JetStream forgets a server that never comes back.

    It is heard in the account of servers alone.
    """
    return Grant("takes servers out of JetStream", ("$JS.API.SERVER.REMOVE",))


# Calls -------------------------------------------------------------------------------------


def calls(component: ComponentName, endpoints: Iterable[str] = ("*",)) -> Grant:
    """Requests to the endpoints of a component, and what goes with them.

    Args:
        endpoints: all unless given.
    """
    return Grant(
        f"calls {component}",
        (
            *(f"{component}.{one}{each}" for one in endpoints for each in ("", ".*")),
            f"{component}.{CONTROL}.*",
            f"{component}.{SCHEMA}.*",
        ),
    )


def calls_all(namespace: str) -> Grant:
    """Requests to whatever is in a namespace, and what goes with them."""
    return Grant(f"calls all of {namespace}", (f"{namespace}.*.*", f"{namespace}.*.*.*"))


def serves(component: ComponentName) -> list[Grant]:
    """The grants by which an instance of a component can be called.

    Replies go to whatever inbox the caller has, so it may publish to all of them.
    """
    names = f"{component.namespace}_{component.component}"
    return [
        Grant(
            f"serves {component}",
            tuple(f"{prefix}>" for prefix in DEFAULT_REPLY_PREFIXES[:2]),
            (
                f"{component}.*",
                f"{component}.*.*",
                *(
                    f"$SRV.{verb}{which}"
                    for verb in SERVICES
                    for which in ("", f".{names}", f".{names}.*")
                ),
            ),
        ),
        Grant(
            f"holds leases of {component}",
            (
                f"$KV.{INSTANCES_BUCKET}.{component}.*",
                *look_up_subjects(_INSTANCES),
                abroad_subject("*", component.instance("*")),
                # Asks whether another process has its id.
                component.instance("*").control_subject,
                # Before a restart: what those that run read and write.
                f"{component}.{SCHEMA}.*",
            ),
        ),
        hears_cancels(component.namespace),
        hears_operators(component.namespace),
    ]


# Jobs --------------------------------------------------------------------------------------


def submits(queue: EndpointName, *, ordered: bool = False) -> Grant:
    """Jobs for an endpoint, how they ended, and cancels and signals for them.

    Who may cancel a job may say how it ended: the record is the same.

    Args:
        ordered: the queue is an ordered one: a job of it that waits for a signal is given out
            again in its place, by who signals or cancels it.
    """
    stream, log = work_stream(queue), job_log_stream(queue)
    return Grant(
        f"submits jobs of {queue}",
        (
            work_subject(queue, "*", "*"),
            *(work_subject(queue, f"*.{name}", "*") for name in WOKEN),
            *read_subjects(stream),
            f"$JS.API.CONSUMER.INFO.{stream}.*",
            job_log_subject(queue, "*", "end"),
            job_log_subject(queue, "*", "log.run"),
            job_log_subject(queue, "*", "log.signal.*"),
            job_cancel_subject(queue),
            *read_subjects(log),
            *read_one_subjects(dead_letter_stream(queue.namespace), _letters(queue)),
            *((f"$JS.ACK.{stream}.*.>",) if ordered else ()),
        ),
        (job_log_subject(queue, "*", "end"),),
    )


def takes(queue: EndpointName, *, durable: bool = True) -> Grant:
    """Jobs of an endpoint, taken, done, and what is said of them.

    Args:
        durable: the jobs are those of a durable handler, which keeps a log of them.
    """
    stream, log = work_stream(queue), job_log_stream(queue)
    heard = (
        job_cancel_subject(queue),
        job_log_subject(queue, "*", "end"),
        job_log_subject(queue, "*", "log.signal.*"),
    )
    of_log = (
        job_log_subject(queue, "*"),
        *read_subjects(log),
        f"$JS.API.STREAM.PURGE.{log}",
        # What another region has taken over is in its log.
        f"$JS.*.API.STREAM.MSG.GET.{log}",
    )
    return Grant(
        f"takes jobs of {queue}",
        (
            work_subject(queue, ">", "*"),
            *read_subjects(stream),
            f"$JS.API.STREAM.MSG.DELETE.{stream}",
            f"$JS.API.CONSUMER.INFO.{stream}.*",
            f"$JS.API.CONSUMER.MSG.NEXT.{stream}.*",
            f"$JS.ACK.{stream}.*.>",
            *_of_takers(queue),
            *(of_log if durable else ()),
        ),
        (
            work_subject(queue, ">", "high"),
            *(heard if durable else ()),
        ),
    )


def _of_takers(queue: EndpointName) -> tuple[str, ...]:
    """The subjects by which takers keep dead letters, and say and ask who holds what."""
    return (
        _letters(queue),
        # The letters of others in the namespace are none of its business.
        *read_one_subjects(dead_letter_stream(queue.namespace), _letters(queue)),
        holder_subject(queue, "*"),
        *read_subjects(_HOLDERS),
        f"{REPLY_ROOT}.>",
    )


def _letters(queue: EndpointName) -> str:
    return dead_letter_subject(*queue)


# Topics ------------------------------------------------------------------------------------


def publishes_events(namespace: str, topic: str, *, kept: bool = True) -> Grant:
    """Events of a topic, published.

    Args:
        kept: a stream keeps them.
    """
    return Grant(
        f"publishes events of {namespace}.{topic}",
        (
            topic_subject(namespace, topic),
            *((f"$JS.API.STREAM.INFO.{topic_stream(namespace, topic)}",) if kept else ()),
        ),
    )


def hears_events(namespace: str, topic: str, *, kept: bool = True) -> Grant:
    """Events of a topic, heard by each instance for itself.

    Args:
        kept: as of `publishes_events`; a consumer of the instance's own reads them then.
    """
    purpose = f"hears events of {namespace}.{topic}"
    if not kept:
        return Grant(purpose, subscribe=(topic_subject(namespace, topic),))
    stream = topic_stream(namespace, topic)
    return Grant(
        purpose,
        (
            f"$JS.API.STREAM.INFO.{stream}",
            f"$JS.API.CONSUMER.CREATE.{stream}.*.{event_subject(namespace, topic)}",
            f"$JS.API.CONSUMER.DELETE.{stream}.*",
            f"$JS.FC.{stream}.>",
        ),
    )


def takes_events(
    namespace: str,
    topic: str,
    group: str,
    handler: EndpointName,
    consumers: Sequence[str],
    others: Sequence[str] = (),
    *,
    ordered: bool = False,
) -> Grant:
    """Events of a topic, taken as a member of a group, and settled.

    Args:
        handler: the method that takes them.
        consumers: those of the group, which an operator makes.
        others: the names that consumers of the group would have with another order; it is asked
            whether they are there.
        ordered: which deliveries were no tries is kept in the log of the method.
    """
    stream, log = topic_stream(namespace, topic), job_log_stream(handler)
    return Grant(
        f"takes events of {namespace}.{topic} in the group {group}",
        (
            f"$JS.API.STREAM.INFO.{stream}",
            *(f"$JS.API.CONSUMER.INFO.{stream}.{one}" for one in (*consumers, *others)),
            *(f"{_NEXT}.{stream}.{one}" for one in consumers),
            *(f"$JS.ACK.{stream}.{one}.>" for one in consumers),
            f"{group_subject(namespace, topic, group)}.*.*",
            *_of_takers(handler),
            *((job_log_subject(handler, "*", "return"), *read_subjects(log)) if ordered else ()),
        ),
    )


_NEXT: Final = "$JS.API.CONSUMER.MSG.NEXT"
_OWN: Final = ("$JS.API.CONSUMER.CREATE", "$JS.API.CONSUMER.DELETE")


def shared_consumers(grants: Iterable[Grant]) -> frozenset[tuple[str, str]]:
    """The consumers that grants name whose messages are shared: their streams and their names."""
    subjects = {subject for grant in grants for subject in grant.publish}
    named = (one.removeprefix(f"{_NEXT}.").split(".") for one in subjects if _NEXT in one)
    return frozenset((stream, name) for stream, name in named if name != "*")


def denied(grants: Iterable[Grant], shared: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """The subjects that a user is denied of those that its grants allow: who makes and drops
    consumers of its own in a stream changes and drops none that others share there."""
    return tuple(
        f"{call}.{stream}.{name}{subject.removeprefix(own)}"
        for stream, name in sorted(shared)
        for call in _OWN
        for own in [f"{call}.{stream}.*"]
        for subject in sorted({one for grant in grants for one in grant.publish})
        if subject.startswith(own)
    )


class Permission(NamedTuple):
    """The subjects of one verb, publishing or subscribing, as a server is to be told of them.

    Attributes:
        allow: for each purpose its subjects, each of them once.
        deny: those that are refused all the same. It is everything where nothing is allowed: an
            empty list of what is allowed allows everything.
    """

    allow: Mapping[str, Sequence[str]]
    deny: Sequence[str] = ()


def permissions(
    grants: Sequence[Grant], shared: Iterable[tuple[str, str]]
) -> tuple[Permission, Permission]:
    """The permissions of a user to publish and to subscribe.

    Args:
        shared: consumers that it may not change; see `shared_consumers`.
    """
    publish = _by_purpose((grant.purpose, grant.publish) for grant in grants)
    subscribe = _by_purpose((grant.purpose, grant.subscribe) for grant in grants)
    return (
        Permission(publish, denied(grants, shared) if publish else (">",)),
        Permission(subscribe, () if subscribe else (">",)),
    )


def _by_purpose(purposes: Iterable[tuple[str, Sequence[str]]]) -> dict[str, list[str]]:
    seen: set[str] = set()
    allowed: dict[str, list[str]] = {}
    for purpose, subjects in purposes:
        new = [one for one in dict.fromkeys(subjects) if one not in seen]
        seen.update(new)
        if new:
            allowed.setdefault(purpose, []).extend(new)
    return allowed


# People ------------------------------------------------------------------------------------


def operates(namespaces: Sequence[str]) -> list[Grant]:
    """The grants to decide over everything that is stored, and to end the calls of others."""
    return [
        Grant(
            "decides over all that is stored",
            ("$JS.API.>", "$JS.*.API.>", "$KV.>", "$O.>", "$JS.FC.>", "$JS.ACK.>"),
        ),
        Grant("asks instances how they are", tuple(f"$SRV.{verb}.>" for verb in SERVICES)),
        Grant("asks instances how they are, all at once", tuple(f"$SRV.{v}" for v in SERVICES)),
        *(
            Grant(
                f"operates {namespace}",
                (f"{namespace}.>",),
                (f"{namespace}.{CANCEL}",),
            )
            for namespace in namespaces
        ),
    ]


def observes(namespaces: Sequence[str]) -> list[Grant]:
    """The grants to see everything and its state; nothing is changed, and no content of a request
    is seen.
    """
    return [
        finds_instances(),
        Grant(
            "asks instances how they are",
            tuple(f"$SRV.{verb}{which}" for verb in SERVICES for which in ("", ".>")),
        ),
        Grant(
            "asks how full streams are",
            (
                "$JS.API.INFO",
                "$JS.API.STREAM.NAMES",
                "$JS.API.STREAM.INFO.*",
                "$JS.API.CONSUMER.NAMES.*",
                "$JS.API.CONSUMER.INFO.*.*",
            ),
        ),
        *(hears_cancels(namespace) for namespace in namespaces),
    ]
