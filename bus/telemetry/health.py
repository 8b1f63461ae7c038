"""Liveness, readiness and metrics over HTTP (`/live`, `/ready`, `/metrics`), for orchestrators and
Prometheus.

Run on the control thread, it answers while a handler blocks the main loop.
"""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from dynbus.bus.errors import ConfigError
from dynbus.bus.extras import how_to_install

from .get_server import GetServer, Response, problem

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_TEXT: Final = "text/plain; charset=utf-8"
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Status:
    """The result of a health check.

    Attributes:
        problems: what is not well, and why; empty when all is well.
        details: what else there is to know, which changes nothing.
    """

    problems: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    details: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def ok(self) -> bool:
        return not self.problems


def metrics_remedy() -> str:
    """The remedy where `/metrics` lacks its extra."""
    return f"needs an extra: {how_to_install('metrics')}, then start again"


def parse_address(text: str) -> tuple[str, int]:
    """Split `HOST:PORT`; an IPv6 host stands in brackets, port 0 takes a free one.

    Raises:
        ConfigError: it is not of this form.
    """
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
        host = host[1:-1]
    if (
        not colon
        or not host
        or (":" in host and not bracketed)
        or not (port.isascii() and port.isdigit())
        or int(port) > 65535
    ):
        raise ConfigError(
            f"{text!r} is not an address: write HOST:PORT, for example 127.0.0.1:9090 or [::1]:9090"
        )
    return host, int(port)


def health_tls(cert: str, key: str, client_ca: str | None = None) -> ssl.SSLContext:
    """The TLS of a health server.

    Args:
        client_ca: a file of authorities; each client needs a certificate that one has signed.

    Raises:
        ConfigError: the files cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(cert, key)
        if client_ca is not None:
            context.load_verify_locations(client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:
        raise ConfigError(
            f"the certificate {cert}, the key {key} and the authorities of clients "
            f"{client_ca or 'none'} cannot be used: {error}"
        ) from None
    return context


class HealthServer(GetServer):
    """Answers `/live`, `/ready` and `/metrics` while it is open.

    Args:
        live: whether the process works at all; if not, an orchestrator restarts it.
        ready: whether it can take calls now.
        metrics: serve `/metrics`; without it the answer there is 501 with the remedy.
        registry: what `/metrics` shows; prometheus-client's own registry unless given, which
            `configure_telemetry(prometheus=True)` fills.
        tls: its certificate, and what it wants of clients; None for plain HTTP.

    `live` and `ready` are called in the server's loop. One that raises counts as not well. It has
    no credentials but those of `tls`: the operator who opens it decides who may reach its host.
    """

    title = "the health server"

    def __init__(
        self,
        host: str,
        port: int,
        *,
        live: Callable[[], Status],
        ready: Callable[[], Status],
        metrics: bool = False,
        registry: CollectorRegistry | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(host, port, tls=tls)
        self._checks = {"/live": live, "/ready": ready}
        self._expose = _metrics_page(registry) if metrics else None

    @property
    def has_metrics(self) -> bool:
        """True if `/metrics` has a page."""
        return self._expose is not None

    async def answer(self, path: str, query: str) -> Response:
        check = self._checks.get(path)
        if check is not None:
            return _answer_check(path, check)
        if path == "/metrics":
            if self._expose is None:
                text = f"/metrics {metrics_remedy()}\n".encode()
                return Response(HTTPStatus.NOT_IMPLEMENTED, text, _TEXT)
            # Collecting takes the longer the more series there are, and this loop may also
            # be the one that sends heartbeats.
            content_type, page = await asyncio.to_thread(self._expose)
            return Response(HTTPStatus.OK, page, content_type)
        return problem(HTTPStatus.NOT_FOUND)


def _answer_check(path: str, check: Callable[[], Status]) -> Response:
    try:
        status = check()
    except Exception as error:
        # A check that cannot be made has failed.
        logger.exception("the health check of %s raised", path)
        status = Status({"check": type(error).__name__})
    code = HTTPStatus.OK if status.ok else HTTPStatus.SERVICE_UNAVAILABLE
    body: dict[str, object] = {
        "status": "ok" if status.ok else "unavailable",
        "problems": dict(status.problems),
    }
    if status.details:
        body["details"] = dict(status.details)
    return Response(code, json.dumps(body).encode() + b"\n")


def _metrics_page(registry: CollectorRegistry | None) -> Callable[[], tuple[str, bytes]]:
    from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, generate_latest

    collecting = threading.Lock()

    def page() -> tuple[str, bytes]:
        # OpenTelemetry's collector gives two that collect at once one page with all of it twice.
        with collecting:
            return CONTENT_TYPE_LATEST, generate_latest(registry or REGISTRY)

    return page
