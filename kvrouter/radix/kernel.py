"""The kernel of the index: the tree of prefixes and who holds them.

There are two kernels that give the same answers; each loads the snapshots of the other. One is
plain Python. The other, of the extra `dynbus[fast]`, is compiled by Numba, and takes a third of
the memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from time import perf_counter
from typing import Any, Final, Generic, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from dynbus.bus.errors import ConfigError
from dynbus.kvrouter import hashing

from .prefix_tree import PrefixTree
from .records import CacheRecord, RunRecord

KernelName: TypeAlias = Literal["auto", "python", "compiled"]
Hashes: TypeAlias = Sequence[int] | NDArray[np.uint64]

Key = TypeVar("Key")
Value = TypeVar("Value")

MANY: Final = 8
"""From so many holders of a run on, what is said of it is worth remembering."""
REMEMBERED: Final = 1024
"""Runs for which that is remembered at most."""

SLOW_START: Final = 5.0
"""Seconds from which on the log tells how long compiling took."""

logger = logging.getLogger(__name__)


class Changes(NamedTuple):
    """What became of the events of a message.

    Attributes:
        orphans: chains that were left out from a block on whose parent is not held.
        unknown: removals of blocks that were not held.
        blocks: how many more blocks are held than before, but for what was cleared.
        is_excessive: whether the rest was left out, since blocks with very many others below
            them came and went. What the rank held is to be dropped.
    """

    orphans: int
    unknown: int
    blocks: int
    is_excessive: bool


class Batch(Protocol):
    """A message of events that is whole."""

    @property
    def dp_rank(self) -> int: ...
    @property
    def event_epoch(self) -> int: ...
    @property
    def first_id(self) -> int: ...
    def __len__(self) -> int: ...


class CacheHolder(Protocol):
    """One cache.

    Attributes:
        number: above 0, and of no other cache until this one is dropped and swept.
    """

    number: int

    @property
    def blocks(self) -> int:
        """How many blocks it holds."""
        ...

    @property
    def detached(self) -> int:
        """How many of them lie behind a hole."""
        ...


class Answers(Generic[Key, Value]):
    """How a look-up puts its answers.

    Attributes:
        labels: by the number of a holder; those without one are left out.
        values: what to say of a number of blocks.
        remembered: by run, what a kernel keeps of what it said.
    """

    __slots__ = ("labels", "remembered", "values")

    def __init__(self, labels: dict[int, Key], values: Callable[[int], Value]) -> None:
        self.labels = labels
        self.values = values
        self.remembered: dict[int, tuple[int, dict[Key, Value]]] = {}


class Kernel(Protocol):
    """A tree of prefixes."""

    def add_holder(self) -> Any:
        """A `CacheHolder` that holds nothing."""

    def drop_holder(self, holder: Any) -> None:
        """Forget a holder; the memory comes back with `sweep`. Costs the same at any size."""

    @property
    def is_swept(self) -> bool: ...

    def sweep(self, limit: int) -> None:
        """Free about `limit` blocks of holders that were dropped."""

    def decode(self, message: bytes) -> Any:
        """A message as the `Batch` that `apply` takes.

        Raises:
            InvalidEvents: it is not one.
        """

    def apply(
        self,
        batch: Any,
        skip: int,
        holder_of: Callable[[int], Any],
        clear: Callable[[], None],
    ) -> Changes:
        """Apply the events of a message from number `skip` on.

        Args:
            holder_of: the holder of a tier.
            clear: drops all holders, where an event says so.
        """
        ...

    def find(self, block_hashes: Hashes, answers: Answers[Key, Value]) -> dict[Key, Value]:
        """How many of these blocks each holder has from the first on, for those that have any."""
        ...

    def find_holders(self, block_hashes: Hashes) -> dict[int, int]:
        """The same by the numbers of the holders, also of those that were dropped."""
        ...

    def count_tiers(
        self, block_hashes: Hashes, holders: Sequence[Sequence[int]]
    ) -> Iterable[Sequence[int]]:
        """How many of these blocks ranks have in each tier.

        A block counts for the nearest tier that has it. The count ends with the first block
        that the rank has nowhere.

        Args:
            holders: of each rank the holder of each tier, nearest first; 0 for none.
        """
        ...

    @property
    def run_count(self) -> int:
        """Stretches of blocks without a branch."""
        ...

    def contents(self, holder: Any) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """The engine's hash and the block hash of each held block."""
        ...

    def choose_victims(self, holders: Sequence[Any], count: int) -> Any:
        """The runs that were found the longest ago, of which `count` blocks or more can be given
        up: by those that hold nothing below them.

        Costs a look at each run.

        Args:
            holders: those that are to give up something; none of them was dropped.

        Returns:
            A sequence, the oldest first; it is empty where only what is to be swept is there.
        """

    def evict(self, holder: Any, victims: Any, most: int) -> int:
        """Forget what a holder has of runs that were chosen, in their order, until that is `most`
        blocks or more; returns how many.

        A run that was found, or went on, since it was chosen stays, and so does one below which
        the holder has something. Costs a look at all that the holder has.
        """
        ...

    @property
    def next_numbers(self) -> tuple[int, int]:
        """Above the numbers of all runs and holders."""
        ...

    def run_records(self) -> Iterator[RunRecord]:
        """All runs, each after its parent.

        The tree must be swept, and must not change meanwhile.
        """
        ...

    def columns(
        self, holder: Any, limit: int
    ) -> Iterator[tuple[NDArray[np.uint64], NDArray[np.uint64]]]:
        """The engine's hashes and the locations of the held blocks, up to `limit` at a time.

        The tree must not change meanwhile.
        """
        ...

    def load(
        self,
        runs: Sequence[RunRecord],
        caches: Sequence[CacheRecord],
        next_numbers: tuple[int, int],
    ) -> Sequence[Any]:
        """Fill an empty tree with records that fit together; returns the holders in order."""
        ...

    def prefix_tree(self) -> PrefixTree:
        """The runs as objects, to look at; it may be a copy."""
        ...


