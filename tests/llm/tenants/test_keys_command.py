"""`dynbus keys`: keys on the bus are made, listed, revoked, and followed by front ends."""

from __future__ import annotations

import asyncio
import json
import secrets

import msgspec
import pytest
from click.testing import CliRunner, Result
from tests.conditions import eventually

from dynbus import Runtime
from dynbus.bus.nats.server_process import RunningServer
from dynbus.llm.commands.keys import keys
from dynbus.llm.tenants.keys import KeyHolder, key_id
from dynbus.llm.tenants.limits import Limits
from dynbus.llm.tenants.records import KEYS_BUCKET, KEYS_STREAM, KeyRecord, hash_of
from dynbus.llm.tenants.tenants import Tenants
from dynbus.spi import unix_time

pytestmark = pytest.mark.anyio


async def command(server: RunningServer, *arguments: str) -> Result:
    """`dynbus keys` in a thread, while front ends go on."""
    return await asyncio.to_thread(
        CliRunner().invoke, keys, [*arguments, "--nats", server.url], catch_exceptions=True
    )


async def added(server: RunningServer, *arguments: str) -> str:
    """A key that is made."""
    done = await command(server, "add", *arguments, "--json")
    assert done.exit_code == 0, done.output
    return str(json.loads(done.stdout)["key"])


async def test_a_key_is_shown_once_and_counts_until_it_is_revoked(
    own_server: RunningServer,
) -> None:
    async with Runtime.connect(own_server.url) as runtime, Tenants(runtime, from_bus=True) as known:
        key = await added(own_server, "ada", "--limit", "requests_per_minute=60")
        other = await added(own_server, "ops", "--operator")
        await eventually(lambda: known.limits_of("ada") is not None)

        holders = [await known.holder_of(one) for one in (key, other, "dk-unknown")]
        table = (await command(own_server, "ls")).output
        listed = json.loads((await command(own_server, "ls", "--json")).output)
        stored = await runtime.bus.data.jetstream.read(KEYS_STREAM.name)
        id = hash_of(key)[:12]
        revoked = await command(own_server, "revoke", id)
        await eventually(lambda: "of 1 keys" in repr(known))
        gone = await known.holder_of(key)
        again = await command(own_server, "revoke", id)
        # There is one key, of which nothing is the beginning, too.

    assert holders[0] == KeyHolder("ada", key=id)
    assert holders[1] is not None
    assert (holders[1].tenant, holders[1].is_operator) == ("ops", True)
    assert holders[2] is None
    assert gone is None
    assert len(key) > 40
    assert known.limits_of("ada") == Limits(requests_per_minute=60)
    assert [one["tenant"] for one in listed["keys"]] == ["ada", "ops"]
    assert "requests_per_minute=60" in table
    assert not any(key.encode() in message.data for message in stored)
    assert key not in table
    assert revoked.exit_code == 0
    assert "there is no key that begins with" in str(again.exception)


async def test_limits_are_changed_and_those_of_all_are_for_who_has_none(
    own_server: RunningServer,
) -> None:
    async with Runtime.connect(own_server.url) as runtime, Tenants(runtime, from_bus=True) as known:
        await command(own_server, "limit", "*", "requests_at_a_time=1")
        await command(own_server, "limit", "ada", "models=a,b", "max_priority=-1")
        stated = Limits(models=("a", "b"), max_priority=-1)
        await eventually(lambda: known.limits_of("ada") == stated)
        others = known.limits_of("bob")
        await command(own_server, "limit", "ada")
        await eventually(lambda: known.limits_of("ada") == Limits())
        wrong = await command(own_server, "limit", "ada", "request_per_minute=1")

    assert others == Limits(requests_at_a_time=1)
    assert "did you mean" in str(wrong.exception).lower()


async def test_limits_that_are_no_longer_stated_are_told_and_can_be_those_of_all_again(
    own_server: RunningServer,
) -> None:
    async with Runtime.connect(own_server.url) as runtime, Tenants(runtime, from_bus=True) as known:
        await command(own_server, "limit", "*", "requests_at_a_time=1")
        first = await command(own_server, "add", "ada", "--limit", "tokens_per_month=9")
        raised = await command(own_server, "limit", "ada", "requests_per_minute=5")
        freed = await command(own_server, "limit", "ada")
        table = await command(own_server, "ls")
        unset = await command(own_server, "limit", "ada", "--unset")
        await eventually(lambda: known.limits_of("ada") == Limits(requests_at_a_time=1))
        held = await command(own_server, "ls")
        both = await command(own_server, "limit", "ada", "--unset", "requests_per_minute=5")

    assert "limits of ada: tokens_per_month=9\n" in first.output
    assert "before" not in first.output
    assert raised.output == "limits of ada: requests_per_minute=5\nbefore: tokens_per_month=9\n"
    assert freed.output == "limits of ada: none\nbefore: requests_per_minute=5\n"
    head, ada = (line.split() for line in table.output.splitlines()[:2])
    assert head == ["ID", "TENANT", "NAME", "ROLE", "AGE", "EXPIRES", "KEY", "LIMITS", "LIMITS"]
    assert (*ada[1:4], *ada[5:]) == ("ada", "-", "-", "never", "-", "none")
    assert float(ada[4].removesuffix("s")) < 60
    assert unset.output == "limits of ada: none are stated\nbefore: none\n"
    assert held.output.splitlines()[1].endswith("those of *: requests_at_a_time=1")
    assert "leave out 'requests_per_minute=5'" in str(both.exception)


