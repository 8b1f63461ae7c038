"""`dynbus deploy`: files with which others deploy a run. Nothing is applied."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click

from dynbus.actors.deploying.application import (
    MAX_REPLICAS,
    Application,
    Choices,
    Hosts,
    Scale,
    application_of,
    check_files_of_tls,
)
from dynbus.actors.deploying.batch import batch_script
from dynbus.actors.deploying.containers import compose, dockerfile, ignored
from dynbus.actors.deploying.kubernetes import Cluster, kubernetes
from dynbus.actors.deploying.servers import (
    CLUSTER,
    RouteTls,
    ServerChoices,
    ServerPlace,
    server_files,
    server_urls,
)
from dynbus.actors.deploying.tree import differences, heading, write
from dynbus.actors.deploying.units import units
from dynbus.actors.documents.alerts import rules
from dynbus.actors.documents.dashboard import dashboard
from dynbus.actors.documents.schemas import json_text
from dynbus.actors.documents.yaml_text import yaml_text
from dynbus.actors.running.plan import PlanRequest
from dynbus.actors.running.planning import load_run
from dynbus.bus import exit_codes
from dynbus.bus.commands.terminal import terminal
from dynbus.bus.errors import ConfigError
from dynbus.bus.identity.credentials import suffix_in
from dynbus.bus.identity.files import server_file_of, write_whole
from dynbus.bus.identity.keys import SUFFIX
from dynbus.bus.protocol.names import check_token

from .options import TargetsCommand, file_option, namespace_option, plan_request, targets_argument

DEFAULT_CALLS: Final = 8
EVERYWHERE: Final = "0.0.0.0"
"""Of a container: who reaches it is said by its surroundings."""


@click.group()
def deploy() -> None:
    """Write the files with which a run is deployed. Nothing is applied.

    TARGETs and options are those of `dynbus run`. The same graph makes the same files, so that they
    can be committed and compared.

    \b
    dynbus deploy docker actors.py -f config.yaml
    dynbus deploy kubernetes actors.py -f config.yaml --image registry.example/chat:1
    dynbus deploy systemd actors.py
    dynbus deploy slurm actors.py --nats nats://bus.example:4222
    dynbus deploy nats --server a=10.0.0.1 --users auth/nats-users.conf
    dynbus deploy docker actors.py --check
    dynbus deploy monitoring monitoring/
    """


Command = Callable[..., None]


def _together(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Several options of a command as one decorator."""

    def decorate(command: Command) -> Command:
        for option in options:
            command = option(command)
        return command

    return decorate


_out_options = _together(
    click.option(
        "--out",
        metavar="FOLDER",
        type=click.Path(file_okay=False, path_type=Path),
        help="Default: deploy/ and the target.",
    ),
    click.option(
        "--check",
        is_flag=True,
        help="Write nothing; end with 1 where the files are not as they would be written.",
    ),
    click.option("--force", is_flag=True, help="Write over files that are not of a deployment."),
)
_common = _together(
    click.option(
        "--secret",
        "variables",
        metavar="VARIABLE",
        multiple=True,
        help="A variable whose value is a secret: named in the files, set elsewhere. Repeatable.",
    ),
    click.option("--name", metavar="NAME", default="", help="Default: the run's namespace."),
    _out_options,
    terminal.nats_option,
    namespace_option,
    file_option,
    targets_argument,
    click.pass_context,
)


secret_file_option = click.option(
    "--secret-file",
    "secret_files",
    metavar="NAME=PATH",
    multiple=True,
    help="A secret that is a file for the processes. Repeatable.",
)
prefix_option = click.option(
    "--prefix",
    metavar="FOLDER",
    default="/opt/dynbus",
    show_default=True,
    help="Where the project is, with its environment .venv.",
)


@deploy.command(cls=TargetsCommand)
@click.option("--image", metavar="NAME", help="Of what is built. Default: the deployment's name.")
@click.option(
    "--requirements",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False),
    help="What pip installs beside dynbus, in its file.",
)
@secret_file_option
@_common
def docker(
    ctx: click.Context,
    /,
    image: str | None,
    requirements: str | None,
    secret_files: Sequence[str],
    **given: Any,
) -> None:
    """A Dockerfile and a Compose file.

    The image has the current folder, and no compiler; its processes are not root, and their file
    system is read-only. Without --nats a server runs beside them.
    """
    choices = _choices(given, listen=EVERYWHERE, secret_files=_pairs("--secret-file", secret_files))
    application = _application(ctx, choices, given, in_containers=True)
    folder: Path = given["out"] or Path("deploy/docker")
    title = heading("docker")
    files = {
        "Dockerfile": dockerfile(application, requirements or "", title),
        "Dockerfile.dockerignore": ignored(folder.as_posix(), title),
        "compose.yaml": compose(application, image or application.name, folder, title),
    }
    _finish(ctx, folder, files, given)


