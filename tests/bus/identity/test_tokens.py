"""Tokens as nats-server reads them, and what is read of them again."""

from __future__ import annotations

import base64
import json

import pytest

from dynbus.bus.identity.keys import Kind, NewKey, is_seed, new_key
from dynbus.bus.identity.tokens import (
    account_claims,
    credentials_text,
    issue,
    operator_claims,
    read_claims,
    says,
    scope,
    user_claims,
    user_of_credentials,
)

NOW = 1_800_000_000.7


def parts(token: str) -> tuple[dict[str, object], dict[str, object], bytes]:
    header, payload, signature = (
        base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)) for part in token.split(".")
    )
    return json.loads(header), json.loads(payload), signature


@pytest.fixture
def signer() -> NewKey:
    return new_key(Kind.ACCOUNT)


def test_each_kind_of_key_begins_with_its_letter() -> None:
    for kind in Kind:
        key = new_key(kind)

        assert key.public.startswith(kind)
        assert is_seed(key.seed, kind)
        assert [other for other in Kind if is_seed(key.seed, other)] == [kind]


def test_a_token_says_who_issued_it_and_is_signed_with_that_key(signer: NewKey) -> None:
    nkeys = pytest.importorskip("nkeys")
    claims = user_claims("UKEY", "billing", account="AKEY")

    token = issue(claims, signer, NOW)

    header, payload, signature = parts(token)
    assert header == {"typ": "JWT", "alg": "ed25519-nkey"}
    jti = payload.pop("jti")
    assert isinstance(jti, str)
    assert len(jti) == 52
    assert payload == {
        "sub": "UKEY",
        "name": "billing",
        "nats": {"issuer_account": "AKEY", "tags": ["dynbus"], "type": "user", "version": 2},
        "iss": signer.public,
        "iat": 1_800_000_000,
    }
    pair = nkeys.from_seed(bytearray(signer.seed.encode()))
    assert pair.verify(token.rpartition(".")[0].encode(), signature)


def test_a_user_has_no_permissions_of_its_own_and_may_expire() -> None:
    claims = user_claims("UKEY", "billing", account="AKEY", expires=1_800_000_060)

    assert claims["exp"] == 1_800_000_060
    assert not {"pub", "sub", "subs", "data", "payload"} & claims["nats"].keys()


def test_an_operator_names_the_account_of_servers() -> None:
    assert operator_claims("OKEY", "dynbus", system_account="AKEY") == {
        "sub": "OKEY",
        "name": "dynbus",
        "nats": {"system_account": "AKEY", "type": "operator", "version": 2},
    }


def test_an_account_has_its_limits_its_scopes_and_what_is_revoked() -> None:
    billing = scope("ASIGN", "billing", publish={"allow": ["a.b"]}, subscribe={"deny": [">"]})

    claims = account_claims(
        "AKEY", "red", limits={"conn": 5, "disk_storage": 10}, scopes=[billing], revoked={"U": 7}
    )

    assert claims["nats"] == {
        "limits": {
            "subs": -1,
            "data": -1,
            "payload": -1,
            "imports": -1,
            "exports": -1,
            "conn": 5,
            "leaf": -1,
            "wildcards": True,
            "disk_storage": 10,
        },
        "signing_keys": [
            {
                "kind": "user_scope",
                "key": "ASIGN",
                "role": "billing",
                "template": {
                    "pub": {"allow": ["a.b"]},
                    "sub": {"deny": [">"]},
                    "subs": -1,
                    "data": -1,
                    "payload": -1,
                },
            }
        ],
        "revocations": {"U": 7},
        "type": "account",
        "version": 2,
    }


def test_a_token_says_the_same_whenever_it_was_issued(signer: NewKey) -> None:
    claims = user_claims("UKEY", "billing", account="AKEY")
    token = issue(claims, signer, NOW)

    assert says(token, claims)
    assert says(issue(claims, new_key(Kind.ACCOUNT), NOW + 9), claims)
    assert not says(token, user_claims("UKEY", "other", account="AKEY"))
    assert not says("", claims)


@pytest.mark.parametrize("text", ["", "a.b", "a.b.c", "a.e30.c.d", "é.é.é", "a.W10.c"])
def test_what_is_no_token_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_claims(text)


def test_a_credentials_file_is_that_of_nats_and_says_whose_it_is(signer: NewKey) -> None:
    token = issue(user_claims("UKEY", "billing", account="AKEY"), signer, NOW)

    text = credentials_text(token, "SUSEED")

    assert text == (
        f"-----BEGIN NATS USER JWT-----\n{token}\n------END NATS USER JWT------\n"
        "\n-----BEGIN USER NKEY SEED-----\nSUSEED\n------END USER NKEY SEED------\n"
    )
    assert user_of_credentials(text) == "billing"


def test_the_user_of_a_credentials_file_of_others_is_no_principal(signer: NewKey) -> None:
    claims = user_claims("UKEY", "billing", account="AKEY")
    del claims["nats"]["tags"]

    assert user_of_credentials(credentials_text(issue(claims, signer, NOW), "SUSEED")) == ""
    assert user_of_credentials("-----BEGIN NATS USER JWT-----\n") == ""
    assert user_of_credentials("") == ""
