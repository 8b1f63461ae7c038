"""Actors: classes whose handlers are served on the bus, and the clients that call them.

What programs are written with is in `dynbus`, what packages are built on in `dynbus.spi`.
"""

from . import runtime, testing

__all__ = ["runtime", "testing"]
