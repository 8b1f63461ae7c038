"""The names of `dynamo.sdk`: services, endpoints, hooks and dependencies."""

from dynbus.compat.service_context import dynamo_context, get_runtime

from .endpoints import async_on_shutdown, async_on_start, dynamo_endpoint, endpoint
from .service import DYNAMO_IMAGE, ServiceClass, depends, service

__all__ = [
    "DYNAMO_IMAGE",
    "ServiceClass",
    "async_on_shutdown",
    "async_on_start",
    "depends",
    "dynamo_context",
    "dynamo_endpoint",
    "endpoint",
    "get_runtime",
    "service",
]
