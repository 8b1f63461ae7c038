"""API keys in a file."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import httpx2
import pytest

from dynbus import ConfigError
from dynbus.llm.http.settings import HttpSettings
from dynbus.llm.tenants.keys import LOOK_INTERVAL, ApiKeys, KeyHolder, key_id
from dynbus.llm.tenants.records import hash_of

from .served import served


def test_keys_are_taken_as_they_are_or_hashed(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    hashed = hashlib.sha256(b"second-key").hexdigest()
    path.write_text(f"# ours\nada first-key\n\nbob sha256:{hashed}\nada third-key\nada first-key\n")

    keys = ApiKeys(path)

    assert [keys.holder_of(key) for key in ("first-key", "second-key", "third-key")] == [
        KeyHolder("ada", key=key_id(hash_of("first-key"))),
        KeyHolder("bob", key=key_id(hashed)),
        KeyHolder("ada", key=key_id(hash_of("third-key"))),
    ]
    assert keys.holder_of("fourth-key") is None
    assert keys.holder_of("") is None
    assert "first-key" not in repr(vars(keys))


def test_a_key_may_be_that_of_an_operator(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    hashed = hashlib.sha256(b"second-key").hexdigest()
    path.write_text(f"ops first-key role: operator\nops sha256:{hashed} role:operator\n")

    keys = ApiKeys(path)

    for key in ("first-key", "second-key"):
        holder = keys.holder_of(key)
        assert holder is not None
        assert (holder.tenant, holder.is_operator) == ("ops", True)


def test_a_file_that_changes_is_read_again_and_a_broken_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys"
    path.write_text("ada first-key\n")
    caplog.set_level(logging.INFO, "dynbus.llm.tenants.keys")
    now = 0.0
    keys = ApiKeys(path, now=lambda: now)
    path.write_text("bob another-key\n")

    before = keys.holder_of("another-key")
    now += LOOK_INTERVAL
    after = keys.holder_of("another-key"), keys.holder_of("first-key")
    path.write_text("nonsense\n")
    now += LOOK_INTERVAL
    broken = keys.holder_of("another-key")
    path.unlink()
    now += LOOK_INTERVAL
    missing = keys.holder_of("another-key")

    assert before is None
    holder = KeyHolder("bob", key=key_id(hash_of("another-key")))
    assert after == (holder, None)
    assert broken == missing == holder
    assert caplog.messages[0] == f"the keys in {path} were read again: there are 1 now"


@pytest.mark.parametrize("left", ["", "# ada has left\n"])
def test_a_file_whose_last_key_is_taken_out_has_none(tmp_path: Path, left: str) -> None:
    path = tmp_path / "keys"
    path.write_text("ada first-key tokens_per_month=5\n")
    now = 0.0
    keys = ApiKeys(path, now=lambda: now)
    seen = []

    # Once it is empty for a moment, as editors have it.
    for text in (left, "ada first-key tokens_per_month=5\n", left, left, "ada first-key\n"):
        path.write_text(text)
        now += LOOK_INTERVAL
        seen.append((keys.holder_of("first-key") is not None, keys.limits_of("ada") is not None))

    assert seen == [(True, True), (True, True), (True, True), (False, False), (True, False)]
    assert not keys.problem


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "has no keys"),
        ("ada\n", "line 1: write a tenant and a key"),
        ("ada first-key role: admin\n", "line 1: write a tenant and a key.* role: operator"),
        ("ada first-key\na/b second-key\n", "line 2: write a tenant"),
        ("ada second-key\nbob second-key\n", "line 2: the key is that of line 1, too"),
        ("ada second-key role: operator\n#\nada second-key\n", "line 3: the key is that of line 1"),
        ("ada short\n", "line 1: write a key of 8 to 512"),
        ("ada sha256:12\n", "line 1: write a key of 8 to 512"),
    ],
)
def test_a_file_with_a_mistake_is_refused_without_its_keys(
    tmp_path: Path, text: str, part: str
) -> None:
    path = tmp_path / "keys"
    path.write_text(text)

    with pytest.raises(ConfigError, match=part) as raised:
        ApiKeys(path)

    assert "second-key" not in str(raised.value)


def test_a_public_host_needs_keys_or_a_word(tmp_path: Path) -> None:
    keys = tmp_path / "keys"

    with pytest.raises(ConfigError, match="--insecure-public"):
        HttpSettings(host="0.0.0.0")

    HttpSettings(host="0.0.0.0", insecure_public=True)
    HttpSettings(host="0.0.0.0", api_keys=keys)
    HttpSettings(host="0.0.0.0", tls_cert=keys, tls_key=keys, tls_client_ca=keys)
    with pytest.raises(ConfigError, match="give tls_cert and tls_key as well"):
        HttpSettings(tls_client_ca=keys)
    HttpSettings(host="::1")


@pytest.mark.anyio
async def test_figures_of_all_tenants_are_for_operators(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("ada key-of-ada\nops key-of-ops role: operator\n")
    async with served(api_keys=path) as front, httpx2.AsyncClient() as client:
        asked = {
            (who, page): await client.get(
                f"{front.url}/{page}", headers={"Authorization": f"Bearer key-of-{who}"}
            )
            for who in ("ada", "ops")
            for page in ("metrics", "page/state", "v1/models")
        }

    statuses = {place: answer.status_code for place, answer in asked.items()}
    assert statuses.pop(("ada", "metrics")) == 403
    assert set(statuses.values()) == {200}
    assert "role: operator" in asked["ada", "metrics"].text
    assert "dynbus keys add --operator" in asked["ada", "metrics"].text
