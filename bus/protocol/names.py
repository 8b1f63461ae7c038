"""The names of the bus: what a token may look like, and how subjects are spelled.

Subjects of calls, jobs and instances are built here and nowhere else; those of KV-cache events, of
transfers and of resumable streams by the packages that own them, each in a module of this name.
Tokens that start with `_` belong to dynbus; a user's token never does.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final, NamedTuple

from dynbus.bus.errors import ConfigError

TOKEN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")
MAX_SUBJECT_BYTES: Final = 255

CONTROL: Final = "_ctl"
SCHEMA: Final = "_schema"
REPLY_ROOT: Final = "_R"
ANONYMOUS: Final = "-"

INSTANCES_BUCKET: Final = "dynbus_instances"
ABROAD: Final = "_abroad"
ABROAD_STREAM_NAME: Final = "DYNBUS_ABROAD"
WORK: Final = "_work"
JOBS: Final = "_jobs"
DEAD: Final = "_dead"
HOLDERS_BUCKET: Final = "dynbus_jobs"
CANCEL: Final = "_cancel"
RUN: Final = "_run"
TOPIC: Final = "_topic"
EVENT: Final = "_event"
GROUP: Final = "_group"
NO_KEY: Final = "="
"""The token of an event without a key; that of a key is never this."""

REGIONAL: Final = (
    "*.*._work.>",
    "*.*._jobs.>",
    "*.*._dead.*.*",
    "*._topic.>",
    "*.*._kv.*.*",
    "*.*._kv_load.>",
    "*.*._kv_resync.>",
    "_streams.>",
    "_models.>",
    "_batches.>",
    "_flight.>",
)
"""The subjects that do not leave a region: those that its streams store, and what its routers tell
each other. Those of buckets (`$KV.`, `$O.`) stay by themselves where each side has a JetStream
domain."""

DEFAULT_REPLY_PREFIXES: Final = ("_R.", "_INBOX.", "_R_.", "_GR_.")
_ROOTS_OF_OTHER_ACCOUNTS: Final = ("_R_", "_GR_")

_LITERAL_SUBJECT = re.compile(r"[!-~]+")
_JOB_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,64}")
_LANE = re.compile(r"[a-z0-9]{1,8}")


def check_token(kind: str, value: object) -> str:
    """Return `value` when it is a legal name.

    Args:
        kind: what is being named, for the message: `namespace`, `component`, ...

    Raises:
        ConfigError: it is not a string of 1 to 63 characters `A-Z a-z 0-9 _ -` that begins
            with a letter or a digit.
    """
    if isinstance(value, str) and TOKEN.fullmatch(value):
        return value
    raise ConfigError(
        f"{kind} {value!r} is not a valid name: use 1 to 63 letters, digits, '_' or '-', "
        "beginning with a letter or a digit"
    )


class ComponentName(NamedTuple):
    """`namespace.component`: one kind of actor in a namespace."""

    namespace: str
    component: str

    @classmethod
    def parse(cls, text: str) -> ComponentName:
        """Split and check a dotted name.

        Raises:
            ConfigError: it does not have two legal parts.
        """
        parts = text.split(".")
        if len(parts) != 2:
            raise ConfigError(
                f"{text!r} is not a component: write namespace.component, for example demo.Shouter"
            )
        return cls.of(*parts)

    @classmethod
    def of(cls, namespace: str, component: str) -> ComponentName:
        """Check two tokens and join them.

        Raises:
            ConfigError: one of them is not a legal name.
        """
        return cls(check_token("namespace", namespace), check_token("component", component))

    def __str__(self) -> str:
        return f"{self.namespace}.{self.component}"

    def endpoint(self, name: str) -> EndpointName:
        """One endpoint of the component; its name is not checked."""
        return EndpointName(self.namespace, self.component, name)

    def instance(self, instance_id: str) -> InstanceName:
        """One instance of the component; its id is not checked."""
        return InstanceName(self.namespace, self.component, instance_id)


class InstanceName(NamedTuple):
    """`namespace.component@id`: one running instance of a component."""

    namespace: str
    component: str
    instance_id: str

    def __str__(self) -> str:
        return f"{self.namespace}.{self.component}@{self.instance_id}"

    @property
    def address(self) -> str:
        """`namespace.component`."""
        return f"{self.namespace}.{self.component}"

    @property
    def control_subject(self) -> str:
        """The subject at which the instance takes cancels, credit, resumes and pings."""
        return control_subject(*self)


class EndpointName(NamedTuple):
    """`namespace.component.endpoint`: one handler of one kind of actor."""

    namespace: str
    component: str
    endpoint: str

    @classmethod
    def parse(cls, text: str) -> EndpointName:
        """Split and check a dotted name.

        Raises:
            ConfigError: it does not have three legal parts.
        """
        parts = text.split(".")
        if len(parts) != 3:
            raise ConfigError(
                f"{text!r} is not an endpoint: write namespace.component.endpoint, "
                "for example demo.Shouter.generate"
            )
        return cls.of(*parts)

    @classmethod
    def of(cls, namespace: str, component: str, endpoint: str) -> EndpointName:
        """Check three tokens and join them.

        Raises:
            ConfigError: one of them is not a legal name.
        """
        return cls(
            check_token("namespace", namespace),
            check_token("component", component),
            check_token("endpoint", endpoint),
        )

    def __str__(self) -> str:
        return f"{self.namespace}.{self.component}.{self.endpoint}"

    @property
    def component_name(self) -> ComponentName:
        """The component that the endpoint is of."""
        return ComponentName(self.namespace, self.component)

    def at(self, instance_id: str) -> str:
        """The subject of this endpoint on one instance."""
        return f"{self.namespace}.{self.component}.{self.endpoint}.{instance_id}"

    def hop(self, instance_id: str) -> str:
        """The name of this endpoint on one instance, in errors and logs."""
        return f"{self.namespace}.{self.component}.{self.endpoint}@{instance_id}"


def control_subject(namespace: str, component: str, instance_id: str) -> str:
    """The subject at which one instance takes cancels, credit, resumes and pings."""
    return f"{namespace}.{component}.{CONTROL}.{instance_id}"


def cancel_subject(namespace: str) -> str:
    """The subject at which operators cancel the requests of a namespace.

    It has a token less than any subject that callers may publish to, so none of them can end
    what another one asked for.
    """
    return f"{namespace}.{CANCEL}"


def abroad_subject(region: str, instance: InstanceName) -> str:
    """The subject at which an instance says to all regions what it is; `*` for any region, and for
    any part of a name."""
    return f"{ABROAD}.{region}.{instance.namespace}.{instance.component}.{instance.instance_id}"


def run_subject(namespace: str) -> str:
    """The subject at which operators ask the runs that serve a namespace, and steer them.

    It has a token less than any subject that callers may publish to, as that of cancels.
    """
    return f"{namespace}.{RUN}"


def job_token(job_id: str) -> str:
    """A job's id as a token of a subject: itself where it can be one, else its hash behind `=`."""
    if _JOB_TOKEN.fullmatch(job_id):
        return job_id
    return f"={hashlib.blake2s(job_id.encode(), digest_size=16).hexdigest()}"


