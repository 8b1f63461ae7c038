"""The users of a server in files, and what nats-server reads of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynbus.bus.errors import ConfigError
from dynbus.bus.identity.grants import (
    Grant,
    hears_events,
    operates,
    removes_servers,
    takes_events,
)
from dynbus.bus.identity.registry import Registry, server_config
from dynbus.bus.identity.users import SYSTEM, ServerTls, User
from dynbus.bus.protocol.names import EndpointName

CALLS = Grant("calls demo.A", ("demo.A.x",), ())
HEARS = Grant("hears its own replies", (), ("_R.one.>",))


def test_a_user_of_the_system_is_in_the_account_of_servers_and_no_other() -> None:
    users = [
        User("one", "caller", "demo", ("UONE",), (HEARS,)),
        User("remover", SYSTEM, "the servers", ("UTWO",), (removes_servers(),)),
    ]

    plain, of_servers = server_config(users).split("accounts {")

    assert "UONE" in plain
    assert "UTWO" not in plain
    assert of_servers == (
        """
  "$SYS": {
  users: [
    # remover: system of the servers
    { nkey: "UTWO", permissions: {
      publish: { allow: [
        # takes servers out of JetStream
        "$JS.API.SERVER.REMOVE"
      ] }
      subscribe: { deny: [">"] }
    } }
  ]
  }
}
"""
    )


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    """One with the user `one`."""
    made = Registry.make(tmp_path / "auth")
    made.put("one", "caller", "demo", [HEARS, CALLS])
    made.save()
    return made


def test_the_server_reads_each_user_with_the_purpose_of_each_subject() -> None:
    user = User("one", "caller", "demo", ("UOLD", "UNEW"), (HEARS, CALLS, CALLS))

    assert server_config([user]) == (
        """\
# Written by `dynbus auth`, from users.json. In the configuration of nats-server:
# include "nats-users.conf"
authorization {
  users: [
    # one: caller of demo
    { nkey: "UNEW", permissions: {
      publish: { allow: [
        # calls demo.A
        "demo.A.x"
      ] }
      subscribe: { allow: [
        # hears its own replies
        "_R.one.>"
      ] }
    } }
    # Its key before the last one.
    { nkey: "UOLD", permissions: {
      publish: { allow: [
        # calls demo.A
        "demo.A.x"
      ] }
      subscribe: { allow: [
        # hears its own replies
        "_R.one.>"
      ] }
    } }
  ]
}
"""
    )


def test_the_server_reads_its_tls_which_is_kept_with_the_users(tmp_path: Path) -> None:
    made = Registry.make(tmp_path, ServerTls("/etc/s.pem", "/etc/s.key", "/etc/ca.pem"))
    made.save()
    Registry(tmp_path).save()

    assert made.server_file.read_text().endswith(
        """\
}
tls {
  cert_file: "/etc/s.pem"
  key_file: "/etc/s.key"
  ca_file: "/etc/ca.pem"
  verify: true
}
"""
    )


def test_a_path_that_depends_on_where_the_server_was_started_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^s\.key is no absolute path, which nats-server needs"):
        ServerTls("/etc/s.pem", "s.key")


def test_who_may_publish_nothing_is_denied_everything() -> None:
    config = server_config([User("one", "caller", "demo", ("U",), (HEARS,))])

    assert 'publish: { deny: [">"] }' in config


def test_nobody_changes_or_drops_a_consumer_that_others_share() -> None:
    events = "demo._topic.sold._event.*.*"
    stream = "DYNBUS_TOPIC_demo+sold"
    taking = takes_events("demo", "sold", "ledger", EndpointName("demo", "A", "b"), ["ledger"])
    users = [
        User("hearing", "actor", "demo.H", ("U1",), (hears_events("demo", "sold"),)),
        User("taking", "actor", "demo.A", ("U2",), (taking,)),
        User("other", "actor", "demo.O", ("U3",), (hears_events("demo", "bought"),)),
        User("operator", "operator", "demo", ("U4",), tuple(operates(["demo"]))),
    ]

    config = server_config(users)

    hearing, *others = config.split("nkey: ")[1:]
    assert (
        f"""\
      ], deny: [
        # changes consumers that others share
        "$JS.API.CONSUMER.CREATE.{stream}.ledger.{events}"
        "$JS.API.CONSUMER.DELETE.{stream}.ledger"
      ] }}
