"""`dynbus auth`: the users of a server with permissions, and accounts of teams, in files."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click
import msgspec

from dynbus.actors.declaring.actor import address_of
from dynbus.actors.declaring.resources import bytes_of, memory_text
from dynbus.actors.needed import setup_commands
from dynbus.actors.permissions import grants_of, grants_of_client
from dynbus.actors.running.graph import Node
from dynbus.actors.running.plan import PlanRequest
from dynbus.actors.running.planning import load_run
from dynbus.bus.commands.terminal import terminal
from dynbus.bus.config import suggestion
from dynbus.bus.errors import ConfigError
from dynbus.bus.identity.accounts import (
    Account,
    Accounts,
    Limits,
    open_users,
    users_in,
)
from dynbus.bus.identity.credentials import user_of
from dynbus.bus.identity.files import SERVER_FILE, locked
from dynbus.bus.identity.grants import (
    Grant,
    calls_all,
    finds_instances,
    hears_cancels,
    hears_replies,
    observes,
    operates,
    removes_servers,
)
from dynbus.bus.identity.registry import Registry
from dynbus.bus.identity.users import ACTOR, SYSTEM, ServerTls, User, Users
from dynbus.bus.protocol.names import ComponentName, check_token
from dynbus.bus.protocol.seconds import seconds_of

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


def _lifetime(_ctx: click.Context, _param: click.Parameter, text: str | None) -> float | None:
    return None if text is None else seconds_of(text, "--expires")


account_option = click.option(
    "--account",
    metavar="NAME",
    help="The account, in a folder with accounts; may be left out where there is one.",
)
expires_option = click.option(
    "--expires",
    "lifetime",
    metavar="TIME",
    callback=_lifetime,
    help='How long credentials of an account count, such as "30d"; 0 for ever, which is the '
    "default. `rotate` issues others in time.",
)
_LIMITS: Final = {
    "consumers": ("NUMBER", "consumers of each stream"),
    "disk": ("BYTES", "bytes of its streams in files, such as 20Gi"),
    "memory": ("BYTES", "bytes of its streams in memory"),
}
"""The options of limits that their name does not say all of: their values, and the meaning."""
FIRST_ACCOUNT: Final = "main"
UNLIMITED: Final = "none"


def caller(namespaces: Sequence[str]) -> list[Grant]:
    """The grants to call everything in the namespaces."""
    grants = [finds_instances()]
    for namespace in namespaces:
        recording = Grant.of_recording(namespace)
        grants += [calls_all(namespace), hears_cancels(namespace), recording]
    return grants


OWN_ROLES: Final[dict[str, Callable[[Sequence[str]], Sequence[Grant]]]] = {
    "caller": caller,
    "observer": observes,
    "operator": operates,
}


def role_names() -> list[str]:
    """The roles that there are."""
    return sorted({*OWN_ROLES, SYSTEM, *(one.name for one in metadata.entry_points(group=ROLES))})


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
    """A user as `Users.put` takes it; see `User`."""

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

    With accounts of teams, each of which sees itself alone:

    \b
    dynbus auth init --jwt --account red
    dynbus auth account blue --disk 10Gi --connections 500
    dynbus auth add actors.py --account blue --expires 30d
    """


