"""`resume=` of a handler or a client: how a stream goes on whose instance is lost."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, NamedTuple, cast

from dynbus.bus.errors import ConfigError

from .brief_repr import brief_repr

REPLAY: Final = "replay"

ResumeFunction = Callable[[Any, list[Any]], Any]
"""Of the request and the accepted items: the request to go on with, `ResumeParts` of several, or
None when nothing is left to come."""


class ResumeParts(NamedTuple):
    """Requests that go on with a stream together, each with a part of it; their items come as they
    are made."""

    requests: Sequence[Any]


class ResumeRule(ABC):
    """A `ResumeFunction` for a client of which not each stream goes on.

    Attributes:
        MIGRATION_LIMIT: how often a stream moves that goes on, unless it is said how often.
        WAIT: seconds for which one that lost its instance waits for another.
    """

    MIGRATION_LIMIT: Final = 3
    WAIT: Final = 10.0

    @abstractmethod
    def __call__(self, request: Any, items: list[Any]) -> Any:
        """The request to go on with; see `ResumeFunction`."""

    @abstractmethod
    def applies(self, request: Any) -> bool:
        """True if the stream of a request goes on, asked before it is sent."""


ClientResume = Literal["replay"] | ResumeFunction


def checked_limit(label: str, limit: Any, *, resumes: bool) -> int:
    """The number of times that a call may move, checked.

    Args:
        limit: as it was given; None for what is usual.
        resumes: whether it is said how a stream goes on.

    Raises:
        ConfigError: it is no number, or below 0.
    """
    if limit is None:
        return ResumeRule.MIGRATION_LIMIT if resumes else 0
    if type(limit) is not int or limit < 0:
        raise ConfigError(
            f"{label}: migration_limit={brief_repr(limit)} must be 0 or more, or None for "
            f"{ResumeRule.MIGRATION_LIMIT} with resume= and 0 without"
        )
    return limit


def checked_resume(label: str, resume: Any, *, streaming: bool) -> str | None:
    """The `resume` that a handler declares, checked as far as that can be done without its class.

    Raises:
        ConfigError: it is no text, or the handler does not stream.
    """
    if resume is None:
        return None
    if not isinstance(resume, str) or not resume.isidentifier():
        raise ConfigError(
            f'{label}: resume={brief_repr(resume)} must be "{REPLAY}", or the name of a method '
            "that takes the request and the accepted items"
        )
    if not streaming:
        raise ConfigError(f"{label} answers once: only a stream is resumed, leave resume= out")
    return resume


def resume_method(cls: type[Any], name: str, label: str, *, takes_request: bool) -> ResumeFunction:
    """The method that a handler names, as its callers call it.

    Args:
        label: how messages name the handler.

    Raises:
        ConfigError: there is none, or it cannot be called with the request and the items.
    """
    source = f'{label}: resume="{name}"'
    method: Any = inspect.getattr_static(cls, name, None)
    if method is None:
        raise ConfigError(
            f'{source}: {cls.__name__} has no method {name!r}; write one, or resume="{REPLAY}"'
        )
    if not takes_request:
        raise ConfigError(
            f"{source}: the handler takes no request, so that none can be made to go on with: "
            f'write resume="{REPLAY}"'
        )
    return _checked(source, getattr(cls, name))


def checked_client_resume(label: str, resume: Any) -> ClientResume | None:
    """The `resume` that an untyped client was given, checked.

    Raises:
        ConfigError: it is neither `"replay"` nor a function of the request and the items.
    """
    if resume is None or resume == REPLAY:
        return cast("ClientResume | None", resume)
    source = f"{label}: resume={brief_repr(resume)}"
    if not callable(resume):
        raise ConfigError(
            f'{source} must be "{REPLAY}", or a function of the request and the accepted items'
        )
    return _checked(source, resume)


def _checked(source: str, function: Any) -> ResumeFunction:
    if not callable(function):
        raise ConfigError(f"{source} is no method: {brief_repr(function)}")
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(f"{source} is asynchronous: write `def`, it only makes a request")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return cast("ResumeFunction", function)
    try:
        signature.bind(None, [])
    except TypeError:
        hint = (
            "; it runs at the caller, where there is no instance: make it a @staticmethod"
            if next(iter(signature.parameters), "") == "self"
            else ""
        )
        named = [one.replace(annotation=one.empty) for one in signature.parameters.values()]
        raise ConfigError(
            f"{source} takes {inspect.Signature(named)}; it must take the request and the "
            f"accepted items{hint}"
        ) from None
    return cast("ResumeFunction", function)
