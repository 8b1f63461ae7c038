"""Configurations of servers, as nats-server reads them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from tests.certificates import Authority

from dynbus.actors.deploying.servers import (
    CLUSTER,
    UNIT,
    RouteTls,
    ServerChoices,
    ServerPlace,
    server_files,
    server_urls,
)
from dynbus.bus.errors import ConfigError
from dynbus.bus.nats.server_process import find_nats_server

CHOICES = ServerChoices("fleet", "/var/lib/nats", "100GB", has_users=False)
THREE = [ServerPlace.parse(text) for text in ("a=10.0.0.1,east", "b=b.example", "c=fd00::3")]


@pytest.mark.parametrize("count", [1, 3])
def test_nats_server_takes_the_files(count: int, tmp_path: Path) -> None:
    for name, text in server_files(THREE[:count], CHOICES, "made").items():
        (tmp_path / name).write_text(text)

    for place in THREE[:count]:
        path = tmp_path / f"{place.name}.conf"
        done = subprocess.run(
            [find_nats_server(), "-t", "-c", path], capture_output=True, text=True, check=False
        )
        assert (done.returncode, "is valid" in done.stderr) == (0, True), done.stderr


def test_a_server_knows_the_others_and_not_itself() -> None:
    routes = RouteTls("/etc/own.pem", "/etc/own.key", "/etc/ca.pem")
    choices = CHOICES._replace(has_users=True, routes=routes)

    text = server_files(THREE, choices, "made")["b.conf"]

    assert text.startswith("# made\n")
    assert '    "nats://10.0.0.1:6222"\n    "nats://[fd00::3]:6222"\n  ]' in text
    assert "b.example:6222" not in text.split("routes:")[1]
    assert '    ca_file: "/etc/ca.pem"\n    verify: true\n' in text
    assert text.endswith('include "nats-users.conf"\n')


@pytest.mark.parametrize("encrypted", [False, True])
def test_nats_server_takes_the_files_of_regions_and_of_what_joins_them(
    tmp_path: Path, encrypted: bool
) -> None:
    (tmp_path / "region").mkdir()
    (tmp_path / "backbone").mkdir()
    routes: RouteTls | None = None
    if encrypted:
        authority = Authority(tmp_path)
        own = authority.sign("server", "10.0.0.1", peer=True)
        routes = RouteTls(own.cert, own.key, authority.ca)
    choices = CHOICES._replace(routes=routes)
    backbone = choices._replace(cluster=CLUSTER, is_backbone=True)
    region = choices._replace(cluster="eu", region="eu", backbone=("10.0.0.1", "fd00::3"))
    for folder, chosen, places in (("backbone", backbone, THREE[:2]), ("region", region, THREE)):
        for name, text in server_files(places, chosen, "made").items():
            (tmp_path / folder / name).write_text(text)
        done = subprocess.run(
            [find_nats_server(), "-t", "-c", tmp_path / folder / "a.conf"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr

    text = (tmp_path / "region" / "a.conf").read_text()
    assert '  domain: "eu"\n' in text
    assert 'urls: ["nats-leaf://10.0.0.1:7422", "nats-leaf://[fd00::3]:7422"]' in text
    assert text.count('"*.*._work.>"') == 2
    joining = (tmp_path / "backbone" / "a.conf").read_text()
    assert "jetstream {" not in joining
    assert 'listen: "127.0.0.1:4222"' in joining


def test_processes_are_given_each_server_with_its_zone() -> None:
    assert server_urls(THREE, encrypted=True) == (
        "tls://10.0.0.1:4222?zone=east,tls://b.example:4222,tls://[fd00::3]:4222"
    )


def test_what_makes_no_cluster_is_refused() -> None:
    for text in ("a", "=10.0.0.1", "a=", "a=ten zero", "two words=10.0.0.1", "a=10.0.0.1,no zone"):
        with pytest.raises(ConfigError):
            ServerPlace.parse(text)
    with pytest.raises(ConfigError, match="neither is the majority: give one, or three"):
        server_files(THREE[:2], CHOICES, "made")
    with pytest.raises(ConfigError, match="the addresses 10.0.0.1, 10.0.0.1, b.example: give each"):
        server_files([THREE[0], THREE[0]._replace(name="d"), THREE[1]], CHOICES, "made")
    region = CHOICES._replace(cluster=CLUSTER, region="eu", backbone=("10.0.0.9",))
    with pytest.raises(ConfigError, match="cannot all be called dynbus: give --cluster another"):
        server_files(THREE, region, "made")
    assert server_files(THREE[:1], region, "made")
    with pytest.raises(ConfigError, match="'much' is no size: write one as in 100GB"):
        server_files(THREE, CHOICES._replace(max_store="much"), "made")


def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    systemd = shutil.which("systemd-analyze")
    if systemd is None:
        pytest.skip("systemd-analyze is not installed")
    program = tmp_path / "nats-server"
    program.touch(mode=0o755)
    text = server_files(THREE, CHOICES, "made")[UNIT]
    (tmp_path / UNIT).write_text(text.replace("/usr/local/bin/nats-server", str(program)))

    done = subprocess.run(
        [systemd, "verify", "--man=no", tmp_path / UNIT],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")
