"""The kernels of the index that can be had where the tests run."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from dynbus.kvrouter.radix.kernel import KernelName, load_compiled

HAS_NUMBA = find_spec("numba") is not None
if HAS_NUMBA:
    # Here and not in a test: the first time on a machine it takes longer than a test may.
    load_compiled(required=True)

KERNELS: list[KernelName] = ["python", "compiled"] if HAS_NUMBA else ["python"]

each_kernel = pytest.mark.parametrize("kernel", KERNELS)
