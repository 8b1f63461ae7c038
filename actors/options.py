"""`call_options`: what a caller may say about its calls beside the request."""

from __future__ import annotations

import math
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Final

from dynbus.bus.endpoint import MAX_SECONDS
from dynbus.bus.errors import ConfigError
from dynbus.bus.names import check_token

MAX_METADATA: Final = 32
MAX_METADATA_BYTES: Final = 8192

_SHORT_TEXT: Final = re.compile(r"[!-~]{0,128}")


class _Default:
    """The type of `DEFAULT`, so that `None` can mean no limit."""

    def __repr__(self) -> str:
        return "DEFAULT"


DEFAULT: Final = _Default()


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """The options in force for a call; see `call_options`."""

    timeout: float | None | _Default = DEFAULT
    wait: float = 0.0
    instance: str = ""
    request_id: str = ""
    priority: int | None = None
    idempotency_key: str = ""
    retries: int | None = None
    metadata: Mapping[str, str] | None = None

    def merged(self, changes: Mapping[str, Any]) -> CallOptions:
        """These options with some of them changed; metadata is added to.

        Raises:
            ConfigError: a value is not usable.
        """
        changes = dict(changes)
        if changes.get("metadata") is not None and self.metadata:
            changes["metadata"] = {**self.metadata, **changes["metadata"]}
        merged = replace(self, **changes)
        _check(merged)
        return merged


_options: ContextVar[CallOptions] = ContextVar("dynbus_call_options")
_NONE: Final = CallOptions()


def current_options() -> CallOptions:
    """The options in force for calls made here."""
    return _options.get(_NONE)


@contextmanager
def call_options(
    *,
    timeout: float | None | _Default = DEFAULT,
    wait: float | None = None,
    instance: str | None = None,
    request_id: str | None = None,
    priority: int | None = None,
    idempotency_key: str | None = None,
    retries: int | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Generator[CallOptions]:
    """Options for every call that is begun inside the `with`, in this task and its children.

    Args:
        timeout: seconds for the whole call; None for no limit.
        wait: seconds to wait for an instance when there is none; 0 waits only for the first
            reading of the instances' records, 5 s at most.
        instance: the id of the instance to call, instead of a routed one.
        request_id: the id that the request and its sub-calls carry.
        priority: larger is more urgent; handed to routers and handlers.
        idempotency_key: names the effect, so that a repeated call has it once.
        retries: how often to repeat a call that failed for a passing reason.
        metadata: keys and values that reach the handler and every sub-call.

    Raises:
        ConfigError: a value is not usable.
    """
    given = {
        "wait": wait,
        "instance": instance,
        "request_id": request_id,
        "priority": priority,
        "idempotency_key": idempotency_key,
        "retries": retries,
        "metadata": metadata,
    }
    changes: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    if not isinstance(timeout, _Default):
        changes["timeout"] = timeout
    options = current_options().merged(changes)
    token = _options.set(options)
    try:
        yield options
    finally:
        _options.reset(token)


def _check(options: CallOptions) -> None:
    # Not everyone runs a type checker, so the types are looked at as well.
    timeout: Any = options.timeout
    if timeout is not DEFAULT and timeout is not None and not _is_number(timeout, above=0):
        raise ConfigError(
            f"timeout={timeout!r} must be more than 0 and at most {MAX_SECONDS:g} seconds, "
            "or None for no limit"
        )
    if not _is_number(options.wait) or not options.wait >= 0:
        raise ConfigError(f"wait={options.wait!r} must be 0 or more seconds")
    if options.instance:
        check_token("instance", options.instance)
    for name in ("request_id", "idempotency_key"):
        text: Any = getattr(options, name)
        if not isinstance(text, str) or not _SHORT_TEXT.fullmatch(text):
            raise ConfigError(
                f"{name}={str(text)[:140]!r} must be at most 128 printable ASCII characters "
                "without spaces"
            )
    retries: Any = options.retries
    if retries is not None and not (isinstance(retries, int) and retries >= 0):
        raise ConfigError(f"retries={retries!r} must be a number, 0 or more")
    priority: Any = options.priority
    if priority is not None and not (isinstance(priority, int) and -9999 <= priority <= 99999):
        raise ConfigError(f"priority={priority!r} must be a number from -9999 to 99999")
    check_metadata(options.metadata or {})


def check_metadata(metadata: Mapping[Any, Any]) -> None:
    """Check that a call can carry metadata.

    Raises:
        ConfigError: keys or values are no strings, or they are too many or too long.
    """
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise ConfigError(f"metadata {key!r}={value!r}: keys and values must be strings")
    size = sum(len(key) + len(value) for key, value in metadata.items())
    if len(metadata) > MAX_METADATA or size > MAX_METADATA_BYTES:
        raise ConfigError(
            f"metadata has {len(metadata)} keys and {size} characters; at most "
            f"{MAX_METADATA} and {MAX_METADATA_BYTES} are carried"
        )


def _is_number(value: Any, *, above: float = -math.inf) -> bool:
    return isinstance(value, int | float) and above < value <= MAX_SECONDS