"""
        in hearing
    )
    assert [one for one in others if "deny: [\n" in one] == []


def test_the_same_users_make_the_same_files(registry: Registry) -> None:
    before = {path: path.read_bytes() for path in registry.folder.iterdir() if path.is_file()}

    again = Registry(registry.folder)
    assert again.put("one", "caller", "demo", [HEARS, CALLS]) == "there"
    again.save()

    assert {path: path.read_bytes() for path in before} == before


def test_keys_are_kept_from_repositories(registry: Registry) -> None:
    assert (registry.folder / "seeds" / ".gitignore").read_text() == "*\n"
    seed = registry.credential_file("one").read_text().strip()
    assert seed not in (registry.folder / "users.json").read_text()
    assert seed not in registry.server_file.read_text()


def test_a_user_that_needs_something_else_keeps_its_key(registry: Registry) -> None:
    keys = registry.user("one").keys

    assert registry.put("one", "caller", "demo, other", [HEARS]) == "changed"
    assert registry.user("one").keys == keys
    assert registry.user("one").what == "caller of demo, other"


def test_a_user_of_another_role_is_not_replaced(registry: Registry) -> None:
    with pytest.raises(ConfigError, match="is caller of demo, and no actor: revoke it first"):
        registry.put("one", "actor", "demo.One", [HEARS])


def test_the_user_of_a_component_is_not_given_to_another_one_of_its_name(
    registry: Registry,
) -> None:
    registry.put("a_b_C", "actor", "a_b.C", [HEARS])
    grants = registry.user("a_b_C").grants

    with pytest.raises(ConfigError, match="a_b.C and a.b_C would both be the user a_b_C"):
        registry.put("a_b_C", "actor", "a.b_C", [CALLS])
    assert registry.user("a_b_C").grants == grants


def test_a_rotated_key_is_taken_beside_the_one_before_until_that_is_revoked(
    registry: Registry,
) -> None:
    (before,) = registry.user("one").keys
    seed = registry.credential_file("one").read_text()

    registry.rotate("one")
    assert registry.credential_file("one").read_text() == seed
    registry.save()
    _, after = registry.user("one").keys
    assert registry.credential_file("one").read_text() != seed
    with pytest.raises(ConfigError, match="revoke one --previous"):
        registry.rotate("one")
    registry.revoke("one", previous=True)

    assert before != after
    assert registry.user("one").keys == (after,)
    with pytest.raises(ConfigError, match="has one key: leave --previous out"):
        registry.revoke("one", previous=True)


def test_a_user_that_is_revoked_is_gone_with_its_key(registry: Registry) -> None:
    registry.revoke("one")
    assert registry.credential_file("one").exists()
    registry.save()

    assert Registry(registry.folder).users == {}
    assert not registry.credential_file("one").exists()
    with pytest.raises(ConfigError, match="there is no user 'one'"):
        registry.user("one")


def test_a_folder_is_made_once(registry: Registry) -> None:
    with pytest.raises(ConfigError, match="is there already"):
        Registry.make(registry.folder)


@pytest.mark.parametrize(
    ("text", "problem"),
    [("{", "cannot be read"), ('{"version": 2, "users": []}', "is of version 2")],
)
def test_a_file_that_cannot_be_used_is_refused(registry: Registry, text: str, problem: str) -> None:
    (registry.folder / "users.json").write_text(text)

    with pytest.raises(ConfigError, match=problem):
        Registry(registry.folder)


def test_a_folder_without_users_is_told_how_to_become_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="make it with `dynbus auth init`"):
        Registry(tmp_path)


def test_a_name_that_is_no_token_is_refused(registry: Registry) -> None:
    with pytest.raises(ConfigError, match=r"user 'a\.b' is not a valid name"):
        registry.put("a.b", "caller", "demo", [])
