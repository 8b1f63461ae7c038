"""The operator of a server and the accounts of teams, in files: what each may use, and its users.

    auth/accounts.json              public keys, limits, tokens and grants; nothing in it is secret
    auth/nats-users.conf            what nats-server includes, made of that
    auth/keys/operator.nk           the key that signs accounts
    auth/keys/ACCOUNT/NAME.nk       the key that signs tokens of one user, with its permissions
    auth/creds/ACCOUNT/NAME.creds   the credential of one user, for its process alone

An account has no key of its own that is kept: with it users could be made that no template bounds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from dynbus.bus.config import suggestion
from dynbus.bus.errors import ConfigError
from dynbus.bus.protocol.names import check_token

from . import tokens
from .credentials import CREDS
from .files import (
    ACCOUNTS_FILE,
    CREDS_FOLDER,
    SERVER_FILE,
    check_unused,
    write_changed,
    write_whole,
)
from .grants import Permission, permissions, shared_consumers
from .keys import SUFFIX, Kind, new_key, read_seed, write_seed
from .registry import Registry
from .users import ServerTls, User, Users

VERSION: Final = 1
KEYS: Final = "keys"
OPERATOR: Final = "operator"
SYSTEM: Final = "SYS"
"""The account in which servers speak of themselves: it has no users, and nobody else's name."""


class Limits(msgspec.Struct, frozen=True, omit_defaults=True):
    """The most that an account may use of a server, or of a cluster; -1 is any number.

    Attributes:
        consumers: of each stream.
        disk, memory: bytes that its streams take; those of each replica count.
    """

    connections: int = tokens.NO_LIMIT
    subscriptions: int = tokens.NO_LIMIT
    streams: int = tokens.NO_LIMIT
    consumers: int = tokens.NO_LIMIT
    disk: int = tokens.NO_LIMIT
    memory: int = tokens.NO_LIMIT

    def claims(self) -> dict[str, int]:
        """The limits by the names that tokens have for them."""
        return {
            "conn": self.connections,
            "subs": self.subscriptions,
            "streams": self.streams,
            "consumer": self.consumers,
            "disk_storage": self.disk,
            "mem_storage": self.memory,
        }


class Account(msgspec.Struct, frozen=True, omit_defaults=True):
    """An account: what is in it is seen by its own users alone.

    Attributes:
        key: its public key.
        revoked: for public keys of users until when tokens of theirs count for nothing.
        token: as it was signed last.
    """

    name: str
    key: str
    limits: Limits = Limits()
    users: tuple[User, ...] = ()
    revoked: dict[str, int] = {}
    token: str = ""

    def claims(self) -> tokens.Claims:
        """The claims of its token: a signing key for each user, with what that may."""
        shared = shared_consumers(grant for user in self.users for grant in user.grants)
        return tokens.account_claims(
            self.key,
            self.name,
            limits=self.limits.claims() if self.name != SYSTEM else {},
            scopes=[_scope(user, shared) for user in self.users],
            revoked=self.revoked,
        )


def _scope(user: User, shared: frozenset[tuple[str, str]]) -> tokens.Claims:
    publish, subscribe = permissions(user.grants, shared)
    return tokens.scope(user.scope, user.name, publish=_lists(publish), subscribe=_lists(subscribe))


def _lists(permission: Permission) -> tokens.Claims:
    allow = [one for subjects in permission.allow.values() for one in subjects]
    lists = {"allow": allow, "deny": list(permission.deny)}
    return {key: each for key, each in lists.items() if each}


class _Content(msgspec.Struct, frozen=True, omit_defaults=True):
    """The content of `accounts.json`.

    Attributes:
        operator: its token, which servers trust and which never changes.
    """

    version: int
    operator: str
    system: Account
    accounts: list[Account]
    tls: ServerTls | None = None


