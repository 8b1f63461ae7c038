"""The kernels of the index that can be had where the tests run.

The first time on a machine the compiled one takes longer than a test may. So a process of its
own compiles it while other tests run, and those with the fixture `compiled_kernel` come last.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from importlib.util import find_spec
from typing import Final

import pytest

from dynbus.kvrouter.radix.compiled.cache import cache_folder
from dynbus.kvrouter.radix.kernel import KernelName, is_compiled, load_compiled

HAS_NUMBA: Final = find_spec("numba") is not None
KERNELS: Final[list[KernelName]] = ["python", "compiled"] if HAS_NUMBA else ["python"]

each_kernel = pytest.mark.parametrize("kernel", KERNELS)

IS_FIRST: Final = os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0"
"""Of the processes that run tests side by side, one has the kernel compiled for all."""
LONGEST: Final = 600.0

_COMPILE = "from dynbus.kvrouter.radix.kernel import load_compiled; load_compiled(required=True)"


class Compilation:
    """The process that compiles the kernel, if that is to be done."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        """Compile beside the tests, unless an earlier run has done it."""
        if HAS_NUMBA and IS_FIRST and not is_compiled():
            self._process = subprocess.Popen([sys.executable, "-c", _COMPILE])

    def wait(self) -> None:
        """Have the compiled kernel in this process."""
        if not HAS_NUMBA:
            return
        if self._process is not None:
            assert self._process.wait(timeout=LONGEST) == 0
            self._process = None
        end = time.monotonic() + LONGEST
        while not IS_FIRST and cache_folder() is not None and not is_compiled():
            assert time.monotonic() < end, "the process that compiles the kernel does not end"
            time.sleep(0.1)  # it is another process's child: nothing here is told of its end
        load_compiled(required=True)

    def end(self) -> None:
        """Leave no process behind."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
