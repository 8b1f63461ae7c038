"""NKEYs: pairs of Ed25519 keys, whose public halves are names that begin with their kind."""

from __future__ import annotations

import secrets
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, NamedTuple

from dynbus.bus.errors import ConfigError
from dynbus.bus.extras import has_extra, how_to_install

from .files import write_whole

SUFFIX: Final = ".nk"
"""That of a file with a seed."""


class Kind(StrEnum):
    """The kinds of keys, by the letter with which a public one begins."""

    OPERATOR = "O"
    ACCOUNT = "A"
    USER = "U"


class NewKey(NamedTuple):
    """A pair of keys: the public one, and the seed that only its owner has."""

    public: str
    seed: str

    def __repr__(self) -> str:
        return f"<NewKey {self.public}>"


def new_key(kind: Kind = Kind.USER) -> NewKey:
    """A new NKEY.

    Raises:
        ConfigError: the extra `nkeys` is missing.
    """
    nkeys = _nkeys()
    prefix = {
        Kind.OPERATOR: nkeys.PREFIX_BYTE_OPERATOR,
        Kind.ACCOUNT: nkeys.PREFIX_BYTE_ACCOUNT,
        Kind.USER: nkeys.PREFIX_BYTE_USER,
    }[kind]
    seed = nkeys.encode_seed(secrets.token_bytes(32), prefix)
    pair = nkeys.from_seed(bytearray(seed))
    return NewKey(pair.public_key.decode(), seed.decode())


def seed_text(key: NewKey) -> str:
    """The content of a file with the seed of a key."""
    return f"{key.seed}\n"


def write_seed(path: Path, seed: str) -> None:
    """Write a seed into a file that its owner alone can read.

    Raises:
        ConfigError: it cannot be written.
    """
    write_whole(path, f"{seed}\n", secret=True)


def read_seed(path: Path, public: str, purpose: str) -> NewKey:
    """The pair of keys whose seed is in a file.

    Args:
        public: its public key.
        purpose: what it is needed for, for the message.

    Raises:
        ConfigError: there is no such file, or it has another key.
    """
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(
            f"{path}, which {purpose}, cannot be read: {reason}; put it back where it was"
        ) from None
    is_whole = is_seed(text, Kind(public[0]))
    if not is_whole or _nkeys().from_seed(bytearray(text.encode())).public_key.decode() != public:
        raise ConfigError(f"{path}, which {purpose}, is not the seed of {public}: put that there")
    return NewKey(public, text)


def is_seed(text: str, kind: Kind) -> bool:
    """True if a text is a whole seed of a kind.

    Raises:
        ConfigError: the extra `nkeys` is missing, and it begins like one.
    """
    if not text.startswith(f"S{kind}"):
        return False
    nkeys = _nkeys()
    try:
        nkeys.from_seed(bytearray(text.encode()))
    except (nkeys.NkeysError, ValueError):
        return False
    return True


def sign(key: NewKey, data: bytes) -> bytes:
    """The signature of some data."""
    signature: bytes = _nkeys().from_seed(bytearray(key.seed.encode())).sign(data)
    return signature


def check_extra() -> None:
    """Refuse what needs NKEYs where they cannot be used.

    Raises:
        ConfigError: the extra `nkeys` is missing.
    """
    _nkeys()


def _nkeys() -> Any:
    if not has_extra("nkeys"):
        raise ConfigError(f"NKEYs need an extra: {how_to_install('nkeys')}")
    import nkeys

    return nkeys