class Accounts:
    """The operator in a folder, and its accounts by their names.

    Args:
        folder: which has been initialised.
        clock: Unix seconds.

    Raises:
        ConfigError: it has not, or its file cannot be read.
    """

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.time) -> None:
        self.folder = folder
        self.clock = clock
        path = folder / ACCOUNTS_FILE
        try:
            self._content = msgspec.json.decode(path.read_bytes(), type=_Content)
        except FileNotFoundError:
            raise ConfigError(
                f"there is no {path}: make it with `dynbus auth init --jwt`, or name its folder "
                "by --folder"
            ) from None
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from None
        if self._content.version != VERSION:
            raise ConfigError(
                f"{path} is of version {self._content.version}, and this dynbus knows {VERSION}: "
                "use the one that wrote it"
            )
        self.accounts = {account.name: account for account in self._content.accounts}

    def __repr__(self) -> str:
        return f"<Accounts {self.folder} [{len(self.accounts)} accounts]>"

    @classmethod
    def make(
        cls,
        folder: Path,
        tls: ServerTls | None = None,
        *,
        clock: Callable[[], float] = time.time,
    ) -> Accounts:
        """An operator without accounts in a folder.

        Args:
            tls: what the server's configuration is to say of it.

        Raises:
            ConfigError: there are users already, or the files cannot be written.
        """
        check_unused(folder)
        operator, system = new_key(Kind.OPERATOR), new_key(Kind.ACCOUNT)
        claims = tokens.operator_claims(operator.public, "dynbus", system_account=system.public)
        token = tokens.issue(claims, operator, clock())
        for secret in (KEYS, CREDS_FOLDER):
            write_whole(folder / secret / ".gitignore", "*\n", secret=True)
        write_seed(folder / KEYS / f"{OPERATOR}{SUFFIX}", operator.seed)
        content = _Content(VERSION, token, Account(SYSTEM, system.public), [], tls)
        write_whole(folder / ACCOUNTS_FILE, _encoded(content))
        return cls(folder, clock=clock)

    def account(self, name: str) -> Account:
        """The account of a name.

        Raises:
            ConfigError: there is none.
        """
        if name not in self.accounts:
            raise ConfigError(
                f"there is no account {name!r}{suggestion(name, self.accounts)}; there are: "
                f"{', '.join(sorted(self.accounts)) or 'none'}; make one with `dynbus auth "
                "account NAME`"
            )
        return self.accounts[name]

    def put(self, name: str, limits: Limits) -> str:
        """Add an account, or give one that is there these limits; what was done: `added`,
        `changed` or `there`.

        Raises:
            ConfigError: the name is no token, or that of the system's account.
        """
        check_token("account", name)
        if name.upper() == SYSTEM:
            raise ConfigError(f"the account {name} is the servers' own: give another name")
        known = self.accounts.get(name)
        if known is None:
            self.accounts[name] = Account(name, new_key(Kind.ACCOUNT).public, limits)
            return "added"
        self.accounts[name] = msgspec.structs.replace(known, limits=limits)
        return "there" if known.limits == limits else "changed"

    def remove(self, name: str) -> None:
        """Remove an account with its users and their files. What it has stored stays at the
        server, and no other account has it.

        Raises:
            ConfigError: there is none, or a file cannot be removed.
        """
        users = self.users(name)
        for user in sorted(users.users):
            users.revoke(user)
        del self.accounts[name]

    def users(self, name: str) -> AccountUsers:
        """The users of an account.

        Raises:
            ConfigError: there is none.
        """
        return AccountUsers(self, name)

    def save(self) -> bool:
        """Sign what has changed, and write both files; True if what the server reads is another.

        Raises:
            ConfigError: the operator's key is needed and cannot be read, or they cannot be
                written.
        """
        self.accounts = {name: self._signed(one) for name, one in sorted(self.accounts.items())}
        self._content = msgspec.structs.replace(
            self._content,
            system=self._signed(self._content.system),
            accounts=list(self.accounts.values()),
        )
        write_whole(self.folder / ACCOUNTS_FILE, _encoded(self._content))
        return write_changed(self.folder / SERVER_FILE, server_config(self._content))

    def _signed(self, account: Account) -> Account:
        claims = account.claims()
        if tokens.says(account.token, claims):
            return account
        path = self.folder / KEYS / f"{OPERATOR}{SUFFIX}"
        public = tokens.read_claims(self._content.operator)["sub"]
        operator = read_seed(path, public, f"signs the account {account.name}")
        token = tokens.issue(claims, operator, self.clock())
        return msgspec.structs.replace(account, token=token)


