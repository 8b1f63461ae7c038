"""Identity of a process on the bus: its credential, and what that may publish and hear.

`Grant` says what is allowed and for what; `Registry` keeps the users and renders the server's
configuration; `identified` finds the credential of a process.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import credentials, files, grants, registry

__all__ = ["credentials", "files", "grants", "registry"]
