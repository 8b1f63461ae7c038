"""The configuration of an actor as its code reads it: `self.config`."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from types import MappingProxyType
from typing import Any, Final, NamedTuple, cast
from weakref import WeakValueDictionary

import msgspec
import pydantic

from dynbus.bus.errors import ConfigError

from .arguments import how_to_give
from .service_args import SERVICE_KEY


class ActorConfig(Mapping[str, Any]):
    """The configuration of an actor: its constructor arguments as they were given, and the keys
    beside them that its class takes (`extra_config`).

    Defaults of the constructor are not in it: they are what the constructor says.

    Args:
        called: how the run calls the actor, for messages.
    """

    def __init__(self, called: str, values: Mapping[str, Any]) -> None:
        self._called = called
        self._values = values

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        # Of a text nobody can tell that it came from a file, and is a secret.
        return f"<ActorConfig of {self._called}: {', '.join(self._values)}>"

    def require(self, key: str) -> Any:
        """The value of a key that must be there.

        Raises:
            ConfigError: it is not, or is null; the message says how to give it.
        """
        value = self._values.get(key)
        if value is None:
            raise ConfigError(f"{self._called} needs {key!r}: {how_to_give(self._called, key)}")
        return value

    def as_args(self, *, prefix: str = "") -> list[str]:
        """The configuration as the command line of another program, for its argparse.

        `{"lib_model": "m", "lib_fast": True}` is `["--model", "m", "--fast"]`. True is a bare flag;
        false and null are left out; a list is a flag and then its values, which `nargs="+"` reads;
        a mapping is JSON. A value that begins with `-` is written `--flag=-1`, or argparse would
        take it for a flag.

        Args:
            prefix: of the keys that are meant; it is stripped.
        """
        words: list[str] = []
        for key, value in self._values.items():
            name = key.removeprefix(prefix)
            if key.startswith(prefix) and name and key != SERVICE_KEY:
                words += _words(f"--{name}", _plain(value))
        return words


class ConfigAttribute:
    """`Actor.config`: what the instance was configured with, from the first line of its constructor
    on. An actor that assigns a `config` of its own has that."""

    def __get__(self, instance: Any, owner: type[Any]) -> Any:
        if instance is None:
            return self
        if instance._dynbus_config is not None:
            return instance._dynbus_config
        made = constructed(instance)
        # Without a runtime it was made in a program or a test.
        return made.config if made is not None else ActorConfig(owner.__name__, {})


class Constructed(NamedTuple):
    """The facts about itself that an actor has while its constructor runs.

    Attributes:
        worker_index: which of the instances of its node it is, from 0.
    """

    actor: type[Any]
    config: ActorConfig
    worker_index: int


@contextmanager
def constructing(given: Constructed) -> Generator[None]:
    """Let the constructor that runs in the block read what it is given."""
    token = _constructing.set(given)
    try:
        yield
    finally:
        _constructing.reset(token)


def constructed(instance: object) -> Constructed | None:
    """The facts that an actor is given whose constructor is running; None for any other object."""
    made = _constructing.get()
    return made if made is not None and isinstance(instance, made.actor) else None


def configs() -> Mapping[str, ActorConfig]:
    """The configurations of the actors of this process, by the name of their node and by that of
    their class.

    A process of `dynbus run` serves one actor, whose configuration is here before its module is
    imported; texts of constructor arguments are read as their types once it is constructed. With
    `--in-process`, and in programs, each actor is here from its construction on and for as long as
    it is kept, and the latest of a name is the one that is found.
    """
    return MappingProxyType(_configs)


def publish_config(config: ActorConfig, *names: str) -> None:
    """Have `configs` give a configuration by these names, while somebody else keeps it."""
    for name in names:
        _configs[name] = config


_constructing: ContextVar[Constructed | None] = ContextVar("dynbus_constructing", default=None)
# An actor that is gone is not kept by what it was given, which may be a whole model.
_configs: Final[WeakValueDictionary[str, ActorConfig]] = WeakValueDictionary()


def _words(flag: str, value: Any) -> list[str]:
    if value is None or value is False:
        return []
    if value is True:
        return [flag]
    if isinstance(value, list):
        texts = [_text(each) for each in cast("list[object]", value)]
        single = len(texts) == 1 and texts[0].startswith("-")
        return [f"{flag}={texts[0]}"] if single else [flag, *texts]
    text = _text(value)
    return [f"{flag}={text}"] if text.startswith("-") else [flag, text]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _plain(value: Any) -> Any:
    """The value in the types of JSON, as far as it has a form there."""
    if isinstance(value, pydantic.SecretStr | pydantic.SecretBytes):
        return _plain(value.get_secret_value())
    if isinstance(value, pydantic.BaseModel):
        return _plain({name: getattr(value, name) for name in type(value).model_fields})
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, Mapping):
        given = cast("Mapping[object, Any]", value)
        return {str(key): _plain(each) for key, each in given.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(each) for each in cast("list[Any]", value)]
    try:
        return msgspec.to_builtins(value, enc_hook=str)
    except (TypeError, ValueError):
        return str(value)
