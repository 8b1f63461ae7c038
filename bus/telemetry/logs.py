"""Logging: one pipeline for everything that logs.

Code of dynbus logs through the standard library, so a program that uses it as a library sees
its records wherever its own logging goes. `configure_logging`, which `dynbus run` calls, sends
every record of the process (ours, the NATS client's, the user's, structlog's) through one
structlog pipeline that adds the running call and takes passwords out of URLs.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import MutableMapping
from typing import IO, TYPE_CHECKING, Any, Final, Literal

from dynbus.bus.context import Context, current_instance

if TYPE_CHECKING:
    from structlog.typing import Processor

LogFormat = Literal["console", "json"]

HIDDEN: Final = "***"

_OF_ANY_RECORD: Final = {*vars(logging.makeLogRecord({})), "message", "asctime"}

# After a scheme of NATS anything up to the last @ is a credential, as a password may hold
# any character; in other URLs an @ may also stand in the path. One of NATS may lack its scheme.
_CREDENTIALS = re.compile(
    r"""(?:(?<=\bnats)|(?<=\btls)|(?<=\bws)|(?<=\bwss)):// (?: (?!://)[^\s"'<>] )* @
      | :// [^\s/?\#"'<>]* @
      | (?<![^\s"'`(<\[{=,;]) [^\s"'`<>@/:,;=(\[{]+ : (?!//) [^\s"'<>]* @""",
    re.VERBOSE | re.IGNORECASE,
)


def redact_url(text: str) -> str:
    """Replace the credentials of every URL in `text` by `***`, keeping a user's name.

    A name without a password is a token to NATS and is hidden too. `user:password@` is taken for
    credentials without a scheme as well.
    """
    return _CREDENTIALS.sub(_hide, text) if "@" in text else text


def _hide(match: re.Match[str]) -> str:
    scheme = "://" if match[0].startswith("://") else ""
    user, colon, _ = match[0][len(scheme) : -1].partition(":")
    return f"{scheme}{user}:{HIDDEN}@" if colon else f"{scheme}{HIDDEN}@"


def configure_logging(
    format: LogFormat | None = None,
    level: str = "info",
    *,
    stream: IO[str] | None = None,
    actor: str = "",
    instance: str = "",
) -> None:
    """Send every log record of the process to one place, in one format.

    Repeating it replaces the former configuration; handlers that others have added to the
    root logger stay.

    Args:
        format: `console` for people, `json` for one object per line; None takes `console`
            on a terminal and `json` elsewhere. Colour needs a terminal and no `NO_COLOR`.
        level: the least severe level to show.
        stream: standard error by default.
        actor, instance: `namespace.component` and the id of the only instance of this process, for
            the records of code that belongs to no call and no instance.
    """
    import structlog

    out = sys.stderr if stream is None else stream
    on_terminal = out.isatty()
    as_json = format == "json" or (format is None and not on_terminal)
    shared = _shared_processors(as_json, _AddOrigin(actor, instance))
    handler = _Handler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *_rendering(as_json, colors=on_terminal and not os.environ.get("NO_COLOR")),
            ],
        )
    )
    root = logging.getLogger()
    for former in [each for each in root.handlers if isinstance(each, _Handler)]:
        root.removeHandler(former)
    root.addHandler(handler)
    root.setLevel(level.upper())
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.contextvars.merge_contextvars,
            structlog.stdlib.PositionalArgumentsFormatter(),
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )


class _Handler(logging.StreamHandler[IO[str]]):
    """The handler of `configure_logging`, told from others by its type."""


class _AddOrigin:
    """Adds to a record its `actor`, `instance` and `process`: those of the code that runs, else
    those of the process."""

    def __init__(self, actor: str, instance: str) -> None:
        self._of_process = actor, instance

    def __call__(
        self, logger: object, method: str, event_dict: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        running = current_instance()
        actor, instance = self._of_process
        if running is not None:
            actor, instance = running.address, running.instance_id
        if actor:
            event_dict.setdefault("actor", actor)
        if instance:
            event_dict.setdefault("instance", instance)
        event_dict.setdefault("process", os.getpid())
        return event_dict


def _shared_processors(as_json: bool, add_origin: Processor) -> list[Processor]:
    import structlog

    stamp = (
        structlog.processors.TimeStamper(fmt="iso", utc=True)
        if as_json
        else structlog.processors.TimeStamper(fmt="%H:%M:%S.%f", utc=False)
    )
    # People read it in the text.
    fields: list[Processor] = [_add_extra] if as_json else []
    return [
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        *fields,
        stamp,
        structlog.processors.StackInfoRenderer(),
        _add_call,
        add_origin,
        _add_span,
    ]


def _rendering(as_json: bool, *, colors: bool) -> list[Processor]:
    import structlog

    if as_json:
        return [
            structlog.processors.format_exc_info,
            _redact,
            structlog.processors.JSONRenderer(),
        ]
    # Not rich's tracebacks: they show local variables, and with them secrets.
    return [
        structlog.processors.format_exc_info,
        _redact,
        structlog.dev.ConsoleRenderer(
            colors=colors, exception_formatter=structlog.dev.plain_traceback
        ),
    ]


def _add_extra(
    logger: object, method: str, event_dict: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """Add what a record of the standard library was logged with as `extra`."""
    record = event_dict.get("_record")
    if isinstance(record, logging.LogRecord):
        for name, value in vars(record).items():
            if name not in _OF_ANY_RECORD:
                event_dict.setdefault(name, value)
    return event_dict


def _add_call(
    logger: object, method: str, event_dict: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """Add the running call's `request_id`, `endpoint` and `instance`."""
    call = Context.current()
    if call is not None:
        event_dict.setdefault("request_id", call.id)
        endpoint, at, instance = call.hop.partition("@")
        if at:
            event_dict.setdefault("endpoint", endpoint)
            event_dict.setdefault("instance", instance)
        traceparent = call.trace_headers().get("traceparent", "")
        if len(traceparent) >= 55:
            event_dict.setdefault("trace_id", traceparent[3:35])
    return event_dict


def _add_span(
    logger: object, method: str, event_dict: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """Add the current span's `trace_id` and `span_id`, which are nearer than the call's."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:  # nobody can have begun a span without it
        return event_dict
    span = trace.get_current_span().get_span_context()
    if span.is_valid:
        event_dict["trace_id"] = f"{span.trace_id:032x}"
        event_dict["span_id"] = f"{span.span_id:016x}"
    return event_dict


def _redact(
    logger: object, method: str, event_dict: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    for key, value in event_dict.items():
        if isinstance(value, str) and "@" in value:
            event_dict[key] = redact_url(value)
    return event_dict
