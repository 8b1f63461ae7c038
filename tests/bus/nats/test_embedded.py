"""The server that several `dynbus run` share."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import nats.errors
import psutil
import pytest
from nats.aio.client import Client
from tests.bus.servers import listener, make_stream, server_stopped, stream_names
from tests.conditions import PATIENCE

from dynbus.bus.errors import ConfigError, Unavailable
from dynbus.bus.nats import neighbours
from dynbus.bus.nats.connection import connect
from dynbus.bus.nats.embedded import EmbeddedServer, default_data_dir, embedded_server
from dynbus.bus.nats.embedded_guard import is_locked
from dynbus.bus.nats.server_process import (
    Address,
    RunningServer,
    free_port,
    probe,
    run_server,
    until,
)

pytestmark = pytest.mark.anyio


@pytest.fixture
def url() -> str:
    return f"nats://127.0.0.1:{free_port()}"


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        await until(condition)


def test_the_data_folder_belongs_to_the_project_folder() -> None:
    assert default_data_dir(Path("/project")) == Path("/project/.dynbus")


async def test_a_server_is_started_where_there_is_none(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    async with embedded_server(url) as server:
        info = await probe(url)

    assert info is not None
    assert info == server.info
    assert info.jetstream
    assert server.started
    assert server.description == (
        f"nats-server {info.version} started on {url} (data in .dynbus; what other NATS clients "
        "need: export NATS_URL=$(cat .dynbus/nats.url))"
    )


async def test_the_server_ends_with_its_only_user(url: str, tmp_path: Path) -> None:
    async with embedded_server(url, data_dir=tmp_path) as server:
        process = psutil.Process(server.pid)

    assert not process.is_running()
    assert server.pid is None
    assert await probe(url) is None


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="reads /proc")
async def test_the_server_keeps_no_secrets_of_the_program_that_started_it(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYNBUS_Splitter__api_key", "sk-secret")
    async with embedded_server(url, data_dir=tmp_path) as server:
        process = psutil.Process(server.pid)
        for each in (process, psutil.Process(process.ppid())):
            assert "sk-secret" not in each.environ().values()


async def test_the_second_user_joins_and_the_last_one_ends_it(url: str, tmp_path: Path) -> None:
    async with embedded_server(url, data_dir=tmp_path) as first:
        async with embedded_server(url, data_dir=tmp_path) as second:
            pids = first.pid, second.pid
        left = await probe(url)

    assert first.started
    assert not second.started
    assert "joined on" in second.description
    assert pids[0] == pids[1]
    assert left is not None
    assert await probe(url) is None


async def test_the_user_that_started_it_may_leave_first(url: str, tmp_path: Path) -> None:
    first = embedded_server(url, data_dir=tmp_path)
    await first.__aenter__()

    async with embedded_server(url, data_dir=tmp_path):
        await first.__aexit__(None, None, None)
        left = await probe(url)

    assert left is not None
    assert await probe(url) is None


async def test_users_that_come_at_once_share_one_server(url: str, tmp_path: Path) -> None:
    entered = 0

    async def use() -> tuple[bool, int | None]:
        nonlocal entered
        async with embedded_server(url, data_dir=tmp_path) as server:
            entered += 1
            await wait_until(lambda: entered == 8)
            return server.started, server.pid

    users = await asyncio.gather(*(use() for _ in range(8)))

    assert sum(started for started, _ in users) == 1
    assert len({pid for _, pid in users}) == 1


async def test_a_user_that_comes_while_the_last_one_leaves_gets_a_server(
    url: str, tmp_path: Path
) -> None:
    async def use() -> bool:
        async with embedded_server(url, data_dir=tmp_path):
            return await probe(url) is not None

    for _ in range(5):
        assert await use()
        assert all(await asyncio.gather(use(), use()))


async def test_a_failure_inside_the_block_ends_the_server(url: str, tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        async with embedded_server(url, data_dir=tmp_path):
            raise KeyError

    assert await probe(url) is None


async def test_a_cancelled_user_leaves(url: str, tmp_path: Path) -> None:
    entered = asyncio.Event()

    async def use() -> None:
        async with embedded_server(url, data_dir=tmp_path):
            entered.set()
            await asyncio.Event().wait()

    user = asyncio.create_task(use())
    await entered.wait()
    user.cancel()
    await asyncio.wait({user})

    assert user.cancelled()
    assert await probe(url) is None


async def test_a_start_that_is_cancelled_leaves_nothing(url: str, tmp_path: Path) -> None:
    user = asyncio.create_task(embedded_server(url, data_dir=tmp_path).__aenter__())
    await wait_until((tmp_path / "server.lock").exists)
    user.cancel()
    await asyncio.wait({user})

    await wait_until(lambda: not is_locked(tmp_path / "guard.lock"))

    assert not is_locked(tmp_path / "server.lock")
    assert await probe(url) is None


async def test_the_server_listens_on_loopback_at_its_port_only(url: str, tmp_path: Path) -> None:
    async with embedded_server(url, data_dir=tmp_path) as server:
        connections = psutil.Process(server.pid).net_connections()

    listening = [c.laddr for c in connections if c.status == psutil.CONN_LISTEN]
    assert listening == [("127.0.0.1", Address.parse(url).port)]


async def test_the_store_outlives_the_server_and_fresh_empties_it(url: str, tmp_path: Path) -> None:
    async with embedded_server(url, data_dir=tmp_path):
        await make_stream(url, "kept")
    async with embedded_server(url, data_dir=tmp_path):
        kept = await stream_names(url)
    async with embedded_server(url, data_dir=tmp_path, fresh=True):
        emptied = await stream_names(url)

    assert kept == ["kept"]
    assert emptied == []


async def test_fresh_is_refused_while_others_use_the_server(url: str, tmp_path: Path) -> None:
    async with embedded_server(url, data_dir=tmp_path):
        await make_stream(url, "kept")

        with pytest.raises(ConfigError, match="another dynbus run uses its server"):
            await enter(url, tmp_path, fresh=True)

        assert await stream_names(url) == ["kept"]


async def enter(url: str, data_dir: Path, *, fresh: bool = False) -> EmbeddedServer:
    async with embedded_server(url, data_dir=data_dir, fresh=fresh) as server:
        return server


async def test_a_foreign_server_with_jetstream_is_used_as_it_is(
    own_server: RunningServer, tmp_path: Path
) -> None:
    server = await enter(own_server.url, tmp_path)

    assert not server.started
    assert server.pid is None
    assert re.fullmatch(
        rf"nats-server [\d.]+ 'dynbus-\w+' used on {own_server.url}", server.description
    )
    assert await probe(own_server.url) is not None


async def test_fresh_is_refused_for_a_foreign_server(
    nats_server: RunningServer, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="--fresh cannot empty its store"):
        await enter(nats_server.url, tmp_path, fresh=True)


async def test_a_foreign_server_without_jetstream_is_refused_by_name(tmp_path: Path) -> None:
    server = await run_server(store_dir=tmp_path / "foreign", config="jetstream: false")

    async with server_stopped(server):
        with pytest.raises(
            ConfigError, match=r"nats-server [\d.]+ 'dynbus-\w+' .* has no JetStream.*-js"
        ):
            await enter(server.url, tmp_path / "ours")


async def test_the_server_of_another_folder_is_shared_until_its_last_user_is_gone(
    url: str, tmp_path: Path
) -> None:
    async with AsyncExitStack() as second_run:
        async with embedded_server(url, data_dir=tmp_path / "one") as first:
            second = await second_run.enter_async_context(
                embedded_server(url, data_dir=tmp_path / "two")
            )
        left = await probe(url)

    assert first.started
    assert not second.started
    assert f"joined on {first.url} (data in {tmp_path / 'one'};" in second.description
    assert left is not None
    assert left.name == first.info.name
    assert await probe(url) is None


async def test_fresh_is_refused_for_the_server_of_another_folder(url: str, tmp_path: Path) -> None:
    async with embedded_server(url, data_dir=tmp_path / "one" / ".dynbus"):
        with pytest.raises(ConfigError, match=f"belongs to a run in {tmp_path / 'one'}"):
            await enter(url, tmp_path / "two", fresh=True)


async def test_two_folders_that_start_at_one_port_at_once_share_the_server_of_one(
    url: str, tmp_path: Path
) -> None:
    async with AsyncExitStack() as one, AsyncExitStack() as two:
        servers = await asyncio.gather(
            one.enter_async_context(embedded_server(url, data_dir=tmp_path / "one")),
            two.enter_async_context(embedded_server(url, data_dir=tmp_path / "two")),
        )
        starter = one if servers[0].started else two

        await starter.aclose()
        left = await probe(url)

    assert sorted(server.started for server in servers) == [False, True]
    assert servers[0].data_dir == servers[1].data_dir
    assert left is not None
    assert left.name == servers[0].info.name == servers[1].info.name
    assert await probe(url) is None


async def test_a_folder_serves_one_port_at_a_time(url: str, tmp_path: Path) -> None:
    async with embedded_server(url, data_dir=tmp_path):
        with pytest.raises(ConfigError, match=f"runs on port {Address.parse(url).port}: use"):
            await enter(f"nats://127.0.0.1:{free_port()}", tmp_path)


async def test_a_port_that_something_else_holds_is_refused(tmp_path: Path) -> None:
    async with listener(b"SSH-2.0-x\r\n") as url:
        with pytest.raises(ConfigError, match="is not a NATS server"):
            await enter(url, tmp_path)


@pytest.mark.parametrize("url", ["nats://10.0.0.1:4222", "nats://bus.example:4222"])
async def test_nothing_is_started_for_another_machine(url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not on this machine"):
        await enter(url, tmp_path)

    assert os.listdir(tmp_path) == []


async def test_an_address_that_the_server_would_not_listen_at_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="listens on 127.0.0.1 only"):
        await enter(f"nats://127.0.0.2:{free_port()}", tmp_path)


async def test_a_server_that_does_not_start_is_an_error_with_its_log(
    url: str, tmp_path: Path
) -> None:
    (tmp_path / "store").write_text("a file where a folder should be")

    with pytest.raises(ConfigError, match=r"does not start on .*\n(.*\n)*.*not a directory"):
        await enter(url, tmp_path)


async def test_a_folder_that_cannot_be_made_is_named(url: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigError, match="the data folder .*file/data is unusable"):
        await enter(url, tmp_path / "file" / "data")


async def test_a_server_that_is_frozen_is_an_error_in_time(url: str, tmp_path: Path) -> None:
    async with embedded_server(url, data_dir=tmp_path) as server:
        process = psutil.Process(server.pid)
        process.suspend()
        # A signal is delivered some time later.
        await wait_until(lambda: process.status() == psutil.STATUS_STOPPED)

        with pytest.raises((ConfigError, Unavailable)):
            await enter(url, tmp_path)

    assert not process.is_running()


async def test_a_server_that_dies_is_restarted_for_its_users(url: str, tmp_path: Path) -> None:
    async with embedded_server(url, data_dir=tmp_path) as server:
        first = server.pid
        psutil.Process(first).kill()

        await wait_until(lambda: server.pid not in (None, first))
        joined = await enter(url, tmp_path)

    assert not joined.started
    assert joined.info.name == server.info.name


async def test_the_folder_is_kept_out_of_version_control(url: str, tmp_path: Path) -> None:
    await enter(url, tmp_path)

    assert (tmp_path / ".gitignore").read_text() == "*\n"


# Who is let in ----------------------------------------------------------------------------------


async def is_let_in(url: str) -> bool:
    """Whether the server takes a plain client."""
    client = Client()
    try:
        await client.connect(url, allow_reconnect=False, error_cb=ignore)
    except nats.errors.Error as error:
        if "Authorization Violation" not in str(error):
            raise
        return False
    finally:
        await client.close()
    return True


async def ignore(error: Exception) -> None:
    """The same error is raised."""


async def test_the_server_takes_those_alone_who_can_read_its_url(url: str, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        async with embedded_server(url, data_dir=tmp_path / "data"):
            known = (tmp_path / "data" / "nats.url").read_text().strip()
            wrong = f"{known[:20]}{'x' * 43}@127.0.0.1:{Address.parse(url).port}"
            let_in = [await is_let_in(each) for each in (url, wrong, known)]
    finally:
        os.umask(before)

    assert let_in == [False, False, True]
    assert Address.parse(known) == Address.parse(url)
    modes = {name: (tmp_path / "data" / name).stat().st_mode & 0o777 for name in PRIVATE}
    assert modes == PRIVATE


PRIVATE = {".": 0o700, "nats.url": 0o600, "nats-server.conf": 0o600}


async def test_a_folder_that_others_could_enter_is_closed(url: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir(mode=0o755)

    async with embedded_server(url, data_dir=tmp_path / "data"):
        assert (tmp_path / "data").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_a_program_in_any_folder_finds_what_lets_it_in(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"nats://{host}:{free_port()}"
    (tmp_path / "elsewhere").mkdir()
    async with embedded_server(url, data_dir=tmp_path / "data"):
        monkeypatch.chdir(tmp_path / "elsewhere")

        connection = await connect([url])

        await connection.barrier()
        await connection.close()


async def test_a_program_in_the_folder_needs_no_note(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbours, "notes_dir", lambda: tmp_path / "none" / "here")
    monkeypatch.chdir(tmp_path)
    async with embedded_server(url):
        connection = await connect([url])

        await connection.barrier()
        await connection.close()


async def test_what_lets_in_is_the_same_after_the_server_has_ended(
    url: str, tmp_path: Path
) -> None:
    known: list[str] = []
    for _ in range(2):
        async with embedded_server(url, data_dir=tmp_path):
            known.append((tmp_path / "nats.url").read_text())

    assert known[0] == known[1]


async def test_programs_in_other_folders_are_let_in_after_old_temporary_files_were_deleted(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = tmp_path / "notes"
    monkeypatch.setattr(neighbours, "notes_dir", lambda: notes)
    async with embedded_server(url, data_dir=tmp_path / "data"):
        known = neighbours.with_credential(url)
        shutil.rmtree(notes)

        await wait_until(lambda: neighbours.with_credential(url) == known)

    assert known == (tmp_path / "data" / "nats.url").read_text().strip()


async def test_nothing_is_shown_to_a_program_that_has_the_port_of_a_server_that_has_ended(
    url: str, tmp_path: Path
) -> None:
    async with embedded_server(url, data_dir=tmp_path):
        known = neighbours.with_credential(url)

    assert known == (tmp_path / "nats.url").read_text().strip()
    assert neighbours.with_credential(url) == url


@pytest.mark.parametrize(
    "other", ["tls://127.0.0.1:{}", "nats://a:b@127.0.0.1:{}", "ws://[::1]:{}"]
)
async def test_a_url_of_another_kind_is_left_as_it_is(other: str, url: str, tmp_path: Path) -> None:
    async with embedded_server(url, data_dir=tmp_path):
        other = other.format(Address.parse(url).port)

        assert neighbours.with_credential(other) == other


async def test_an_open_server_takes_anybody(url: str, tmp_path: Path) -> None:
    async with embedded_server(url, data_dir=tmp_path):
        pass
    async with embedded_server(url, data_dir=tmp_path, is_open=True):
        assert await is_let_in(url)
        connection = await connect([url])
        await connection.close()

    assert (tmp_path / "nats.url").read_text() == f"{url}\n"


OTHER_USER = """
import asyncio, os, sys
from dynbus.bus.errors import PermissionDenied
from dynbus.bus.nats.connection import connect

async def main():
    os.setgid(65534)
    os.setuid(65534)
    try:
        await connect([sys.argv[1]])
    except PermissionDenied as error:
        print(error)

asyncio.run(main())
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root becomes another user")
async def test_another_user_of_the_machine_is_refused_and_told_why(
    url: str, tmp_path: Path
) -> None:
    async with embedded_server(url, data_dir=tmp_path):
        ended = await anyio.run_process([sys.executable, "-c", OTHER_USER, url], cwd="/")

    assert "refuses the credentials" in ended.stdout.decode()
    assert "credential is in .dynbus/nats.url of the folder" in ended.stdout.decode()
    theirs = f"NATS_URL=nats://127.0.0.1:{Address.parse(url).port + 1}"
    assert theirs in ended.stdout.decode()
