"""Specifications of options: dataclasses from which constructors, commands and pages are made.

    @dataclass(frozen=True, kw_only=True)
    class SplitterOptions(Options):
        separator: Annotated[str, Option("what stands between two words")] = " "
        words: Annotated[int, Option("how many are given at most", least=1)] = 100

    class Splitter(Actor, namespace="demo"):
        @takes(SplitterOptions)
        def __init__(self, options: SplitterOptions) -> None: ...

The fields are the parameters of that constructor, `flags` of the commands makes them options of a
command, and `declared` has what a page tells of each.
"""

from __future__ import annotations

import functools
import inspect
import math
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, MISSING, Field, dataclass, fields
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Concatenate,
    Final,
    Literal,
    ParamSpec,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

from dynbus.bus.config import suggestion
from dynbus.bus.errors import ConfigError
from dynbus.bus.telemetry.logs import HIDDEN

P = ParamSpec("P")
T = TypeVar("T", bound="Options")
S = TypeVar("S")

_CALLABLE: Final[Any] = Callable
_NOUNS: Final[Mapping[Any, str]] = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a text",
    Path: "a path",
}


@dataclass(frozen=True, slots=True)
class Option:
    """The description of a field beside its name, its type and its default.

    Attributes:
        meaning: what it is, for pages and for the help of commands.
        least, above, most: bounds of a number; `above` is not in its range.
        unit: of a number, such as `seconds`.
        wanted: what to give, for messages, where the type does not say it.
        as_text: its type in files, variables and command lines, where that is another one.
        flag: its name at a command, without dashes; that of the field unless given.
        guide: where the guides tell more, such as `tiers.md`; empty for nowhere.
    """

    meaning: str
    _: KW_ONLY
    least: float | None = None
    above: float | None = None
    most: float | None = None
    unit: str = ""
    wanted: str = ""
    as_text: Any = None
    flag: str = ""
    guide: str = ""


@dataclass(frozen=True, slots=True)
class DeclaredOption:
    """A field of a specification.

    Attributes:
        kind: its type.
        default: `MISSING` where it must be given.
        is_secret: whether it is in no `repr`, and so shown nowhere.
    """

    name: str
    kind: Any
    option: Option
    default: Any
    is_secret: bool = False

    @property
    def plain_kind(self) -> Any:
        """Its type where it is not None; a union where it has several still."""
        kinds = _members(self.option.as_text or self.kind)
        return kinds[0] if len(kinds) == 1 else self.kind

    @property
    def is_list(self) -> bool:
        """True if it holds several values."""
        return get_origin(self.plain_kind) in (Sequence, list, tuple)

    @property
    def choices(self) -> tuple[Any, ...]:
        """Its values where it has but a few; none otherwise."""
        kinds = _members(self.kind)
        return get_args(kinds[0]) if kinds and get_origin(kinds[0]) is Literal else ()

    @property
    def wanted(self) -> str:
        """The values to give, for messages."""
        option, kinds = self.option, _members(self.kind)
        if self.choices:
            text = f"one of {', '.join(map(str, self.choices))}"
        else:
            noun = _NOUNS.get(kinds[0] if kinds else None) or inspect.formatannotation(self.kind)
            text = option.wanted or noun + self._range()
        return text + (", or None" if type(None) in get_args(self.kind) else "")

    def _range(self) -> str:
        option = self.option
        unit = f" of {option.unit}" if option.unit else ""
        if option.least is not None and option.most is not None:
            return f"{unit} from {option.least} to {option.most}"
        bounds: list[str] = []
        if option.above is not None:
            bounds.append(f"above {option.above}")
        if option.least is not None:
            bounds.append(f"at least {option.least}" if unit else f"of at least {option.least}")
        if option.most is not None:
            bounds.append(f"at most {option.most}")
        joint = ", " if unit and option.above is None else " "
        return unit + (joint + ", ".join(bounds) if bounds else "")

    def check(self, value: Any) -> None:
        """Check a value.

        Raises:
            ConfigError: it is not usable.
        """
        if not _fits(value, self.kind) or not self._is_in_range(value):
            near = suggestion(str(value), self.choices) if self.choices else ""
            given = HIDDEN if self.is_secret else f"{value!r}{near}"
            raise ConfigError(f"{self.name}={given}: give {self.wanted}")

    def _is_in_range(self, value: Any) -> bool:
        option = self.option
        if isinstance(value, bool) or not isinstance(value, int | float):
            return True
        return (
            (option.least is None or value >= option.least)
            and (option.above is None or value > option.above)
            and (option.most is None or value <= option.most)
        )


@dataclass(frozen=True, kw_only=True)
class Options:
    """Base of specifications. Each field has an `Option` in its annotation; a secret one is a
    `field(repr=False)`, and shown nowhere.

    Not everyone runs a type checker, so the types of values are looked at as well.

    Raises:
        ConfigError: a value is not usable.
    """

    def __post_init__(self) -> None:
        for each in declared(type(self)):
            each.check(getattr(self, each.name))
        self.check()

    def check(self) -> None:
        """Check what several options are together; for subclasses.

        Raises:
            ConfigError: they do not go together.
        """

    def load(self) -> None:
        """Import what values name; for subclasses. `dynbus run` does it before it starts anything.

        Raises:
            ConfigError: it is not there, or not of use.
        """

    def shared(self, spec: type[Options]) -> dict[str, Any]:
        """The values of those fields that another specification has too, by their names."""
        return {each.name: getattr(self, each.name) for each in declared(spec)}


