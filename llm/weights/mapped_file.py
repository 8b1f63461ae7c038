"""The base of readers of model files: a file in memory, and numbers that are not quantised."""

from __future__ import annotations

import mmap
import os
import stat
from os import PathLike, fspath
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from .errors import BrokenModel


def floats(raw: NDArray[np.uint8], type: str) -> NDArray[np.float32] | None:
    """Numbers of type F32, F16 or BF16 as float32, in an array of their own; None for another."""
    match type:
        case "F32":
            return raw.view("<f4").astype(np.float32)
        case "F16":
            return raw.view("<f2").astype(np.float32)
        case "BF16":
            # bfloat16 is the upper half of a float32.
            return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
        case _:
            return None


class MappedFile:
    """A file of a model that is open for reading; it must not change meanwhile.

    A subclass reads and checks what the file says of itself when it is made.

    Attributes:
        path: of the file.
    """

    def __init__(self, path: str, content: mmap.mmap) -> None:
        self.path = path
        self._content = content

    @classmethod
    def open(cls, path: str | PathLike[str]) -> Self:
        """Open a file and check what it says of itself.

        Raises:
            OSError: it cannot be read.
            BrokenModel: it is not of this format, it is cut, or it says what cannot be.
            UnsupportedModel: it is of a version that is not read.
        """
        if not stat.S_ISREG(os.stat(path).st_mode):
            # To open a pipe would wait for somebody.
            raise BrokenModel(f"{fspath(path)}: this is no plain file")
        with open(path, "rb") as file:
            if not file.seek(0, 2):
                raise BrokenModel(f"{fspath(path)}: the file is empty")
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            return cls(fspath(path), content)
        except BaseException:
            content.close()
            raise

    def close(self) -> None:
        """Close the file; nothing of it can be read any more."""
        self._content.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
