"""The deployment of a run, as data: its workloads, each a node with what its processes need.

No I/O: it is made of a run that has been loaded.
"""

from __future__ import annotations

import math
import posixpath
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Final, NamedTuple

from dynbus.actors.declaring.arguments import (
    build_arguments,
    defaults,
    is_from_file,
    secret_arguments,
)
from dynbus.actors.declaring.resources import Resources
from dynbus.actors.declaring.service_args import SERVICE_KEY
from dynbus.actors.declaring.specification import load_options
from dynbus.actors.running.in_process import Assignment
from dynbus.actors.running.plan import PlanRequest
from dynbus.actors.running.planning import LoadedRun
from dynbus.bus.config import BusConfig, is_loopback, suggestion
from dynbus.bus.errors import ConfigError
from dynbus.bus.identity.credentials import CREDS, user_of
from dynbus.bus.identity.keys import SUFFIX
from dynbus.bus.protocol.endpoint import DEFAULT_CONCURRENCY
from dynbus.bus.protocol.names import ComponentName, work_stream
from dynbus.bus.telemetry.logs import redact_url
from dynbus.bus.work_queue import lanes_of

HEALTH_PORT: Final = 9180
"""The port at which each `dynbus run` of a deployment serves `/live`, `/ready` and `/metrics`."""
ON_STOP_SECONDS: Final = 30
"""The most that `on_stop` may take after the grace."""
MARGIN_SECONDS: Final = 5
OVERHEAD_BYTES: Final = 256 * 1024**2
"""Memory of `dynbus run` and of the process that makes its instances, beside that of these."""
MAX_REPLICAS: Final = 1024

LISTENS_AT: Final = "host"
"""The argument of actors that listen beside the bus, which have `port` too."""

LEFT_OUT: Final = frozenset({"..", "secrets", "seeds", ".git", ".venv"})
"""Parts of paths of files that are in no image: outside the project, or not for it."""

_NAME: Final = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", re.ASCII)
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


class Scale(NamedTuple):
    """The bounds between which the number of instances goes by what waits.

    Attributes:
        calls: those that one instance is to have at a time, running and waiting.
    """

    least: int
    most: int
    calls: int


class Hosts(NamedTuple):
    """The hosts that one instance takes.

    Attributes:
        number: how many, the one that serves included.
        lead: a shell command that is run on that one before it serves; empty for none.
        join: what the others run; `LWS_LEADER_ADDRESS` in it is where the first is.
    """

    number: int
    lead: str
    join: str


class Queue(NamedTuple):
    """A queue of jobs that instances of a workload take.

    Attributes:
        jobs: how many one instance does at a time.
    """

    stream: str
    lanes: tuple[str, ...]
    jobs: int


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A node of the run, which is deployed by itself.

    Attributes:
        name: of its objects, unique in the application.
        address: `namespace.component`.
        key: how options name the node.
        replicas: its instances.
        grace: seconds that it may take to end, from the signal on.
        port: where it listens beside the bus; 0 for nowhere.
        listen: at which address it does in place of the one that it is given; empty for that one.
        queues: of its durable handlers.
        is_called: whether it has handlers that are called directly.
        reaches_peers: whether its instances reach those of other such workloads at any port.
    """

    name: str
    address: str
    key: str
    replicas: int
    resources: Resources = Resources()
    grace: int = 65
    port: int = 0
    listen: str = ""
    queues: tuple[Queue, ...] = ()
    is_called: bool = True
    scale: Scale | None = None
    hosts: Hosts | None = None
    reaches_peers: bool = False

    @property
    def user(self) -> str:
        """Its user on the server, where it has one of its own."""
        return user_of(ComponentName.parse(self.address))

    @property
    def memory_limit(self) -> int | None:
        """Bytes of all processes of one `dynbus run` that serves one instance; None for any."""
        declared = self.resources.memory
        return None if declared is None else declared + OVERHEAD_BYTES


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The choices of the user, beside those of the run.

    Attributes:
        name: of the application; empty for the namespace of its nodes.
        scale, hosts: by the keys of nodes.
        peers: keys of nodes.
        listen: the address where a node listens for others that listens at loopback now; empty for
            leaving it there.
        variables: names of variables whose values are secrets.
        secret_files: paths in the process, by the names of secrets.
        egress: ports of TCP that processes may reach anywhere.
    """

    name: str = ""
    scale: Mapping[str, Scale] = field(default_factory=dict[str, Scale])
    hosts: Mapping[str, Hosts] = field(default_factory=dict[str, Hosts])
    peers: Collection[str] = ()
    listen: str = ""
    variables: Sequence[str] = ()
    secret_files: Mapping[str, str] = field(default_factory=dict[str, str])
    egress: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True)