def declared(spec: type[Options]) -> tuple[DeclaredOption, ...]:
    """The fields of a specification, in the order in which a constructor takes them.

    Raises:
        TypeError: one has no `Option`.
    """
    hashable: Any = spec  # a class is, whatever mypy makes of its instances' __hash__
    return _declared_by(hashable)


@functools.cache
def _declared_by(spec: Any) -> tuple[DeclaredOption, ...]:
    kinds = get_type_hints(spec, include_extras=True)
    of_fields = {each.name: each for each in fields(spec)}
    return tuple(
        _declared(of_fields[name], kinds[name])
        for name in inspect.signature(spec).parameters
        if of_fields[name].init
    )


def _declared(field: Field[Any], kind: Any) -> DeclaredOption:
    options = [each for each in get_args(kind)[1:] if isinstance(each, Option)]
    if get_origin(kind) is not Annotated or not options:
        raise TypeError(f"{field.name} has no Option in its annotation")
    default = field.default
    if field.default_factory is not MISSING:
        default = field.default_factory()
    return DeclaredOption(field.name, get_args(kind)[0], options[0], default, not field.repr)


def _members(kind: Any) -> list[Any]:
    """The types of a union without None, or the one that is none."""
    members = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    return [each for each in members if each is not type(None)]


def _fits(value: Any, kind: Any) -> bool:
    """True if a value is of a type, as far as can be seen from outside."""
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return any(_fits(value, each) for each in get_args(kind))
    if origin is Literal:
        return any(type(value) is type(each) and value == each for each in get_args(kind))
    if kind is type(None):
        return value is None
    if kind is float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and math.isfinite(value)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    outer = origin or kind
    if not isinstance(outer, type) or outer is _CALLABLE:
        return True
    # A text is a sequence too, of what nobody means.
    return isinstance(value, outer) and not (outer is Sequence and isinstance(value, str))


@overload
def takes(
    spec: Callable[P, T],
) -> Callable[[Callable[[S, T], None]], Callable[Concatenate[S, P], None]]: ...
@overload
def takes(
    spec: type[T], *, like: Callable[P, None]
) -> Callable[[Callable[Concatenate[S, T, ...], None]], Callable[Concatenate[S, P], None]]: ...
def takes(spec: Any, *, like: Any = None) -> Any:
    """Have a constructor take the fields of a specification, and get them as one value.

    Args:
        spec: a class of `Options`.
        like: for a constructor that takes further keyword arguments, which it gets as they are: a
            function that is never called, and has for type checkers the fields and `**further`.

    Raises:
        TypeError: `like` has other fields than `spec`.
    """
    beside = "" if like is None else _further(spec, like)

    def decorate(constructor: Callable[..., None]) -> Callable[..., None]:
        known = [each.name for each in declared(spec)]

        @functools.wraps(constructor)
        def construct(self: Any, /, *args: Any, **given: Any) -> None:
            others = {name: given.pop(name) for name in list(given) if beside and name not in known}
            constructor(self, spec(*args, **given), **others)

        signature = _signature(spec, beside)
        made: Any = construct
        made.__signature__ = signature
        made.__dynbus_options__ = spec
        made.__annotations__ = {
            one.name: one.annotation for one in list(signature.parameters.values())[1:]
        } | {"return": None}
        return construct

    return decorate


def _further(spec: type[Options], like: Callable[..., None]) -> str:
    """The name of the further arguments of a signature.

    Raises:
        TypeError: it does not take the fields of a specification, and further ones by name.
    """
    kinds, given = get_type_hints(like), inspect.signature(like).parameters.values()
    further = [one.name for one in given if one.kind is one.VAR_KEYWORD]
    written = {
        one.name: (kinds.get(one.name), one.default is one.empty)
        for one in given
        if one.name not in further
    }
    own = {each.name: (each.kind, each.default is MISSING) for each in declared(spec)}
    wrong = [name for name in (own | written) if own.get(name) != written.get(name)]
    if wrong or not further:
        remedy = f"compare {', '.join(wrong)}" if wrong else "give it **further arguments too"
        raise TypeError(f"{like.__name__} is not like {spec.__name__}: {remedy}")
    return further[0]


def load_options(actor: type[Any], given: Mapping[str, Any]) -> None:
    """Check what an actor class is configured with as its constructor will, where that `takes`
    a specification; and import what it names.

    Args:
        given: the arguments, as the constructor gets them.

    Raises:
        ConfigError: values are not usable, or name what is not there.
    """
    spec: type[Options] | None = getattr(actor.__init__, "__dynbus_options__", None)
    if spec is not None:
        known = {each.name for each in declared(spec)}
        spec(**{name: value for name, value in given.items() if name in known}).load()


def _signature(spec: type[Options], beside: str) -> inspect.Signature:
    """That of a constructor, with the types that its arguments have as text."""
    own = inspect.signature(spec).parameters
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)]
    for each in declared(spec):
        default = inspect.Parameter.empty if each.default is MISSING else each.default
        kind = each.option.as_text or each.kind
        if each.is_secret:
            import pydantic  # most commands need nothing of it

            kind = Annotated[kind, pydantic.Field(repr=False)]
        parameters.append(own[each.name].replace(default=default, annotation=kind))
    if beside:
        parameters.append(inspect.Parameter(beside, inspect.Parameter.VAR_KEYWORD, annotation=Any))
    return inspect.Signature(parameters, return_annotation=None)
