"""A fleet as docs/guides/fleet has it: made by the pages' commands, upgraded, broken and mended."""

from __future__ import annotations

import re
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.certificates import Authority, Pair
from tests.conditions import wait_until

from dynbus.bus.nats.server_process import find_nats_server

from .host import Host
from .lab import Lab
from .program import Program, dynbus_in

ACTORS = """
from dynbus import Actor, handler

class Echo(Actor, namespace="fleet"):
    @handler(idempotent=True)
    async def echo(self, text: str) -> str:
        return text

    @handler(durable=True)
    async def keep(self, text: str) -> str:
        return text
"""
CALLER = """
import asyncio
from dynbus import DynbusError, Runtime

async def main():
    async with Runtime.connect(name="web") as runtime:
        echo = await runtime.endpoint("fleet.Echo.echo").client()
        await echo.wait_for_instances(60.0)
        count = 0
        while True:
            try:
                await echo.generate("text")
                count += 1
                print("answered", count, flush=True)
            except DynbusError as error:
                print("failed", type(error).__name__, error, flush=True)
            await asyncio.sleep(0.05)

asyncio.run(main())
"""
FORGET = """
import asyncio, os, ssl
import nats

async def main():
    client = await nats.connect(
        os.environ["NATS_URL"].partition("?")[0].partition(",")[0],
        tls=ssl.create_default_context(cafile=os.environ["DYNBUS_TLS_CA"]),
        nkeys_seed=os.environ["DYNBUS_CREDENTIALS"],
        inbox_prefix=b"_R.remover",
    )
    answer = await client.request("$JS.API.SERVER.REMOVE", b'{"peer": "b"}', timeout=10)
    print(answer.data.decode())
    await client.close()

asyncio.run(main())
"""
SERVERS, WORKERS = "abc", "de"


class Fleet:
    """Servers on a, b and c, workers on d and e, everybody else on f, and g to spare; by TLS, with
    users."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab = lab
        self.folder = folder
        self.servers: dict[str, Program] = {}
        self.url = ""
        self.authority = Authority(folder)
        (folder / "actors.py").write_text(ACTORS)

    def make(self, *command: str) -> str:
        """The output of a command of dynbus that asks nobody, in the project's folder."""
        return dynbus_in(self.folder, *command)

    def command(self, user: str, *words: str) -> list[str]:
        """A command line that runs in the project's folder with the key of a user."""
        variables = [
            f"NATS_URL={self.url}",
            f"DYNBUS_CREDENTIALS={self.folder}/auth/seeds{user and f'/{user}.nk'}",
            f"DYNBUS_TLS_CA={self.authority.ca}",
        ]
        folder = str(self.folder)
        return ["env", "-C", folder, *variables, sys.executable, *words]

    def dynbus(self, *words: str, user: str = "operator") -> str:
        """The output of a command on f."""
        return self.lab["f"].run(*self.command(user, "-m", "dynbus", *words))

    def is_well(self) -> bool:
        """True if `dynbus doctor --all` finds nothing that failed."""
        try:
            self.dynbus("doctor", "--all")
        except AssertionError:
            return False
        return True

    def diagnosis(self) -> str:
        """The output of `dynbus doctor --all --json`, whatever it finds."""
        try:
            return self.dynbus("doctor", "--all", "--json")
        except AssertionError as error:
            return str(error)

    def deploying(self, pair: Pair, names: str) -> list[str]:
        """The command that writes the configuration of the servers on some hosts."""
        return [
            *("deploy", "nats", "--users", "auth/nats-users.conf"),
            *("--store", "/mnt/nats", "--max-store", "20GB"),
            *("--route-tls", str(pair.cert), str(pair.key), str(self.authority.ca)),
            *(f"--server={name}={self.lab[name].address}" for name in names),
        ]

    def copy_files(self, host: Host) -> None:
        for name in (f"deploy/nats/{host.name}.conf", "auth/nats-users.conf"):
            shutil.copy(self.folder / name, host.folder)

    def reload_server(self, name: str) -> None:
        """Have a server read what is new in its files."""
        self.copy_files(self.lab[name])
        before = self.servers[name].output.count("Reloaded server configuration")
        self.servers[name].signal(signal.SIGHUP)
        wait_until(
            lambda: self.servers[name].output.count("Reloaded server configuration") > before,
            what=f"{name} reloads",
        )

    def start_server(self, host: Host) -> None:
        """Start the server of a host, with what its store has."""
        self.copy_files(host)
        host.run("mount", "--bind", str(host.folder), "/mnt")
        path = f"/mnt/{host.name}.conf"
        self.servers[host.name] = host.popen(str(find_nats_server()), "-c", path)

    def end_server(self, name: str) -> None:
        """End a server by its lame-duck mode, as its unit does."""
        server = self.servers[name]
        server.signal(signal.SIGUSR2)
        wait_until(lambda: server.has_ended, what=f"{server!r} ends")
        self.lab[name].run("umount", "/mnt")

    def start_worker(self, host: Host) -> Program:
        command = self.command("", "-m", "dynbus", "run", "actors.py")
        return host.popen(*command, name="run")


