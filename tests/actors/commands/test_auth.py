"""`dynbus auth` writes the users of a server, and starts nothing."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path

import pytest
from tests.actors.commands.conftest import MakeFolder

from dynbus import cli
from dynbus.bus import exit_codes
from dynbus.bus.identity.accounts import Accounts, open_users
from dynbus.bus.identity.files import locked
from dynbus.bus.identity.registry import Registry

ACTORS = """
from dynbus import Actor, depends, handler

class Printer(Actor, namespace="shop"):
    @handler(durable=True)
    async def print(self, text: str) -> int:
        return len(text)

class Front(Actor, namespace="shop"):
    printer = depends(Printer)

    @handler
    async def order(self, text: str) -> int:
        return 1
"""


@pytest.fixture(autouse=True)
def folder(folder_with: MakeFolder) -> Path:
    """A working directory with actors, and with users that have been initialised."""
    made = folder_with("authorised_actors", ACTORS)
    assert auth("init") == exit_codes.OK
    return made / "auth"


def auth(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        cli.main(["auth", *arguments])
    return int(end.value.code or 0)


def test_each_component_of_a_run_becomes_a_user(folder: Path) -> None:
    assert auth("add", "authorised_actors.py") == exit_codes.OK

    registry = Registry(folder)
    assert sorted(registry.users) == ["operator", "shop_Front", "shop_Printer"]
    purposes = [grant.purpose for grant in registry.user("shop_Front").grants]
    assert "submits jobs of shop.Printer.print" in purposes
    assert registry.credential_file("shop_Front").is_file()


def test_what_was_done_is_told_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert auth("add", "authorised_actors.py", "--json") == exit_codes.OK
    assert auth("add", "authorised_actors.py", "--json") == exit_codes.OK

    decoder, text = json.JSONDecoder(), capsys.readouterr().out
    first, end = decoder.raw_decode(text)
    second, _ = decoder.raw_decode(text[end:].lstrip())
    assert first == {
        "users": [
            {"name": "shop_Front", "done": "added"},
            {"name": "shop_Printer", "done": "added"},
        ],
        "server_file": "auth/nats-users.conf",
        "setup": ["dynbus setup shop --durable Printer.print"],
    }
    assert [user["done"] for user in second["users"]] == ["there", "there"]


def test_a_run_in_another_namespace_has_users_of_its_own(folder: Path) -> None:
    assert auth("add", "authorised_actors.py", "--namespace", "blue") == exit_codes.OK

    assert sorted(Registry(folder).users) == ["blue_Front", "blue_Printer", "operator"]


def test_a_user_in_a_role_has_what_it_needs_in_its_namespaces(folder: Path) -> None:
    assert auth("add", "billing", "--role", "caller", "--namespace", "shop,blue") == exit_codes.OK

    user = Registry(folder).user("billing")
    assert user.what == "caller of shop, blue"
    assert [grant.purpose for grant in user.grants] == [
        "hears its own replies",
        "finds instances",
        "calls all of shop",
        "hears cancels in shop",
        "records the flight of shop",
        "calls all of blue",
        "hears cancels in blue",
        "records the flight of blue",
    ]


def test_a_client_calls_the_actors_of_a_run_and_submits_their_jobs(folder: Path) -> None:
    assert auth("add", "authorised_actors.py", "--client", "billing") == exit_codes.OK

    user = Registry(folder).user("billing")
    assert user.what == "client of shop.Front, shop.Printer"
    assert [grant.purpose for grant in user.grants] == [
        "hears its own replies",
        "finds instances",
        "calls shop.Front",
        "hears cancels in shop",
        "records the flight of shop",
        "calls shop.Printer",
        "submits jobs of shop.Printer.print",
    ]


def test_the_front_end_of_a_package_above_is_a_role(folder: Path) -> None:
    pytest.importorskip("dynbus.llm")

    assert auth("add", "web", "--role", "frontend", "--namespace", "shop") == exit_codes.OK

    purposes = [grant.purpose for grant in Registry(folder).user("web").grants]
    assert "serves dynbus.http" in purposes
    assert "finds models" in purposes


def test_a_role_that_there_is_not_is_told_with_those_that_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert auth("add", "x", "--role", "caler", "--namespace", "shop") == exit_codes.CONFIG_ERROR

    told = capsys.readouterr().err
    assert "no role 'caler' (did you mean caller?)" in told
    assert "observer, operator" in told


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["a", "b", "--role", "caller", "--namespace", "shop"], "--role makes one user"),
        (["a", "--role", "caller"], "--role needs --namespace"),
        (["a", "--role", "system", "--namespace", "shop"], "--role system takes no --namespace"),
    ],
)
def test_a_role_takes_one_name_and_a_namespace(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert auth("add", *arguments) == exit_codes.USAGE

    assert problem in capsys.readouterr().err


def test_a_key_is_rotated_and_the_one_before_revoked(folder: Path) -> None:
    auth("add", "billing", "--role", "caller", "--namespace", "shop")

    assert auth("rotate", "billing") == exit_codes.OK
    assert len(Registry(folder).user("billing").keys) == 2
    assert auth("revoke", "billing", "--previous") == exit_codes.OK
    assert len(Registry(folder).user("billing").keys) == 1
    assert auth("revoke", "billing") == exit_codes.OK
    assert "billing" not in Registry(folder).users


def test_users_and_their_subjects_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    auth("add", "billing", "--role", "caller", "--namespace", "shop")
    capsys.readouterr()

    assert auth("show") == exit_codes.OK
    assert "caller of shop" in capsys.readouterr().out
    assert auth("show", "billing") == exit_codes.OK
    assert "shop.*.*.*" in capsys.readouterr().out
    assert auth("show", "billing", "--json") == exit_codes.OK
    assert json.loads(capsys.readouterr().out)["grants"][0]["subscribe"] == ["_R.billing.>"]


def test_the_server_gets_its_tls_whole_or_not_at_all(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert auth("init", "--folder", "half", "--tls-cert", "/etc/s.pem") == exit_codes.USAGE
    assert "give --tls-cert and --tls-key" in capsys.readouterr().err
    given = ("--tls-cert", "/etc/s.pem", "--tls-key", "/etc/s.key")
    assert auth("init", "--folder", "whole", *given) == exit_codes.OK
    assert auth("add", "one", "--folder", "whole", "--role", "caller", "--namespace", "a") == 0

    assert 'tls {\n  cert_file: "/etc/s.pem"' in Path("whole/nats-users.conf").read_text()


def test_teams_have_accounts_with_limits_and_users_of_their_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    in_teams = ("--folder", "teams")
    assert auth("init", "--jwt", "--account", "red", *in_teams) == exit_codes.OK
    limits = ("--disk", "100Gi", "--connections", "500")
    assert auth("account", "blue", *limits, *in_teams) == exit_codes.OK
    for team in ("red", "blue"):
        assert auth("add", "authorised_actors.py", "--account", team, *in_teams) == exit_codes.OK
    assert auth("account", "blue", "--connections", "none", *in_teams) == exit_codes.OK
    capsys.readouterr()

    assert auth("account", "--json", *in_teams) == exit_codes.OK
    blue, red = json.loads(capsys.readouterr().out)
    assert auth("show", "--json", *in_teams) == exit_codes.OK
    users = json.loads(capsys.readouterr().out)
    assert (blue["name"], blue["users"], red["name"], red["users"]) == ("blue", 3, "red", 3)
    assert (blue["limits"]["disk"], blue["limits"]["connections"]) == (100 * 1024**3, -1)
    assert [(user["account"], user["name"]) for user in users] == [
        (team, name)
        for team in ("blue", "red")
        for name in ("operator", "shop_Front", "shop_Printer")
    ]
    assert Path("teams/creds/red/shop_Front.creds").is_file()


def test_a_credential_of_an_account_expires_is_rotated_and_revoked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    in_teams = ("--folder", "teams")
    auth("init", "--jwt", *in_teams)
    role = ("--role", "caller", "--namespace", "shop", "--expires", "30d")
    assert auth("add", "billing", *role, *in_teams) == exit_codes.OK
    assert "nats-server --signal reload" in capsys.readouterr().err
    # Nothing of it is for the server.
    assert auth("rotate", "billing", *in_teams) == exit_codes.OK
    assert "reload" not in capsys.readouterr().err
    assert auth("revoke", "billing", "--previous", *in_teams) == exit_codes.OK
    assert "nats-server --signal reload" in capsys.readouterr().err

    assert auth("show", *in_teams) == exit_codes.OK
    shown = capsys.readouterr().out
    assert re.search(r"main +billing +caller of shop +1 +U\w+ +in (30d|29d 23h)", shown), shown
    assert auth("account", *in_teams) == exit_codes.OK
    assert re.search(r"main .* 2 +1 *$", capsys.readouterr().out, re.MULTILINE)


def test_a_user_of_the_system_takes_servers_out_and_is_for_no_folder_with_accounts(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert auth("add", "remover", "--role", "system") == exit_codes.OK
    assert '"$SYS": {' in (folder / "nats-users.conf").read_text()
    auth("init", "--jwt", "--folder", "teams")
    capsys.readouterr()

    given = ("add", "remover", "--role", "system", "--folder", "teams")
    assert auth(*given) == exit_codes.CONFIG_ERROR

    assert "--role system is for a server with one account" in capsys.readouterr().err


def test_a_nightly_job_rotates_without_the_operators_key() -> None:
    in_teams = ("--folder", "teams")
    auth("init", "--jwt", *in_teams)
    role = ("--role", "caller", "--namespace", "shop", "--expires", "30d")
    auth("add", "billing", *role, *in_teams)
    Path("teams/keys/operator.nk").rename("operator.nk")

    for _ in range(6):
        assert auth("rotate", "billing", *in_teams) == exit_codes.OK


def test_a_command_signs_the_account_that_it_is_about_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    in_teams = ("--folder", "teams")
    auth("init", "--jwt", "--account", "red", *in_teams)
    auth("account", "blue", *in_teams)
    path = Path("teams/accounts.json")
    content = json.loads(path.read_text())
    for account in content["accounts"]:
        account["users"][0]["grants"] = [["x", ["mine"], [">"]]]
    path.write_text(json.dumps(content))

    assert auth("account", "blue", "--connections", "5", *in_teams) == exit_codes.CONFIG_ERROR
    assert "has other content than was signed for: red;" in capsys.readouterr().err
    # As it is said there.
    for name in ("red", "blue"):
        assert auth("account", name, *in_teams) == exit_codes.OK
    assert auth("account", "blue", "--connections", "5", *in_teams) == exit_codes.OK


@pytest.mark.parametrize("kind", [[], ["--jwt"]])
def test_a_command_reads_the_folder_after_the_change_of_another(kind: list[str]) -> None:
    auth("init", *kind, "--folder", "teams")
    auth("add", "billing", "--role", "caller", "--namespace", "shop", "--folder", "teams")
    codes: list[int] = []
    rotating = threading.Thread(
        target=lambda: codes.append(auth("rotate", "billing", "--folder", "teams"))
    )

    with locked(Path("teams")):
        rotating.start()
        rotating.join(0.5)
        assert rotating.is_alive()
        users = open_users(Path("teams"))
        users.revoke("billing")
        users.save()
    rotating.join()

    assert codes == [exit_codes.CONFIG_ERROR]
    assert "billing" not in open_users(Path("teams")).users


@pytest.mark.parametrize(
    "change",
    [["revoke", "billing", "--account", "main"], ["account", "main", "--remove"]],
    ids=["user", "account"],
)
def test_what_cannot_be_signed_loses_no_credential(change: list[str]) -> None:
    in_teams = ("--folder", "teams")
    auth("init", "--jwt", *in_teams)
    auth("account", "blue", *in_teams)
    auth(
        "add", "billing", "--role", "caller", "--namespace", "shop", "--account", "main", *in_teams
    )
    Path("teams/keys/operator.nk").rename("operator.nk")
    path = Path("teams/accounts.json")
    content = json.loads(path.read_text())
    content["accounts"][0]["users"] = []
    path.write_text(json.dumps(content))
    before = sorted(Path("teams").rglob("*"))

    assert auth(*change, *in_teams) == exit_codes.CONFIG_ERROR

    assert sorted(Path("teams").rglob("*")) == before
    assert "billing" in Accounts(Path("teams")).users("main").users


def test_an_account_is_removed_with_its_users(capsys: pytest.CaptureFixture[str]) -> None:
    in_teams = ("--folder", "teams")
    auth("init", "--jwt", *in_teams)
    auth("account", "blue", *in_teams)

    assert auth("account", "blue", "--remove", *in_teams) == exit_codes.OK
    assert "removed" in capsys.readouterr().out
    assert auth("show", "--account", "blue", *in_teams) == exit_codes.CONFIG_ERROR
    assert "there is no account 'blue'; there are: main" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "problem"),
    [
        (["init", "--account", "red", "--folder", "x"], exit_codes.USAGE, "give --jwt too"),
        (["account"], exit_codes.CONFIG_ERROR, "make it with `dynbus auth init --jwt`"),
        (["account", "--remove"], exit_codes.CONFIG_ERROR, "auth init --jwt"),
        (["account", "a", "--disk", "much"], exit_codes.USAGE, "give bytes, such as 20Gi, or none"),
        (["account", "a", "--streams", "0"], exit_codes.USAGE, "a number above 0, or none"),
        (["show", "--account", "red"], exit_codes.CONFIG_ERROR, "auth has no accounts"),
        (["rotate", "operator", "--expires", "30d"], exit_codes.CONFIG_ERROR, "cannot expire"),
        (["rotate", "operator", "--expires", "soon"], exit_codes.CONFIG_ERROR, "--expires='soon'"),
    ],
)
def test_what_is_for_accounts_alone_is_refused_elsewhere(
    arguments: list[str], code: int, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert auth(*arguments) == code

    assert problem in capsys.readouterr().err


def test_without_init_nothing_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    code = auth("add", "x", "--role", "caller", "--namespace", "shop", "--folder", "none")

    assert code == exit_codes.CONFIG_ERROR
    assert "dynbus auth init" in capsys.readouterr().err
    assert not Path("none").exists()


def test_two_components_of_one_name_are_refused(
    folder_with: MakeFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    source = """
from dynbus import Actor, handler

class C(Actor, namespace="a_b"):
    @handler
    async def x(self) -> int:
        return 1

class D(Actor, namespace="a", component="b_C"):
    @handler
    async def x(self) -> int:
        return 1
"""
    folder_with("alike_actors", source)
    auth("init")

    assert auth("add", "alike_actors.py") == exit_codes.CONFIG_ERROR
    assert "a_b.C and a.b_C would both be the user a_b_C" in capsys.readouterr().err
