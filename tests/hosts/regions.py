"""Regions on hosts of a lab, joined as docs/guides/regions.md has it: by the files that `dynbus
deploy nats` writes, with TLS and users."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.certificates import Authority

from dynbus.bus.nats.server_process import find_nats_server

from .host import Host
from .lab import Lab
from .program import Program, dynbus_in

WORKLOAD = str(Path(__file__).with_name("workload.py"))


class Regions:
    """Servers of regions, and those that join them.

    Args:
        folder: of the files; the operator's machine.
        servers: the hosts of each region's servers.
        backbone: the host of the server of each region that joins it to the others.

    Attributes:
        running: the server of each host, by the host's name.
    """

    def __init__(
        self, lab: Lab, folder: Path, servers: Mapping[str, str], backbone: Mapping[str, str]
    ) -> None:
        self.lab = lab
        self.running: dict[str, Program] = {}
        self._folder = folder
        self._servers = servers
        self._backbone = backbone
        self._make()

    def dynbus(self, *words: str) -> str:
        """The output of a command that asks nobody."""
        return dynbus_in(self._folder, *words)

    def _make(self) -> None:
        """Write the users, and the files of all servers."""
        lab, folder = self.lab, self._folder
        pair = Authority(folder).sign("server", *(host.address for host in lab), peer=True)
        tls = ("--route-tls", pair.cert, pair.key, str(folder / "authority.pem"))
        self.dynbus("auth", "init", "--tls-cert", pair.cert, "--tls-key", pair.key)
        self.dynbus("auth", "add", WORKLOAD, "--Counter.effects=effects")
        self.dynbus("auth", "add", WORKLOAD, "--Counter.effects=effects", "--client", "web")
        joining = self._places("".join(self._backbone.values()))
        self.dynbus("deploy", "nats", "--as-backbone", *joining, *tls, "--out", "deploy/backbone")
        for region, names in self._servers.items():
            self.dynbus(
                *("deploy", "nats", "--region", region, *self._places(names), *tls),
                *("--backbone", lab[self._backbone[region]].address),
                *("--users", "auth/nats-users.conf", "--out", f"deploy/{region}"),
                *("--store", "/mnt/nats", "--max-store", "20GB"),
            )

    def _places(self, names: str) -> list[str]:
        return [f"--server={name}={self.lab[name].address}" for name in names]

    def url(self, region: str) -> str:
        """What processes of a region connect to: any of its servers."""
        return ",".join(f"tls://{self.lab[name].address}:4222" for name in self._servers[region])

    def start(self, region: str) -> None:
        """Start the servers of a region, and the one that joins it, with what their stores have."""
        for name in (self._backbone[region], *self._servers[region]):
            self.begin_server(name)
        for name in (self._backbone[region], *self._servers[region]):
            self.running[name].says("Server is ready")

    def begin_server(self, name: str) -> None:
        """Start the server of a host."""
        host = self.lab[name]
        [file] = (self._folder / "deploy").glob(f"*/{name}.conf")
        for path in (file, self._folder / "auth" / "nats-users.conf"):
            shutil.copy(path, host.folder)
        host.run("sh", "-c", f"mountpoint -q /mnt || mount --bind {host.folder} /mnt")
        command = (str(find_nats_server()), "-c", f"/mnt/{name}.conf")
        self.running[name] = host.popen(*command)

    def ask(self, name: str, region: str, *words: str) -> str:
        """The output of a command of the operator's on a host, which asks a region."""
        command = (*self._as("operator"), "-m", "dynbus", *words, "--nats", self.url(region))
        return self.lab[name].run(*command)

    def begin(
        self, host: Host, user: str, module: str, *arguments: object, **variables: str
    ) -> Program:
        """Start a module of these tests on a host, with the key of a user."""
        command = (*self._as(user, **variables), "-m", module, *map(str, arguments))
        return host.popen(*command, name=module.rpartition(".")[2])

    def _as(self, user: str, **variables: str) -> tuple[str, ...]:
        given = (f"{name}={value}" for name, value in variables.items())
        key, ca = self._folder / f"auth/seeds/{user}.nk", self._folder / "authority.pem"
        return ("env", f"DYNBUS_CREDENTIALS={key}", f"DYNBUS_TLS_CA={ca}", *given, sys.executable)

    def begin_worker(self, host: Host, region: str, instance_id: str) -> Program:
        """Start a worker of `Counter`, which says "ready" when it serves."""
        effects = host.folder / "effects"
        module = "tests.hosts.worker"
        return self.begin(host, "hosts_Counter", module, self.url(region), effects, instance_id)
