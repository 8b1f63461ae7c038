"""Cost functions by name: those that come with dynbus, and a user's own."""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, nullcontext, suppress
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from dynbus.bus.config import suggestion
from dynbus.bus.errors import ConfigError

from .cost import CostFunction, DynamoCost
from .kv_cost import KvCost

POLICIES: Final[dict[str, Callable[[], CostFunction]]] = {"dynamo": DynamoCost, "kv": KvCost}


def resolve_policy(policy: str | CostFunction, *, reload: bool = False) -> tuple[CostFunction, str]:
    """The cost function that is given, or that a name is given of, and its name.

    Args:
        reload: see `load_policy`.

    Raises:
        ConfigError: it is no cost function, or cannot be loaded.
    """
    if isinstance(policy, str):
        return load_policy(policy, reload=reload), policy
    given: Any = policy
    if isinstance(given, type):
        raise ConfigError(f"policy {given.__name__} is a class: give an object, {given.__name__}()")
    if not callable(given):
        raise ConfigError(
            f"policy {given!r} is no cost function: give an object that can be called with a "
            "request and its candidates, or its name"
        )
    return policy, policy_name(policy)


def load_policy(
    name: str, *, reload: bool = False, known_names: Iterable[str] = POLICIES
) -> CostFunction:
    """The cost function of a name: `dynamo`, `kv`, or `module:function` for one of your own.

    An attribute that is a class is called without arguments, and must give a cost function.

    Args:
        reload: read the module's file again when it was imported before, into a module of its
            own: no other file, neither of what it imports. It is what is imported from then on,
            or the one before if this fails. Who has imported that one keeps it as it is.
        known_names: what the error about an unknown name lists.

    Raises:
        ConfigError: there is no such policy, or it cannot be imported.
    """
    known = POLICIES.get(name)
    if known is not None:
        return known()
    module_name, colon, attribute = name.partition(":")
    if not (colon and module_name and attribute):
        raise ConfigError(
            f"policy {name!r} is unknown: use one of {', '.join(known_names)}, or module:function"
            f"{_did_you_mean(name)}"
        )
    with _replaced(module_name) if reload else nullcontext():
        return _load(name, module_name, attribute)


def _load(name: str, module_name: str, attribute: str) -> CostFunction:
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and _is_part(error.name, module_name):
            raise ConfigError(
                f"policy {name!r} cannot be loaded: there is no module {error.name!r} in "
                f"{', '.join(_own_folders()) or 'the current folder'}, or among the installed ones"
            ) from None
        raise _unloadable(name, error) from error
    found = _attribute(module, attribute, name)
    try:
        policy = found() if isinstance(found, type) else found
    except Exception as error:
        raise _unloadable(name, error) from error
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
    """What a module has under a dotted path.

    Raises:
        ConfigError: nothing.
    """
    found: Any = module
    for part in path.split("."):
        if not hasattr(found, part):
            where = module.__file__ or module.__name__
            raise ConfigError(
                f"policy {name!r} cannot be loaded: {where} has no {path!r}"
                f"{suggestion(path, vars(module))}"
            )
        found = getattr(found, part)
    return found


def _did_you_mean(name: str) -> str:
    module, _, attribute = name.rpartition(".")
    if ":" in name or not (module and attribute.isidentifier()):
        return ""
    return f"; did you mean {module}:{attribute}?" if attribute != "py" else f", as {name}:function"


def _is_part(missing: str | None, module: str) -> bool:
    """Whether it is the module itself, or a package around it, that is missing."""
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


def policy_name(policy: CostFunction) -> str:
    """How decisions name a cost function that was given as an object."""
    name = getattr(policy, "__qualname__", type(policy).__qualname__)
    return f"{getattr(policy, '__module__', type(policy).__module__)}:{name}"
