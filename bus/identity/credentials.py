"""The credential of a process: an NKEY in a file, or a credentials file of NATS."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from dynbus.bus.config import BusConfig
from dynbus.bus.errors import ConfigError
from dynbus.bus.extras import has_extra, how_to_install
from dynbus.bus.protocol.names import ANONYMOUS, ComponentName, check_token

from .files import write_whole

SUFFIX: Final = ".nk"
_SEED_OF_USER: Final = "SU"


class NewKey(NamedTuple):
    """A pair of keys: the public one, and the seed that only its owner has."""

    public: str
    seed: str

    def __repr__(self) -> str:
        return f"<NewKey {self.public}>"


def new_key() -> NewKey:
    """A new NKEY of a user.

    Raises:
        ConfigError: the extra `nkeys` is missing.
    """
    nkeys = _nkeys()
    seed = nkeys.encode_seed(secrets.token_bytes(32), nkeys.PREFIX_BYTE_USER)
    pair = nkeys.from_seed(bytearray(seed))
    return NewKey(pair.public_key.decode(), seed.decode())


def write_seed(path: Path, seed: str) -> None:
    """Write a seed into a file that its owner alone can read.

    Raises:
        ConfigError: it cannot be written.
    """
    write_whole(path, f"{seed}\n", secret=True)


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
    path = folder / f"{user_of(ComponentName.parse(served[0]))}{SUFFIX}"
    if not path.is_file():
        raise ConfigError(
            f"there is no {path}, which would be the credential of {served[0]}: make it with "
            "`dynbus auth add`"
        )
    return str(path)


def identified(config: BusConfig) -> BusConfig:
    """A configuration with its principal: the name of the file with its NKEY, unless it is set.

    Raises:
        ConfigError: the file cannot be read or used.
    """
    if config.principal != ANONYMOUS or not _seed_in(config.credentials):
        return config
    name = Path(config.credentials).stem
    return msgspec.structs.replace(config, principal=check_token("the user of credentials", name))


def credential_options(credentials: str) -> dict[str, Any]:
    """The options of nats-py's `connect` for a file with a credential.

    Raises:
        ConfigError: the file cannot be read or used.
    """
    if not credentials:
        return {}
    seed = _seed_in(credentials)
    return {"nkeys_seed_str": seed} if seed else {"user_credentials": credentials}


def _seed_in(credentials: str) -> str:
    """The NKEY that a file has; empty for a file of another kind, or none."""
    if not credentials:
        return ""
    path, source = Path(credentials), f"credentials = {credentials!r}"
    try:
        text = path.read_text(encoding="utf-8").strip()
    except IsADirectoryError:
        names = ", ".join(sorted(one.name for one in path.glob(f"*{SUFFIX}")))
        raise ConfigError(
            f"{source} is a folder: name a file in it; there are: {names or 'none'}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"{source} cannot be read: {reason}") from None
    if not text.startswith(_SEED_OF_USER):
        return ""
    nkeys = _nkeys()
    try:
        nkeys.from_seed(bytearray(text.encode()))
    except (nkeys.NkeysError, ValueError):
        # What it raises may tell of the seed.
        raise ConfigError(f"{source} is no NKEY of a user, although it begins like one") from None
    return text


def _nkeys() -> Any:
    if not has_extra("nkeys"):
        raise ConfigError(f"NKEYs need an extra: {how_to_install('nkeys')}")
    import nkeys

    return nkeys
