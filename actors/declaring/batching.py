"""Handlers whose calls go together: `@handler(batch=...)`, and what it asks of their signature."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Coroutine, Hashable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Any, Final, Protocol, TypeVar, overload

from dynbus.bus.errors import ConfigError
from dynbus.bus.protocol.seconds import seconds_of

DEFAULT_CONCURRENCY: Final = 1
"""Batches that run at a time."""

A = TypeVar("A")
Q = TypeVar("Q")
R = TypeVar("R")
A_contra = TypeVar("A_contra", contravariant=True)

Selector = str | Callable[[Any], Any]
"""A field's name, or a function of the request, that yields a value of it."""


class BatchDeclared(ConfigError):
    """Raised for a handler of batches that takes or returns something else than lists."""


@dataclass(frozen=True)
class Batching:
    """The options by which calls of a handler are batched; see `handler`.

    Attributes:
        most: calls of one batch.
        wait: seconds.
    """

    most: int
    wait: float
    key: Selector | None
    size_of: Selector | None

    @classmethod
    def of(
        cls, label: str, batch: Any, wait: Any, key: Any, size_of: Any, *, streaming: bool
    ) -> Batching | None:
        """The batching that the options of a handler ask for; None where they ask for none.

        Raises:
            ConfigError: one of them is not usable.
        """
        if batch is None:
            given = {"batch_wait": wait, "batch_key": key, "batch_size_of": size_of}
            for option, value in given.items():
                if value is not None:
                    raise ConfigError(
                        f"{label}: {option}={value!r} is of batches: give batch= as well, the "
                        "number of calls of one"
                    )
            return None
        if type(batch) is not int or batch < 1:
            raise ConfigError(f"{label}: batch={batch!r} must be the calls of a batch, 1 or more")
        if streaming:
            raise ConfigError(
                f"{label} streams, and batch= is for handlers that return: send the items of many "
                "streams together with push_each"
            )
        for option, value in (("batch_key", key), ("batch_size_of", size_of)):
            if not (value is None or callable(value) or _is_field(value)):
                raise ConfigError(
                    f"{label}: {option}={value!r} must be the name of a field of the request, or a "
                    "function of it"
                )
        waits = 0.0 if wait is None else seconds_of(wait, f"{label}: batch_wait")
        return cls(batch, waits, key, size_of)

    def check_fields(self, label: str, annotation: Any) -> None:
        """Check that the requests have the fields that are named.

        Args:
            annotation: of one request.

        Raises:
            BatchDeclared: one of them is not there.
        """
        known = _fields_of(annotation)
        for option, name in (("batch_key", self.key), ("batch_size_of", self.size_of)):
            if isinstance(name, str) and known is not None and name not in known:
                raise BatchDeclared(
                    f"{label}: {option}={name!r} is no field of {annotation.__name__}; it has "
                    f"{', '.join(known) or 'none'}"
                )

    @property
    def key_function(self) -> Callable[[Any], Hashable] | None:
        """The function of a request by which requests are batched together."""
        return _function(self.key)

    @property
    def size_function(self) -> Callable[[Any], float] | None:
        """The function that gives the size of a request."""
        return _function(self.size_of)


def request_of(label: str, annotation: Any) -> Any:
    """The type of one request, of the annotation of a batch's.

    Raises:
        BatchDeclared: it is no list of them.
    """
    item = _item_of(annotation)
    if item is None:
        raise BatchDeclared(
            f"{label} takes {_name_of(annotation)} and is called with a batch: annotate a "
            "list, for example prompts: list[Prompt]"
        )
    return item


def result_of(label: str, annotation: Any) -> Any:
    """The type of one result, of the annotation of a batch's; without the exceptions that may stand
    in the place of one.

    Raises:
        BatchDeclared: it is no list of results.
    """
    item = _item_of(annotation)
    if item is not None:
        members = typing.get_args(item) if _is_union(item) else (item,)
        results = [each for each in members if not _is_exception(each)]
        if len(results) == len(members):
            return item
        if results:
            return typing.Union[tuple(results)]  # noqa: UP007 - made of values
    raise BatchDeclared(
        f"{label} returns {_name_of(annotation)} and is called with a batch: annotate a list "
        "with one result for each request, for example -> list[Vector] or "
        "-> list[Vector | Exception]"
    )


def check_parameter(label: str, parameter: inspect.Parameter | None) -> None:
    """Check that a handler takes its batch.

    Raises:
        BatchDeclared: it takes nothing, or has a default.
    """
    if parameter is None:
        raise BatchDeclared(
            f"{label} takes no request and is called with a batch: give it a list, for example "
            "prompts: list[Prompt]"
        )
    if parameter.default is not inspect.Parameter.empty:
        raise BatchDeclared(
            f"{label}: {parameter.name!r} has a default, and a batch is never left out: remove it"
        )


def _item_of(annotation: Any) -> Any:
    arguments = typing.get_args(annotation)
    return arguments[0] if typing.get_origin(annotation) is list and arguments else None


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


def _is_exception(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseException)


def _name_of(annotation: Any) -> str:
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return annotation.__name__
    return str(annotation).replace("typing.", "")


def _is_field(value: Any) -> bool:
    return isinstance(value, str) and value.isidentifier()


def _fields_of(annotation: Any) -> list[str] | None:
    """The fields of a request of a type; None where nobody knows, as of a mapping."""
    bases = typing.cast("Sequence[type[Any]]", getattr(annotation, "__mro__", ()))
    if not bases or any(base in (dict, Mapping) for base in bases):
        return None
    known = list(typing.get_type_hints(bases[0]))
    for base in bases:
        known += [name for name, value in vars(base).items() if isinstance(value, property)]
    return list(dict.fromkeys(name for name in known if not name.startswith("_")))


def _function(selector: Selector | None) -> Callable[[Any], Any] | None:
    if selector is None or not isinstance(selector, str):
        return selector
    of_object, of_mapping = attrgetter(selector), itemgetter(selector)

    def select(request: Any) -> Any:
        is_mapping = issubclass(type(request), Mapping)
        return of_mapping(request) if is_mapping else of_object(request)

    return select


# What a handler of batches is to its callers ------------------------------------------------


class TakesBatch(Protocol[A_contra, Q, R]):
    """A method that takes the requests of a batch and returns their results."""

    def __call__(self, actor: A_contra, requests: list[Q], /) -> Coroutine[Any, Any, list[R]]: ...


class TakesBatchOrFails(Protocol[A_contra, Q, R]):
    """The same, with exceptions in the place of some results."""

    def __call__(
        self, actor: A_contra, requests: list[Q], /
    ) -> Coroutine[Any, Any, list[R | Exception]]: ...


class BatchDecorator(Protocol):
    """The decorator `handler(batch=...)`: callers see a call of one request with one result."""

    @overload
    def __call__(
        self, function: TakesBatchOrFails[A, Q, R], /
    ) -> Callable[[A, Q], Coroutine[Any, Any, R]]: ...
    @overload
    def __call__(
        self, function: TakesBatch[A, Q, R], /
    ) -> Callable[[A, Q], Coroutine[Any, Any, R]]: ...
    @overload
    def __call__(
        self, function: Callable[[list[Q]], Coroutine[Any, Any, list[R | Exception]]], /
    ) -> Callable[[Q], Coroutine[Any, Any, R]]: ...
    @overload
    def __call__(
        self, function: Callable[[list[Q]], Coroutine[Any, Any, list[R]]], /
    ) -> Callable[[Q], Coroutine[Any, Any, R]]: ...
