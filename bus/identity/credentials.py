"""The credential of a process: an NKEY in a file, or a credentials file of NATS."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from dynbus.bus.config import BusConfig
from dynbus.bus.errors import ConfigError
from dynbus.bus.protocol.names import ANONYMOUS, ComponentName, check_token

from .keys import SUFFIX, Kind, check_extra, is_seed
from .tokens import user_of_credentials

logger = logging.getLogger(__name__)

CREDS: Final = ".creds"
"""The suffix of a credentials file of NATS: the token of a user, and its seed."""


def user_of(component: ComponentName) -> str:
    """The name of the user that is one component, and of nothing else."""
    return f"{component.namespace}_{component.component}"


def own_credentials(credentials: str, served: Sequence[str]) -> str:
    """The file of a process in a folder of credentials; what is no folder is as it was.

    Args:
        served: the components that the process serves, as `namespace.component`.

    Raises:
        ConfigError: it serves several, or has no file there.
    """
    folder = Path(credentials)
    if not credentials or not folder.is_dir():
        return credentials
    if len(served) != 1:
        raise ConfigError(
            f"credentials = {credentials!r} is a folder with a file for each component, and this "
            f"process serves {', '.join(served)}: run them in processes of their own, or name a "
            "file"
        )
    user = user_of(ComponentName.parse(served[0]))
    paths = [folder / f"{user}{suffix}" for suffix in (SUFFIX, CREDS)]
    there = [path for path in paths if path.is_file()]
    if not there:
        raise ConfigError(
            f"there is no {paths[0]}, and no {paths[1].name}, which would be the credential of "
            f"{served[0]}: make it with `dynbus auth add` and bring it here, or leave "
            f"{served[0]} to another host (--{served[0].partition('.')[2]}.workers=0)"
        )
    return str(there[0])


def suffix_in(folder: Path) -> str:
    """The suffix of the files in a folder of credentials: that of NKEYs, or of NATS's files."""
    return CREDS if any(folder.glob(f"*{CREDS}")) else SUFFIX


def identified(config: BusConfig) -> BusConfig:
    """A configuration with its principal, unless it is set: the name of the file with its NKEY, or
    the user of a credentials file that dynbus wrote.

    Raises:
        ConfigError: the file cannot be read or used.
    """
    if config.principal != ANONYMOUS or not config.credentials:
        return config
    text = _content(config.credentials)
    name = Path(config.credentials).stem if _is_key(text) else user_of_credentials(text)
    if not name:
        return config
    return msgspec.structs.replace(config, principal=check_token("the user of credentials", name))


def credential_options(credentials: str) -> dict[str, Any]:
    """The options of nats-py's `connect` for a file with a credential.

    A credentials file is read again for each connection, so that it can be replaced by one that
    expires later.

    Raises:
        ConfigError: the file cannot be read or used.
    """
    if not credentials:
        return {}
    text = _content(credentials)
    if _is_key(text):
        return {"nkeys_seed_str": text}
    check_extra()
    return {"user_credentials": credentials}


class CredentialFile:
    """A file with the credential of a process, which is read again for each connection.

    A file that was replaced counts from the next connection on. Where it cannot be read by then, as
    while it is copied, what it had before is used.

    Raises:
        ConfigError: the file cannot be read or used.
    """

    def __init__(self, credentials: str) -> None:
        self._credentials = credentials
        self._options = credential_options(credentials)

    def options(self) -> dict[str, Any]:
        """The options of nats-py's `connect`, as `credential_options` has them."""
        try:
            self._options = credential_options(self._credentials)
        except ConfigError as error:
            logger.warning("%s: what it had before is used", error)
        return self._options


def _is_key(text: str) -> bool:
    """True if a file's content is an NKEY, and not one of another kind."""
    return text.startswith(f"S{Kind.USER}")


def _content(credentials: str) -> str:
    """The content of a file with a credential, whose NKEY is whole where it is one.

    Raises:
        ConfigError: it cannot be read, or is a broken NKEY.
    """
    path, source = Path(credentials), f"credentials = {credentials!r}"
    try:
        text = path.read_text(encoding="utf-8").strip()
    except IsADirectoryError:
        files = (one for suffix in (SUFFIX, CREDS) for one in path.glob(f"*{suffix}"))
        names = ", ".join(sorted(one.name for one in files))
        raise ConfigError(
            f"{source} is a folder: name a file in it; there are: {names or 'none'}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"{source} cannot be read: {reason}") from None
    if _is_key(text) and not is_seed(text, Kind.USER):
        # What the package raises may tell of the seed.
        raise ConfigError(f"{source} is no NKEY of a user, although it begins like one")
    return text
