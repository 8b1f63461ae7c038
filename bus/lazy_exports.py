"""Packages that import their modules when a name of them is first asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import MappingProxyType


def lazy_exports(
    package: str,
    *modules: str,
    homes: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package that finds the names of its `__all__` in modules.

    Args:
        modules: from the package on, those first that take the least time to import: all are
            imported up to the one that has the name. Any of them may be asked for as well.
        homes: modules that are imported for these names alone, since not everybody has what they
            need.
    """
    names = vars(sys.modules[package])
    module_of = {each: module for module, its_names in homes.items() for each in its_names}

    def find(name: str) -> object:
        if name in modules:
            return import_module(f"{package}.{name}")
        if name in names["__all__"]:
            for module in (module_of[name],) if name in module_of else modules:
                found = import_module(f"{package}.{module}")
                if hasattr(found, name):
                    return names.setdefault(name, getattr(found, name))
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find, lambda: sorted({*names, *names["__all__"]})