@auth.command()
@click.option("--tls-cert", metavar="FILE", help="The server's certificate with its chain, PEM.")
@click.option("--tls-key", metavar="FILE", help="Its key.")
@click.option(
    "--tls-client-ca",
    metavar="FILE",
    help="Want certificates of clients, signed by the authorities in FILE.",
)
@click.option(
    "--jwt",
    is_flag=True,
    help="Accounts of teams, with tokens: an operator of the server, and a first account.",
)
@click.option("--account", metavar="NAME", help=f"With --jwt: the first account [{FIRST_ACCOUNT}].")
@folder_option
@terminal.json_option
def init(
    tls_cert: str | None,
    tls_key: str | None,
    tls_client_ca: str | None,
    jwt: bool,
    account: str | None,
    folder: Path,
    as_json: bool,
) -> None:
    """Make the files, with an operator.

    The operator may do everything: it makes the streams of namespaces with `dynbus setup`. With
    accounts each has one, which may do everything in it. The files of TLS are paths on the machine
    of the server.

    \b
    dynbus auth init --tls-cert /etc/nats/server.pem --tls-key /etc/nats/server.key
    """
    tls = _server_tls(tls_cert, tls_key, tls_client_ca)
    if account is not None and not jwt:
        raise click.UsageError("--account is for a folder with accounts: give --jwt too")
    users: Users
    with locked(folder, make=True):
        if jwt:
            accounts = Accounts.make(folder, tls)
            accounts.put(account or FIRST_ACCOUNT, Limits())
            users = accounts.users(account or FIRST_ACCOUNT)
        else:
            users = Registry.make(folder, tls)
        users.put("operator", "operator", "all", _operator())
        users.save()
    _tell(users, {"operator": "added"}, as_json, reload=True)


def _server_tls(cert: str | None, key: str | None, client_ca: str | None) -> ServerTls | None:
    if cert is None and key is None and client_ca is None:
        return None
    if cert is None or key is None:
        raise click.UsageError("TLS needs both: give --tls-cert and --tls-key")
    return ServerTls(cert, key, client_ca or "")


def _operator() -> list[Grant]:
    return [Grant("may do everything", (">",), (">",))]


def _is_bytes(limit: str) -> bool:
    return limit in _LIMITS and _LIMITS[limit][0] == "BYTES"


def _limit(_ctx: click.Context, param: click.Parameter, text: str | None) -> int | None:
    """The value of an option that is a field of `Limits`."""
    if text is None:
        return None
    if text == UNLIMITED:
        return Limits().disk
    is_bytes = _is_bytes(param.name or "")
    try:
        number = bytes_of(text) if is_bytes else int(text)
    except ValueError:
        number = 0
    if not 0 < number < 2**63:
        wanted = "bytes, such as 20Gi" if is_bytes else "a number above 0"
        raise click.BadParameter(f"{text!r}: give {wanted}, or {UNLIMITED}")
    return number


