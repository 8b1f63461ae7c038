"""JSON Web Tokens of an OpenID provider, in place of keys."""

from __future__ import annotations

import asyncio
import logging
import urllib.request
from collections import OrderedDict
from collections.abc import Callable
from http.client import HTTPException
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import anyio
import msgspec

from dynbus import ConfigError, Unavailable
from dynbus.llm.openai.errors import Unauthorized
from dynbus.spi import how_to_install, is_loopback, monotonic, unix_time

from .keys import KeyHolder, digest_of, is_tenant

logger = logging.getLogger(__name__)

ALGORITHMS: Final = (
    *("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    *("ES256", "ES384", "ES512", "EdDSA"),
)
"""The signatures that are taken: of a private key that the provider alone has."""

KEY_TYPES: Final = frozenset(("RSA", "EC", "OKP"))

FETCH_TIMEOUT: Final = 5.0
"""Seconds for each: the connection to the provider, the head of its answer, and the rest."""

PATIENCE: Final = 1.0
"""Seconds that a token of a known key waits for the keys of a provider that answered the last
time."""

MOST_BYTES: Final = 256 * 1024
"""Of a document of the provider."""

FETCHED_SECONDS: Final = 300.0
"""Seconds after which the keys of the provider are read again."""

FETCH_INTERVAL: Final = 10.0
"""Seconds between two readings at least, however many tokens are of unknown keys."""

OF_PROVIDER: Final = "oidc"
"""The id of the keys that its tokens are, for what is counted by key."""

LEEWAY: Final = 30.0
"""Seconds by which the clocks of the provider and of this machine may differ."""

LOG_INTERVAL: Final = 1.0
"""Seconds between two lines of the log that say the same of refused tokens: anybody sends some."""

NOT_SIGNED: Final = "no key of its issuer has signed it"

MOST_KNOWN: Final = 4096
"""Tokens that are not looked at again, until the keys are read again."""

Fetch = Callable[[str], bytes]


class _Refusal(NamedTuple):
    """A kind of refusal in the log: when it was logged last, and how often it came since."""

    logged_at: float
    more: int


class _Documents(msgspec.Struct):
    """The parts of a provider's configuration that are read."""

    issuer: str
    jwks_uri: str


class _KeySet(msgspec.Struct):
    keys: list[dict[str, Any]] = []


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """No redirect: the provider answers at the address that is configured."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


_opener: Final = urllib.request.build_opener(_NoRedirect)


def fetch(url: str) -> bytes:
    """The document at an address, which is waited for.

    Raises:
        Unavailable: it cannot be read, or is too large.
    """
    try:
        with _opener.open(url, timeout=FETCH_TIMEOUT) as response:
            data, ends = b"", monotonic() + FETCH_TIMEOUT
            # The timeout of a socket is that of one read.
            while len(data) <= MOST_BYTES and (piece := response.read1(MOST_BYTES)):
                data += piece
                if monotonic() > ends:
                    raise TimeoutError(f"it takes more than {FETCH_TIMEOUT:g} s")
    except (OSError, HTTPException, ValueError) as error:
        raise Unavailable(f"{url} cannot be read: {error}", started=False) from error
    if len(data) > MOST_BYTES:
        raise Unavailable(f"{url} has more than {MOST_BYTES} bytes", started=False)
    return data


class OidcTokens:
    """The tokens of a provider: each says whose it is.

    The provider is asked for its keys when the first token comes, and again when one of an unknown
    key does. Where it does not answer, or not soon, the keys count that it had.

    Args:
        issuer: the address of the provider, as its tokens have it.
        audience: that tokens must be for.
        tenant_claim: the claim whose value is the tenant.
        fetch: reads a document, in a thread.

    Raises:
        ConfigError: the address may be answered by anybody, or the extra `oidc` is not installed.
    """

    def __init__(
        self, issuer: str, audience: str, tenant_claim: str, *, fetch: Fetch = fetch
    ) -> None:
        try:
            import jwt
        except ImportError as error:
            raise ConfigError(
                f"--oidc-issuer needs an extra: {how_to_install('oidc')} ({error})"
            ) from error
        self._jwt = jwt
        self._issuer = _check_address("--oidc-issuer", issuer)
        self._audience = audience
        self._tenant_claim = tenant_claim
        self._fetch = fetch
        self._keys: dict[str, jwt.PyJWK] = {}
        self._reading: asyncio.Event | None = None
        self._is_slow = False
        self._fetched_at: float | None = None
        self._tried_at: float | None = None
        self._known: OrderedDict[bytes, KeyHolder] = OrderedDict()
        self._refusals: dict[str, _Refusal] = {}

    def __repr__(self) -> str:
        return f"<OidcTokens of {self._issuer}>"

    async def holder_of(self, token: str) -> KeyHolder | None:
        """The holder of a token; None for what is no token.

        Raises:
            Unauthorized: it is not for us, or has expired, or the provider has not signed it.
            Unavailable: the keys of the provider are not known, and cannot be read.
        """
        digest = digest_of(token)
        known = self._known.get(digest)
        if known is not None and not known.has_expired(unix_time()) and not self._is_old:
            self._known.move_to_end(digest)
            return known
        try:
            header = self._jwt.get_unverified_header(token)
        except (self._jwt.InvalidTokenError, UnicodeError):
            return None
        key_id = header.get("kid", "")
        if header.get("alg") not in ALGORITHMS:
            raise self._refused(NOT_SIGNED, "its algorithm is none that is taken")
        if not isinstance(key_id, str):
            raise self._refused(NOT_SIGNED, "its key has no name")
        if self._is_old or key_id not in self._keys:
            await self._refresh(key_id)
        key = self._keys.get(key_id)
        if key is None:
            raise self._refused(NOT_SIGNED, "its key is not known")
        return self._verified(token, key, digest)

    @property
    def _is_old(self) -> bool:
        at = self._fetched_at
        return at is None or monotonic() - at > FETCHED_SECONDS

    def _verified(self, token: str, key: Any, digest: bytes) -> KeyHolder:
        try:
            claims: dict[str, Any] = self._jwt.decode(
                token,
                key,
                algorithms=list(ALGORITHMS),
                audience=self._audience,
                issuer=self._issuer,
                leeway=LEEWAY,
                options={"require": ["exp", "iss", "aud"]},
            )
        except self._jwt.InvalidTokenError as error:
            raise self._refused(self._reason(error), str(error)) from None
        tenant = claims.get(self._tenant_claim)
        if not isinstance(tenant, str) or not is_tenant(tenant):
            why = f"its claim {self._tenant_claim} names no tenant"
            raise self._refused(why, why)
        holder = KeyHolder(tenant, key=OF_PROVIDER, expires=float(claims["exp"]), leeway=LEEWAY)
        self._known[digest] = holder
        while len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)
        return holder

    def _reason(self, error: Exception) -> str:
        """The reason that the holder of a token is told. Of one that the provider has not signed it
        is told no more."""
        if isinstance(error, self._jwt.ExpiredSignatureError):
            return "it has expired"
        if isinstance(error, self._jwt.ImmatureSignatureError):
            return "it is not valid yet"
        if isinstance(error, self._jwt.InvalidAudienceError):
            return f"its claim aud has not {self._audience}, so that it is for others"
        if isinstance(error, self._jwt.InvalidIssuerError):
            return f"its claim iss is not {self._issuer}"
        if isinstance(error, self._jwt.MissingRequiredClaimError):
            return f"it has no claim {error.claim}"
        if isinstance(error, self._jwt.InvalidSignatureError | self._jwt.InvalidAlgorithmError):
            return NOT_SIGNED
        return "it cannot be read"

    def _refused(self, why: str, detail: str) -> Unauthorized:
        """The refusal of a token, which is logged.

        Args:
            why: as its holder is told: one of few texts, whatever the token says.
            detail: for the log.
        """
        now = monotonic()
        logged_at, more = self._refusals.get(why, _Refusal(-LOG_INTERVAL, 0))
        if now - logged_at < LOG_INTERVAL:
            self._refusals[why] = _Refusal(logged_at, more + 1)
        else:
            self._refusals[why] = _Refusal(now, 0)
            others = f" ({more} others since the last line)" if more else ""
            logger.info("a token of %s is refused: %s%s", self._issuer, detail, others)
        return Unauthorized(
            f"this token is refused: {why}; get another one of its issuer", is_given=True
        )

    async def _refresh(self, key_id: str) -> None:
        """Read the keys of the provider, unless that was tried just now.

        Raises:
            Unavailable: they are not known.
        """
        now = monotonic()
        if self._reading is None and (
            self._tried_at is None or now - self._tried_at >= FETCH_INTERVAL
        ):
            self._tried_at = now
            self._reading = asyncio.Event()
            reading = asyncio.get_running_loop().run_in_executor(None, self._read_keys)
            reading.add_done_callback(self._end_reading)
        is_known = key_id in self._keys
        if self._reading is not None and not (is_known and self._is_slow):
            with anyio.move_on_after(PATIENCE if is_known else FETCH_TIMEOUT) as waiting:
                await self._reading.wait()
            if waiting.cancelled_caught:
                self._is_slow = True
        if self._fetched_at is None:
            raise Unavailable("the keys of the issuer cannot be read: ask again", started=False)

    def _end_reading(self, reading: asyncio.Future[dict[str, Any]]) -> None:
        ended, self._reading = self._reading, None
        if ended is not None:
            ended.set()
        try:
            self._keys = reading.result()
        except Unavailable as error:
            self._is_slow = True
            logger.warning("the keys of %s are those from before: %s", self._issuer, error)
        else:
            self._is_slow = False
            self._fetched_at = monotonic()
            self._known.clear()

    def _read_keys(self) -> dict[str, Any]:
        base = self._issuer.rstrip("/")
        documents = _decode(self._fetch(f"{base}/.well-known/openid-configuration"), _Documents)
        if documents.issuer != self._issuer:
            raise Unavailable(f"{base} says that it is {documents.issuer[:200]!r}", started=False)
        try:
            address = _check_address("jwks_uri", documents.jwks_uri)
        except ConfigError as error:
            raise Unavailable(error.message, started=False) from error
        keys: dict[str, Any] = {}
        for one in _decode(self._fetch(address), _KeySet).keys:
            if one.get("kty") not in KEY_TYPES or one.get("use", "sig") != "sig":
                continue
            try:
                keys[str(one.get("kid", ""))] = self._jwt.PyJWK(one)
            except self._jwt.PyJWTError as error:
                logger.info("a key of %s is passed over: %s", self._issuer, error)
        return keys


def _decode(data: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise Unavailable(f"the issuer's document cannot be read: {error}") from error


def _check_address(name: str, url: str) -> str:
    """Return an address when nobody between can answer for it.

    Raises:
        ConfigError: anybody could.
    """
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError:
        parts, host = None, ""
    is_own = parts is not None and parts.scheme == "http" and bool(host) and is_loopback(host)
    if not is_own and (parts is None or parts.scheme != "https" or not host):
        raise ConfigError(f"{name}={url[:200]!r}: give an address that begins with https://")
    return url
