"""How an actor class is served by a run: the class arguments, and the key `ServiceArgs` of its
configuration, which overrides them one by one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from dynbus.bus.config import suggestion
from dynbus.bus.errors import ConfigError
from dynbus.bus.protocol.names import check_token

from .arguments import Text
from .restart_policy import OnCrash, check_on_crash

MAX_WORKERS: Final = 1024


@dataclass(frozen=True, kw_only=True)
class ServiceArgs:
    """How an actor class is served.

    Attributes:
        namespace: the deployment or model that it belongs to; empty where nothing says.
        workers: the number of instances; 0 starts none.
        on_crash: what follows when an instance ends by itself.
        enabled: whether its instances are announced on the bus.
    """

    namespace: str = ""
    workers: int = 1
    on_crash: OnCrash = "restart"
    enabled: bool = True

    def overridden(self, given: Mapping[str, Any], source: Callable[[str], str]) -> ServiceArgs:
        """The same with what `given` has instead.

        Args:
            given: values by key; a `Text` is read as the key's type.
            source: names where the value of a key came from, for messages.

        Raises:
            ConfigError: a key does not exist, or a value does not fit; the message begins with the
                source.
        """
        changed: dict[str, Any] = {}
        for key, value in given.items():
            parse = PARSERS.get(key)
            if parse is None:
                raise ConfigError(
                    f"{source(key)} does not exist{suggestion(key, PARSERS)}; there are: "
                    f"{', '.join(f'ServiceArgs.{known}' for known in PARSERS)}"
                )
            changed[key] = parse(value, source(key), getattr(self, key))
        return dataclasses.replace(self, **changed)


def _namespace(value: Any, source: str, below: str) -> str:
    return check_token(source, str(value) if isinstance(value, Text) else value)


def _workers(value: Any, source: str, below: int) -> int:
    number = value
    if isinstance(number, Text) and number.isascii() and number.isdigit() and len(number) < 10:
        number = int(number)
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= MAX_WORKERS:
        raise ConfigError(
            f"{source} = {value!r} must be a number of instances from 0 to {MAX_WORKERS}"
        )
    return number


def _on_crash(value: Any, source: str, below: OnCrash) -> OnCrash:
    return check_on_crash(value, source)


def _enabled(value: Any, source: str, below: bool) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, Text) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise ConfigError(f"{source} = {value!r}: write true or false")


PARSERS: Final[Mapping[str, Callable[[Any, str, Any], Any]]] = {
    "namespace": _namespace,
    "workers": _workers,
    "on_crash": _on_crash,
    "enabled": _enabled,
}
"""What reads the value of each key: of the value, where it came from, and the value below it,
which a mapping is merged into."""