class Application:
    """All workloads of a run, and what they have in common.

    Attributes:
        targets, options: as `dynbus run` takes them.
        configs: the YAML files, by their paths as given.
        servers: of the bus; empty where one is deployed beside the workloads.
        keys: the folder with a key for each workload, each a user of its own; empty without users.
        key_suffix: that of these files: of NKEYs, or of credentials files of NATS.
        server_users: the file with these users, which nats-server includes; empty without keys.
        variables, secret_files, egress: as of `Choices`.
    """

    name: str
    targets: tuple[str, ...]
    workloads: tuple[Workload, ...]
    options: tuple[str, ...] = ()
    configs: Mapping[str, str] = field(default_factory=dict[str, str])
    servers: tuple[str, ...] = ()
    keys: str = ""
    key_suffix: str = SUFFIX
    server_users: str = ""
    variables: tuple[str, ...] = ()
    secret_files: Mapping[str, str] = field(default_factory=dict[str, str])
    egress: tuple[int, ...] = ()

    def key_file(self, workload: Workload) -> str:
        """The name of the file with the key of a workload."""
        return f"{workload.user}{self.key_suffix}"

    def command(
        self,
        workload: Workload,
        *,
        workers: int = 1,
        configs: Sequence[str] | None = None,
        health: str = "",
    ) -> list[str]:
        """The arguments of `dynbus` that serve one workload, and nothing else of the run.

        Args:
            configs: the paths of the YAML files, unless they are as given.
            health: where `--health` listens; empty for nowhere.
        """
        paths = list(self.configs) if configs is None else configs
        command = ["run", *self.targets, *(word for path in paths for word in ("-f", path))]
        command += self.options
        for each in self.workloads:
            number = workers if each is workload else 0
            command.append(f"--{each.key}.{SERVICE_KEY}.workers={number}")
        if workload.listen:
            command.append(f"--{workload.key}.{LISTENS_AT}={workload.listen}")
        if health:
            command += ["--health", health]
            if not is_loopback(health.rpartition(":")[0]):
                command.append("--health-public")
        return [*command, "--log-format", "json"]


def application_of(
    run: LoadedRun,
    request: PlanRequest,
    choices: Choices,
    configs: Mapping[str, str],
    server_users: str = "",
    *,
    key_suffix: str = SUFFIX,
) -> Application:
    """The deployment of a run.

    Args:
        request: of which the run was made.
        configs: the YAML files by their paths.
        server_users: the text of the file with the users of the server, where there is one.
        key_suffix: see `Application`.

    Raises:
        ConfigError: a name cannot be used, a choice is of a node that the run has not, or a secret
            would be written down.
    """
    served = [
        (assignment, origins)
        for assignment, origins in zip(run.assignments, run.origins, strict=True)
        if assignment.service.workers or _key(assignment, run) in choices.scale
    ]
    keys = [_key(assignment, run) for assignment, _ in served]
    for option, given in (
        ("--scale", choices.scale),
        ("--hosts", choices.hosts),
        ("--peers", choices.peers),
    ):
        for key in given:
            if key not in keys:
                raise ConfigError(
                    f"{option} {key}: this run starts no node {key}{suggestion(key, keys)}; it "
                    f"starts {', '.join(keys)}"
                )
    for assignment, origins in served:
        _refuse_secrets(assignment, origins, choices)
    for text, place in [
        *((text, path) for path, text in configs.items()),
        *((option.value, str(option)) for option in request.options),
        *((server, "servers") for server in run.config.servers),
    ]:
        if redact_url(text) != text:
            raise ConfigError(
                f"{place} has the password of a URL, which would be in a file that is committed: "
                "give processes keys of their own with `dynbus auth`, or the variable that holds "
                "the URL by --secret"
            )
    for path in [*request.targets, *configs]:
        _check_inside(path)
    for name in choices.variables:
        if not _VARIABLE.fullmatch(name):
            raise ConfigError(f"--secret {name}: it is no name of an environment variable")
    workloads = [
        _workload(assignment, key, run, choices)
        for (assignment, _), key in zip(served, keys, strict=True)
    ]
    _check_distinct(workloads)
    return Application(
        name=_application_name(choices.name, run),
        targets=tuple(request.targets),
        workloads=tuple(workloads),
        options=(
            *(("--namespace", request.namespace) if request.namespace else ()),
            *(f"{option}={option.value}" for option in request.options),
            # They are called elsewhere.
            *(
                f"--{_key(each, run)}.{SERVICE_KEY}.workers=0"
                for each in run.assignments
                if _key(each, run) not in keys
            ),
        ),
        configs=configs,
        servers=tuple(run.config.servers) if "servers" in run.bus.sources else (),
        keys=_key_folder(run),
        key_suffix=key_suffix,
        server_users=server_users,
        variables=tuple(choices.variables),
        secret_files=choices.secret_files,
        egress=tuple(choices.egress),
    )


def check_files_of_tls(config: BusConfig, secret_files: Mapping[str, str]) -> None:
    """Refuse files of TLS that no container would have, and keys that an image would have: a file
    in the project is in the image, unless it is below a folder of secrets.

    Raises:
        ConfigError: there is such a file, and no secret brings it.
    """
    for name in ("tls_ca", "tls_cert", "tls_key"):
        given: str = getattr(config, name)
        path = PurePosixPath(given)
        is_left_out = path.is_absolute() or not LEFT_OUT.isdisjoint(path.parts)
        if given and given not in secret_files.values() and (is_left_out or name == "tls_key"):
            wrong = "would not be in the containers" if is_left_out else "would be in the image"
            place = given if path.is_absolute() else f"/etc/nats/{path.name}"
            also = "" if given == place else f", and set {name} to {place}"
            raise ConfigError(
                f"{name} = {given!r} {wrong}: bring it there by --secret-file {path.name}={place}"
                f"{also}"
            )


