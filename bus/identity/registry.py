"""The users of a server, in files: who there is with which key and grants, and what nats-server
reads of it.

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

from dynbus.bus.config import suggestion
from dynbus.bus.errors import ConfigError
from dynbus.bus.protocol.names import check_token

from .credentials import SUFFIX, new_key, write_seed
from .files import write_whole
from .grants import Grant, denied, shared_consumers

VERSION: Final = 1
USERS_FILE: Final = "users.json"
SERVER_FILE: Final = "nats-users.conf"
SEEDS: Final = "seeds"
ACTOR: Final = "actor"
"""The role of a user that is a component."""


class User(msgspec.Struct, frozen=True):
    """A user of the server.

    Attributes:
        role: `actor`, `caller` and so on.
        of: what it is that of: a component, or namespaces.
        keys: its public NKEYs; the last one is the one that is handed out, one before it is still
            taken.
    """

    name: str
    role: str
    of: str
    keys: tuple[str, ...]
    grants: tuple[Grant, ...]

    @property
    def what(self) -> str:
        """A phrase for people, such as `caller of hello`."""
        return f"{self.role} {self.of}" if self.role == ACTOR else f"{self.role} of {self.of}"


class ServerTls(msgspec.Struct, frozen=True):
    """The files of nats-server's TLS, as paths on its machine.

    Attributes:
        cert, key: its own certificate, and its key.
        client_ca: the authorities of the certificates that it wants of clients; empty for none.
    """

    cert: str
    key: str
    client_ca: str = ""

    def __post_init__(self) -> None:
        for path in (self.cert, self.key, self.client_ca or "/"):
            if not path.startswith("/"):
                raise ConfigError(
                    f"{path} is no absolute path, which nats-server needs, since it looks for "
                    "others from the folder that it was started in: begin it with /"
                )


class _Users(msgspec.Struct, frozen=True, omit_defaults=True):
    """The content of `users.json`."""

    version: int
    users: list[User]
    tls: ServerTls | None = None


class Registry:
    """The users in a folder.

    Args:
        folder: which has been initialised.

    Raises:
        ConfigError: it has not, or its file cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.users: dict[str, User] = {}
        self._tls: ServerTls | None = None
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
        if (folder / USERS_FILE).exists():
            raise ConfigError(
                f"{folder / USERS_FILE} is there already: add users to it with `dynbus auth add`"
            )
        write_whole(folder / SEEDS / ".gitignore", "*\n", secret=True)
        write_whole(folder / USERS_FILE, _encoded((), tls))
        registry = cls(folder)
        registry.save()
        return registry

    @property
    def server_file(self) -> Path:
        """The file that nats-server includes."""
        return self.folder / SERVER_FILE

    def seed_file(self, name: str) -> Path:
        """The file with the key of a user."""
        return self.folder / SEEDS / f"{name}{SUFFIX}"

    def user(self, name: str) -> User:
        """The user of a name.

        Raises:
            ConfigError: there is none.
        """
        if name not in self.users:
            raise ConfigError(
                f"there is no user {name!r}{suggestion(name, self.users)}; there are: "
                f"{', '.join(sorted(self.users)) or 'none'}"
            )
        return self.users[name]

    def put(self, name: str, role: str, of: str, grants: Sequence[Grant]) -> str:
        """Add a user with a new key, or give one that is there these grants; what was done:
        `added`, `changed` or `there`.

        Raises:
            ConfigError: the name is no token or somebody else's, or its key cannot be written.
        """
        check_token("user", name)
        known = self.users.get(name)
        if known is None:
            key = new_key()
            write_seed(self.seed_file(name), key.seed)
            self.users[name] = User(name, role, of, (key.public,), tuple(grants))
            return "added"
        if known.role != role:
            raise ConfigError(
                f"the user {name} is {known.what}, and no {role}: revoke it first, or give another "
                "name"
            )
        self.users[name] = msgspec.structs.replace(known, of=of, grants=tuple(grants))
        return "there" if self.users[name] == known else "changed"

    def rotate(self, name: str) -> None:
        """Give a user another key; the one that it had is taken until it is revoked.

        Raises:
            ConfigError: there is no such user, or two keys already, or it cannot be written.
        """
        user = self.user(name)
        if len(user.keys) > 1:
            raise ConfigError(
                f"{name} has a key before its last one: revoke that first, with `dynbus auth "
                f"revoke {name} --previous`"
            )
        key = new_key()
        write_seed(self.seed_file(name), key.seed)
        self.users[name] = msgspec.structs.replace(user, keys=(*user.keys, key.public))

    def revoke(self, name: str, *, previous: bool = False) -> None:
        """Remove a user, or the key that it had before its last one.

        Raises:
            ConfigError: there is no such user, or no such key.
        """
        user = self.user(name)
        if not previous:
            del self.users[name]
            self.seed_file(name).unlink(missing_ok=True)
        elif len(user.keys) == 1:
            raise ConfigError(f"{name} has one key: leave --previous out to remove the user")
        else:
            self.users[name] = msgspec.structs.replace(user, keys=user.keys[-1:])

    def save(self) -> None:
        """Write both files.

        Raises:
            ConfigError: they cannot be written.
        """
        users = [self.users[name] for name in sorted(self.users)]
        write_whole(self.folder / USERS_FILE, _encoded(users, self._tls))
        write_whole(self.server_file, server_config(users, self._tls))


