"""The files that a browser gets, and the headers that keep them to themselves."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Final, NamedTuple

PATHS: Final[Mapping[str, str]] = {
    "/": "index.html",
    "/page/page.css": "page.css",
    "/page/page.js": "page.js",
    "/page/icon.svg": "icon.svg",
}
"""The file of each path."""

STATE_PATH: Final = "/page/state"
"""The path of `PageState.read`."""

_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}

_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        # Text becomes markup nowhere: a browser refuses it to any script.
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)

HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": _POLICY,
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""Of each file, beside its type."""


class PageFile(NamedTuple):
    """A file as it is answered."""

    body: bytes
    content_type: str


@cache
def page_file(path: str) -> PageFile:
    """The file that is served at one of `PATHS`.

    Raises:
        KeyError: it is none of them.
    """
    name = PATHS[path]
    body = (resources.files(__name__.rpartition(".")[0]) / "static" / name).read_bytes()
    return PageFile(body, _TYPES[name.rpartition(".")[2]])