def work_subject(queue: EndpointName, job: str = ">", lane: str = "normal") -> str:
    """The subject to which jobs of an endpoint are put. Copies of it have one more token.

    Args:
        lane: of the queue; `*` for any.
    """
    return f"{queue.namespace}.{queue.component}.{WORK}.{queue.endpoint}.{lane}.{job}"


def is_lane(text: str) -> bool:
    """True if a text may be the name of a lane of a queue."""
    return _LANE.fullmatch(text) is not None


def lane_of_subject(subject: str) -> str:
    """The lane of the job that was put at a subject."""
    return subject.split(".")[4]


def job_of_subject(subject: str) -> str:
    """The token of the job that was put at a subject."""
    return subject.split(".")[5]


WOKEN: Final = ("woken0", "woken1")
"""The names of the copies by which signals have a job handed out at once."""


def is_copy_subject(subject: str) -> bool:
    """True if a job was put at a subject as a copy of one."""
    return subject.count(".") > 5


_WORK_STREAM: Final = "DYNBUS_WORK_"


def work_stream(queue: EndpointName) -> str:
    """The stream of an endpoint's jobs; `+` is in no token, so no two endpoints share one."""
    return f"{_WORK_STREAM}{queue.namespace}+{queue.component}+{queue.endpoint}"


def job_log_subject(queue: EndpointName, job: str, record: str = ">") -> str:
    """The subject of a record of one job of an endpoint, by the job's token; `>` for any."""
    return f"{queue.namespace}.{queue.component}.{JOBS}.{queue.endpoint}.{job}.{record}"


def job_of_record(subject: str) -> str:
    """The token of the job that a record of a log is about."""
    return subject.split(".")[4]


def job_cancel_subject(queue: EndpointName) -> str:
    """The subject where the takers of an endpoint's jobs hear of cancelled ones.

    It has a token more than any subject that callers may publish to, so that who only calls ends
    nobody's job.
    """
    return f"{queue.namespace}.{queue.component}.{JOBS}.{queue.endpoint}.cancelled"


def job_log_stream(queue: EndpointName) -> str:
    """The stream of what became of an endpoint's jobs."""
    return f"DYNBUS_JOBS_{queue.namespace}+{queue.component}+{queue.endpoint}"


