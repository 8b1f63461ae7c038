"""Class arguments of an actor, and the key `ServiceArgs` of its configuration, which overrides
them one by one: namespace, workers, `on_crash`, resources.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast

from dynbus.bus.config import suggestion
from dynbus.bus.errors import ConfigError
from dynbus.bus.protocol.names import check_token

from .arguments import Text
from .resources import Resources
from .restart_policy import OnCrash, check_on_crash

SERVICE_KEY: Final = "ServiceArgs"
MAX_WORKERS: Final = 1024
MAX_VARIABLE: Final = 64 * 1024
"""Characters in the value of an environment variable."""

_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class ServiceArgs:
    """The options with which an actor class is served.

    Attributes:
        namespace: the deployment or model that it belongs to; empty where nothing says.
        workers: the number of instances; 0 starts none.
        on_crash: what follows when an instance ends by itself.
        resources: what each instance needs of the machine.
        environment: variables that the process of each instance has beside those of the run. Their
            values are not shown: variables hold tokens.
        enabled: whether its instances are announced on the bus.
    """

    namespace: str = ""
    workers: int = 1
    on_crash: OnCrash = "restart"
    resources: Resources = Resources()
    environment: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    enabled: bool = True

    def overridden(self, given: Mapping[str, Any], source: Callable[[str], str]) -> ServiceArgs:
        """The same with what `given` has instead.

        Args:
            given: values by key; a `Text` is read as the key's type. What is a mapping goes over
                the one below, and `resources.gpu` names one of its values.
            source: names where the value of a key came from, for messages.

        Raises:
            ConfigError: a key does not exist, or a value does not fit; the message begins with the
                source.
        """
        changed: dict[str, Any] = {}
        for key, value in given.items():
            name, _, member = key.partition(".")
            below = changed.get(name, getattr(self, name, None))
            if member and name in MEMBERS:
                changed[name] = MEMBERS[name](member, value, source(key), below)
            elif key in PARSERS:
                changed[key] = PARSERS[key](value, source(key), below)
            else:
                raise ConfigError(
                    f"{source(key)} does not exist{suggestion(key, PARSERS)}; there are: "
                    f"{', '.join(f'{SERVICE_KEY}.{known}' for known in PARSERS)}"
                )
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


def _resources(value: Any, source: str, below: Resources) -> Resources:
    return below.updated(_mapping(value, source, '{"cpu": 4, "gpu": 1}'), source)


def _resource(key: str, value: Any, source: str, below: Resources) -> Resources:
    return below.with_value(key, value, source)


def _environment(value: Any, source: str, below: Mapping[str, str]) -> Mapping[str, str]:
    for name, each in _mapping(value, source, '{"OMP_NUM_THREADS": "4"}').items():
        below = _variable(name, each, f"{source}.{name}", below)
    return below


def _variable(name: str, value: Any, source: str, below: Mapping[str, str]) -> Mapping[str, str]:
    if not _VARIABLE.fullmatch(name):
        raise ConfigError(f"{source}: {name!r} is no name of an environment variable")
    if name.startswith("DYNBUS_") or name == "NATS_URL":
        raise ConfigError(
            f"{source}: {name} is for the run as a whole: set it where dynbus run is started"
        )
    if value is None:
        return {known: each for known, each in below.items() if known != name}
    if not isinstance(value, str) and not _is_plain_number(value):
        # It is not shown: variables hold tokens.
        kind = type(value).__name__
        raise ConfigError(f"{source} is of the type {kind}: write it as text, in quotes")
    text = str(value)
    if len(text) > MAX_VARIABLE or "\0" in text:
        raise ConfigError(f"{source}: give at most {MAX_VARIABLE} characters, none of them NUL")
    return {**below, name: text}


def _is_plain_number(value: Any) -> bool:
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) < 2**64
    return isinstance(value, float) and math.isfinite(value)


def _mapping(value: Any, source: str, example: str) -> dict[str, Any]:
    """The value as a mapping, which a `Text` has as JSON; nothing is an empty one."""
    parsed: object = {} if value is None else value
    if isinstance(value, Text):
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError):
            parsed = None
    if not isinstance(parsed, Mapping):
        raise ConfigError(f"{source} must be a mapping, for example {example}")
    return {str(key): each for key, each in cast("Mapping[object, Any]", parsed).items()}


PARSERS: Final[Mapping[str, Callable[[Any, str, Any], Any]]] = {
    "namespace": _namespace,
    "workers": _workers,
    "on_crash": _on_crash,
    "resources": _resources,
    "environment": _environment,
    "enabled": _enabled,
}
"""The parser of each key's value: of the value, its origin, and the value below it, which a mapping
is merged into.
"""

MEMBERS: Final[Mapping[str, Callable[[str, Any, str, Any], Any]]] = {
    "resources": _resource,
    "environment": _variable,
}
"""The functions that merge one value into the mapping below it: its key, the value, its origin, and
that mapping.
"""