@deploy.command(name="kubernetes", cls=TargetsCommand)
@click.option(
    "--image", metavar="NAME:TAG", required=True, help="What `dynbus deploy docker` had built."
)
@click.option(
    "--scale",
    metavar="NODE=LEAST:MOST[:CALLS]",
    multiple=True,
    help="Let KEDA choose the instances, by jobs and by calls for each. Repeatable.",
)
@click.option(
    "--hosts",
    metavar="NODE=COUNT",
    multiple=True,
    help="Hosts of one instance (LeaderWorkerSet); needs --join. Repeatable.",
)
@click.option(
    "--lead", metavar="NODE=COMMAND", multiple=True, help="Run on the first before it serves."
)
@click.option(
    "--join", metavar="NODE=COMMAND", multiple=True, help="Run on the other hosts instead."
)
@click.option(
    "--peers",
    metavar="NODE",
    multiple=True,
    help="May reach the pods of other such nodes at any port, to move KV blocks. Repeatable.",
)
@click.option(
    "--egress",
    metavar="PORT",
    type=click.IntRange(1, 65535),
    multiple=True,
    help="May be reached anywhere, such as 443 for models. Repeatable.",
)
@click.option(
    "--prometheus",
    metavar="URL",
    default="",
    help="What KEDA asks for calls; needed by --scale of nodes that are called.",
)
@click.option(
    "--nats-monitor",
    metavar="HOST:PORT",
    default="",
    help="The monitoring of the servers of --nats, for --scale of nodes that take jobs.",
)
@click.option("--gpu-resource", default="nvidia.com/gpu", show_default=True)
@secret_file_option
@_common
def to_kubernetes(
    ctx: click.Context,
    /,
    image: str,
    scale: Sequence[str],
    hosts: Sequence[str],
    lead: Sequence[str],
    join: Sequence[str],
    peers: Sequence[str],
    egress: Sequence[int],
    prometheus: str,
    nats_monitor: str,
    gpu_resource: str,
    secret_files: Sequence[str],
    **given: Any,
) -> None:
    """A kustomization, with NATS by its own chart unless there are servers (--nats).

    Apply it with `kustomize build --enable-helm FOLDER | kubectl apply -f -`.
    """
    choices = _choices(
        given,
        scale={key: _scale(key, text) for key, text in _pairs("--scale", scale).items()},
        hosts=_hosts(hosts, lead, join),
        peers=peers,
        listen=EVERYWHERE,
        secret_files=_pairs("--secret-file", secret_files),
        egress=egress,
    )
    application = _application(ctx, choices, given, in_containers=True)
    _check_scaling(application, prometheus, nats_monitor)
    cluster = Cluster(image, gpu_resource, prometheus, nats_monitor)
    files = kubernetes(application, cluster, heading("kubernetes"))
    _finish(ctx, given["out"] or Path("deploy/kubernetes"), files, given)


@deploy.command(cls=TargetsCommand)
@prefix_option
@_common
def systemd(ctx: click.Context, /, prefix: str, **given: Any) -> None:
    """A unit for each node on one machine, and a target for all."""
    application = _application(ctx, _choices(given), given)
    files = units(application, _prefix(prefix), heading("systemd"))
    _finish(ctx, given["out"] or Path("deploy/systemd"), files, given)


@deploy.command(cls=TargetsCommand)
@prefix_option
@_common
def slurm(ctx: click.Context, /, prefix: str, **given: Any) -> None:
    """A batch script for Slurm; its processes need connections to the bus alone."""
    application = _application(ctx, _choices(given), given)
    script = batch_script(application, _prefix(prefix), heading("slurm"))
    _finish(
        ctx, given["out"] or Path("deploy/slurm"), {f"{application.name}.sbatch": script}, given
    )


