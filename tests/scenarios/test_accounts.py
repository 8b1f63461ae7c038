"""Accounts of two teams at one server: each with all that it needs, and nothing of the other."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from shutil import copy

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import NoRespondersError
from tests.conditions import eventually

from dynbus import PermissionDenied, Runtime, Unavailable, call_options
from dynbus.actors.commands.auth import client_of_run, grants_of_role, users_of_run
from dynbus.actors.running.plan import PlanRequest
from dynbus.actors.runtime import Connecting
from dynbus.bus.errors import DynbusError
from dynbus.bus.identity import tokens
from dynbus.bus.identity.accounts import Accounts, AccountUsers, Limits
from dynbus.bus.identity.grants import Grant, finds_instances, hears_replies
from dynbus.bus.identity.keys import NewKey, new_key
from dynbus.bus.nats.connection import NatsConnection
from dynbus.bus.nats.server_process import RunningServer, run_server
from dynbus.bus.transport import StreamConfig
from dynbus.llm.commands.setting_up import needed_in, set_up

from .guarded import connect_plainly, reload
from .workload import Source

pytestmark = pytest.mark.anyio

RUN = PlanRequest(targets=[f"{Source.__module__}:Source"])
SOURCE = "scenario_Source"
EVERYTHING = [Grant("may do everything", (">",), (">",))]


class Teams:
    """A server with the accounts red and blue, of two teams that chose the same names."""

    def __init__(self, server: RunningServer, accounts: Accounts) -> None:
        self.server = server
        self.accounts = accounts

    def users(self, team: str) -> AccountUsers:
        return self.accounts.users(team)

    def connect(self, team: str, user: str) -> Connecting:
        path = self.users(team).credential_file(user)
        return Runtime.connect(self.server.url, credentials=str(path), drain_grace=1.0)

    async def plainly(self, team: str, user: str) -> NatsConnection:
        return await connect_plainly(self.server, self.users(team), user)

    async def reload(self) -> None:
        await reload(self.server)


@pytest.fixture
async def teams(tmp_path: Path) -> AsyncIterator[Teams]:
    accounts = Accounts.make(tmp_path / "auth")
    for name in ("red", "blue"):
        accounts.put(name, Limits())
        users = accounts.users(name)
        users.put("operator", "operator", "all", EVERYTHING)
        for user in [*users_of_run(RUN), client_of_run("billing", RUN)]:
            users.put(*user)
        users.put(
            "looker", "observer", "scenario", grants_of_role("observer", ["scenario"], "looker")
        )
        users.save()
    include = 'include "../auth/nats-users.conf"'
    server = await run_server(store_dir=tmp_path / "nats", config=include)
    made = Teams(server, accounts)
    try:
        for name in ("red", "blue"):
            operator = await made.plainly(name, "operator")
            await set_up(operator.jetstream, needed_in("scenario", []))
            await operator.close()
        yield made
    finally:
        await server.stop()


async def test_graphs_of_one_namespace_run_in_two_accounts_at_once(teams: Teams) -> None:
    async with (
        teams.connect("red", SOURCE) as red,
        teams.connect("blue", SOURCE) as blue,
        teams.connect("red", "billing") as of_red,
        teams.connect("blue", "billing") as of_blue,
    ):
        await red.start(Source, instance_id="red")
        await blue.start(Source, instance_id="blue")
        with call_options(wait=60.0):
            answers = [(await one.client(Source).where()).instance for one in (of_red, of_blue)]
        seen = [one.instance_ids("scenario", "Source") for one in (of_red, of_blue)]

    assert answers == ["red", "blue"]
    assert seen == [["red"], ["blue"]]
    assert "iolation" not in teams.server.log.read_text()


async def test_nobody_of_an_account_sees_hears_or_calls_what_is_in_another(teams: Teams) -> None:
    """Its operator may do everything, and so shows what the account itself keeps apart."""
    heard: list[str] = []

    async def hear(message: Msg) -> None:
        heard.append(message.subject)

    red = Client()
    path = teams.users("red").credential_file("operator")
    await red.connect(teams.server.url, user_credentials=str(path), inbox_prefix=b"_R.operator")
    hearing = await red.subscribe(">", cb=hear)  # pyright: ignore[reportUnknownMemberType]
    await red.flush()
    operator = await teams.plainly("blue", "operator")
    try:
        async with (
            teams.connect("blue", SOURCE) as serving,
            teams.connect("blue", "billing") as billing,
        ):
            await operator.jetstream.ensure_stream(StreamConfig("PLANS", ("plans.>",)))
            await operator.jetstream.publish("plans.secret", b"")
            await serving.start(Source, instance_id="blue")
            with call_options(wait=60.0):
                await billing.client(Source).where()
            await red.flush()
            # It would hear its own requests, which have an answer then.
            await hearing.unsubscribe()
            with pytest.raises(NoRespondersError):
                await red.request("scenario.Source.where.blue", b"{}", timeout=10.0)
            with pytest.raises(NoRespondersError):
                await red.request("$SRV.PING", b"", timeout=10.0)
            info = await red.request("$JS.API.STREAM.INFO.PLANS", b"", timeout=10.0)
            of_red = await red.request("$JS.API.STREAM.NAMES", b"", timeout=10.0)
            of_blue = await operator.jetstream.api("STREAM.NAMES", {}, timeout=10.0)
    finally:
        await operator.close()
        await red.close()

    assert heard == []
    assert b"stream not found" in info.data
    assert "PLANS" in of_blue["streams"]
    assert b"PLANS" not in of_red.data


async def test_a_user_has_the_permissions_of_its_role_alone(teams: Teams) -> None:
    async with (
        teams.connect("red", SOURCE) as serving,
        teams.connect("red", "billing") as billing,
        teams.connect("red", "looker") as looker,
    ):
        await serving.start(Source, instance_id="red")
        with pytest.raises(PermissionDenied):
            await billing.start(Source)
        with pytest.raises(PermissionDenied), call_options(wait=60.0):
            await looker.client(Source).where()


async def test_a_key_signs_no_more_than_its_permissions(teams: Teams, tmp_path: Path) -> None:
    """Who has the key that signs for billing can make a user of billing, and of nobody else."""
    account = teams.accounts.account("red")
    signer = NewKey(
        teams.users("red").user("billing").scope,
        (teams.accounts.folder / "keys" / "red" / "billing.nk").read_text().strip(),
    )
    key = new_key()
    honest = tokens.user_claims(key.public, "operator", account=account.key)
    wide = {"pub": {"allow": [">"]}, "sub": {"allow": [">"]}}
    greedy = {**honest, "nats": {**honest["nats"], **wide}}
    paths: dict[str, str] = {}
    for name, claims in {"honest": honest, "greedy": greedy}.items():
        text = tokens.credentials_text(tokens.issue(claims, signer, time.time()), key.seed)
        (tmp_path / f"{name}.creds").write_text(text)
        paths[name] = str(tmp_path / f"{name}.creds")

    with pytest.raises(PermissionDenied, match="refuses the credentials"):
        await Runtime.connect(teams.server.url, credentials=paths["greedy"])
    # It would hear the operator's answers.
    with pytest.raises(PermissionDenied, match=r"_R\.operator"):
        await Runtime.connect(teams.server.url, credentials=paths["honest"])


async def test_who_is_revoked_is_refused_and_nobody_else(teams: Teams) -> None:
    users = teams.users("red")
    text = users.credential_file("billing").read_text()
    async with (
        teams.connect("red", SOURCE) as serving,
        teams.connect("red", "billing") as billing,
        teams.connect("blue", "billing") as other,
    ):
        users.revoke("billing")
        users.save()
        await teams.reload()
        await eventually(lambda: not billing.is_connected, what="its connections are ended")
        assert serving.is_connected
        assert other.is_connected
    users.credential_file("copied").write_text(text)
    with pytest.raises(PermissionDenied, match="refuses the credentials"):
        await teams.connect("red", "copied")


async def test_a_job_rotates_in_a_folder_of_its_own_until_its_user_is_revoked(
    teams: Teams, tmp_path: Path
) -> None:
    """The folder is a copy with the key of one user; the operator's knows nothing of its keys."""
    job = tmp_path / "job"
    for name in ("accounts.json", "nats-users.conf", "keys/red/billing.nk"):
        (job / name).parent.mkdir(parents=True, exist_ok=True)
        copy(teams.accounts.folder / name, job / name)
    rotating = Accounts(job).users("red")
    rotating.rotate("billing")
    assert not rotating.save()
    path = str(rotating.credential_file("billing"))

    async with await Runtime.connect(teams.server.url, credentials=path) as billing:
        users = teams.users("red")
        users.revoke("billing")
        users.save()
        await teams.reload()
        await eventually(lambda: not billing.is_connected, what="its connections are ended")
    with pytest.raises(PermissionDenied, match="refuses the credentials"):
        await Runtime.connect(teams.server.url, credentials=path)


