"""The users of a server with one account, in files: who there is with which NKEY and grants, and
what nats-server reads of it.

    auth/users.json         names, public keys and grants; nothing in it is secret
    auth/nats-users.conf    what nats-server includes, made of that
    auth/seeds/NAME.nk      the key of one user, for its process alone
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from dynbus.bus.errors import ConfigError

from .files import (
    SERVER_FILE,
    USERS_FILE,
    check_unused,
    write_changed,
    write_secrets,
    write_whole,
)
from .grants import Permission, permissions, shared_consumers
from .keys import SUFFIX, new_key, seed_text
from .users import SYSTEM, ServerTls, User, Users

VERSION: Final = 1
SEEDS: Final = "seeds"


class _Users(msgspec.Struct, frozen=True, omit_defaults=True):
    """The content of `users.json`."""

    version: int
    users: list[User]
    tls: ServerTls | None = None


class Registry(Users):
    """The users in a folder.

    Args:
        folder: which has been initialised.

    Raises:
        ConfigError: it has not, or its file cannot be read.
    """

    may_expire = False
    most_keys = 2

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.users: dict[str, User] = {}
        self._tls: ServerTls | None = None
        self._secrets: dict[Path, str | None] = {}
        path = folder / USERS_FILE
        try:
            read = msgspec.json.decode(path.read_bytes(), type=_Users)
        except FileNotFoundError:
            raise ConfigError(
                f"there is no {path}: make it with `dynbus auth init`, or name its folder by "
                "--folder"
            ) from None
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from None
        if read.version != VERSION:
            raise ConfigError(
                f"{path} is of version {read.version}, and this dynbus knows {VERSION}: use the "
                "one that wrote it"
            )
        self.users = {user.name: user for user in read.users}
        self._tls = read.tls

    def __repr__(self) -> str:
        return f"<Registry {self.folder} [{len(self.users)} users]>"

    @classmethod
    def make(cls, folder: Path, tls: ServerTls | None = None) -> Registry:
        """An empty one in a folder.

        Args:
            tls: what the server's configuration is to say of it.

        Raises:
            ConfigError: there is one already, or the files cannot be written.
        """
        check_unused(folder)
        write_whole(folder / SEEDS / ".gitignore", "*\n", secret=True)
        write_whole(folder / USERS_FILE, _encoded((), tls))
        registry = cls(folder)
        registry.save()
        return registry

    def credential_file(self, name: str) -> Path:
        return self.folder / SEEDS / f"{name}{SUFFIX}"

    def save(self) -> bool:
        users = [self.users[name] for name in sorted(self.users)]
        write_whole(self.folder / USERS_FILE, _encoded(users, self._tls))
        is_changed = write_changed(self.server_file, server_config(users, self._tls))
        write_secrets(self._secrets)
        return is_changed

    def _issue(self, user: User) -> User:
        key = new_key()
        self._secrets[self.credential_file(user.name)] = seed_text(key)
        return msgspec.structs.replace(user, keys=(*user.keys, key.public))

    def _withdraw(self, user: User, keys: Sequence[str]) -> None:
        # A key that is not in the server's file counts for nothing.
        if len(keys) == len(user.keys):
            self._secrets[self.credential_file(user.name)] = None


def server_config(users: Sequence[User], tls: ServerTls | None = None) -> str:
    """The part of nats-server's configuration on users: the same text for the same users."""
    lines = [
        "# Written by `dynbus auth`, from users.json. In the configuration of nats-server:",
        f'# include "{SERVER_FILE}"',
        "authorization {",
        *_users_block([user for user in users if user.role != SYSTEM]),
        "}",
    ]
    if of_servers := [user for user in users if user.role == SYSTEM]:
        lines += ["accounts {", '  "$SYS": {', *_users_block(of_servers), "  }", "}"]
    return "\n".join([*lines, *(tls.lines() if tls else ()), ""])


def _users_block(users: Sequence[User]) -> list[str]:
    """The users of an account, each with its keys and what it may."""
    lines = ["  users: ["]
    shared = shared_consumers(grant for user in users for grant in user.grants)
    for user in users:
        lines.append(f"    # {user.name}: {user.what}")
        publish, subscribe = permissions(user.grants, shared)
        for number, key in enumerate(reversed(user.keys)):
            if number:
                lines.append("    # Its key before the last one.")
            lines += [f'    {{ nkey: "{key}", permissions: {{', *_rules("publish", publish)]
            lines += [*_rules("subscribe", subscribe), "    } }"]
    return [*lines, "  ]"]


def _rules(verb: str, permission: Permission) -> list[str]:
    """The permission of a user for a verb, each subject below its purpose."""
    if not permission.allow:
        return [f"      {verb}: {{ deny: {json.dumps(permission.deny)} }}"]
    lines = [f"      {verb}: {{ allow: ["]
    for purpose, subjects in permission.allow.items():
        lines.append(f"        # {purpose}")
        lines += [f"        {json.dumps(one)}" for one in subjects]
    if permission.deny:
        lines += ["      ], deny: [", "        # changes consumers that others share"]
        lines += [f"        {json.dumps(one)}" for one in permission.deny]
    return [*lines, "      ] }"]


def _encoded(users: Sequence[User], tls: ServerTls | None) -> str:
    text = msgspec.json.encode(_Users(VERSION, list(users), tls))
    return msgspec.json.format(text, indent=1).decode() + "\n"
