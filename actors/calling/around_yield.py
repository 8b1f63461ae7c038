"""Whether a generator that enters a `with` block is going to wait in a `yield` inside it.

What the block changes for its task is then seen by whatever runs while the generator waits,
and taken back by whoever closes it, maybe another task.
"""

from __future__ import annotations

import contextlib
import dis
import inspect
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any, Final

from dynbus.bus.serving.execution import drives

_ENTERING: Final = ("__enter__", "__aenter__")
_CONTEXTLIB: Final = contextlib.contextmanager.__code__.co_filename
_GENERATOR: Final = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
_AFTER_YIELD: Final = (1, 2)
"""Arguments of `RESUME` behind `yield` and `yield from`; that behind `await` is 3."""


def waits_in_yield(frame: FrameType) -> str | None:
    """The name of the generator that carries a block across a `yield`; None when none does.

    A handler's own generator, which runs alone in its task, does no harm.

    Args:
        frame: of the function that enters the block. A context manager's `__enter__`, or the
            generator behind one, enters it for whoever uses that context manager.
    """
    by_statement = True
    while (caller := frame.f_back) is not None:
        code = frame.f_code
        if code.co_name in _ENTERING:
            pass
        elif code.co_filename == _CONTEXTLIB:
            # An `ExitStack` may be left anywhere.
            by_statement = False
        elif not (_is_generator(code) and _is_contextlib_entering(caller)):
            break
        frame = caller
    code = frame.f_code
    if not _is_generator(code) or drives(frame):
        return None
    if by_statement and not _has_yield(code, frame.f_lasti):
        return None
    return code.co_qualname


def _is_generator(code: CodeType) -> bool:
    return bool(code.co_flags & _GENERATOR)


def _is_contextlib_entering(frame: FrameType) -> bool:
    code = frame.f_code
    return code.co_filename == _CONTEXTLIB and code.co_name in _ENTERING


@lru_cache(maxsize=1024)
def _has_yield(code: CodeType, entered_at: int) -> bool:
    """Whether a `yield` is inside the `with` whose context manager is entered at an offset."""
    instructions = list(dis.get_instructions(code))
    handlers: dict[int, int] = {}
    bytecode: Any = dis.Bytecode(code)  # the type checkers do not know its table of handlers
    for entry in bytecode.exception_entries:
        for offset in range(entry.start, entry.end, 2):
            handlers[offset] = entry.target

    def chain(offset: int) -> Iterator[int]:
        """The handlers that an exception goes through, innermost first."""
        while (handler := handlers.get(offset)) is not None:
            yield handler
            offset = handler

    ends = {
        one.offset
        for one, following in zip(instructions, instructions[1:], strict=False)
        if following.opname == "WITH_EXCEPT_START"
    }
    around = set(chain(entered_at))
    own = next(
        (
            handler
            for one in instructions
            if one.offset > entered_at
            for handler in chain(one.offset)
            if handler in ends and handler not in around
        ),
        None,
    )
    # Without a `with` of its own to be seen, the block may be open at any `yield`.
    return any(
        own is None or own in chain(one.offset)
        for one, following in zip(instructions, instructions[1:], strict=False)
        if one.opname == "YIELD_VALUE"
        and following.opname == "RESUME"
        and (following.arg or 0) & 3 in _AFTER_YIELD
    )