def queue_of_stream(stream: str) -> EndpointName | None:
    """The endpoint whose jobs a stream has; None for a stream of something else."""
    names = stream.removeprefix(_WORK_STREAM).split("+")
    if not stream.startswith(_WORK_STREAM) or len(names) != 3:
        return None
    return EndpointName(*names)


SCHEDULE: Final = "=schedule"
MOVES: Final = "=moves"
NO_JOBS: Final = (SCHEDULE, MOVES)
"""The tokens of a log that are no jobs'."""


def copy_stream(stream: str, region: str) -> str:
    """The stream in which another region keeps a copy of a stream of this one."""
    return f"DYNBUS_COPY_{region}_{stream.removeprefix('DYNBUS_')}"


def check_other_region(own: str, region: str) -> None:
    """Refuse what is no name of a region other than the one that the server is in.

    Args:
        own: the region of the server; empty for none.

    Raises:
        ConfigError: it is none, or the server is in it, or in none.
    """
    if TOKEN.fullmatch(region) is None:
        raise ConfigError(
            f"{region!r} is no region: give the name that the JetStream domain of its servers has"
        )
    if not own:
        raise ConfigError(
            f"what region {region} has goes on in another region alone, and the server is in none: "
            "give it a JetStream domain, docs/guides/regions.md"
        )
    if own == region:
        raise ConfigError(
            f"the server is in region {region} itself: give --nats a server of the region that is "
            "to go on with what it has"
        )


def moves_subject(queue: EndpointName, region: str) -> str:
    """The subject of the record of an endpoint's log that says which jobs of another region were
    taken over from there."""
    return job_log_subject(queue, MOVES, region)


def holder_subject(queue: EndpointName, taker: str) -> str:
    """The subject under which one taker of an endpoint's jobs stores which of them it holds; `*`
    for any."""
    return f"$KV.{HOLDERS_BUCKET}.{queue.namespace}.{queue.component}.{queue.endpoint}.{taker}"


def dead_letter_subject(
    namespace: str, component: str = "*", endpoint: str = "*", letter: str = "*"
) -> str:
    """The subject under which one dead letter of an endpoint's jobs is kept; `*` for any."""
    return f"{namespace}.{component}.{DEAD}.{endpoint}.{letter}"


def dead_letter_stream(namespace: str) -> str:
    """The stream of the dead letters of a namespace."""
    return f"DYNBUS_DEAD_{namespace}"


def check_topic(name: object) -> str:
    """Return `name` when it is a legal name of a topic: names with dots between.

    Raises:
        ConfigError: it is not, or has more than 128 characters.
    """
    if isinstance(name, str) and len(name) <= 128 and all(map(TOKEN.fullmatch, name.split("."))):
        return name
    raise ConfigError(
        f"topic {name!r} is not a valid name: use letters, digits, '_' or '-' with dots between, "
        "128 at most, for example conversation.closed"
    )


def topic_subject(namespace: str, topic: str, key: str = "*") -> str:
    """The subject of a topic's events, by the token of their key; `*` for any."""
    return f"{namespace}.{TOPIC}.{topic}.{EVENT}.{key}"


def event_subject(namespace: str, topic: str, lane: str = "*") -> str:
    """The subject under which the stream of a topic keeps the events of a lane, of all keys; `*`
    for any lane.
    """
    return f"{namespace}.{TOPIC}.{topic}.{EVENT}.{lane}.*"


def topic_key(key: str) -> str:
    """The token of an event's key; `=` for an event without one."""
    return job_token(key) if key else NO_KEY


def group_subject(namespace: str, topic: str, group: str, lane: str = "*") -> str:
    """Below which copies of the events of a lane are put that one group alone is to get."""
    return f"{namespace}.{TOPIC}.{topic}.{GROUP}.{group}.{lane}"


def lane_of_event(subject: str) -> str:
    """The lane of an event by where it is kept, or of a copy of one."""
    *_, kind, lane, _ = subject.split(".")
    return lane if kind == EVENT else kind


class GroupAt(NamedTuple):
    """A lane of a group of a topic."""

    namespace: str
    topic: str
    group: str
    lane: str


def group_at(subject: str) -> GroupAt | None:
    """The group of which copies of events may be put below a subject; None where nothing else is
    put."""
    tokens = subject.split(".")
    if len(tokens) < 6 or tokens[1] != TOPIC or tokens[-3] != GROUP:
        return None
    if not all(map(TOKEN.fullmatch, (tokens[0], *tokens[2:-3], *tokens[-2:]))):
        return None
    return GroupAt(tokens[0], ".".join(tokens[2:-3]), *tokens[-2:])


_TOPIC_STREAM: Final = "DYNBUS_TOPIC_"


def topic_stream(namespace: str, topic: str) -> str:
    """The stream of a topic's events."""
    return f"{_TOPIC_STREAM}{namespace}+{topic.replace('.', '+')}"


