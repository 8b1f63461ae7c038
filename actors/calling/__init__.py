"""The calling of actors: clients, options, routing, retries.

`RetryPolicy` and `Continuation` decide what is tried again and how a stream goes on,
`MigrationLine` which of many streams moves first; `Invocation`, for streams `StreamInvocation`,
their attempts and parts, and `Migrations` carry it out.
"""

from . import clients, continuation, dependencies, jobs, options, relay, routing, stream

__all__ = [
    "clients",
    "continuation",
    "dependencies",
    "jobs",
    "options",
    "relay",
    "routing",
    "stream",
]
