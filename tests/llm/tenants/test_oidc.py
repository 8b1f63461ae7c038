"""Tokens of an OpenID provider, which a server of the test's own is."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import anyio
import httpx2
import jwt
import openai
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.algorithms import ECAlgorithm, RSAAlgorithm
from openai import AsyncOpenAI
from tests.llm.http.served import served

from dynbus import ConfigError, Unavailable
from dynbus.llm.http.settings import HttpSettings
from dynbus.llm.openai.errors import Unauthorized
from dynbus.llm.tenants import oidc
from dynbus.llm.tenants.keys import KeyHolder
from dynbus.llm.tenants.oidc import (
    FETCH_INTERVAL,
    FETCHED_SECONDS,
    LEEWAY,
    OF_PROVIDER,
    OidcTokens,
)

pytestmark = pytest.mark.anyio

AUDIENCE = "dynbus"


class Provider:
    """An OpenID provider on loopback.

    Attributes:
        asked: the paths that were asked for.
        drips: the beginning of answers that then go on by a byte at a time; None for whole ones.
    """

    def __init__(self) -> None:
        self.keys: dict[str, Any] = {"one": rsa.generate_private_key(65537, 2048)}
        self.documents: dict[str, Any] = {}
        self.asked: list[str] = []
        self.is_away = False
        self.drips: bytes | None = None
        self.is_closing = threading.Event()
        provider = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                provider.asked.append(self.path)
                if provider.drips is not None:
                    self.drip(provider.drips)
                    return
                body = json.dumps(provider.document(self.path)).encode()
                self.send_response(503 if provider.is_away else 200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def drip(self, head: bytes) -> None:
                self.wfile.write(head)
                with contextlib.suppress(OSError):
                    while not provider.is_closing.wait(0.02):
                        self.wfile.write(b" ")

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.issuer = f"http://127.0.0.1:{self.server.server_port}/realm"
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self._thread.start()

    def document(self, path: str) -> Any:
        """What it answers."""
        if path in self.documents:
            return self.documents[path]
        if path == "/realm/.well-known/openid-configuration":
            return {"issuer": self.issuer, "jwks_uri": f"{self.issuer}/keys", "more": 1}
        return {"keys": [self._public(name, key) for name, key in self.keys.items()]}

    def _public(self, name: str, key: Any) -> dict[str, Any]:
        kind: Any = RSAAlgorithm if isinstance(key, rsa.RSAPrivateKey) else ECAlgorithm
        return {**kind.to_jwk(key.public_key(), as_dict=True), "kid": name, "use": "sig"}

    def token(self, name: str = "one", algorithm: str = "RS256", **claims: Any) -> str:
        """A token of one of its keys; a claim that is None is left out."""
        given = {
            "iss": self.issuer,
            "aud": AUDIENCE,
            "exp": int(time.time()) + 600,
            "tenant": "ada",
            **claims,
        }
        told = {claim: value for claim, value in given.items() if value is not None}
        return jwt.encode(told, self.keys[name], algorithm, headers={"kid": name})

    def close(self) -> None:
        self.is_closing.set()
        self.server.shutdown()
        self._thread.join()
        self.server.server_close()


@pytest.fixture
def provider() -> Iterator[Provider]:
    provider = Provider()
    try:
        yield provider
    finally:
        provider.close()


class Clock:
    """Seconds that a test moves on."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(oidc, "monotonic", clock)
    return clock


def tenant_of(holder: KeyHolder | None) -> str:
    """Whose a token is."""
    return "" if holder is None else holder.tenant


async def test_a_token_names_its_tenant_and_the_provider_is_asked_once(provider: Provider) -> None:
    provider.keys["two"] = ec.generate_private_key(ec.SECP256R1())
    tokens = OidcTokens(provider.issuer, AUDIENCE, "tenant")
    token = provider.token()

    holders = [
        await tokens.holder_of(token),
        await tokens.holder_of(token),
        await tokens.holder_of(provider.token("two", "ES256", tenant="bob", aud=["x", AUDIENCE])),
    ]
    ends = jwt.decode(token, options={"verify_signature": False})["exp"]

    ada = KeyHolder("ada", key=OF_PROVIDER, expires=ends, leeway=LEEWAY)
    assert holders[:2] == [ada, ada]
    assert not ada.has_expired(ends + LEEWAY - 1)
    assert ada.has_expired(ends + LEEWAY)
    assert tenant_of(holders[2]) == "bob"
    assert len(provider.asked) == 2


async def refusal(tokens: OidcTokens, token: str) -> str:
    """What the holder of a token that is refused is told; empty for one that is not."""
    try:
        await tokens.holder_of(token)
    except Unauthorized as error:
        return error.message
    return ""


