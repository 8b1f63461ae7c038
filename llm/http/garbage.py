"""How rarely Python looks for garbage among all objects of a front end.

No thread runs meanwhile, the control lane's neither. With 4,096 open streams that is half a second
of a processor, and on a busy machine so long that instances take the process for dead.
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

THRESHOLDS: Final = (5_000, 10, 20)
"""Of `gc.set_threshold`: all objects are looked at after a million that outlived their youth.

Opening thousands of streams makes half as many, and a request leaves less than a hundred that only
a collection finds, most of which the young ones do.
"""


@contextmanager
def rare_collections() -> Generator[None]:
    """Have full collections made rarely in this process while the block runs."""
    before = gc.get_threshold()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
