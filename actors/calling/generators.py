"""The generator that opens a `with` block, where one does.

What a block changes for its task would hold for whatever runs while the generator waits in a
`yield`, and be taken back by its closer, maybe another task. Whether there is a `yield`
inside is not asked: nobody who reads the code has to find out either.
"""

from __future__ import annotations

import contextlib
import inspect
from types import CodeType, FrameType
from typing import Final

from dynbus.bus.serving.execution import drives

_ENTERING: Final = ("__enter__", "__aenter__")
_CONTEXTLIB: Final = contextlib.contextmanager.__code__.co_filename
_GENERATOR: Final = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR


def opening_generator(frame: FrameType) -> str | None:
    """The name of the generator that opens a block; None where none does.

    A handler's own generator, which runs alone in its task, does no harm, and counts for none.

    Args:
        frame: of the function that enters the block. A context manager's `__enter__`, or the
            generator behind one, enters it for the user of that context manager.
    """
    while (caller := frame.f_back) is not None:
        code = frame.f_code
        is_manager = code.co_name in _ENTERING or code.co_filename == _CONTEXTLIB
        if not (is_manager or (_is_generator(code) and _is_contextlib_entering(caller))):
            break
        frame = caller
    code = frame.f_code
    return None if not _is_generator(code) or drives(frame) else code.co_qualname


def _is_generator(code: CodeType) -> bool:
    return bool(code.co_flags & _GENERATOR)


def _is_contextlib_entering(frame: FrameType) -> bool:
    code = frame.f_code
    return code.co_filename == _CONTEXTLIB and code.co_name in _ENTERING