def make_kernel(name: KernelName) -> Kernel:
    """A kernel with an empty tree.

    Args:
        name: "auto" takes the compiled one where that is ready, see `load_compiled`.

    Raises:
        ConfigError: the compiled kernel is asked for and cannot be had.
    """
    if name == "compiled" or (name == "auto" and is_compiled()):
        load_compiled(required=name == "compiled")
    if name != "python" and hashing.compiled is not None:
        from .compiled.kernel import CompiledKernel

        return CompiledKernel()
    from .python_kernel import PythonKernel

    return PythonKernel()


def is_compiled() -> bool:
    """Whether the compiled kernel is loaded, or can be within a second or two."""
    if hashing.compiled is not None:
        return True
    if not _has_numba():
        return False
    from .compiled.cache import cache_folder, is_whole

    return is_whole(cache_folder())


def load_compiled(*, required: bool = False) -> bool:
    """Load the compiled kernel, for hashing too; returns whether it is there.

    The first time on a machine it is compiled, which takes half a minute or more; then it is
    loaded from the user's cache within a second or two. On an event loop, call it in a thread.

    Raises:
        ConfigError: it is `required` and cannot be had.
    """
    if hashing.compiled is not None:
        return True
    if not _has_numba():
        if required:
            raise ConfigError(
                'kernel = "compiled", but Numba is not installed: pip install "dynbus[fast]"'
            )
        return False
    begun = perf_counter()
    if not is_compiled():
        logger.warning("compiling the index's kernel, once on this machine: half a minute or more")
    try:
        from .compiled import hashing as compiled_hashing
        from .compiled import jit
        from .compiled.cache import note_whole
        from .compiled.kernel import warm_up
    except ImportError as error:
        if required:
            raise ConfigError(f'kernel = "compiled", but Numba cannot be used: {error}') from error
        logger.warning("the plain Python kernel is used, since Numba cannot be: %s", error)
        return False
    warm_up()
    note_whole(jit.CACHE_FOLDER)
    taken = perf_counter() - begun
    kept = f"kept in {jit.CACHE_FOLDER}" if jit.CACHE_FOLDER else "not kept: no folder for it"
    logger.log(
        logging.INFO if taken < SLOW_START else logging.WARNING,
        "the compiled kernel was ready after %.1f s (%s)",
        taken,
        kept,
    )
    hashing.compiled = compiled_hashing
    return True


def _has_numba() -> bool:
    try:
        return find_spec("numba") is not None
    except ValueError:
        # It was taken out of the modules that can be imported.
        return False