def server_config(users: Sequence[User], tls: ServerTls | None = None) -> str:
    """The part of nats-server's configuration on users: the same text for the same users."""
    lines = [
        "# Written by `dynbus auth`, from users.json. In the configuration of nats-server:",
        f'# include "{SERVER_FILE}"',
        "authorization {",
        "  users: [",
    ]
    shared = shared_consumers(grant for user in users for grant in user.grants)
    for user in users:
        lines.append(f"    # {user.name}: {user.what}")
        published = _rules(user, "publish", denied(user.grants, shared))
        for number, key in enumerate(reversed(user.keys)):
            if number:
                lines.append("    # Its key before the last one.")
            lines += [f'    {{ nkey: "{key}", permissions: {{', *published]
            lines += [*_rules(user, "subscribe"), "    } }"]
    return "\n".join([*lines, "  ]", "}", *_tls_lines(tls), ""])


def _tls_lines(tls: ServerTls | None) -> list[str]:
    if tls is None:
        return []
    lines = [f"  cert_file: {json.dumps(tls.cert)}", f"  key_file: {json.dumps(tls.key)}"]
    if tls.client_ca:
        lines += [f"  ca_file: {json.dumps(tls.client_ca)}", "  verify: true"]
    return ["tls {", *lines, "}"]


def _rules(user: User, verb: str, refused: Sequence[str] = ()) -> list[str]:
    """The permissions of a user, each subject once, below its purpose."""
    seen: set[str] = set()
    lines: list[str] = []
    for grant in user.grants:
        subjects: tuple[str, ...] = getattr(grant, verb)
        new = [one for one in dict.fromkeys(subjects) if one not in seen]
        seen.update(new)
        if new:
            lines.append(f"        # {grant.purpose}")
            lines += [f"        {json.dumps(one)}" for one in new]
    if not lines:
        # An empty list of what is allowed allows everything.
        return [f'      {verb}: {{ deny: [">"] }}']
    if not refused:
        return [f"      {verb}: {{ allow: [", *lines, "      ] }"]
    return [
        f"      {verb}: {{ allow: [",
        *lines,
        "      ], deny: [",
        "        # changes consumers that others share",
        *(f"        {json.dumps(one)}" for one in refused),
        "      ] }",
    ]


def _encoded(users: Sequence[User], tls: ServerTls | None) -> str:
    text = msgspec.json.encode(_Users(VERSION, list(users), tls))
    return msgspec.json.format(text, indent=1).decode() + "\n"
