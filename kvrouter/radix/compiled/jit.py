"""How functions are compiled: each entry point once, for one signature, kept on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar, cast

import numpy as np

from .cache import cache_folder

Function = TypeVar("Function", bound=Callable[..., Any])

# Numba, which has no types of its own for type checkers. What compiled functions are given and
# return it checks itself, when it compiles them.
numba: Any = import_module("numba")
import_module("numba.extending")
types: Any = numba.types
structref: Any = import_module("numba.experimental.structref")

Int: TypeAlias = Any
"""A number with a sign, of 64 bits."""
Word: TypeAlias = Any
"""A number without a sign, of 64 bits."""

# Numba makes a float of an operation on a signed and an unsigned number, so that every
# constant beside an unsigned one is unsigned too.
MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
MIX_2: Final = np.uint64(0x94D049BB133111EB)
_30, _27, _31 = np.uint64(30), np.uint64(27), np.uint64(31)

WORDS: Final = types.uint64[::1]
NUMBERS: Final = types.int64[::1]
TABLE: Final = types.int64[:, ::1]
READ_ONLY_WORDS: Final = types.Array(types.uint64, 1, "C", readonly=True)
READ_ONLY_TOKENS: Final = types.Array(types.uint32, 1, "C", readonly=True)
READ_ONLY_BYTES: Final = types.Array(types.uint8, 1, "C", readonly=True)

if TYPE_CHECKING:

    class Structure:
        """What compiled code reaches by reference."""

    class StructureType:
        """The type of a structure in compiled code."""

        def __init__(self, fields: Sequence[tuple[str, Any]]) -> None: ...

else:
    Structure = structref.StructRefProxy
    StructureType = types.StructRef


def structure(
    kind: type[StructureType], proxy: type[Structure], fields: Sequence[tuple[str, Any]]
) -> Any:
    """The type of a structure, made known to Numba.

    Args:
        proxy: what Python sees of it: a reference to hand on.
    """
    structref.register(kind)
    structref.define_boxing(kind, proxy)
    return kind(fields)


CACHE_FOLDER: Final = cache_folder()


def entry(signature: object) -> Callable[[Function], Function]:
    """Compile a function that Python calls, now, or load it from the cache."""

    def compile_now(function: Function) -> Function:
        if CACHE_FOLDER is None:
            return cast(Function, numba.njit(signature)(function))
        config: Any = numba.config
        before, config.CACHE_DIR = config.CACHE_DIR, str(CACHE_FOLDER)
        try:
            return cast(Function, numba.njit(signature, cache=True)(function))
        finally:
            config.CACHE_DIR = before

    return compile_now


def inner(function: Function) -> Function:
    """Compile a function as part of those that call it."""
    return cast(Function, numba.njit(function))


@inner
def mixed(number: Word) -> Word:
    """The number with all its bits spread over all of it."""
    number = (number ^ (number >> _30)) * MIX_1
    number = (number ^ (number >> _27)) * MIX_2
    return number ^ (number >> _31)
