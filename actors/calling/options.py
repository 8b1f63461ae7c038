"""Options of calls beside the request: as a value, or for a block of code."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from contextvars import ContextVar, Token
from typing import Any, Final, TypedDict, Unpack, cast, get_args

from dynbus.actors.middleware.passing import Middleware, checked_middleware
from dynbus.bus.config import Spill, suggestion
from dynbus.bus.context import Context
from dynbus.bus.errors import ConfigError
from dynbus.bus.protocol.endpoint import MAX_SECONDS
from dynbus.bus.protocol.names import check_token

from .generators import opening_generator

MAX_METADATA: Final = 32
MAX_METADATA_BYTES: Final = 8192

_SHORT_TEXT: Final = re.compile(r"[!-~]{0,128}")


class ClientOptions(TypedDict, total=False):
    """Options that every call of a client or a dependency may have; see `call_options`."""

    timeout: float | None
    wait: float | None
    priority: int | None
    retries: int | None
    metadata: Mapping[str, str] | None
    middleware: Sequence[Middleware] | None
    spill: Spill | None


class CallOptions(ClientOptions, total=False):
    """Options of calls; see `call_options`. As a value it is not changed once it is checked."""

    instance: str | None
    request_id: str | None
    idempotency_key: str | None


NONE: Final[CallOptions] = {}

_options: ContextVar[CallOptions] = ContextVar("dynbus_call_options")


def current_options() -> CallOptions:
    """The options in force for calls made here."""
    return _options.get(NONE)


def combined(options: CallOptions, others: CallOptions) -> CallOptions:
    """The options, and `others` where they say nothing; metadata adds up, and so does middleware,
    that of the options outside.

    Raises:
        ConfigError: the metadata of both together is more than a call can carry.
    """
    if not others:
        return options
    if not options:
        return others
    both: CallOptions = {**others, **options}
    above, below = options.get("metadata"), others.get("metadata")
    if above and below:
        metadata = both["metadata"] = {**below, **above}
        check_metadata(metadata)
    outer, inner = options.get("middleware"), others.get("middleware")
    if outer and inner:
        both["middleware"] = (*outer, *inner)
    return both


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
    return _checked(given)


def checked_options(given: CallOptions, where: str) -> CallOptions:
    """The options of a call as a value, which keeps nothing that the caller may change.

    Args:
        where: how messages name the call that was given them.

    Raises:
        ConfigError: there is no such option, or a value is not usable.
    """
    for name in given:
        if name not in _ALL:
            raise ConfigError(
                f"{where} has no option {name!r}{suggestion(name, _ALL)}; its options are "
                f"{', '.join(_ALL)}"
            )
    return _checked(given)


def inherited(options: CallOptions, parent: Context | None) -> tuple[dict[str, str], int]:
    """The metadata and the priority of what is asked for with these options in a running call."""
    metadata = dict(parent.metadata) if parent is not None else {}
    metadata |= options.get("metadata") or {}
    priority = options.get("priority")
    if priority is None:
        priority = parent.priority if parent is not None else 0
    return metadata, priority


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
        generator = opening_generator(sys._getframe(1))  # pyright: ignore[reportPrivateUsage]
        if generator is not None:
            raise ConfigError(
                f"{generator} is a generator and opens call_options, which would hold for whatever "
                "runs while it waits in a yield, other callers' calls too; give them to a client "
                "instead, as in with_options(client, timeout=2.0)"
            )
        options = combined(self._given, current_options())
        self._token = _options.set(options)
        return options

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
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


def call_options(**options: Unpack[CallOptions]) -> OptionsBlock:
    """Options for every call that is begun inside the `with`, in this task and its children.

    They go before those of the client (`with_options`, `runtime.client`, `depends`), and those
    before what the handler declares; an inner block goes before an outer one, and metadata
    adds up. A handler's own generator may have the block, around its `yield` too. Any other
    generator is refused: while it waits in a `yield`, they would hold for whatever runs.
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
        middleware: of clients alone: what is done around their calls, the first outermost.
        spill: `region` to call an instance of another region when nobody in the own one can take
            the call, `never` to stay; `DYNBUS_SPILL` says it for calls that do not.

    Raises:
        ConfigError: there is no such option, a value is not usable, or a generator opens the
            block.
    """
    checked = checked_options(options, "call_options(...)")
    if checked.get("middleware"):
        raise ConfigError(
            "call_options(...): middleware is a client's: with_options(client, middleware=...)"
        )
    return OptionsBlock(checked)


_ALL: Final = CallOptions.__annotations__


def _checked(given: Mapping[str, Any]) -> CallOptions:
    # Not everyone runs a type checker, so the types are looked at as well.
    options: dict[str, Any] = {
        name: value for name, value in given.items() if value is not None or name == "timeout"
    }
    timeout = options.get("timeout")
    if timeout is not None and not _is_number(timeout, above=0):
        raise ConfigError(
            f"timeout={timeout!r} must be more than 0 and at most {MAX_SECONDS:g} seconds, "
            "or None for no limit"
        )
    wait = options.get("wait", 0.0)
    if not (_is_number(wait) and wait >= 0):
        raise ConfigError(f"wait={wait!r} must be 0 or more seconds")
    if "spill" in options and options["spill"] not in get_args(Spill):
        raise ConfigError(f"spill={options['spill']!r} must be one of {', '.join(get_args(Spill))}")
    if "instance" in options:
        check_token("instance", options["instance"])
    for name in ("request_id", "idempotency_key"):
        text = options.get(name, "")
        if not (isinstance(text, str) and _SHORT_TEXT.fullmatch(text)):
            raise ConfigError(
                f"{name}={str(text)[:140]!r} must be at most 128 printable ASCII characters "
                "without spaces"
            )
    retries = options.get("retries", 0)
    if isinstance(retries, bool) or not (isinstance(retries, int) and retries >= 0):
        raise ConfigError(f"retries={retries!r} must be a whole number, 0 or more")
    priority = options.get("priority", 0)
    is_whole = isinstance(priority, int) and not isinstance(priority, bool)
    if not (is_whole and -9999 <= priority <= 99999):
        raise ConfigError(f"priority={priority!r} must be a whole number from -9999 to 99999")
    if "metadata" in options:
        metadata: Any = options["metadata"]
        if not isinstance(metadata, Mapping):
            raise ConfigError(f"metadata={metadata!r} must be a mapping of strings to strings")
        # Its giver may go on to change it.
        own: dict[str, str] = dict(cast("Mapping[str, str]", metadata))
        check_metadata(own)
        options["metadata"] = own
    if "middleware" in options:
        options["middleware"] = checked_middleware(options["middleware"], "middleware")
    return cast("CallOptions", options)


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
