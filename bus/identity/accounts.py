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
    write_secrets,
    write_whole,
)
from .grants import Permission, permissions, shared_consumers
from .keys import SUFFIX, Kind, new_key, read_seed, seed_text, write_seed
from .registry import Registry
from .users import ServerTls, User, Users

VERSION: Final = 1
KEYS: Final = "keys"
OPERATOR: Final = "operator"
SYSTEM: Final = "SYS"
"""The account in which servers speak of themselves: it has no users, and nobody else's name."""
CLOCK_SKEW: Final = 3600.0
"""The seconds by which the clock of a server may be behind the one here."""


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


class Revoked(msgspec.Struct, frozen=True, omit_defaults=True):
    """A revocation of the tokens of a key.

    Attributes:
        until: Unix seconds; those that were issued before count for nothing.
        expires: when the last of them does; 0 for never.
    """

    until: int
    expires: int = 0


class Account(msgspec.Struct, frozen=True, omit_defaults=True):
    """An account: what is in it is seen by its own users alone.

    Attributes:
        key: its public key.
        revoked: by public keys of users.
        token: as it was signed last.
    """

    name: str
    key: str
    limits: Limits = Limits()
    users: tuple[User, ...] = ()
    revoked: dict[str, Revoked] = {}
    token: str = ""

    def claims(self) -> tokens.Claims:
        """The claims of its token: a signing key for each user, with what that may."""
        shared = shared_consumers(grant for user in self.users for grant in user.grants)
        return tokens.account_claims(
            self.key,
            self.name,
            limits=self.limits.claims() if self.name != SYSTEM else {},
            scopes=[_scope(user, shared) for user in self.users],
            revoked={key: one.until for key, one in self.revoked.items()},
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
        system: the account of servers, which never changes either.
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

    Attributes:
        secrets: files of credentials that the next `save` writes, or removes where they have no
            text.

    Raises:
        ConfigError: it has not, or its file cannot be read.
    """

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.time) -> None:
        self.folder = folder
        self.clock = clock
        self.secrets: dict[Path, str | None] = {}
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
        operator, system = new_key(Kind.OPERATOR), Account(SYSTEM, new_key(Kind.ACCOUNT).public)
        claims = tokens.operator_claims(operator.public, "dynbus", system_account=system.key)
        token = tokens.issue(claims, operator, clock())
        of_system = tokens.issue(system.claims(), operator, clock())
        for secret in (KEYS, CREDS_FOLDER):
            write_whole(folder / secret / ".gitignore", "*\n", secret=True)
        write_seed(folder / KEYS / f"{OPERATOR}{SUFFIX}", operator.seed)
        system = msgspec.structs.replace(system, token=of_system)
        content = _Content(VERSION, token, system, [], tls)
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
            ConfigError: there is none.
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

    def save(self, name: str, *, despite_others: bool = False) -> bool:
        """Sign an account if it has changed, and write the files, those of credentials last; True
        if what the server reads is another.

        Args:
            name: that of the account, which may have been removed.
            despite_others: other accounts that are not as they were signed are left as they are,
                token and all.

        Raises:
            ConfigError: another account is not as it was signed, the operator's key is needed and
                cannot be read, or they cannot be written.
        """
        if not despite_others:
            self._check_others(name)
        if name in self.accounts:
            self.accounts[name] = self._signed(self.accounts[name])
        accounts = [self.accounts[each] for each in sorted(self.accounts)]
        self._content = msgspec.structs.replace(self._content, accounts=accounts)
        write_whole(self.folder / ACCOUNTS_FILE, _encoded(self._content))
        is_changed = write_changed(self.folder / SERVER_FILE, server_config(self._content))
        # A key that is recorded and that nobody has does no harm; one in use has to be recorded,
        # and a user that is still there has to keep its own.
        write_secrets(self.secrets)
        return is_changed

    def _check_others(self, name: str) -> None:
        # Not all who may write the file have the operator's key: what they wrote is not signed
        # by a command about something else.
        others = [
            each
            for each, account in sorted(self.accounts.items())
            if each != name and not _is_signed(account)
        ]
        if others:
            raise ConfigError(
                f"{self.folder / ACCOUNTS_FILE} has other content than was signed for: "
                f"{', '.join(others)}; nothing is written. Put the file back, or see what differs "
                f"and have it signed as it is with `dynbus auth account {others[0]}`"
            )

    def _signed(self, account: Account) -> Account:
        if _is_signed(account):
            return account
        path = self.folder / KEYS / f"{OPERATOR}{SUFFIX}"
        public = tokens.read_claims(self._content.operator)["sub"]
        operator = read_seed(path, public, f"signs the account {account.name}")
        token = tokens.issue(account.claims(), operator, self.clock())
        return msgspec.structs.replace(account, token=token)


def _is_signed(account: Account) -> bool:
    return tokens.says(account.token, account.claims())


class AccountUsers(Users):
    """The users of one account: each has a token, which a key signs that can sign no other's.

    Args:
        accounts: which keep them.

    Raises:
        ConfigError: there is no such account.
    """

    may_expire = True
    most_keys = 4

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
        return self._accounts.save(self.account)

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
            self._accounts.secrets[path] = seed_text(signer)
        key = new_key()
        expires = math.ceil(now + user.lifetime) if user.lifetime else 0
        claims = tokens.user_claims(
            key.public,
            user.name,
            account=self._accounts.account(self.account).key,
            expires=expires,
        )
        text = tokens.credentials_text(tokens.issue(claims, signer, now), key.seed)
        self._accounts.secrets[self.credential_file(user.name)] = text
        kept = user.with_keys(one for one in user.keys if not self._is_over(user.ends.get(one, 0)))
        return msgspec.structs.replace(
            kept,
            keys=(*kept.keys, key.public),
            ends=kept.ends | ({key.public: expires} if expires else {}),
            scope=signer.public,
        )

    def _is_over(self, expires: int) -> bool:
        """True if a token that expires then is refused by each server."""
        return 0 < expires <= self._accounts.clock() - CLOCK_SKEW

    def _withdraw(self, user: User, keys: Sequence[str]) -> None:
        # Who signs for a user goes with it, which would do; a revocation is what NATS's tools show.
        now = math.ceil(self._accounts.clock())
        revoked = self._accounts.account(self.account).revoked | {
            key: Revoked(now, user.ends.get(key, 0)) for key in keys
        }
        self._keep(
            revoked={key: one for key, one in revoked.items() if not self._is_over(one.expires)}
        )
        if len(keys) == len(user.keys):
            for path in (self.credential_file(user.name), self._scope_file(user.name)):
                self._accounts.secrets[path] = None

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
