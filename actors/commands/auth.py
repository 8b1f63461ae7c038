"""`dynbus auth`: the users of a server with permissions, in files."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from dynbus.actors.declaring.actor import address_of
from dynbus.actors.needed import setup_commands
from dynbus.actors.permissions import grants_of, grants_of_client
from dynbus.actors.running.graph import Node
from dynbus.actors.running.plan import PlanRequest
from dynbus.actors.running.planning import load_run
from dynbus.bus.commands.terminal import terminal
from dynbus.bus.config import suggestion
from dynbus.bus.errors import ConfigError
from dynbus.bus.identity.credentials import user_of
from dynbus.bus.identity.grants import (
    Grant,
    calls_all,
    finds_instances,
    hears_cancels,
    hears_replies,
    observes,
    operates,
)
from dynbus.bus.identity.registry import ACTOR, Registry, ServerTls, User
from dynbus.bus.protocol.names import ComponentName, check_token

if TYPE_CHECKING:
    from dynbus.actors.runtime import Actor

from .options import TargetsCommand, file_option, namespace_option, plan_request

ROLES: Final = "dynbus.roles"
"""The group of entry points with the roles of packages above the kernel, each an actor that a
command of theirs serves."""

CLIENT: Final = "client"
"""The role of a user that calls the actors of a run."""

folder_option = click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("auth"),
    show_default=True,
    help="Where the files are.",
)


def caller(namespaces: Sequence[str]) -> list[Grant]:
    """The grants to call everything in the namespaces."""
    grants = [finds_instances()]
    for namespace in namespaces:
        grants += [calls_all(namespace), hears_cancels(namespace)]
    return grants


OWN_ROLES: Final[dict[str, Callable[[Sequence[str]], Sequence[Grant]]]] = {
    "caller": caller,
    "observer": observes,
    "operator": operates,
}


def role_names() -> list[str]:
    """The roles that there are."""
    return sorted({*OWN_ROLES, *(one.name for one in metadata.entry_points(group=ROLES))})


def grants_of_role(role: str, namespaces: Sequence[str], principal: str) -> list[Grant]:
    """The grants of a role in namespaces.

    Raises:
        ConfigError: there is no such role.
    """
    if role in OWN_ROLES:
        return list(dict.fromkeys([hears_replies(principal), *OWN_ROLES[role](namespaces)]))
    known = {one.name: one for one in metadata.entry_points(group=ROLES)}
    if role not in known:
        raise ConfigError(
            f"there is no role {role!r}{suggestion(role, role_names())}; there are: "
            f"{', '.join(role_names())}"
        )
    actor: type[Actor] = known[role].load()
    return grants_of(address_of(actor), actor, {}, principal=principal, namespaces=namespaces)


class NeededUser(NamedTuple):
    """A user as `Registry.put` takes it; see `User`."""

    name: str
    role: str
    of: str
    grants: list[Grant]


def users_of_run(request: PlanRequest) -> list[NeededUser]:
    """The users of a run, one for each component.

    Raises:
        ConfigError: the run is not usable, or two components would have one name.
    """
    addresses = _addresses(request)
    users: list[NeededUser] = []
    names: dict[str, ComponentName] = {}
    namespaces = sorted({address.namespace for address in addresses.values()})
    for node, address in addresses.items():
        name = check_token("user", user_of(address))
        other = names.setdefault(name, address)
        if other != address:
            raise ConfigError(
                f"{other} and {address} would both be the user {name}: give one another name"
            )
        called = {addresses[each]: each.actor for each in node.edges.values()}
        grants = grants_of(address, node.actor, called, principal=name, namespaces=namespaces)
        users.append(NeededUser(name, ACTOR, str(address), grants))
    return users


def client_of_run(name: str, request: PlanRequest) -> NeededUser:
    """The user that calls the actors of a run.

    Raises:
        ConfigError: the run is not usable.
    """
    called = {address: node.actor for node, address in _addresses(request).items()}
    grants = grants_of_client(called, principal=check_token("user", name))
    return NeededUser(name, CLIENT, ", ".join(sorted(map(str, called))), grants)


def setup_of_run(request: PlanRequest) -> list[str]:
    """The commands of an operator that make what the users of a run need; see `setup_commands`.

    Raises:
        ConfigError: the run is not usable.
    """
    return setup_commands({address: node.actor for node, address in _addresses(request).items()})


def _addresses(request: PlanRequest) -> dict[Node, ComponentName]:
    run = load_run(request, os.environ)
    return {Node(one.node, one.actor): one.address for one in run.assignments}


@click.group(epilog=terminal.EXIT_CODES)
def auth() -> None:
    """Write the users of nats-server: a key for each, and exactly what it needs.

    \b
    dynbus auth init
    dynbus auth add actors.py
    dynbus auth add actors.py --client billing
    dynbus auth add looker --role observer --namespace hello
    dynbus auth rotate billing
    dynbus auth revoke billing --previous
    dynbus auth show
    """


@auth.command()
@click.option("--tls-cert", metavar="FILE", help="The server's certificate with its chain, PEM.")
@click.option("--tls-key", metavar="FILE", help="Its key.")
@click.option(
    "--tls-client-ca",
    metavar="FILE",
    help="Want certificates of clients, signed by the authorities in FILE.",
)
@folder_option
@terminal.json_option
def init(
    tls_cert: str | None,
    tls_key: str | None,
    tls_client_ca: str | None,
    folder: Path,
    as_json: bool,
) -> None:
    """Make the files, with an operator.

    The operator may do everything: it makes the streams of namespaces with `dynbus setup`. The
    files of TLS are paths on the machine of the server.

    \b
    dynbus auth init --tls-cert /etc/nats/server.pem --tls-key /etc/nats/server.key
    """
    registry = Registry.make(folder, _server_tls(tls_cert, tls_key, tls_client_ca))
    registry.put("operator", "operator", "all", _operator())
    registry.save()
    _tell(registry, {"operator": "added"}, as_json)


def _server_tls(cert: str | None, key: str | None, client_ca: str | None) -> ServerTls | None:
    if cert is None and key is None and client_ca is None:
        return None
    if cert is None or key is None:
        raise click.UsageError("TLS needs both: give --tls-cert and --tls-key")
    return ServerTls(cert, key, client_ca or "")


def _operator() -> list[Grant]:
    return [Grant("may do everything", (">",), (">",))]


@auth.command(cls=TargetsCommand)
@click.argument("targets", nargs=-1, required=True, metavar="(TARGET... | NAME)")
@file_option
@namespace_option
@click.option(
    "--role", metavar="ROLE", help="Make the user NAME in this role, and none for TARGETs."
)
@click.option(
    "--client", metavar="NAME", help="Make the user NAME that calls TARGETs, and none for them."
)
@folder_option
@terminal.json_option
@click.pass_context
def add(
    ctx: click.Context,
    /,
    *,
    targets: tuple[str, ...],
    config_files: tuple[str, ...],
    namespace: str | None,
    role: str | None,
    client: str | None,
    folder: Path,
    as_json: bool,
) -> None:
    """Add a user for each component of TARGETs, one that calls them, or one with a role.

    TARGETs and options are those of `dynbus run`; nothing is started. A user that is there keeps
    its key and gets what it needs now. What an operator has to make for TARGETs is printed. The
    roles are those of a caller of all that is in a namespace, an observer, an operator, and where
    the packages are there the front end of `dynbus http`.

    \b
    dynbus auth add actors.py -f hello.yaml
    dynbus auth add actors.py --client billing
    dynbus auth add billing --role caller --namespace hello,accounts
    """
    registry = Registry(folder)
    if client is not None and role is not None:
        raise click.UsageError("give --client or --role, not both")
    setup: list[str] = []
    if client is not None:
        users = [client_of_run(client, plan_request(ctx, targets, config_files, namespace))]
    elif role is None:
        request = plan_request(ctx, targets, config_files, namespace)
        users, setup = users_of_run(request), setup_of_run(request)
    else:
        users = [_user_in_role(role, targets, config_files, namespace)]
    done = {user.name: registry.put(*user) for user in users}
    registry.save()
    _tell(registry, done, as_json, setup)


def _user_in_role(
    role: str, names: Sequence[str], files: Sequence[str], namespace: str | None
) -> NeededUser:
    if len(names) != 1 or files:
        raise click.UsageError("--role makes one user: give its name and no -f")
    if not namespace:
        raise click.UsageError("--role needs --namespace NAME, or several with commas")
    (name,) = names
    check_token("user", name)
    namespaces = [check_token("namespace", one.strip()) for one in namespace.split(",")]
    return NeededUser(name, role, ", ".join(namespaces), grants_of_role(role, namespaces, name))


@auth.command()
@click.argument("name")
@folder_option
@terminal.json_option
def rotate(name: str, folder: Path, as_json: bool) -> None:
    """Give a user another key.

    The server takes both, until the one before is revoked: reload the server, give the process its
    new file and restart it, then `dynbus auth revoke NAME --previous`, and reload again.
    """
    registry = Registry(folder)
    registry.rotate(name)
    registry.save()
    _tell(registry, {name: "rotated"}, as_json)


@auth.command()
@click.argument("name")
@click.option("--previous", is_flag=True, help="Only the key that it had before its last one.")
@folder_option
@terminal.json_option
def revoke(name: str, previous: bool, folder: Path, as_json: bool) -> None:
    """Remove a user, or the key that it had before `rotate`.

    The server ends its connections when it is reloaded.
    """
    registry = Registry(folder)
    registry.revoke(name, previous=previous)
    registry.save()
    _tell(registry, {name: "previous key revoked" if previous else "revoked"}, as_json)


@auth.command()
@click.argument("name", required=False)
@folder_option
@terminal.json_option
def show(name: str | None, folder: Path, as_json: bool) -> None:
    """List the users, or what one of them may publish and hear, and for what."""
    registry = Registry(folder)
    if name is not None:
        _show_user(registry.user(name), as_json)
    elif as_json:
        terminal.print_json([_json(registry.users[each]) for each in sorted(registry.users)])
    else:
        terminal.print_table(
            ("USER", "WHO", "KEYS", "LAST KEY"),
            [
                (user.name, terminal.plain(user.what), str(len(user.keys)), user.keys[-1])
                for _, user in sorted(registry.users.items())
            ],
        )


def _json(user: User) -> dict[str, Any]:
    return {
        "name": user.name,
        "role": user.role,
        "of": user.of,
        "keys": list(user.keys),
        "grants": [grant._asdict() for grant in user.grants],
    }


def _show_user(user: User, as_json: bool) -> None:
    if as_json:
        terminal.print_json(_json(user))
        return
    terminal.print_table(
        ("FOR", "", "SUBJECT"),
        [
            (terminal.plain(grant.purpose), verb, terminal.plain(subject))
            for grant in user.grants
            for verb, subjects in (("publish", grant.publish), ("subscribe", grant.subscribe))
            for subject in subjects
        ],
    )


def _tell(
    registry: Registry, done: dict[str, str], as_json: bool, setup: Sequence[str] = ()
) -> None:
    """Say what was done, where the keys are, and what is left to do.

    Args:
        setup: the commands that make what these users need at the server.
    """
    if as_json:
        terminal.print_json(
            {
                "users": [{"name": name, "done": how} for name, how in sorted(done.items())],
                "server_file": str(registry.server_file),
                "setup": list(setup),
            }
        )
        return
    rows = [
        (name, how, str(registry.seed_file(name)) if name in registry.users else "")
        for name, how in sorted(done.items())
    ]
    terminal.print_table(("USER", "", "KEY"), rows)
    if set(done.values()) != {"there"}:
        terminal.notice(
            f"{registry.server_file} is written: include it in the configuration of nats-server, "
            "and have it read that again: nats-server --signal reload"
        )
    for command in setup:
        terminal.notice(f"an operator makes what they need, before they start: {command}")
