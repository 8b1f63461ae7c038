"""Modules that import others when a name of those is first asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import MappingProxyType


def lazy_exports(
    face: str,
    *modules: str,
    homes: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a module that finds the names of its `__all__` in others.

    Args:
        face: the module that has the names.
        modules: from its package on, those first that take the least time to import: all are
            imported up to the one that has the name. A package may be asked for any of them too.
        homes: modules that are imported for these names alone, since not everybody has, or has
            time for, what they need.
    """
    names = vars(sys.modules[face])
    package: str = names["__package__"]
    module_of = {each: module for module, its_names in homes.items() for each in its_names}

    def find(name: str) -> object:
        if name in modules and face == package:
            return import_module(f"{package}.{name}")
        if name in names["__all__"]:
            for module in (module_of[name],) if name in module_of else modules:
                imported = import_module(f"{package}.{module}")
                if hasattr(imported, name):
                    return names.setdefault(name, getattr(imported, name))
        raise AttributeError(f"module {face!r} has no attribute {name!r}")

    return find, lambda: sorted({*names, *names["__all__"]})
