"""Whatever is tested here first, the compiled kernel is there before it."""

from __future__ import annotations

from tests.kvrouter.kernels import KERNELS as KERNELS