@deploy.command()
@click.option(
    "--server",
    "servers",
    metavar="NAME=ADDRESS[,ZONE]",
    multiple=True,
    required=True,
    help="A server and its host. Repeatable: one, or three and more.",
)
@click.option(
    "--users",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="nats-users.conf of `dynbus auth`, which is to lie beside each configuration.",
)
@click.option(
    "--without-users", is_flag=True, help="Anybody who reaches a server may do everything."
)
@click.option(
    "--route-tls",
    "route_tls",
    metavar="CERT KEY CA",
    nargs=3,
    help="Files with which servers know each other, as they are called on each host.",
)
@click.option(
    "--region",
    metavar="NAME",
    default="",
    help="The region of the servers, which keeps its own streams: their JetStream domain.",
)
@click.option(
    "--backbone",
    metavar="ADDRESS",
    multiple=True,
    help="A server that joins the regions, the nearest first; needs --region. Repeatable.",
)
@click.option(
    "--as-backbone",
    is_flag=True,
    help="These are the servers that join regions; they keep nothing.",
)
@click.option(
    "--cluster",
    metavar="NAME",
    default="",
    help="The servers' own name for all of them, another one in each region and in the backbone. "
    "Default: that of the region, else dynbus.",
)
@click.option("--store", metavar="FOLDER", default="/var/lib/nats", show_default=True)
@click.option("--max-store", metavar="SIZE", default="100GB", show_default=True)
@_out_options
@click.pass_context
def nats(
    ctx: click.Context,
    /,
    servers: Sequence[str],
    users: Path | None,
    without_users: bool,
    route_tls: tuple[str, str, str] | None,
    region: str,
    backbone: tuple[str, ...],
    as_backbone: bool,
    cluster: str,
    store: str,
    max_store: str,
    **given: Any,
) -> None:
    """The configuration of nats-servers on hosts of their own, and their unit of systemd.

    Each host gets the file of its server as /etc/nats/nats-server.conf, and beside it the file of
    users. The last line is NATS_URL of all processes, with tls:// where the users' file has TLS.

    \b
    dynbus deploy nats --server a=10.0.0.1 --server b=10.0.0.2 --server c=10.0.0.3 \\
        --users auth/nats-users.conf
    dynbus deploy nats --as-backbone --server eu=10.9.0.1 --server us=10.9.0.2
    dynbus deploy nats --region eu --backbone 10.9.0.1 --backbone 10.9.0.2 \\
        --server a=10.0.0.1 --without-users
    """
    if as_backbone and (users is not None or region or backbone):
        raise click.UsageError(
            "--as-backbone: no process connects to these servers, and they are of no region: leave "
            "out --users, --region and --backbone"
        )
    if bool(region) != bool(backbone):
        raise click.UsageError("give --region and --backbone together, or neither")
    if region:
        check_token("region", region)
    if (users is None) != without_users and not as_backbone:
        raise click.UsageError(
            "the servers listen beyond their hosts: give --users auth/nats-users.conf, which "
            "`dynbus auth` makes, or --without-users where all who reach them may do everything"
        )
    cluster = cluster or region or CLUSTER
    check_token("cluster", cluster)
    if not store.startswith("/"):
        raise click.UsageError(f"--store {store}: give a whole path, for example /var/lib/nats")
    places = [ServerPlace.parse(text) for text in servers]
    is_encrypted = users is not None and re.search(r"^tls \{", _text(users), re.M) is not None
    routes = RouteTls(*route_tls) if route_tls else None
    choices = ServerChoices(
        cluster,
        store.rstrip("/"),
        max_store,
        users is not None,
        routes,
        region,
        backbone,
        as_backbone,
    )
    files = server_files(places, choices, heading("nats"))
    _finish(ctx, given["out"] or Path("deploy/nats"), files, given)
    if not as_backbone:
        # Some shells take the question mark of a zone for a pattern.
        click.echo(f"NATS_URL={shlex.quote(server_urls(places, encrypted=is_encrypted))}")


@deploy.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
def monitoring(folder: Path) -> None:
    """Alert rules for Prometheus and a dashboard for Grafana, for every run.

    They are written into FOLDER: dynbus-alerts.yaml and dynbus-dashboard.json, the same for the
    same version of dynbus. Files of these names are replaced.
    """
    for name, text in (
        ("dynbus-alerts.yaml", yaml_text(rules())),
        ("dynbus-dashboard.json", json_text(dashboard())),
    ):
        write_whole(folder / name, text)
        click.echo(folder / name)


