"""Policies: cost functions by name, how they are asked, and those that are only on trial."""

from __future__ import annotations

import ast
import importlib
import inspect
import logging
import math
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Generator, Iterable, Mapping, Set
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dynbus import ConfigError
from dynbus.spi import brief_repr, suggestion

from .candidates import Candidates
from .cost import CostFunction, DynamoCost, KvCost, RequestShape, choose
from .decision import ShadowChoice

logger = logging.getLogger(__name__)

COST_FUNCTIONS: Final[Mapping[str, Callable[..., CostFunction]]] = {
    "dynamo": DynamoCost,
    "kv": KvCost,
}
"""Those that come with dynbus; all others are named `module:function`."""

_CALLED: Final = re.compile(r"([^()]*)\((.*)\)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Policy:
    """A cost function and the name that decisions and errors have for it."""

    name: str
    cost: CostFunction

    @classmethod
    def of(
        cls,
        policy: str | CostFunction,
        *,
        reload: bool = False,
        known_names: Iterable[str] = COST_FUNCTIONS,
    ) -> Policy:
        """The policy of a name, or of a cost function.

        Args:
            policy: `dynamo`, `kv`, `module:function` for one of your own, or an object. What the
                module has under that name may be a class: it is called without arguments, and
                must give a cost function. With arguments behind it, as in
                `module:Cost(bound=2)`, whatever has that name is called with them: they are
                named, and literals.
            reload: read the module's file again when it was imported before, into a module of its
                own: no other file, neither of what it imports. It is what is imported from then
                on, or the one before if this fails. Who has imported that one keeps it as it is.
            known_names: what the error about an unknown name lists.

        Raises:
            ConfigError: there is no such policy, it cannot be imported, or it is no cost function.
        """
        if isinstance(policy, str):
            return cls(policy, _find(policy, reload, known_names))
        given: Any = policy
        if isinstance(given, type):
            name = given.__name__
            raise ConfigError(f"policy {name} is a class: give an object, {name}()")
        if not callable(given):
            raise ConfigError(
                f"policy {given!r} is not a cost function: give a callable that takes a request "
                "and its candidates, or a name"
            )
        return cls(_name_of(policy), policy)

    def costs(
        self, shape: RequestShape, candidates: Candidates, *, request_id: str = ""
    ) -> NDArray[np.float64]:
        """The cost of each candidate, whatever kind of numbers the cost function uses.

        Args:
            request_id: for errors.

        Raises:
            ConfigError: it does not return one number for each candidate, or raises.
        """
        failed = partial(ConfigError, request_id=request_id, started=False)
        cost = self.cost
        try:
            if isinstance(cost, (KvCost, DynamoCost)) and type(cost) in COST_FUNCTIONS.values():
                columns = cost.columns(shape, candidates)
                if not columns.size or columns.min() > -math.inf:
                    return columns
                costs: Any = columns
            else:
                # A tuple: one that sorts them would have its costs told of others. What is derived
                # from dynbus's own may count on tuples, too.
                costs = cost(shape, tuple(candidates))
        except Exception as error:
            raise failed(
                f"policy {self.name} raised {type(error).__name__}: {error}"
                f"{_place(self.cost, error)}"
            ) from error
        if inspect.iscoroutine(costs):
            costs.close()
            raise failed(
                f"policy {self.name} is asynchronous: write `def`, since the router calls it "
                "without awaiting"
            )
        numbers = _numbers(costs)
        if numbers is None or len(numbers) != len(candidates):
            raise failed(
                f"policy {self.name} returned {brief_repr(costs)} for {len(candidates)} "
                "candidates: return a list with one number for each, in their order; infinity "
                "means never, NaN and -infinity are not costs"
            )
        return numbers


class Shadows:
    """The policies on trial of one scheduler: they score every request, and decide nothing.

    Attributes:
        agreements: by policy, in how many decisions it would have chosen the same.

    Raises:
        ConfigError: one of them cannot be loaded.
    """

    def __init__(self, policies: Mapping[str, str | CostFunction], random: Random) -> None:
        self._policies = {
            name: Policy(name, Policy.of(policy).cost) for name, policy in policies.items()
        }
        self._random = random
        self._failed: set[str] = set()
        self.agreements = dict.fromkeys(self._policies, 0)

    def __repr__(self) -> str:
        return f"<Shadows {self.agreements}>"

    def ask(self, request: RequestShape, candidates: Candidates, chosen: int) -> list[ShadowChoice]:
        """The choice that each would have made.

        Args:
            chosen: the position of the candidate that gets the request.
        """
        return [self._ask(one, request, candidates, chosen) for one in self._policies.values()]

    def _ask(
        self, policy: Policy, request: RequestShape, candidates: Candidates, chosen: int
    ) -> ShadowChoice:
        name = policy.name
        try:
            costs = policy.costs(request, candidates)
        except ConfigError as error:
            # A policy on trial must not harm a request; the decision says what is wrong with it.
            if name not in self._failed:
                self._failed.add(name)
                logger.warning("shadow policy %s failed", name, exc_info=True)
            raised = error.__cause__
            return ShadowChoice(
                name, error=f"{type(raised).__name__}: {raised}" if raised else str(error)
            )
        at = choose(costs, 0.0, self._random)
        if at is None:
            return ShadowChoice(name, None, math.inf)
        regret = float(costs[chosen]) - float(costs[at])
        if regret:
            return ShadowChoice(name, candidates.ranks[at], regret)
        # Of equal costs it may have drawn another one: that is no disagreement.
        self.agreements[name] += 1
        return ShadowChoice(name, candidates.ranks[chosen])


def _find(policy: str, reload: bool, known_names: Iterable[str]) -> CostFunction:
    called = _CALLED.fullmatch(policy.strip())
    name, given = (called[1], _arguments(policy, called[2])) if called else (policy, None)
    known = COST_FUNCTIONS.get(name)
    if known is not None:
        return _build(policy, known, given)  # type: ignore[no-any-return]
    module_name, colon, attribute = name.partition(":")
    if not (colon and module_name and attribute):
        raise ConfigError(
            f"policy {policy!r} is unknown: use one of {', '.join(known_names)}, or module:function"
            f"{_did_you_mean(name)}"
        )
    with _replaced(module_name) if reload else nullcontext():
        return _import(policy, module_name, attribute, given)


def _arguments(policy: str, text: str) -> dict[str, Any]:
    """The arguments between the parentheses of a policy's name.

    Raises:
        ConfigError: it is anything but names with literals.
    """
    try:
        call: Any = ast.parse(f"_({text})", mode="eval").body
        if call.args or not all(one.arg for one in call.keywords):
            raise ValueError("each argument needs its name")
        return {one.arg: ast.literal_eval(one.value) for one in call.keywords}
    except (AttributeError, MemoryError, RecursionError, SyntaxError, ValueError) as error:
        raise ConfigError(
            f"policy {policy!r}: its arguments cannot be read: {error}: write them as in "
            "kv(slowdown=0.4)"
        ) from None


def _build(policy: str, named: Any, given: Mapping[str, Any] | None) -> Any:
    """The cost function that a class, or a function with arguments, returns; else what has the
    name itself.

    Raises:
        ConfigError: it does not take them.
    """
    if given is None and not isinstance(named, type):
        return named
    try:
        return named(**given or {})
    except Exception as error:
        raise _unloadable(policy, error) from error


def _import(
    name: str, module_name: str, attribute: str, given: Mapping[str, Any] | None
) -> CostFunction:
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and _is_part(error.name, module_name):
            raise ConfigError(
                f"policy {name!r} cannot be loaded: there is no module {error.name!r} in "
                f"{', '.join(_own_folders()) or 'the current folder'}, or among the installed ones"
            ) from None
        raise _unloadable(name, error) from error
    policy = _build(name, _attribute(module, attribute, name), given)
    if not callable(policy):
        raise ConfigError(
            f"policy {name!r} is a {type(policy).__name__}: write a function of a request and "
            "its candidates that returns one cost for each"
        )
    return policy  # type: ignore[no-any-return]


@contextmanager
def _replaced(module_name: str) -> Generator[None]:
    """Have a module imported anew in the `with`; it gives way to the old one if that fails."""
    before = sys.modules.get(module_name)
    if before is None:
        yield
        return
    parent, _, child = module_name.rpartition(".")
    package = sys.modules.get(parent)
    _drop_bytecode(before)
    importlib.invalidate_caches()
    del sys.modules[module_name]
    try:
        yield
    except BaseException:
        sys.modules[module_name] = before
        if package is not None:
            setattr(package, child, before)
        raise


def _drop_bytecode(module: ModuleType) -> None:
    """Have the source of a module compiled anew, if it has one: without, its bytecode is all."""
    spec = module.__spec__
    if spec is None or spec.cached is None or not isinstance(spec.loader, SourceFileLoader):
        return
    # Bytecode is compared with its file by size and whole seconds, which may miss an edit.
    # Where it cannot be removed, this process has not just written it.
    with suppress(OSError):
        Path(spec.cached).unlink()


def _unloadable(name: str, error: Exception) -> ConfigError:
    return ConfigError(f"policy {name!r} cannot be loaded: {type(error).__name__}: {error}")


def _attribute(module: ModuleType, path: str, name: str) -> Any:
    """The attribute of a module under a dotted path.

    Raises:
        ConfigError: nothing.
    """
    value: Any = module
    for part in path.split("."):
        if not hasattr(value, part):
            where = module.__file__ or module.__name__
            raise ConfigError(
                f"policy {name!r} cannot be loaded: {where} has no {path!r}"
                f"{suggestion(path, vars(module))}"
            )
        value = getattr(value, part)
    return value


def _did_you_mean(name: str) -> str:
    module, _, attribute = name.rpartition(".")
    if ":" in name or not (module and attribute.isidentifier()):
        return ""
    return f"; did you mean {module}:{attribute}?" if attribute != "py" else f", as {name}:function"


def _is_part(missing: str | None, module: str) -> bool:
    """True if the module itself, or a package around it, is missing."""
    return missing is not None and f"{module}.".startswith(f"{missing}.")


def _own_folders() -> list[str]:
    """The folders that imports look in, but for those of Python and of what was installed."""
    installed = tuple({path for path in sysconfig.get_paths().values() if path})
    folders = [os.path.abspath(folder) for folder in sys.path]
    return [
        folder
        for folder in dict.fromkeys(folders)
        if os.path.isdir(folder) and not folder.startswith(installed)
    ]


def _name_of(policy: CostFunction) -> str:
    """The name in decisions of a cost function that was given as an object."""
    name = getattr(policy, "__qualname__", type(policy).__qualname__)
    return f"{getattr(policy, '__module__', type(policy).__module__)}:{name}"


def _numbers(costs: Any) -> NDArray[np.float64] | None:
    """A policy's costs as an array of shape [costs]; None for anything else."""
    # What has no order cannot be matched with candidates, and the rows of a matrix are no numbers.
    if isinstance(costs, (Set, Mapping)) or getattr(costs, "ndim", 1) != 1:
        return None
    try:
        if type(costs) is not np.ndarray or costs.dtype.kind not in "fiu":
            # A number as text passes `float`, not `isnan`.
            if any(map(math.isnan, costs)):
                return None
            costs = list(map(float, costs))
        # A copy: the decision keeps it, and its maker may change it.
        with np.errstate(over="ignore"):
            numbers = np.array(costs, dtype=np.float64)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        # A container of the user's own may fail in many ways.
        return None
    # The least one is NaN where one is.
    return numbers if not numbers.size or numbers.min() > -math.inf else None


def _place(policy: CostFunction, error: Exception) -> str:
    """The place where a policy raised: its own line, rather than one of a library that it calls."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    if not frames:
        return ""  # It was not entered: what it takes is wrong.
    code = getattr(policy, "__code__", None) or getattr(type(policy).__call__, "__code__", None)
    own = [one for one in frames if code is not None and one.filename == code.co_filename]
    frame = (own or frames)[-1]
    return f" ({frame.filename}, line {frame.lineno})"
