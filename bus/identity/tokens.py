"""Tokens by which servers know operators, accounts and users: NATS's JWTs, version 2.

The format is that of https://github.com/nats-io/jwt (`v2/claims.go` and its neighbours), of
which this is what dynbus writes: `HEADER.PAYLOAD.SIGNATURE` in base64url without padding, where the
signature is Ed25519 by an NKEY over the first two with their dot. An operator signs itself and its
accounts. An account has signing keys with a scope, each with the permissions of the users that it
signs; those users' own tokens have none, or the server refuses them.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from .keys import NewKey, sign

Claims = dict[str, Any]

OURS: Final = "dynbus"
"""The tag of users whose name is their principal."""
NO_LIMIT: Final = -1

_HEADER: Final = {"typ": "JWT", "alg": "ed25519-nkey"}
_VERSION: Final = 2
_OF_ISSUE: Final = ("iss", "iat", "jti")
_USER: Final = ("-----BEGIN NATS USER JWT-----", "------END NATS USER JWT------")
_SEED: Final = ("-----BEGIN USER NKEY SEED-----", "------END USER NKEY SEED------")


def operator_claims(key: str, name: str, *, system_account: str) -> Claims:
    """The claims of an operator.

    Args:
        key: its public key.
        system_account: the public key of the account in which servers speak of themselves.
    """
    return _claims("operator", key, name, {"system_account": system_account})


def account_claims(
    key: str,
    name: str,
    *,
    limits: Mapping[str, int],
    scopes: list[Claims],
    revoked: Mapping[str, int],
) -> Claims:
    """The claims of an account.

    Args:
        key: its public key.
        limits: those that differ from having none, by the names of the format; of JetStream an
            account has nothing without them.
        scopes: its signing keys; see `scope`.
        revoked: for public keys of users the time, in Unix seconds, until which tokens of theirs
            that were issued count for nothing.
    """
    unlimited = ("subs", "data", "payload", "imports", "exports", "conn", "leaf")
    own: Claims = {
        "limits": dict.fromkeys(unlimited, NO_LIMIT) | {"wildcards": True} | dict(limits),
        "signing_keys": scopes,
    }
    if revoked:
        own["revocations"] = dict(revoked)
    return _claims("account", key, name, own)


def scope(key: str, role: str, *, publish: Claims, subscribe: Claims) -> Claims:
    """A signing key of an account, with the permissions of each user that it signs.

    Args:
        key: its public half.
        publish, subscribe: lists `allow` and `deny` of subjects.
    """
    unlimited = dict.fromkeys(("subs", "data", "payload"), NO_LIMIT)
    template = {"pub": publish, "sub": subscribe, **unlimited}
    return {"kind": "user_scope", "key": key, "role": role, "template": template}


def user_claims(key: str, name: str, *, account: str, expires: int = 0) -> Claims:
    """The claims of a user that a signing key with a scope signs.

    Args:
        key: its public key.
        account: the public key of its account.
        expires: in Unix seconds; 0 for never.
    """
    claims = _claims("user", key, name, {"issuer_account": account, "tags": [OURS]})
    return claims | {"exp": expires} if expires else claims


def _claims(kind: str, key: str, name: str, own: Claims) -> Claims:
    return {"sub": key, "name": name, "nats": {**own, "type": kind, "version": _VERSION}}


def issue(claims: Claims, issuer: NewKey, now: float) -> str:
    """A token with these claims.

    Args:
        now: Unix seconds.
    """
    claims = {**claims, "iss": issuer.public, "iat": int(now)}
    digest = hashlib.sha256(msgspec.json.encode(claims)).digest()
    claims["jti"] = base64.b32encode(digest).decode().rstrip("=")
    signed = f"{_text(msgspec.json.encode(_HEADER))}.{_text(msgspec.json.encode(claims))}"
    return f"{signed}.{_text(sign(issuer, signed.encode()))}"


def read_claims(token: str) -> Claims:
    """The claims of a token, those of its issue included. Nothing is proved by them.

    Raises:
        ValueError: it is none.
    """
    try:
        _, payload, _ = token.split(".")
        text = base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4))
        return msgspec.json.decode(text, type=Claims)
    except (binascii.Error, msgspec.MsgspecError) as error:
        raise ValueError(str(error)) from None


def says(token: str, claims: Claims) -> bool:
    """True if a token has these claims, whenever and by whom it was issued."""
    try:
        issued = read_claims(token)
    except ValueError:
        return False
    return {key: value for key, value in issued.items() if key not in _OF_ISSUE} == claims


def credentials_text(token: str, seed: str) -> str:
    """The content of a credentials file of NATS, of a user's token and seed."""
    parts = ((_USER, token), (_SEED, seed))
    return "\n".join(f"{begin}\n{text}\n{end}\n" for (begin, end), text in parts)


def user_of_credentials(text: str) -> str:
    """The name of the user of a credentials file that dynbus wrote; empty for any other file."""
    begin, end = _USER
    token = text.partition(begin)[2].partition(end)[0].strip()
    try:
        user = msgspec.convert(read_claims(token), _NamedUser)
    except (ValueError, msgspec.ValidationError):
        return ""
    return user.name if OURS in user.nats.tags else ""


class _Tagged(msgspec.Struct):
    tags: list[str] = []


class _NamedUser(msgspec.Struct):
    name: str
    nats: _Tagged


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
