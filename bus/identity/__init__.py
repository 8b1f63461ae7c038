"""Identity of a process on the bus: its credential, and what that may publish and hear.

`Grant` says what is allowed and for what; `Users` are those of a server (`Registry`, with NKEYs) or
of one account of several (`Accounts`, with tokens), and render the server's configuration;
`identified` finds the credential of a process.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import accounts, credentials, files, grants, keys, registry, tokens, users

__all__ = [
    "accounts",
    "credentials",
    "files",
    "grants",
    "keys",
    "registry",
    "tokens",
    "users",
]