@pytest.fixture
def fleet(namespaces: None, tmp_path: Path) -> Iterator[Fleet]:
    with Lab("abcdefg", tmp_path / "hosts") as lab:
        yield Fleet(lab, tmp_path)


def test_a_fleet_is_made_upgraded_and_mended_without_a_call_that_fails(fleet: Fleet) -> None:
    lab = fleet.lab
    addresses = [lab[name].address for name in (*SERVERS, "g")]
    pair = fleet.authority.sign("server", *addresses, peer=True)
    fleet.make("auth", "init", "--tls-cert", str(pair.cert), "--tls-key", str(pair.key))
    fleet.make("auth", "add", "actors.py")
    fleet.make("auth", "add", "actors.py", "--client", "web")
    printed = fleet.make(*fleet.deploying(pair, SERVERS))
    fleet.url = printed.split("NATS_URL=")[1].strip()
    assert fleet.url.count("tls://") == 3

    # Servers, streams, workers, callers.
    for name in SERVERS:
        fleet.start_server(lab[name])
    wait_until(fleet.is_well, what="the servers have a leader")
    fleet.dynbus("setup", "fleet", "--durable", "Echo.keep")
    for worker in [fleet.start_worker(lab[name]) for name in WORKERS]:
        worker.says("fleet.Echo@")
    caller = lab["f"].popen(*fleet.command("web", "-c", CALLER), name="caller")
    caller.says("answered 20")
    for endpoint in ("echo", "keep"):
        said = fleet.dynbus("call", f"fleet.Echo.{endpoint}", '"text"', user="web")
        assert said.strip() == '"text"'
    assert fleet.is_well()

    # Each server in turn, in its lame-duck mode.
    for name in SERVERS:
        fleet.end_server(name)
        fleet.start_server(lab[name])
        wait_until(fleet.is_well, what=f"{name} is back")

    # A host is lost with its disk, and replaced.
    lab["b"].die()
    answered(caller, 40)
    assert not fleet.is_well()
    shutil.rmtree(lab["b"].folder / "nats")
    lab.power_on(lab["b"])
    fleet.start_server(lab["b"])
    wait_until(fleet.is_well, what="b is back, and its streams with it")

    # It is lost for good, and a server of another name is there in its stead.
    lab["b"].die()
    printed = fleet.make(*fleet.deploying(pair, "acg"))
    fleet.url = printed.split("NATS_URL=")[1].strip()
    fleet.start_server(lab["g"])
    fleet.reload_server("a")
    fleet.reload_server("c")
    wait_until(lambda: "not at b" in fleet.diagnosis(), what="doctor names b")
    answered(caller, 20)
    fleet.make("auth", "add", "remover", "--role", "system")
    for name in "acg":
        fleet.reload_server(name)
    assert '"success":true' in lab["f"].run(*fleet.command("remover", "-c", FORGET))
    wait_until(fleet.is_well, what="g has the streams of b")

    # A host more.
    fleet.start_worker(lab["a"]).says("fleet.Echo@")
    answered(caller, 20)
    assert "failed" not in caller.output


def answered(caller: Program, more: int) -> None:
    """Wait until so many further calls were answered."""
    numbers = re.findall(r"answered (\d+)", caller.output)
    caller.says(f"answered {int(numbers[-1]) + more}\n")
