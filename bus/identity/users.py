"""The users of a server, or of one of its accounts: who there is, in which role, with which grants.

What a credential is differs, and with it what is written for a server: `registry.py` has NKEYs,
`accounts.py` tokens.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar, Final

import msgspec

from dynbus.bus.config import suggestion
from dynbus.bus.errors import ConfigError
from dynbus.bus.protocol.names import check_token

from .files import SERVER_FILE
from .grants import Grant

ACTOR: Final = "actor"
"""The role of a user that is a component."""
SYSTEM: Final = "system"
"""The role of a user of the account in which nats-server speaks of its servers."""


class User(msgspec.Struct, frozen=True, omit_defaults=True):
    """A user of the server.

    Attributes:
        role: `actor`, `caller` and so on.
        of: what it is that of: a component, or namespaces.
        keys: its public NKEYs; the last one is the one that is handed out, those before it are
            still taken.
        scope: of an account's user, the public half of the key that signs its tokens.
        lifetime: seconds for which a token counts; 0 for ever.
        ends: for those of its keys whose token expires, when it does, in Unix seconds.
    """

    name: str
    role: str
    of: str
    keys: tuple[str, ...]
    grants: tuple[Grant, ...]
    scope: str = ""
    lifetime: float = 0.0
    ends: dict[str, int] = {}

    @property
    def expires(self) -> int:
        """The end of its last token, in Unix seconds; 0 for never."""
        return self.ends.get(self.keys[-1], 0)

    def with_keys(self, keys: Iterable[str]) -> User:
        """The user with some of its keys alone."""
        kept = tuple(keys)
        ends = {key: end for key, end in self.ends.items() if key in kept}
        return msgspec.structs.replace(self, keys=kept, ends=ends)

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

    def lines(self) -> list[str]:
        """The block `tls` of the server's configuration."""
        lines = [f"  cert_file: {json.dumps(self.cert)}", f"  key_file: {json.dumps(self.key)}"]
        if self.client_ca:
            lines += [f"  ca_file: {json.dumps(self.client_ca)}", "  verify: true"]
        return ["tls {", *lines, "}"]


class Users(ABC):
    """Users with a credential each, in files of a folder.

    Attributes:
        account: the name of theirs; empty where the server has one.
    """

    folder: Path
    account: str = ""
    users: dict[str, User]
    may_expire: ClassVar[bool]
    """True if credentials may count for a time alone."""
    most_keys: ClassVar[int]
    """The most keys of a user that may count at once and do not expire."""

    @property
    def server_file(self) -> Path:
        """The file that nats-server includes."""
        return self.folder / SERVER_FILE

    @abstractmethod
    def credential_file(self, name: str) -> Path:
        """The file with the credential of a user, for its process."""

    @abstractmethod
    def save(self) -> bool:
        """Write the files, those of credentials last; True if what the server reads is another.

        Raises:
            ConfigError: they cannot be written.
        """

    @abstractmethod
    def _issue(self, user: User) -> User:
        """Make a new credential of a user, for `save` to write; the user with it.

        Raises:
            ConfigError: it cannot be made.
        """

    @abstractmethod
    def _withdraw(self, user: User, keys: Sequence[str]) -> None:
        """Have the server take no credential of some of a user's keys, and `save` remove the
        user's files if these are all.
        """

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

    def put(
        self,
        name: str,
        role: str,
        of: str,
        grants: Sequence[Grant],
        *,
        lifetime: float | None = None,
    ) -> str:
        """Add a user with a new credential, or give one that is there these grants; what was done:
        `added`, `changed` or `there`.

        Args:
            lifetime: seconds that its credentials count from now on; as before unless given.

        Raises:
            ConfigError: the name is no token or somebody else's, or its credential cannot be
                made, or cannot expire.
        """
        check_token("user", name)
        self._check_lifetime(name, lifetime)
        known = self.users.get(name)
        if known is None:
            user = User(name, role, of, (), tuple(grants), lifetime=lifetime or 0.0)
            self.users[name] = self._issue(user)
            return "added"
        if known.role != role:
            raise ConfigError(
                f"the user {name} is {known.what}, and no {role}: revoke it first, or give another "
                "name"
            )
        if role == ACTOR and known.of != of:
            # Its key has the name that handlers allow.
            raise ConfigError(
                f"{known.of} and {of} would both be the user {name}: give one another name, or "
                "revoke it first"
            )
        lasts = known.lifetime if lifetime is None else lifetime
        user = msgspec.structs.replace(known, of=of, grants=tuple(grants), lifetime=lasts)
        self.users[name] = user
        return "there" if user == known else "changed"

    def rotate(self, name: str, *, lifetime: float | None = None) -> None:
        """Give a user another key; the one that it had is taken until it is revoked or expires.

        Args:
            lifetime: see `put`.

        Raises:
            ConfigError: there is no such user, or it has too many keys that do not expire, or one
                cannot be made.
        """
        user = self.user(name)
        lasting = sum(key not in user.ends for key in user.keys)
        if lasting >= self.most_keys:
            raise ConfigError(
                f"{name} has {lasting} keys that do not expire: revoke those before its last one "
                f"first, with `dynbus auth revoke {name} --previous`"
            )
        self._check_lifetime(name, lifetime)
        if lifetime is not None:
            user = msgspec.structs.replace(user, lifetime=lifetime)
        self.users[name] = self._issue(user)

    def revoke(self, name: str, *, previous: bool = False) -> None:
        """Remove a user, or the keys that it had before its last one.

        Raises:
            ConfigError: there is no such user, or no such key.
        """
        user = self.user(name)
        if not previous:
            self._withdraw(user, user.keys)
            del self.users[name]
        elif len(user.keys) == 1:
            raise ConfigError(f"{name} has one key: leave --previous out to remove the user")
        else:
            self._withdraw(user, user.keys[:-1])
            self.users[name] = user.with_keys(user.keys[-1:])

    def _check_lifetime(self, name: str, lifetime: float | None) -> None:
        if lifetime and not self.may_expire:
            raise ConfigError(
                f"the key of {name} cannot expire: only the tokens of accounts' users do, in a "
                "folder that `dynbus auth init --jwt` has made"
            )
