"""Values that JSON cannot hold, refused before they are written: bytes, and floats that are not
finite."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import finite, raw_bytes

__all__ = ["finite", "raw_bytes"]