async def test_a_rotated_credential_is_taken_by_a_server_that_has_read_nothing(
    teams: Teams,
) -> None:
    users = teams.users("red")
    async with teams.connect("red", "billing") as before:
        users.rotate("billing")
        assert not users.save()
        first = _session(before)
        async with teams.connect("red", "billing") as after:
            second = _session(after)
            users.revoke("billing", previous=True)
            users.save()
            await teams.reload()
            # Its next connection reads the file, and so has the new key.
            await eventually(
                lambda: before.is_connected and _session(before) != first,
                what="it goes on with the new key",
            )
            assert after.is_connected
            assert _session(after) == second


def _session(runtime: Runtime) -> object:
    """The number by which the server knows a connection of a process."""
    connection = runtime.bus.data
    assert isinstance(connection, NatsConnection)
    return connection.server_info["client_id"]


async def test_a_credential_that_ends_is_replaced_in_its_place(teams: Teams) -> None:
    users = teams.users("red")
    # Servers count whole seconds, and a busy machine takes some to come to the first connection.
    users.put(
        "brief", "caller", "scenario", grants_of_role("caller", ["scenario"], "brief"), lifetime=5.0
    )
    users.save()
    await teams.reload()
    async with teams.connect("red", "brief") as brief:
        await eventually(lambda: not brief.is_connected, 30.0, what="its credential has ended")
        users.rotate("brief", lifetime=3600.0)
        assert not users.save()
        await eventually(lambda: brief.is_connected, 30.0, what="it reads the new one")