def _choices(given: Mapping[str, Any], **more: Any) -> Choices:
    return Choices(name=given["name"], variables=given["variables"], **more)


def _application(
    ctx: click.Context,
    choices: Choices,
    given: Mapping[str, Any],
    *,
    in_containers: bool = False,
) -> Application:
    request = plan_request(ctx, given["targets"], given["config_files"], given["namespace"])
    request = PlanRequest(
        targets=request.targets,
        config_files=request.config_files,
        options=request.options,
        nats=given["nats"],
        namespace=request.namespace,
    )
    # What this machine has set would be in force here alone.
    run = load_run(request, {k: v for k, v in os.environ.items() if k in choices.variables})
    for warning in run.warnings:
        terminal.notice(f"dynbus: {warning}")
    configs = {path: _text(Path(path)) for path in request.config_files}
    users, suffix = "", SUFFIX
    if run.config.credentials:
        folder = Path(run.config.credentials)
        users, suffix = _text(server_file_of(folder)), suffix_in(folder)
    application = application_of(run, request, choices, configs, users, key_suffix=suffix)
    if in_containers:
        check_files_of_tls(run.config, choices.secret_files)
    return application


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None


def _finish(
    ctx: click.Context, folder: Path, files: Mapping[str, str], given: Mapping[str, Any]
) -> None:
    if given["check"]:
        changed = differences(folder, files)
        for name, how in changed:
            click.echo(f"{folder / name}: {how}")
        ctx.exit(exit_codes.FAILURE if changed else exit_codes.OK)
    for name, how in write(folder, files, force=given["force"]):
        click.echo(f"{folder / name}: {'removed' if how == 'left over' else 'written'}")


def _pairs(option: str, given: Sequence[str]) -> dict[str, str]:
    """`KEY=VALUE`, each key once."""
    pairs: dict[str, str] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not (key and equals and value):
            raise click.UsageError(f"{option} {text!r}: write NAME=VALUE")
        if key in pairs:
            raise click.UsageError(f"{option} {key} is there twice")
        pairs[key] = value
    return pairs


def _scale(key: str, text: str) -> Scale:
    parts = text.split(":")
    if len(parts) in (2, 3) and all(part.isascii() and part.isdigit() for part in parts):
        least, most, calls = (*map(int, parts), DEFAULT_CALLS)[:3]
        if least <= most <= MAX_REPLICAS and most and calls:
            return Scale(least, most, calls)
    raise click.UsageError(
        f"--scale {key}={text}: write LEAST:MOST, or LEAST:MOST:CALLS, for example {key}=0:4:8; at "
        f"most {MAX_REPLICAS}"
    )


def _hosts(counts: Sequence[str], leads: Sequence[str], joins: Sequence[str]) -> dict[str, Hosts]:
    lead, join = _pairs("--lead", leads), _pairs("--join", joins)
    hosts: dict[str, Hosts] = {}
    for key, text in _pairs("--hosts", counts).items():
        if not (text.isascii() and text.isdigit() and 2 <= int(text) <= MAX_REPLICAS):
            raise click.UsageError(f"--hosts {key}={text}: give 2 hosts or more")
        if key not in join:
            raise click.UsageError(
                f"--hosts {key} needs --join {key}=COMMAND, what the further hosts run, for "
                f"example 'ray start --address=$LWS_LEADER_ADDRESS:6379 --block'"
            )
        hosts[key] = Hosts(int(text), lead.get(key, ""), join[key])
    for option, given in (("--lead", lead), ("--join", join)):
        for key in given:
            if key not in hosts:
                raise click.UsageError(f"{option} {key} needs --hosts {key}=COUNT")
    return hosts


def _check_scaling(application: Application, prometheus: str, nats_monitor: str) -> None:
    for each in application.workloads:
        if each.scale is None:
            continue
        if each.is_called and not prometheus:
            raise click.UsageError(
                f"--scale {each.key} goes by its calls, too, which Prometheus knows: give "
                "--prometheus URL, for example http://prometheus-operated.monitoring.svc:9090"
            )
        if each.queues and application.servers and not nats_monitor:
            raise click.UsageError(
                f"--scale {each.key} goes by its jobs, too, which the servers of --nats know: give "
                "the address of their monitoring, --nats-monitor HOST:8222"
            )


def _prefix(text: str) -> str:
    if not text.startswith("/"):
        raise click.UsageError(f"--prefix {text}: give a whole path, for example /opt/chat")
    return text.rstrip("/")
