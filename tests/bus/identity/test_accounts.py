"""Accounts of teams in files, and what nats-server reads of them."""

from __future__ import annotations

import json
import re
import stat
from pathlib import Path
from typing import Any

import pytest

from dynbus.bus.config import BusConfig
from dynbus.bus.errors import ConfigError
from dynbus.bus.identity.accounts import Accounts, Limits, open_users, users_in
from dynbus.bus.identity.credentials import identified, own_credentials
from dynbus.bus.identity.grants import Grant, hears_events, takes_events
from dynbus.bus.identity.keys import Kind, new_key
from dynbus.bus.identity.registry import Registry
from dynbus.bus.identity.tokens import read_claims
from dynbus.bus.protocol.names import EndpointName

DAY = 86400.0
CALLS = Grant("calls demo.A", ("demo.A.x",), ())
HEARS = Grant("hears its own replies", (), ("_R.one.>",))


class Clock:
    """Unix seconds, which a test moves on."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def accounts(tmp_path: Path, clock: Clock) -> Accounts:
    """Those of red, with the user `one`, and of blue."""
    made = Accounts.make(tmp_path / "auth", clock=clock)
    made.put("blue", Limits(connections=5, disk=1024))
    made.save("blue")
    made.put("red", Limits())
    users = made.users("red")
    users.put("one", "caller", "demo", [HEARS, CALLS])
    users.save()
    return made


def claims_of(accounts: Accounts, name: str) -> dict[str, Any]:
    """The claims of an account, as the server reads them."""
    key = accounts.account(name).key
    text = (accounts.folder / "nats-users.conf").read_text()
    match = re.search(rf'^  {key}: "(.*)"$', text, re.MULTILINE)
    assert match is not None
    return read_claims(match[1])


def user_claims_of(accounts: Accounts, account: str, name: str) -> dict[str, Any]:
    text = accounts.users(account).credential_file(name).read_text()
    return read_claims(text.splitlines()[1])


def test_the_server_trusts_the_operator_and_has_each_account(accounts: Accounts) -> None:
    text = (accounts.folder / "nats-users.conf").read_text()

    operator = re.search(r'^operator: "(.*)"$', text, re.MULTILINE)
    system = re.search(r'^system_account: "(.*)"$', text, re.MULTILINE)
    assert operator is not None
    assert system is not None
    trusted = read_claims(operator[1])
    assert trusted["nats"]["system_account"] == system[1]
    assert "\nresolver: MEMORY\n" in text
    assert re.findall(r"^  # (.*)$", text, re.MULTILINE) == ["SYS", "blue", "red"]
    for name in ("red", "blue"):
        claims = claims_of(accounts, name)
        assert (claims["iss"], claims["name"]) == (trusted["sub"], name)


def test_a_user_is_signed_by_a_key_that_has_its_permissions(accounts: Accounts) -> None:
    user, account = user_claims_of(accounts, "red", "one"), claims_of(accounts, "red")

    (scope,) = account["nats"]["signing_keys"]
    assert user["iss"] == scope["key"]
    assert user["nats"]["issuer_account"] == account["sub"]
    assert scope["template"] == {
        "pub": {"allow": ["demo.A.x"]},
        "sub": {"allow": ["_R.one.>"]},
        "subs": -1,
        "data": -1,
        "payload": -1,
    }


def test_who_may_publish_nothing_is_denied_everything(accounts: Accounts) -> None:
    users = accounts.users("red")
    users.put("one", "caller", "demo", [HEARS])
    users.save()

    (scope,) = claims_of(accounts, "red")["nats"]["signing_keys"]
    assert scope["template"]["pub"] == {"deny": [">"]}


def test_nobody_changes_a_consumer_that_others_of_the_account_share(accounts: Accounts) -> None:
    taking = takes_events("demo", "sold", "ledger", EndpointName("demo", "A", "b"), ["ledger"])
    for name in ("red", "blue"):
        users = accounts.users(name)
        users.put("hearing", "actor", "demo.H", [hears_events("demo", "sold")])
        if name == "red":
            users.put("taking", "actor", "demo.A", [taking])
        users.save()

    denied = {
        name: [
            scope["template"]["pub"].get("deny")
            for scope in claims_of(accounts, name)["nats"]["signing_keys"]
            if scope["role"] == "hearing"
        ]
        for name in ("red", "blue")
    }
    stream = "DYNBUS_TOPIC_demo+sold"
    assert denied == {
        "red": [
            [
                f"$JS.API.CONSUMER.CREATE.{stream}.ledger.demo._topic.sold._event.*.*",
                f"$JS.API.CONSUMER.DELETE.{stream}.ledger",
            ]
        ],
        "blue": [None],
    }


def test_an_account_has_its_limits_and_the_one_of_servers_no_streams(accounts: Accounts) -> None:
    limits = claims_of(accounts, "blue")["nats"]["limits"]

    assert (limits["conn"], limits["disk_storage"], limits["streams"]) == (5, 1024, -1)
    text = (accounts.folder / "nats-users.conf").read_text()
    system = re.search(r'# SYS\n.*: "(.*)"', text)
    assert system is not None
    assert "disk_storage" not in read_claims(system[1])["nats"]["limits"]


def test_what_has_not_changed_is_not_signed_again(accounts: Accounts, clock: Clock) -> None:
    before = {path: path.read_bytes() for path in accounts.folder.iterdir() if path.is_file()}
    clock.now += 3600.0

    again = Accounts(accounts.folder, clock=clock)
    users = again.users("red")
    assert users.put("one", "caller", "demo", [HEARS, CALLS]) == "there"
    assert not users.save()

    assert {path: path.read_bytes() for path in before} == before


def test_secrets_are_for_their_owner_alone_and_for_no_repository(accounts: Accounts) -> None:
    folder = accounts.folder
    secrets = [folder / "keys" / "operator.nk", *folder.glob("keys/*/*"), *folder.glob("creds/*/*")]

    assert len(secrets) == 3
    for path in secrets:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    for name in ("keys", "creds"):
        assert (folder / name / ".gitignore").read_text() == "*\n"
    public = "".join((folder / name).read_text() for name in ("accounts.json", "nats-users.conf"))
    for path in secrets:
        (seed,) = re.findall(r"^S[OAU][A-Z2-7]{56}$", path.read_text(), re.MULTILINE)
        assert seed not in public


def test_a_process_has_the_principal_of_its_credential(accounts: Accounts) -> None:
    users = accounts.users("red")
    users.put("demo_Printer", "actor", "demo.Printer", [HEARS])
    users.save()
    folder = users.credential_file("demo_Printer").parent

    path = own_credentials(str(folder), ["demo.Printer"])

    assert path == str(users.credential_file("demo_Printer"))
    assert identified(BusConfig(credentials=path)).principal == "demo_Printer"


def test_a_credential_counts_as_long_as_is_said_and_the_next_one_too(
    accounts: Accounts, clock: Clock
) -> None:
    users = accounts.users("red")
    users.put("two", "caller", "demo", [HEARS], lifetime=60.0)
    users.save()
    first = user_claims_of(accounts, "red", "two")
    clock.now += 50.0
    users.rotate("two")
    users.save()
    second = user_claims_of(accounts, "red", "two")
    users.rotate("two", lifetime=0.0)
    users.save()

    assert first["exp"] == 1_800_000_060
    assert second["exp"] == 1_800_000_110
    assert "exp" not in user_claims_of(accounts, "red", "two")


def test_a_rotated_credential_is_signed_by_the_same_key_without_the_operators(
    accounts: Accounts,
) -> None:
    before = user_claims_of(accounts, "red", "one")
    (accounts.folder / "keys" / "operator.nk").unlink()

    users = accounts.users("red")
    users.rotate("one")
    assert not users.save()

    after = user_claims_of(accounts, "red", "one")
    assert after["sub"] != before["sub"]
    assert after["iss"] == before["iss"]
    assert users.user("one").keys == (before["sub"], after["sub"])


def test_credentials_that_expire_are_rotated_each_night_without_the_operators_key(
    accounts: Accounts, clock: Clock
) -> None:
    users = accounts.users("red")
    users.put("two", "caller", "demo", [HEARS], lifetime=7 * DAY)
    users.save()
    (accounts.folder / "keys" / "operator.nk").unlink()

    for _ in range(30):
        clock.now += DAY
        users = Accounts(accounts.folder, clock=clock).users("red")
        users.rotate("two")
        assert not users.save()

    user = users.user("two")
    assert sorted(user.ends.values()) == [clock.now + day * DAY for day in range(8)]
    assert user.keys == tuple(user.ends)
    clock.now += 9 * DAY
    users.rotate("two")
    users.save()
    assert len(users.user("two").keys) == 1


def test_keys_that_do_not_expire_are_revoked_before_there_are_many(accounts: Accounts) -> None:
    users = accounts.users("red")
    for _ in range(3):
        users.rotate("one")

    with pytest.raises(ConfigError, match=r"one has 4 keys that do not expire: .*one --previous"):
        users.rotate("one")
    users.revoke("one", previous=True)
    users.rotate("one")
    assert len(users.user("one").keys) == 2


def test_a_revocation_ends_with_the_tokens_that_it_is_of(accounts: Accounts, clock: Clock) -> None:
    users = accounts.users("red")
    users.put("two", "caller", "demo", [HEARS], lifetime=DAY)
    users.rotate("one")
    users.save()
    users.rotate("two")
    users.revoke("two", previous=True)
    users.revoke("one", previous=True)
    users.save()
    first = set(claims_of(accounts, "red")["nats"]["revocations"])
    clock.now += 2 * DAY
    users.put("three", "caller", "demo", [HEARS])
    users.revoke("three")
    # What is over needs no revocation.
    users.rotate("two")
    users.revoke("two")
    users.save()

    last = set(claims_of(accounts, "red")["nats"]["revocations"])
    assert len(first) == 2
    assert len(first & last) == 1
    assert len(last) == 3


def test_what_is_revoked_is_in_the_accounts_token(accounts: Accounts, clock: Clock) -> None:
    users = accounts.users("red")
    users.rotate("one")
    first, second = users.user("one").keys
    clock.now += 5.5
    users.revoke("one", previous=True)
    assert users.save()
    once = claims_of(accounts, "red")["nats"]
    users.revoke("one")
    assert users.save()

    twice = claims_of(accounts, "red")["nats"]
    assert once["revocations"] == {first: 1_800_000_006}
    assert len(once["signing_keys"]) == 1
    assert twice["revocations"] == {first: 1_800_000_006, second: 1_800_000_006}
    assert twice["signing_keys"] == []
    assert not users.credential_file("one").exists()
    assert not (accounts.folder / "keys" / "red" / "one.nk").exists()


def test_a_change_without_the_operators_key_says_which_file_is_missing(accounts: Accounts) -> None:
    (accounts.folder / "keys" / "operator.nk").unlink()
    users = accounts.users("red")
    users.put("two", "caller", "demo", [HEARS])

    with pytest.raises(ConfigError, match=r"operator\.nk, which signs the account red, cannot be"):
        users.save()


def change(accounts: Accounts, name: str) -> None:
    """Have accounts.json let the users of an account do everything."""
    path = accounts.folder / "accounts.json"
    content = json.loads(path.read_text())
    for account in content["accounts"]:
        if account["name"] == name:
            for user in account["users"]:
                user["grants"].append(["x", [">"], [">"]])
    path.write_text(json.dumps(content))


def test_what_else_was_written_into_the_file_is_not_signed(accounts: Accounts) -> None:
    change(accounts, "red")
    before = {path: path.read_bytes() for path in accounts.folder.rglob("*") if path.is_file()}

    changed = Accounts(accounts.folder)
    users = changed.users("blue")
    users.put("two", "caller", "demo", [HEARS])
    with pytest.raises(
        ConfigError,
        match=r"accounts\.json has other content than was signed for: red; .*account red",
    ):
        users.save()

    after = {path: path.read_bytes() for path in accounts.folder.rglob("*") if path.is_file()}
    assert after == before


def test_an_account_is_signed_as_it_is_whatever_others_are(accounts: Accounts) -> None:
    users = accounts.users("blue")
    users.put("two", "caller", "demo", [HEARS])
    users.save()
    for name in ("red", "blue"):
        change(accounts, name)

    changed = Accounts(accounts.folder)
    changed.save("blue", despite_others=True)

    assert ">" not in str(claims_of(accounts, "red")["nats"]["signing_keys"][0]["template"]["pub"])
    (scope,) = claims_of(accounts, "blue")["nats"]["signing_keys"]
    assert ">" in scope["template"]["pub"]["allow"]


def test_nothing_is_lost_where_a_change_cannot_be_signed(accounts: Accounts) -> None:
    (accounts.folder / "keys" / "operator.nk").unlink()
    before = {path: path.read_bytes() for path in accounts.folder.rglob("*") if path.is_file()}

    users = Accounts(accounts.folder).users("red")
    users.revoke("one")
    with pytest.raises(ConfigError, match=r"operator\.nk, which signs the account red"):
        users.save()
    users = Accounts(accounts.folder).users("red")
    users.put("two", "caller", "demo", [HEARS])
    with pytest.raises(ConfigError, match=r"operator\.nk, which signs the account red"):
        users.save()

    after = {path: path.read_bytes() for path in accounts.folder.rglob("*") if path.is_file()}
    assert after == before


def test_a_user_whose_key_is_missing_or_anothers_is_not_rotated(accounts: Accounts) -> None:
    path = accounts.folder / "keys" / "red" / "one.nk"
    path.unlink()

    with pytest.raises(ConfigError, match=r"one\.nk, which signs tokens of one, cannot be read"):
        accounts.users("red").rotate("one")
    for text in (new_key(Kind.ACCOUNT).seed, new_key().seed, "SA"):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"one\.nk, .* is not the seed of A\w+") as raised:
            accounts.users("red").rotate("one")
        assert text not in str(raised.value).split()


def test_an_account_that_is_removed_is_gone_with_its_users(accounts: Accounts) -> None:
    key = accounts.account("red").key
    accounts.remove("red")
    assert list(accounts.folder.glob("*/red/*")) != []
    assert accounts.save("red")

    assert key not in (accounts.folder / "nats-users.conf").read_text()
    assert list(accounts.folder.glob("*/red/*")) == []
    with pytest.raises(ConfigError, match="there is no account 'red'; there are: blue"):
        accounts.users("red")


@pytest.mark.parametrize(("name", "problem"), [("a.b", "is not a valid name"), ("sys", "own")])
def test_a_name_that_no_account_may_have_is_refused(
    accounts: Accounts, name: str, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        accounts.put(name, Limits())


def test_a_folder_has_users_with_keys_or_accounts(accounts: Accounts, tmp_path: Path) -> None:
    Registry.make(tmp_path / "keys")

    for make in (Registry.make, Accounts.make):
        for folder in (accounts.folder, tmp_path / "keys"):
            with pytest.raises(ConfigError, match=r"json is there already"):
                make(folder)


def test_the_account_is_named_where_there_are_several(accounts: Accounts, tmp_path: Path) -> None:
    assert [group.account for group in users_in(accounts.folder)] == ["blue", "red"]
    assert open_users(accounts.folder, "red").users.keys() == {"one"}
    with pytest.raises(ConfigError, match="name the account by --account; there are: blue, red"):
        open_users(accounts.folder)
    accounts.remove("blue")
    accounts.save("blue")
    assert open_users(accounts.folder).account == "red"

    Registry.make(tmp_path / "keys")
    assert open_users(tmp_path / "keys").account == ""
    with pytest.raises(ConfigError, match="has no accounts"):
        open_users(tmp_path / "keys", "red")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "cannot be read"),
        (
            '{"version": 2, "operator": "", "system": {"name": "SYS", "key": "A"}, "accounts": []}',
            "is of version 2",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(accounts: Accounts, text: str, problem: str) -> None:
    (accounts.folder / "accounts.json").write_text(text)

    with pytest.raises(ConfigError, match=problem):
        Accounts(accounts.folder)


def test_a_folder_without_accounts_is_told_how_to_become_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="make it with `dynbus auth init --jwt`"):
        Accounts(tmp_path)
