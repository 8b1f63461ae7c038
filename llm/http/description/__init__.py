"""The description of the interface: the OpenAPI document, and a page of it."""

from .openapi import DOCUMENT, PAGE, document

__all__ = ["DOCUMENT", "PAGE", "document"]
