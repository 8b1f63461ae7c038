"""Cost functions by name: those that come with dynbus, and a user's own."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any, Final

from dynbus.bus.errors import ConfigError

from .cost import CostFunction, DynamoCost
from .kv_cost import KvCost

POLICIES: Final[dict[str, Callable[[], CostFunction]]] = {"dynamo": DynamoCost, "kv": KvCost}


def load_policy(name: str, *, reload: bool = False) -> CostFunction:
    """The cost function of a name: `dynamo`, `kv`, or `module:function` for one of your own.

    An attribute that is a class is called without arguments, and must give a cost function.

    Args:
        reload: read the module's file again when it was imported before.

    Raises:
        ConfigError: there is no such policy, or it cannot be imported.
    """
    known = POLICIES.get(name)
    if known is not None:
        return known()
    module_name, colon, attribute = name.partition(":")
    if not (colon and module_name and attribute):
        raise ConfigError(
            f"policy {name!r} is unknown: use one of {', '.join(POLICIES)}, or module:function"
        )
    try:
        loaded = sys.modules.get(module_name)
        if loaded is not None and reload:
            module = importlib.reload(loaded)
        else:
            module = importlib.import_module(module_name)
        found: Any = module
        for part in attribute.split("."):
            found = getattr(found, part)
        policy = found() if isinstance(found, type) else found
    except Exception as error:
        raise ConfigError(
            f"policy {name!r} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    if not callable(policy):
        raise ConfigError(
            f"policy {name!r} is a {type(policy).__name__}: write a function of a request and "
            "its candidates that returns one cost for each"
        )
    return policy  # type: ignore[no-any-return]


def policy_name(policy: CostFunction) -> str:
    """How decisions name a cost function that was given as an object."""
    name = getattr(policy, "__qualname__", type(policy).__qualname__)
    return f"{getattr(policy, '__module__', type(policy).__module__)}:{name}"