def topic_of_stream(stream: str) -> tuple[str, str] | None:
    """The namespace and the name of the topic whose events a stream has; None for another one."""
    namespace, plus, topic = stream.removeprefix(_TOPIC_STREAM).partition("+")
    if not stream.startswith(_TOPIC_STREAM) or not plus:
        return None
    return namespace, topic.replace("+", ".")


def look_up_subjects(stream: str) -> tuple[str, ...]:
    """The subjects by which it is asked whether a stream is there, and for the last message of a
    subject."""
    return (f"$JS.API.STREAM.INFO.{stream}", f"$JS.API.STREAM.MSG.GET.{stream}")


def read_subjects(stream: str) -> tuple[str, ...]:
    """The subjects by which what a stream holds now is read."""
    return (*look_up_subjects(stream), f"$JS.API.DIRECT.GET.{stream}")


def read_one_subjects(stream: str, subject: str) -> tuple[str, ...]:
    """The subjects by which it is asked whether a stream is there, and what it holds last under a
    subject (wildcards allowed) and no other."""
    return (f"$JS.API.STREAM.INFO.{stream}", f"$JS.API.DIRECT.GET.{stream}.{subject}")


def follow_subjects(stream: str) -> tuple[str, ...]:
    """The subjects by which a stream is read, and what is stored from then on, through a consumer
    of one's own."""
    return (
        *look_up_subjects(stream),
        f"$JS.API.CONSUMER.CREATE.{stream}.*.>",
        f"$JS.API.CONSUMER.DELETE.{stream}.*",
        f"$JS.FC.{stream}.>",
    )


class ReplySubjects:
    """The subjects under which one client hears from the bus.

    `{base}.{number}` answers one request, `{base}.f` carries frames, `{base}.b.{peer}` is
    where the server's own 503 comes back to when a message found nobody;
    `{base}.ctl.f` and `{base}.ctl.b.{peer}` are the same on the control connection. Below
    `server_api` and `control_server_api` a connection hears answers of the server's own APIs.
    """

    def __init__(self, principal: str, client_id: str) -> None:
        self.principal = principal
        self.client_id = client_id
        self.base = f"{REPLY_ROOT}.{principal}.{client_id}"
        self.frames = f"{self.base}.f"
        self.control_frames = f"{self.base}.ctl.f"
        self.data_wildcard = f"{self.base}.*"
        self.bounce_wildcard = f"{self.base}.b.*"
        self.server_api = f"{self.base}.js"
        self.control_server_api = f"{self.base}.jscontrol"

    def request(self, number: int) -> str:
        return f"{self.base}.{number}"

    def bounce(self, peer: str) -> str:
        return f"{self.base}.b.{peer}"

    def control_bounce(self, peer: str) -> str:
        return f"{self.base}.ctl.b.{peer}"

    def holder(self, taker: str) -> str:
        """The subject at which the process of a taker of jobs listens on its control connection."""
        return f"{self.base}.ctl.h.{taker}"


def split_number(subject: str) -> tuple[str, int] | None:
    """A subject without its last token, and that token where it is a number."""
    base, _, number = subject.rpartition(".")
    if number.isascii() and number.isdigit() and len(number) <= 18:
        return base, int(number)
    return None


def principal_of(base: str) -> str:
    """The principal whose users alone hear the answers below a client's reply base; nobody's where
    others may hear them too, such as below `_INBOX`."""
    root, principal, _ = base.split(".")
    return principal if root == REPLY_ROOT else ANONYMOUS


def turn_taker(reply: str) -> str:
    """The one that takes turns with others: the principal or the client that is answered at
    `reply`.

    That is the credential's name where there is one, else what all requests of one client have
    in common. Those that name no client (`_INBOX.{random}`, replies from another account) take
    turns as one: a client that makes up a new name for each request gains nothing by it.
    """
    root, _, rest = reply.partition(".")
    first, _, others = rest.partition(".")
    if root in _ROOTS_OF_OTHER_ACCOUNTS or not others:
        return root
    if root == REPLY_ROOT and first != ANONYMOUS:
        return f"{root}.{first}"
    return reply.rpartition(".")[0]


def is_safe_reply(reply: str, prefixes: tuple[str, ...]) -> bool:
    """True if a message may be answered at `reply`.

    A reply subject is chosen by the sender of the request and used with our permissions, so
    anything but an inbox (`$JS.API...`, another service's subject) is an attack.
    """
    return (
        reply.startswith(prefixes)
        and len(reply) <= MAX_SUBJECT_BYTES
        and _LITERAL_SUBJECT.fullmatch(reply) is not None
        and "*" not in reply
        and ">" not in reply
        and ".." not in reply
        and not reply.endswith(".")
    )