async def test_a_key_has_a_name_and_an_end(own_server: RunningServer) -> None:
    async with Runtime.connect(own_server.url) as runtime, Tenants(runtime, from_bus=True) as known:
        limit = ("--key-limit", "requests_per_minute=5", "--limit", "requests_per_minute=9")
        made = await command(
            own_server, "add", "ada", "--name", "nightly builds", "--expires", "2d", *limit
        )
        await added(own_server, "ada", "--expires", "2999-01-31")
        await eventually(lambda: "of 2 keys" in repr(known))
        holder = await known.holder_of(made.stdout.strip())
        table = await command(own_server, "ls")
        listed = json.loads((await command(own_server, "ls", "--json")).output)["keys"]
        wrong = [
            await command(own_server, "add", "ada", *arguments)
            for arguments in (
                ("--expires", "2020-01-31"),
                ("--expires", "soon"),
                ("--expires", "0s"),
                ("--key-limit", "kept_answers=1"),
                ("--name", ""),
                ("--name", "a\x1b[2J"),
            )
        ]

    assert holder is not None
    assert holder.name == "nightly builds"
    assert [one.limits for one in known.quotas_of(holder)] == [
        Limits(requests_per_minute=5),
        Limits(requests_per_minute=9),
    ]
    assert listed[0]["limits"] == {"requests_per_minute": 5}
    assert not holder.has_expired(unix_time())
    assert holder.has_expired(unix_time() + 2 * 86400)
    assert "it expires at 2" in made.stderr
    assert "nightly builds" in table.output
    assert "in 1d 23h" in table.output
    assert (listed[0]["name"], listed[1]["name"]) == ("nightly builds", "")
    assert listed[1]["expires"] == 32474736000.0
    errors = [str(one.exception) for one in wrong]
    assert ["is over" in text for text in errors] == [True, False, True, False, False, False]
    assert "or how long from now" in errors[1]
    assert "kept_answers is a limit of a tenant" in errors[3]
    assert ["is no name of a key" in text for text in errors[4:]] == [True, True]


async def test_limits_of_a_tenant_without_keys_are_pointed_out(own_server: RunningServer) -> None:
    keys = [await added(own_server, "ada") for _ in range(2)]
    known = await command(own_server, "limit", "ada", "requests_per_minute=5")
    unknown = await command(own_server, "limit", "adda", "requests_per_minute=5")
    for_all = await command(own_server, "limit", "*", "requests_per_minute=9")
    taken_back = await command(own_server, "limit", "adda", "--unset")
    first, last = [await command(own_server, "revoke", hash_of(key)[:12]) for key in keys]
    table = await command(own_server, "ls")

    assert unknown.exit_code == 0
    assert "warning: no key on the bus is of adda (did you mean ada?): " in unknown.output
    assert "unless such a file states limits of its own" in unknown.output
    assert "`dynbus keys limit adda --unset` takes them back" in unknown.output
    for one in (known, for_all, taken_back):
        assert "no key on the bus" not in one.output
    assert "last" not in first.output
    assert (
        "it was the last one of ada, whose limits stay (requests_per_minute=5): "
        "`dynbus keys limit ada --unset` takes them back" in last.output
    )
    assert ["-", "ada", "-", "-", "-", "-", "-", "requests_per_minute=5"] in [
        line.split() for line in table.output.splitlines()
    ]


def test_the_help_names_all_limits() -> None:
    shown = CliRunner().invoke(keys, ["limit", "--help"]).output.replace("=", " ").replace(",", " ")

    assert set(Limits.__struct_fields__) <= set(shown.split())


async def test_an_empty_id_revokes_no_key(own_server: RunningServer) -> None:
    await added(own_server, "ada")

    wrong = await command(own_server, "revoke", "")
    listed = json.loads((await command(own_server, "ls", "--json")).output)

    assert "the id is empty" in str(wrong.exception)
    assert len(listed["keys"]) == 1


async def test_the_beginning_of_an_id_revokes_the_one_key_that_has_it(
    own_server: RunningServer,
) -> None:
    hashes = ["ab" + "0" * 62, "ac" + "0" * 62]
    async with Runtime.connect(own_server.url) as runtime:
        jetstream = runtime.bus.data.jetstream
        await jetstream.ensure_stream(KEYS_STREAM)
        for one in hashes:
            record = msgspec.json.encode(KeyRecord(tenant="ada"))
            await jetstream.publish(f"$KV.{KEYS_BUCKET}.key.{one}", record)

    of_both = await command(own_server, "revoke", "a")
    of_one = await command(own_server, "revoke", "ac")
    listed = json.loads((await command(own_server, "ls", "--json")).output)

    assert "2 keys have an id that begins with 'a'" in str(of_both.exception)
    assert of_one.exit_code == 0
    assert [one["id"] for one in listed["keys"]] == [key_id(hashes[0])]


async def test_a_front_end_that_is_cut_off_keeps_the_keys_that_it_knows(
    own_server: RunningServer,
) -> None:
    key = await added(own_server, f"ada-{secrets.token_hex(2)}")
    async with Runtime.connect(own_server.url) as runtime, Tenants(runtime, from_bus=True) as known:
        own_server.kill()
        await eventually(lambda: not runtime.is_connected)

        holder = await known.holder_of(key)
        await own_server.restart()

    assert holder is not None
