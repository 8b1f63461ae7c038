"""The kernels of the index that can be had where the tests run.

The first time on a machine the compiled one takes longer than a test may. So a process of its
own compiles it while other tests run, and what is below this folder comes after them.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from typing import Final

import pytest

from dynbus.kvrouter.radix.kernel import KernelName, is_compiled, load_compiled

HAS_NUMBA: Final = find_spec("numba") is not None
KERNELS: Final[list[KernelName]] = ["python", "compiled"] if HAS_NUMBA else ["python"]

each_kernel = pytest.mark.parametrize("kernel", KERNELS)

_COMPILE = "from dynbus.kvrouter.radix.kernel import load_compiled; load_compiled(required=True)"


class Compilation:
    """The process that compiles the kernel, if that is to be done."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        """Compile beside the tests, unless an earlier run has done it."""
        if HAS_NUMBA and not is_compiled():
            self._process = subprocess.Popen([sys.executable, "-c", _COMPILE])

    def wait(self) -> None:
        """Have the compiled kernel in this process."""
        if self._process is not None:
            assert self._process.wait(timeout=600) == 0
            self._process = None
        if HAS_NUMBA:
            load_compiled(required=True)

    def end(self) -> None:
        """Leave no process behind."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