@pytest.mark.parametrize(
    ("claims", "why"),
    [
        ({"aud": "others"}, "its claim aud has not dynbus"),
        ({"aud": None}, "it has no claim aud"),
        ({"iss": "https://elsewhere.example"}, "its claim iss is not http://127.0.0.1"),
        ({"iss": None}, "it has no claim iss"),
        ({"exp": 1_000_000}, "it has expired"),
        ({"exp": None}, "it has no claim exp"),
        ({"exp": "soon"}, "it cannot be read"),
        ({"nbf": 9_999_999_999}, "it is not valid yet"),
        ({"tenant": None}, "its claim tenant names no tenant"),
        ({"tenant": "a/b"}, "its claim tenant names no tenant"),
        ({"tenant": ["ada"]}, "its claim tenant names no tenant"),
    ],
    ids=str,
)
async def test_a_token_that_is_not_for_us_is_refused_and_its_holder_told_why(
    provider: Provider, claims: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = OidcTokens(provider.issuer, AUDIENCE, "tenant")
    caplog.set_level(logging.INFO, "dynbus.llm.tenants.oidc")

    told = await refusal(tokens, provider.token(**claims))

    assert f"this token is refused: {why}" in told
    assert "is refused" in caplog.text
    # Nobody is told why who has not had it signed.
    signed = provider.token(**claims).rpartition(".")[0]
    forged = f"{signed}.{provider.token(sub='other').rpartition('.')[2]}"
    assert "no key of its issuer has signed it" in await refusal(tokens, forged)


async def test_refused_tokens_do_not_flood_the_log(
    provider: Provider, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = OidcTokens(provider.issuer, AUDIENCE, "tenant")
    caplog.set_level(logging.INFO, "dynbus.llm.tenants.oidc")
    forged = jwt.encode({}, "", "none")

    for _ in range(100):
        await refusal(tokens, forged)
    clock.now += oidc.LOG_INTERVAL
    await refusal(tokens, forged)

    first, last = caplog.messages
    assert "its algorithm is none that is taken" in first
    assert last == f"{first} (99 others since the last line)"


async def test_signatures_that_anybody_can_make_are_refused(provider: Provider) -> None:
    tokens = OidcTokens(provider.issuer, AUDIENCE, "tenant")
    claims = jwt.decode(provider.token(), options={"verify_signature": False})
    public = provider.keys["one"].public_key().public_numbers().n.to_bytes(256, "big")
    header, body, signature = provider.token().split(".")
    other = Provider()
    other.issuer = provider.issuer
    try:
        forged = [
            jwt.encode(claims, "", "none", headers={"kid": "one"}),
            jwt.encode(claims, public, "HS256", headers={"kid": "one"}),
            other.token(),
            provider.token(tenant="eve").rpartition(".")[0] + "." + signature,
            f"{header}.{body}.",
        ]
        refused = [await refusal(tokens, one) for one in forged]
        nothing = [await tokens.holder_of(one) for one in ("no token", "..", "")]
    finally:
        other.close()

    told = "this token is refused: no key of its issuer has signed it"
    assert [one.partition(";")[0] for one in refused] == [told] * len(forged)
    assert nothing == [None] * 3


async def test_a_symmetric_key_of_the_provider_is_passed_over(provider: Provider) -> None:
    secret = "c2VjcmV0LXNlY3JldC1zZWNyZXQtc2VjcmV0LXNlY3JldA"
    provider.documents["/realm/keys"] = {"keys": [{"kty": "oct", "k": secret, "kid": "one"}]}
    tokens = OidcTokens(provider.issuer, AUDIENCE, "tenant")

    assert "no key of its issuer" in await refusal(tokens, provider.token())


async def test_a_new_key_is_found_and_unknown_ones_do_not_flood_the_provider(
    provider: Provider, clock: Clock
) -> None:
    tokens = OidcTokens(provider.issuer, AUDIENCE, "tenant")
    assert await tokens.holder_of(provider.token()) is not None
    provider.keys["new"] = rsa.generate_private_key(65537, 2048)
    token = provider.token("new")

    soon = [await refusal(tokens, token) for _ in range(3)]
    asked = len(provider.asked)
    clock.now += FETCH_INTERVAL
    later = await tokens.holder_of(token)

    assert all(soon)
    assert asked == 2
    assert tenant_of(later) == "ada"


async def test_a_key_that_is_withdrawn_is_gone_when_keys_are_read_again(
    provider: Provider, clock: Clock
) -> None:
    tokens = OidcTokens(provider.issuer, AUDIENCE, "tenant")
    token = provider.token()
    assert await tokens.holder_of(token) is not None
    provider.keys = {"two": provider.keys["one"]}

    before = await tokens.holder_of(token)
    clock.now += FETCHED_SECONDS + 1

    assert tenant_of(before) == "ada"
    assert await refusal(tokens, token)


async def test_the_keys_from_before_count_while_the_provider_is_away(
    provider: Provider, clock: Clock
) -> None:
    tokens = OidcTokens(provider.issuer, AUDIENCE, "tenant")
    provider.is_away = True
    with pytest.raises(Unavailable, match="cannot be read: ask again"):
        await tokens.holder_of(provider.token())
    provider.is_away = False
    clock.now += FETCH_INTERVAL
    assert await tokens.holder_of(provider.token()) is not None

    provider.is_away = True
    clock.now += FETCHED_SECONDS + 1

    assert tenant_of(await tokens.holder_of(provider.token())) == "ada"


HEAD = b"HTTP/1.0 200 OK\r\nContent-Length: 100000\r\n\r\n"


async def test_a_provider_that_answers_slowly_keeps_no_token_of_a_known_key_waiting(
    provider: Provider, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = OidcTokens(provider.issuer, AUDIENCE, "tenant")
    assert tenant_of(await tokens.holder_of(provider.token())) == "ada"
    monkeypatch.setattr(oidc, "PATIENCE", 0.01)
    monkeypatch.setattr(oidc, "FETCH_TIMEOUT", 30.0)
    provider.drips = HEAD
    clock.now += FETCHED_SECONDS + 1

    with anyio.fail_after(10):
        first = [await tokens.holder_of(provider.token(sub=str(n))) for n in range(3)]
    # No token waits for a provider that was slow the last time.
    monkeypatch.setattr(oidc, "PATIENCE", 30.0)
    with anyio.fail_after(10):
        later = await tokens.holder_of(provider.token())
    # Time is over for the answer, and the next reading is a whole one.
    clock.now += 31
    provider.drips = None
    provider.keys = {"two": provider.keys["one"]}
    with anyio.fail_after(10):
        while await refusal(tokens, provider.token("two")):
            clock.now += FETCH_INTERVAL

    assert {tenant_of(one) for one in (*first, later)} == {"ada"}


async def test_a_document_that_takes_too_long_is_given_up(
    provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oidc, "FETCH_TIMEOUT", 0.2)
    provider.drips = HEAD

    with pytest.raises(Unavailable, match="takes more than 0.2 s|timed out"):
        await asyncio.to_thread(oidc.fetch, f"{provider.issuer}/keys")


@pytest.mark.parametrize(
    "document",
    [
        {"issuer": "https://elsewhere.example", "jwks_uri": "https://elsewhere.example/keys"},
        {"issuer": "", "jwks_uri": "http://elsewhere.example/keys"},
        {"issuer": 1},
        {"issuer": "x" * oidc.MOST_BYTES, "jwks_uri": ""},
    ],
    ids=["another", "plain", "misfit", "too large"],
)
async def test_a_document_that_is_not_the_provider_s_is_not_believed(
    provider: Provider, document: dict[str, Any]
) -> None:
    if document["issuer"] == "":
        document = {**document, "issuer": provider.issuer}
    provider.documents["/realm/.well-known/openid-configuration"] = document
    tokens = OidcTokens(provider.issuer, AUDIENCE, "tenant")

    with pytest.raises(Unavailable):
        await tokens.holder_of(provider.token())


@pytest.mark.parametrize("issuer", ["http://example.com", "file:///etc", "https://", "http://[x"])
def test_an_issuer_that_anybody_may_answer_for_is_refused(issuer: str) -> None:
    with pytest.raises(ConfigError, match="give an address that begins with https://"):
        OidcTokens(issuer, AUDIENCE, "tenant")


async def test_a_front_end_takes_tokens_in_place_of_keys(provider: Provider) -> None:
    with pytest.raises(ConfigError, match="--oidc-audience"):
        HttpSettings(oidc_issuer=provider.issuer)
    async with served(
        oidc_issuer=provider.issuer, oidc_audience=AUDIENCE, oidc_tenant_claim="org"
    ) as front:
        messages: Any = [{"role": "user", "content": "say hi"}]

        async def ask(key: str) -> None:
            async with AsyncOpenAI(base_url=f"{front.url}/v1", api_key=key) as client:
                await client.chat.completions.create(model="tiny", messages=messages)

        token = provider.token(org="carol")
        await ask(token)
        with pytest.raises(openai.AuthenticationError, match="its claim aud") as refused:
            await ask(provider.token(org="carol", aud="others"))
        async with httpx2.AsyncClient() as client:
            unknown = await client.get(
                f"{front.url}/v1/key", headers={"authorization": "Bearer no-key-of-mine"}
            )
            nothing = await client.get(f"{front.url}/v1/key")
            known = await client.get(
                f"{front.url}/v1/key", headers={"authorization": f"Bearer {token}"}
            )

    wrong = 'Bearer error="invalid_token"'
    challenges = [
        one.headers["www-authenticate"] for one in (refused.value.response, unknown, nothing)
    ]
    assert challenges == [wrong, wrong, "Bearer"]
    ends = jwt.decode(token, options={"verify_signature": False})["exp"]
    assert known.json()["expires_at"] == ends
    assert [one["tenant"] for one in front.engine.metadata] == ["carol"]