async def test_a_user_that_needs_something_else_has_it_with_the_next_reload(teams: Teams) -> None:
    users = teams.users("red")
    users.put("late", "caller", "scenario", [hears_replies("late"), finds_instances()])
    users.save()
    await teams.reload()
    async with teams.connect("red", SOURCE) as serving, teams.connect("red", "late") as late:
        await serving.start(Source, instance_id="red")
        with pytest.raises(PermissionDenied), call_options(wait=60.0):
            await late.client(Source).where()
        assert (
            users.put("late", "caller", "scenario", grants_of_role("caller", ["scenario"], "late"))
            == "changed"
        )
        users.save()
        await teams.reload()

        async def may_call() -> bool:
            # Its connections are ended, in order that the next ones have these permissions.
            with suppress(DynbusError), call_options(wait=60.0):
                return (await late.client(Source).where()).instance == "red"
            return False

        await eventually(may_call, what="it may call")


async def test_an_account_has_no_more_than_its_limits(teams: Teams) -> None:
    teams.accounts.put("small", Limits(connections=1, streams=1, disk=1_000_000))
    users = teams.users("small")
    users.put("operator", "operator", "all", EVERYTHING)
    users.save()
    await teams.reload()

    first = await teams.plainly("small", "operator")
    try:
        with pytest.raises((PermissionDenied, Unavailable), match="maximum account active conn"):
            await teams.plainly("small", "operator")
        await first.jetstream.ensure_stream(StreamConfig("ONE", ("one",)))
        await first.jetstream.publish("one", bytes(600_000))
        with pytest.raises(DynbusError, match="resource limits exceeded for account"):
            await first.jetstream.publish("one", bytes(600_000))
        with pytest.raises(DynbusError, match="maximum number of streams reached"):
            await first.jetstream.ensure_stream(StreamConfig("TWO", ("two",)))
    finally:
        await first.close()


async def test_an_account_has_no_streams_where_its_bytes_cannot_be_set_aside(teams: Teams) -> None:
    teams.accounts.put("large", Limits(disk=2**60))
    users = teams.users("large")
    users.put("operator", "operator", "all", EVERYTHING)
    users.save()
    await teams.reload()

    operator = await teams.plainly("large", "operator")
    try:
        with pytest.raises(DynbusError, match="is JetStream enabled"):
            await operator.jetstream.ensure_stream(StreamConfig("ONE", ("one",)))
    finally:
        await operator.close()
    assert "insufficient storage resources available" in teams.server.log.read_text()


async def test_an_account_that_is_removed_is_refused(teams: Teams) -> None:
    path = teams.users("red").credential_file("billing")
    kept = path.read_text()
    async with teams.connect("red", "billing") as red, teams.connect("blue", "billing") as blue:
        teams.accounts.remove("red")
        teams.accounts.save("red")
        await teams.reload()
        await eventually(lambda: not red.is_connected, what="its connections are ended")
        assert blue.is_connected
    path.write_text(kept)
    with pytest.raises(PermissionDenied, match="refuses the credentials"):
        await Runtime.connect(teams.server.url, credentials=str(path))