def _key_folder(run: LoadedRun) -> str:
    credentials = run.config.credentials
    if credentials.endswith((SUFFIX, CREDS)):
        raise ConfigError(
            f"credentials = {credentials!r} is a file, and each node is deployed with a key of its "
            "own: name the folder that `dynbus auth add` has made, such as auth/seeds or "
            "auth/creds/red"
        )
    return credentials


def _workload(assignment: Assignment, key: str, run: LoadedRun, choices: Choices) -> Workload:
    given = defaults(assignment.actor) | dict(assignment.arguments)
    port = _number(given.get("port"))
    own_grace = _number(given.get("grace"))
    host = given.get(LISTENS_AT)
    listen = choices.listen if port and isinstance(host, str) and is_loopback(host) else ""
    if listen:
        built = build_arguments(assignment.actor, assignment.arguments)
        try:
            load_options(assignment.actor, built | {LISTENS_AT: listen})
        except ConfigError as error:
            raise ConfigError(f"{key} would listen at {listen}: {error}") from error
    durable = {
        spec.name: spec for spec in assignment.actor.__dynbus_handlers__.values() if spec.durable
    }
    name = assignment.address.component.lower().replace("_", "-")
    return Workload(
        name=_checked_name(name, f"the node {key}"),
        address=str(assignment.address),
        key=key,
        replicas=assignment.service.workers,
        resources=assignment.service.resources,
        grace=math.ceil(max(run.config.drain_grace, own_grace)) + ON_STOP_SECONDS + MARGIN_SECONDS,
        port=int(port),
        listen=listen,
        queues=tuple(
            Queue(
                work_stream(assignment.address.endpoint(endpoint)),
                lanes_of(ordered=spec.durable is not None and spec.durable.ordered_by is not None),
                spec.concurrency or DEFAULT_CONCURRENCY,
            )
            for endpoint, spec in sorted(durable.items())
        ),
        is_called=len(durable) < len(assignment.actor.__dynbus_handlers__),
        scale=choices.scale.get(key),
        hosts=choices.hosts.get(key),
        reaches_peers=key in choices.peers,
    )


def _number(value: object) -> float:
    """A number that an argument is; 0 for anything else."""
    text = str(value)
    return float(text) if re.fullmatch(r"\d{1,9}(\.\d+)?", text, re.ASCII) else 0.0


def _key(assignment: Assignment, run: LoadedRun) -> str:
    """The name by which options mean the node of an assignment alone."""
    name = assignment.node or assignment.actor.__dynbus_component__
    same = [
        each for each in run.assignments if (each.node or each.actor.__dynbus_component__) == name
    ]
    return name if len(same) == 1 else f"{assignment.actor.__module__}:{name}"


def _refuse_secrets(assignment: Assignment, origins: Mapping[str, str], choices: Choices) -> None:
    for name in secret_arguments(assignment.actor):
        origin = origins.get(name, "constructor")
        if origin in (*choices.variables, "constructor") or is_from_file(name, origin):
            continue
        component = assignment.address.component.replace("-", "_")
        raise ConfigError(
            f"{origin} is a secret, which would be in a file that is committed: leave it out, set "
            f"the variable DYNBUS_{component}__{name} and say --secret DYNBUS_{component}__{name}"
        )


def _application_name(given: str, run: LoadedRun) -> str:
    if given:
        return _checked_name(given, "--name")
    names = sorted({each.address.namespace for each in run.assignments})
    if len(names) > 1:
        raise ConfigError(
            f"the nodes of the run are in several namespaces ({', '.join(names)}): give the "
            "deployment a name, --name NAME"
        )
    return _checked_name(names[0].lower().replace("_", "-"), "the namespace")


def _checked_name(name: str, what: str) -> str:
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{what}: {name!r} cannot name what is deployed: use at most 40 letters in lower case, "
            "digits and hyphens, a letter first"
        )
    return name


def _check_distinct(workloads: Sequence[Workload]) -> None:
    known: dict[str, Workload] = {}
    for each in workloads:
        other = known.setdefault(each.name, each)
        if other is not each:
            raise ConfigError(
                f"{other.address} and {each.address} would both be deployed as {each.name}: give "
                "one of the nodes another name"
            )


def _check_inside(path: str) -> None:
    """Refuse a path that is not below the current folder, which is what an image is made of."""
    place = path.partition(":")[0]
    if "/" not in place and not place.endswith((".py", ".yaml", ".yml")):
        return  # a module
    if PurePosixPath(place).is_absolute() or posixpath.normpath(place).startswith(".."):
        raise ConfigError(
            f"{path} is not below the current folder, which is what is deployed: change to the "
            "folder of the project, and give paths below it"
        )
