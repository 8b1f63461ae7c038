"""What a caller may say about its calls beside the request: as a value, or for a block of code."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Mapping
from contextvars import ContextVar, Token
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Final, Never, TypedDict

from dynbus.bus.config import suggestion
from dynbus.bus.errors import ConfigError
from dynbus.bus.protocol.endpoint import MAX_SECONDS
from dynbus.bus.protocol.names import check_token

from .around_yield import waits_in_yield

MAX_METADATA: Final = 32
MAX_METADATA_BYTES: Final = 8192

_SHORT_TEXT: Final = re.compile(r"[!-~]{0,128}")


class Default:
    """The type of `DEFAULT`, so that `None` can mean no limit."""

    def __repr__(self) -> str:
        return "DEFAULT"


DEFAULT: Final = Default()


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """Options of calls; see `call_options`. What was not given is None, of `timeout` `DEFAULT`."""

    timeout: float | None | Default = DEFAULT
    wait: float | None = None
    instance: str | None = None
    request_id: str | None = None
    priority: int | None = None
    idempotency_key: str | None = None
    retries: int | None = None
    metadata: Mapping[str, str] | None = None

    def over(self, others: CallOptions) -> CallOptions:
        """These options, and `others` where they say nothing; metadata adds up.

        Raises:
            ConfigError: the metadata of both together is more than a call can carry.
        """
        if others is NONE:
            return self
        if self is NONE:
            return others
        given: dict[str, Any] = {
            name: value
            for name in CallOptions.__slots__
            if (value := getattr(self, name)) is not None and value is not DEFAULT
        }
        if self.timeout is None:
            given["timeout"] = None
        if self.metadata and others.metadata:
            given["metadata"] = {**others.metadata, **self.metadata}
            check_metadata(given["metadata"])
        return replace(others, **given)


NONE: Final = CallOptions()


class ClientOptions(TypedDict, total=False):
    """Options that every call of a client or a dependency may have; see `call_options`."""

    timeout: float | None
    wait: float
    priority: int
    retries: int
    metadata: Mapping[str, str]


_options: ContextVar[CallOptions] = ContextVar("dynbus_call_options")


def current_options() -> CallOptions:
    """The options in force for calls made here."""
    return _options.get(NONE)


def client_options(given: ClientOptions, where: str) -> CallOptions:
    """The options of a client as a value.

    Args:
        where: how messages name the call that was given them.

    Raises:
        ConfigError: there is no such option of a client, or a value is not usable.
    """
    known = ClientOptions.__annotations__
    for name in given:
        if name not in known:
            hint = ": give it with with_options(client, ...)" if name in _ALL else ""
            raise ConfigError(
                f"{where} has no option {name!r}{hint}; its options are {', '.join(known)}"
            )
    return checked(CallOptions(**given)) if given else NONE


def refuse_unknown(names: Iterable[str], where: str) -> None:
    """Refuse options of a call that there are not.

    Raises:
        ConfigError: `names` has one.
    """
    for name in names:
        raise ConfigError(
            f"{where} has no option {name!r}{suggestion(name, _ALL)}; its options are "
            f"{', '.join(_ALL)}"
        )


def checked(options: CallOptions) -> CallOptions:
    """The options themselves, when every value is usable; `NONE` for those that say nothing.

    Raises:
        ConfigError: a value is not usable.
    """
    _check(options)
    if options == NONE:
        return NONE
    if options.metadata is not None:
        # Whoever gave it may go on to change it.
        return replace(options, metadata=dict(options.metadata))
    return options


class OptionsBlock:
    """Options for the calls inside a `with`; what `call_options` returns."""

    __slots__ = ("_given", "_token")

    def __init__(self, given: CallOptions) -> None:
        self._given = given
        self._token: Token[CallOptions] | None = None

    def __repr__(self) -> str:
        return f"<OptionsBlock {self._given}>"

    def __enter__(self) -> CallOptions:
        if self._token is not None:
            raise ConfigError(
                "these call_options are in force already: call call_options(...) for each block"
            )
        generator = waits_in_yield(sys._getframe(1))  # pyright: ignore[reportPrivateUsage]
        if generator is not None:
            raise ConfigError(
                f"{generator} opens call_options around a yield: they would hold for whatever "
                "runs while it waits there, other callers' calls too; give them to a client "
                "instead, as in with_options(client, timeout=2.0)"
            )
        options = self._given.over(current_options())
        self._token = _options.set(options)
        return options

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        token, self._token = self._token, None
        if token is None:
            raise ConfigError("these call_options were not entered")
        try:
            _options.reset(token)
        except ValueError:
            raise ConfigError(
                "call_options were entered in one task and left in another: they hold in the "
                "first one still; give them to a client instead, as in "
                "with_options(client, timeout=2.0)"
            ) from error


def call_options(
    *,
    timeout: float | None | Default = DEFAULT,
    wait: float | None = None,
    instance: str | None = None,
    request_id: str | None = None,
    priority: int | None = None,
    idempotency_key: str | None = None,
    retries: int | None = None,
    metadata: Mapping[str, str] | None = None,
    **unknown: Never,
) -> OptionsBlock:
    """Options for every call that is begun inside the `with`, in this task and its children.

    They go before those of the client (`with_options`, `runtime.client`, `depends`), and those
    before what the handler declares; an inner block goes before an outer one, and metadata
    adds up. A handler's own generator may have the block around its `yield`. In any other
    generator the options would hold for whatever runs while it waits there: that is refused.
    None says nothing, as if the option was not given; for `timeout` it is no limit.

    Args:
        timeout: seconds for the whole call; None for no limit.
        wait: seconds to wait for an instance when there is none, or the only one has just gone;
            0 waits only for the first reading of the instances' records, 5 s at most.
        instance: the id of the instance to call, instead of a routed one.
        request_id: the id that the request and its sub-calls carry.
        priority: a whole number from -9999 to 99999, larger is more urgent; handed to routers and
            handlers.
        idempotency_key: names the effect, so that a repeated call has it once.
        retries: how often to repeat a call that failed for a passing reason.
        metadata: keys and values that reach the handler and every sub-call.

    Raises:
        ConfigError: there is no such option, a value is not usable, or the block would be open
            around a `yield`.
    """
    refuse_unknown(unknown, "call_options(...)")
    return OptionsBlock(
        checked(
            CallOptions(
                timeout=timeout,
                wait=wait,
                instance=instance,
                request_id=request_id,
                priority=priority,
                idempotency_key=idempotency_key,
                retries=retries,
                metadata=metadata,
            )
        )
    )


_ALL: Final = CallOptions.__slots__


def _check(options: CallOptions) -> None:
    # Not everyone runs a type checker, so the types are looked at as well.
    timeout: Any = options.timeout
    if timeout is not DEFAULT and timeout is not None and not _is_number(timeout, above=0):
        raise ConfigError(
            f"timeout={timeout!r} must be more than 0 and at most {MAX_SECONDS:g} seconds, "
            "or None for no limit"
        )
    wait: Any = options.wait
    if wait is not None and not (_is_number(wait) and wait >= 0):
        raise ConfigError(f"wait={wait!r} must be 0 or more seconds")
    if options.instance is not None:
        check_token("instance", options.instance)
    for name in ("request_id", "idempotency_key"):
        text: Any = getattr(options, name)
        if text is not None and not (isinstance(text, str) and _SHORT_TEXT.fullmatch(text)):
            raise ConfigError(
                f"{name}={str(text)[:140]!r} must be at most 128 printable ASCII characters "
                "without spaces"
            )
    retries: Any = options.retries
    if retries is not None and not (isinstance(retries, int) and retries >= 0):
        raise ConfigError(f"retries={retries!r} must be a whole number, 0 or more")
    priority: Any = options.priority
    if priority is not None and not (isinstance(priority, int) and -9999 <= priority <= 99999):
        raise ConfigError(f"priority={priority!r} must be a whole number from -9999 to 99999")
    metadata: Any = options.metadata
    if metadata is not None and not isinstance(metadata, Mapping):
        raise ConfigError(f"metadata={metadata!r} must be a mapping of strings to strings")
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