def limit_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for each field of `Limits`."""
    for field in reversed(msgspec.structs.fields(Limits)):
        kind, meaning = _LIMITS.get(field.name, ("NUMBER", field.name))
        command = click.option(
            f"--{field.name}",
            metavar=kind,
            callback=_limit,
            help=f"The most {meaning}, or {UNLIMITED}.",
        )(command)
    return command


@auth.command()
@click.argument("name", required=False)
@limit_options
@click.option("--remove", is_flag=True, help="Remove the account with its users.")
@folder_option
@terminal.json_option
def account(
    name: str | None, remove: bool, folder: Path, as_json: bool, **limits: int | None
) -> None:
    """Add an account for a team, change its limits, or list the accounts.

    Who is in an account sees, calls and stores nothing of another, whatever its namespaces are
    called. A limit that is not given stays as it is, and is none for a new account, which gets an
    operator of its own. Bytes are set aside: a server that has fewer than all accounts together
    gives the last of them no JetStream.

    \b
    dynbus auth account blue --disk 10Gi --connections 500
    dynbus auth account blue --connections none
    """
    given = {key: value for key, value in limits.items() if value is not None}
    if name is None:
        accounts = Accounts(folder)
        if given or remove:
            raise click.UsageError("give the NAME of the account")
        _show_accounts(list(accounts.accounts.values()), as_json)
        return
    with locked(folder):
        accounts = Accounts(folder)
        if remove:
            shown, done = accounts.account(name), "removed"
            accounts.remove(name)
            changed = accounts.save(name)
        else:
            done, changed = _put_account(accounts, name, given)
            shown = accounts.account(name)
    _show_accounts([shown], as_json, done)
    if changed and not as_json:
        _ask_to_reload(folder / SERVER_FILE)


def _put_account(accounts: Accounts, name: str, given: dict[str, int]) -> tuple[str, bool]:
    """Add an account or change its limits; what was done, and whether the server has to know."""
    known = accounts.accounts.get(name)
    before = known.limits if known is not None else Limits()
    done = accounts.put(name, msgspec.structs.replace(before, **given))
    if done == "added":
        users = accounts.users(name)
        users.put("operator", "operator", "all", _operator())
        return done, users.save()
    # Where several are not as they were signed, each is put right by a command of its own.
    return done, accounts.save(name, despite_others=not given)


def _show_accounts(accounts: Sequence[Account], as_json: bool, done: str = "") -> None:
    if as_json:
        terminal.print_json(
            [
                {
                    "name": one.name,
                    "key": one.key,
                    "limits": msgspec.structs.asdict(one.limits),
                    "users": len(one.users),
                    "revoked": len(one.revoked),
                    **({"done": done} if done else {}),
                }
                for one in accounts
            ]
        )
        return
    names = [field.name for field in msgspec.structs.fields(Limits)]
    terminal.print_table(
        ("ACCOUNT", "", *(name.upper() for name in names), "USERS", "REVOKED"),
        [
            (
                one.name,
                done,
                *(_limit_text(name, getattr(one.limits, name)) for name in names),
                str(len(one.users)),
                str(len(one.revoked)),
            )
            for one in accounts
        ],
    )


def _limit_text(name: str, value: int) -> str:
    if value < 0:
        return "-"
    return memory_text(value) if _is_bytes(name) else str(value)


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
@account_option
@expires_option
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
    account: str | None,
    lifetime: float | None,
    folder: Path,
    as_json: bool,
) -> None:
    """Add a user for each component of TARGETs, one that calls them, or one with a role.

    TARGETs and options are those of `dynbus run`; nothing is started. A user that is there keeps
    its key and gets what it needs now. What an operator has to make for TARGETs is printed. The
    roles are those of a caller of all that is in a namespace, an observer, an operator, `system`
    for who takes servers out of a cluster, and where the packages are there the front end of
    `dynbus http`.

    \b
    dynbus auth add actors.py -f hello.yaml
    dynbus auth add actors.py --client billing
    dynbus auth add billing --role caller --namespace hello,accounts
    dynbus auth add remover --role system
    """
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
    with locked(folder):
        registered = open_users(folder, account)
        if role == SYSTEM and registered.account:
            raise ConfigError(
                "a folder with accounts makes no user of the account of servers: --role system "
                "is for a server with one account"
            )
        done = {user.name: registered.put(*user, lifetime=lifetime) for user in users}
        reload = registered.save()
    _tell(registered, done, as_json, setup, reload=reload)


def _user_in_role(
    role: str, names: Sequence[str], files: Sequence[str], namespace: str | None
) -> NeededUser:
    if len(names) != 1 or files:
        raise click.UsageError("--role makes one user: give its name and no -f")
    if role == SYSTEM:
        if namespace:
            raise click.UsageError("--role system takes no --namespace: it is of all servers")
        (name,) = names
        check_token("user", name)
        return NeededUser(name, role, "the servers", [hears_replies(name), removes_servers()])
    if not namespace:
        raise click.UsageError("--role needs --namespace NAME, or several with commas")
    (name,) = names
    check_token("user", name)
    namespaces = [check_token("namespace", one.strip()) for one in namespace.split(",")]
    return NeededUser(name, role, ", ".join(namespaces), grants_of_role(role, namespaces, name))


@auth.command()
@click.argument("name")
@account_option
@expires_option
@folder_option
@terminal.json_option
def rotate(
    name: str, account: str | None, lifetime: float | None, folder: Path, as_json: bool
) -> None:
    """Give a user another key.

    The server takes both, until the one before is revoked or expires: reload the server, give the
    process its new file and restart it, then `dynbus auth revoke NAME --previous`, and reload
    again. A credential of an account is taken without a first reload, and counts as long as the one
    before unless --expires says otherwise.
    """
    with locked(folder):
        users = open_users(folder, account)
        users.rotate(name, lifetime=lifetime)
        reload = users.save()
    _tell(users, {name: "rotated"}, as_json, reload=reload)


@auth.command()
@click.argument("name")
@click.option("--previous", is_flag=True, help="Only the keys that it had before its last one.")
@account_option
@folder_option
@terminal.json_option
def revoke(name: str, previous: bool, account: str | None, folder: Path, as_json: bool) -> None:
    """Remove a user, or the keys that it had before `rotate`.

    The server ends its connections when it is reloaded.
    """
    with locked(folder):
        users = open_users(folder, account)
        users.revoke(name, previous=previous)
        reload = users.save()
    done = "previous key revoked" if previous else "revoked"
    _tell(users, {name: done}, as_json, reload=reload)


@auth.command()
@click.argument("name", required=False)
@account_option
@folder_option
@terminal.json_option
def show(name: str | None, account: str | None, folder: Path, as_json: bool) -> None:
    """List the users, or what one of them may publish and hear, and for what."""
    if name is not None:
        users = open_users(folder, account)
        _show_user(users.account, users.user(name), as_json)
        return
    listed = [
        (users.account, user)
        for users in users_in(folder, account)
        for _, user in sorted(users.users.items())
    ]
    if as_json:
        terminal.print_json([_json(*one) for one in listed])
        return
    has_accounts = any(account for account, _ in listed)
    terminal.print_table(
        (*(["ACCOUNT"] if has_accounts else []), "USER", "WHO", "KEYS", "LAST KEY")
        + (("EXPIRES",) if has_accounts else ()),
        [
            (
                *([account] if has_accounts else []),
                user.name,
                terminal.plain(user.what),
                str(len(user.keys)),
                user.keys[-1],
                *([_expiry(user)] if has_accounts else []),
            )
            for account, user in listed
        ],
    )


def _expiry(user: User) -> str:
    if not user.expires:
        return "never"
    left = user.expires - time.time()
    return f"in {terminal.duration(left)}" if left > 0 else "expired"


def _json(account: str, user: User) -> dict[str, Any]:
    return {
        **({"account": account, "expires": user.expires or None} if account else {}),
        "name": user.name,
        "role": user.role,
        "of": user.of,
        "keys": list(user.keys),
        "grants": [grant._asdict() for grant in user.grants],
    }


def _show_user(account: str, user: User, as_json: bool) -> None:
    if as_json:
        terminal.print_json(_json(account, user))
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
    users: Users,
    done: dict[str, str],
    as_json: bool,
    setup: Sequence[str] = (),
    *,
    reload: bool,
) -> None:
    """Say what was done, where the credentials are, and what is left to do.

    Args:
        setup: the commands that make what these users need at the server.
        reload: whether the server has to read its configuration again.
    """
    if as_json:
        terminal.print_json(
            {
                "users": [{"name": name, "done": how} for name, how in sorted(done.items())],
                "server_file": str(users.server_file),
                "setup": list(setup),
            }
        )
        return
    rows = [
        (name, how, str(users.credential_file(name)) if name in users.users else "")
        for name, how in sorted(done.items())
    ]
    terminal.print_table(("USER", "", "KEY"), rows)
    if reload:
        _ask_to_reload(users.server_file)
    for command in setup:
        terminal.notice(f"an operator makes what they need, before they start: {command}")


def _ask_to_reload(server_file: Path) -> None:
    terminal.notice(
        f"{server_file} is written: include it in the configuration of nats-server, and have it "
        "read that again: nats-server --signal reload"
    )