class AccountUsers(Users):
    """The users of one account: each has a token, which a key signs that can sign no other's.

    Args:
        accounts: which keep them.

    Raises:
        ConfigError: there is no such account.
    """

    may_expire = True

    def __init__(self, accounts: Accounts, account: str) -> None:
        self.folder = accounts.folder
        self.account = account
        self.users = {user.name: user for user in accounts.account(account).users}
        self._accounts = accounts

    def __repr__(self) -> str:
        return f"<AccountUsers {self.account} [{len(self.users)} users]>"

    def credential_file(self, name: str) -> Path:
        return self.folder / CREDS_FOLDER / self.account / f"{name}{CREDS}"

    def save(self) -> bool:
        self._keep(users=tuple(self.users[name] for name in sorted(self.users)))
        return self._accounts.save()

    def _keep(self, **changes: object) -> None:
        """Have the account differ in some of its fields."""
        account = self._accounts.account(self.account)
        self._accounts.accounts[self.account] = msgspec.structs.replace(account, **changes)

    def _issue(self, user: User) -> User:
        path, now = self._scope_file(user.name), self._accounts.clock()
        if user.scope:
            signer = read_seed(path, user.scope, f"signs tokens of {user.name}")
        else:
            signer = new_key(Kind.ACCOUNT)
            write_seed(path, signer.seed)
        key = new_key()
        expires = math.ceil(now + user.lifetime) if user.lifetime else 0
        claims = tokens.user_claims(
            key.public,
            user.name,
            account=self._accounts.account(self.account).key,
            expires=expires,
        )
        text = tokens.credentials_text(tokens.issue(claims, signer, now), key.seed)
        write_whole(self.credential_file(user.name), text, secret=True)
        keys = (*user.keys, key.public)
        return msgspec.structs.replace(user, keys=keys, scope=signer.public, expires=expires)

    def _withdraw(self, user: User, keys: Sequence[str]) -> None:
        # Who signs for a user goes with it, which would do; a revocation is what NATS's tools show.
        now = math.ceil(self._accounts.clock())
        before = self._accounts.account(self.account).revoked
        self._keep(revoked=before | dict.fromkeys(keys, now))
        if len(keys) == len(user.keys):
            self._scope_file(user.name).unlink(missing_ok=True)

    def _scope_file(self, name: str) -> Path:
        return self.folder / KEYS / self.account / f"{name}{SUFFIX}"


def users_in(folder: Path, account: str | None = None) -> list[Users]:
    """The users of a folder: of each of its accounts, or of the one that is named.

    Raises:
        ConfigError: the folder has none, or not this account.
    """
    if (folder / ACCOUNTS_FILE).exists():
        accounts = Accounts(folder)
        names = sorted(accounts.accounts) if account is None else [account]
        return [accounts.users(name) for name in names]
    if account is not None:
        raise ConfigError(
            f"--account {account}: {folder} has no accounts; `dynbus auth init --jwt` makes a "
            "folder with some"
        )
    return [Registry(folder)]


def open_users(folder: Path, account: str | None = None) -> Users:
    """The users of a folder, or of its account.

    Args:
        account: may be left out where there is one.

    Raises:
        ConfigError: there are none, or the account is not there, or has to be named.
    """
    groups = users_in(folder, account)
    if len(groups) != 1:
        raise ConfigError(
            "name the account by --account; there are: "
            f"{', '.join(group.account for group in groups) or 'none'}"
        )
    return groups[0]


def server_config(content: _Content) -> str:
    """The part of nats-server's configuration on accounts: the same text for the same ones."""
    lines = [
        f"# Written by `dynbus auth`, from {ACCOUNTS_FILE}. In the configuration of nats-server:",
        f'# include "{SERVER_FILE}"',
        f'operator: "{content.operator}"',
        f'system_account: "{content.system.key}"',
        "resolver: MEMORY",
        "resolver_preload: {",
    ]
    for account in (content.system, *content.accounts):
        lines += [f"  # {account.name}", f'  {account.key}: "{account.token}"']
    return "\n".join([*lines, "}", *(content.tls.lines() if content.tls else ()), ""])


def _encoded(content: _Content) -> str:
    return msgspec.json.format(msgspec.json.encode(content), indent=1).decode() + "\n"
