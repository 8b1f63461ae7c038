"""TLS to nats-server: the files of a process, read again when they change, and what goes wrong."""

from __future__ import annotations

import errno
import os
import ssl
from typing import Any, Final, NoReturn

from dynbus.bus.config import BusConfig
from dynbus.bus.errors import ConfigError

ENCRYPTED_SCHEMES: Final = ("tls://", "wss://")

_UNKNOWN_AUTHORITY: Final = (18, 19, 20, 21)
"""OpenSSL's codes of certificates that no known authority has signed."""
_NOT_YET_VALID: Final = 9
_EXPIRED: Final = 10
_OTHER_NAME: Final = (62, 64)
_REFUSALS: Final = {
    "CERTIFICATE_REQUIRED": "wants a certificate of the client: give tls_cert and tls_key",
    "CERTIFICATE_EXPIRED": "takes the client's certificate {cert} for expired: renew it",
    "UNKNOWN_CA": "does not know the authority of the client's certificate {cert}: have one signed "
    "by the authority that the server's ca_file has",
    "BAD_CERTIFICATE": "does not take the client's certificate {cert}: it must be for clients, and "
    "signed by the authority that the server's ca_file has",
    "CERTIFICATE_REVOKED": "takes the client's certificate {cert} for revoked: renew it",
}
"""The words of a server about a client's certificate, by the end of OpenSSL's name of the alert."""


class ClientTls:
    """The certificates with which a process knows its server, and is known to it.

    Args:
        config: names the files; without an authority the system's are trusted.

    Attributes:
        handshake_first: whether the server says nothing before TLS.
    """

    def __init__(self, config: BusConfig) -> None:
        self._ca = config.tls_ca
        self._cert = config.tls_cert
        self._key = config.tls_key
        self.is_demanded = config.demands_tls
        self.handshake_first = config.tls_handshake_first
        self._context: ssl.SSLContext | None = None
        self._read: list[tuple[int, int, int]] = []

    def __repr__(self) -> str:
        return f"<ClientTls [ca: {self._ca or 'of the system'}, certificate: {self._cert or '-'}]>"

    def is_for(self, server: str) -> bool:
        """True if nothing is said to the server at a URL but by TLS."""
        return self.is_demanded or server.startswith(ENCRYPTED_SCHEMES)

    def context(self) -> ssl.SSLContext:
        """The context of a session, with the files as they are now.

        Raises:
            ConfigError: one of them cannot be used.
        """
        files = [_version("tls_ca", self._ca)] if self._ca else []
        if self._cert:
            files += [_version("tls_cert", self._cert), _version("tls_key", self._key)]
        if self._context is None or files != self._read:
            self._context = self._made()
            self._read = files
        return self._context

    def _made(self) -> ssl.SSLContext:
        try:
            context = ssl.create_default_context(cafile=self._ca or None)
        except OSError as error:
            raise ConfigError(
                f"tls_ca = {self._ca!r} cannot be used: {_reason(error)}; it must have the "
                "certificates of authorities, PEM"
            ) from None
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self._cert:
            try:
                context.load_cert_chain(self._cert, self._key, password=_refuse_password)
            except OSError as error:
                raise ConfigError(
                    f"tls_cert = {self._cert!r} with tls_key = {self._key!r} cannot be used: "
                    f"{_reason(error)}; they must be a certificate and its key, PEM"
                ) from None
        return context

    def problem(self, error: BaseException) -> str:
        """The fault of the server's certificate, with its remedy; empty for any other error."""
        if not isinstance(error, ssl.SSLCertVerificationError):
            return ""
        source = f"tls_ca = {self._ca!r}" if self._ca else "the system's authorities"
        code = error.verify_code
        if code in _UNKNOWN_AUTHORITY:
            return (
                f"its certificate is signed by none of {source}: name the file with its "
                "authority by tls_ca (DYNBUS_TLS_CA)"
            )
        if code in _OTHER_NAME:
            return (
                f"its certificate is for another name ({error.verify_message}): use a name that is "
                "in the certificate, or have it made for this one"
            )
        if code == _EXPIRED:
            return "its certificate has expired: renew it there (or set this machine's clock)"
        if code == _NOT_YET_VALID:
            return "its certificate is not valid yet: set the clock, here or there"
        return f"its certificate cannot be trusted: {error.verify_message}"

    def refusal(self, error: BaseException) -> str:
        """The server's fault with our certificate, with its remedy; empty for any other error."""
        reason = str(getattr(error, "reason", None) or "").upper()
        if isinstance(error, ssl.SSLError) and "ALERT" in reason:
            for alert, text in _REFUSALS.items():
                if reason.endswith(alert):
                    return text.format(cert=self._cert)
        return ""


def _version(name: str, path: str) -> tuple[int, int, int]:
    try:
        status = os.stat(path)
    except OSError as error:
        raise ConfigError(f"{name} = {path!r} cannot be read: {error.strerror}") from None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _reason(error: OSError) -> str:
    # OpenSSL's text of a file without a certificate is its own lines of code.
    if isinstance(error, ssl.SSLError):
        return (error.reason or "it is no PEM").lower().replace("_", " ")
    return error.strerror or str(error)


def _refuse_password(*_: Any) -> NoReturn:
    """Refuse a key that is encrypted, for whose password OpenSSL would ask the terminal."""
    raise OSError(errno.EACCES, "the key has a password")
