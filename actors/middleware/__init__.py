"""Middleware: what is done around calls, streams and jobs, at handlers and at clients."""

from . import handlers, passing

__all__ = ["handlers", "passing"]
