"""`dynbus deploy` writes what `dynbus run` would start, and starts nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.actors.commands.conftest import MakeFolder

from dynbus import cli
from dynbus.bus import exit_codes

ACTORS = """
from typing import Annotated

from pydantic import Field

from dynbus import Actor, depends, handler

class Printer(Actor, namespace="shop", resources={"cpu": 2}):
    @handler(durable=True)
    async def print(self, text: str) -> int:
        return len(text)

class Front(Actor, namespace="shop", workers=2):
    printer = depends(Printer)

    def __init__(
        self, host: str = "127.0.0.1", port: int = 8000,
        key: Annotated[str, Field(repr=False)] = "",
    ) -> None:
        pass

    @handler
    async def order(self, text: str) -> int:
        return 1
"""


@pytest.fixture(autouse=True)
def folder(folder_with: MakeFolder, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("NATS_URL", raising=False)
    made = folder_with("deployed_actors", ACTORS)
    (made / "tls.yaml").write_text("bus: {tls_ca: /etc/nats/ca.pem, servers: [tls://a:4222]}\n")
    (made / "left_out.yaml").write_text("bus: {tls_ca: secrets/ca.pem}\n")
    (made / "baked.yaml").write_text("bus: {tls_cert: cert.pem, tls_key: own.pem}\n")
    (made / "shop.yaml").write_text("Front: {port: 9000}\nbus: {drain_grace: 60}\n")
    return made


def deploy(target: str, *arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        cli.main(["deploy", target, "deployed_actors.py", "-f", "shop.yaml", *arguments])
    return int(end.value.code or 0)


def services() -> dict[str, Any]:
    services: dict[str, Any] = yaml.safe_load(Path("deploy/docker/compose.yaml").read_text())[
        "services"
    ]
    return services


def test_each_node_is_served_by_itself_as_the_run_would() -> None:
    assert deploy("docker") == exit_codes.OK

    found = services()
    assert found["front"]["command"] == [
        *("run", "deployed_actors.py", "-f", "shop.yaml"),
        *("--Printer.ServiceArgs.workers=0", "--Front.ServiceArgs.workers=1"),
        *("--Front.host=0.0.0.0", "--health", "0.0.0.0:9180", "--health-public"),
        *("--log-format", "json"),
    ]
    assert found["front"]["deploy"]["replicas"] == 2
    assert found["printer"]["deploy"]["resources"]["limits"]["cpus"] == "2"
    # `drain_grace`, what `on_stop` may take, and 5 s.
    assert found["printer"]["stop_grace_period"] == "95s"


@pytest.mark.parametrize(
    ("kind", "keys", "suffix"),
    [((), "auth/seeds", ".nk"), (("--jwt", "--account", "red"), "auth/creds/red", ".creds")],
)
def test_each_node_has_its_own_credential_and_the_server_its_users(
    folder: Path, kind: tuple[str, ...], keys: str, suffix: str
) -> None:
    for arguments in (["init", *kind], ["add", "deployed_actors.py"]):
        with pytest.raises(SystemExit):
            cli.main(["auth", *arguments])
    (folder / "shop.yaml").write_text(f"bus: {{credentials: {keys}}}\n")
    users = (folder / "auth" / "nats-users.conf").read_text()

    assert deploy("docker") == exit_codes.OK

    compose = yaml.safe_load(Path("deploy/docker/compose.yaml").read_text())
    assert compose["configs"]["nats-users"]["content"].replace("$$", "$") == users
    assert compose["secrets"]["shop_Front"]["file"] == f"../../{keys}/shop_Front{suffix}"
    front = compose["services"]["front"]
    key = f"/etc/dynbus/keys/shop_Front{suffix}"
    assert front["environment"]["DYNBUS_CREDENTIALS"] == key
    assert front["secrets"] == [{"source": "shop_Front", "target": key}]


def test_check_fails_where_the_files_are_not_those_of_the_graph(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert deploy("docker", "--check") == exit_codes.FAILURE
    assert deploy("docker") == deploy("docker", "--check") == exit_codes.OK
    (folder / "shop.yaml").write_text("Front: {port: 9001}\n")
    capsys.readouterr()

    assert deploy("docker", "--check") == exit_codes.FAILURE

    assert capsys.readouterr().out == "deploy/docker/compose.yaml: differs\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--Front.key=abc",), "--Front.key is a secret, which would be in a file"),
        (("--nats", "nats://me:secret@bus:4222"), "servers has the password of a URL"),
        (("--scale", "Frnt=0:4"), "starts no node Frnt (did you mean Front?)"),
        (("--scale", "Front=4:2"), "write LEAST:MOST"),
        (("--scale", "Front=0:4"), "give --prometheus URL"),
        (("--hosts", "Front=2"), "needs --join Front=COMMAND"),
        (("--name", "Shop_1"), "'Shop_1' cannot name what is deployed"),
        (
            ("-f", "tls.yaml"),
            "tls_ca = '/etc/nats/ca.pem' would not be in the containers: bring it there by "
            "--secret-file ca.pem=/etc/nats/ca.pem",
        ),
        (
            ("-f", "left_out.yaml"),
            "tls_ca = 'secrets/ca.pem' would not be in the containers: bring it there by "
            "--secret-file ca.pem=/etc/nats/ca.pem, and set tls_ca to /etc/nats/ca.pem",
        ),
        (("-f", "baked.yaml"), "tls_key = 'own.pem' would be in the image"),
    ],
)
def test_what_cannot_be_deployed_is_refused_with_the_remedy(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert deploy("kubernetes", "--image", "shop:1", *arguments) in (
        exit_codes.USAGE,
        exit_codes.CONFIG_ERROR,
    )

    assert said in " ".join(capsys.readouterr().err.split())
    assert not Path("deploy").exists()


def test_a_secret_comes_by_a_variable_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNBUS_Front__key", "abc")

    assert deploy("docker", "--secret", "DYNBUS_Front__key") == exit_codes.OK

    text = Path("deploy/docker/compose.yaml").read_text()
    assert "DYNBUS_Front__key: ${DYNBUS_Front__key:?set it}" in text
    assert "abc" not in text


@pytest.mark.parametrize(
    ("target", "arguments", "files"),
    [
        ("kubernetes", ("--image", "shop:1", "--scale", "Printer=0:4"), 7),
        ("systemd", ("--prefix", "/opt/shop"), 3),
        ("slurm", ("--nats", "nats://bus.example:4222"), 1),
    ],
)
def test_the_other_targets_have_files_of_their_own(
    target: str, arguments: tuple[str, ...], files: int
) -> None:
    assert deploy(target, *arguments) == exit_codes.OK

    assert len(list(Path("deploy", target).iterdir())) == files


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ((), "dynbus"),
        (("--region", "eu", "--backbone", "10.1.0.9"), "eu"),
        (("--region", "eu", "--backbone", "10.1.0.9", "--cluster", "own"), "own"),
    ],
)
def test_the_cluster_of_a_region_has_another_name_than_that_of_the_backbone(
    given: tuple[str, ...], name: str
) -> None:
    # Servers refuse a leaf node of a cluster that is called as their own.
    servers = [f"--server={one}=10.1.0.{number}" for number, one in enumerate("abc", 1)]

    with pytest.raises(SystemExit) as end:
        cli.main(["deploy", "nats", *servers, "--without-users", *given])

    assert not end.value.code
    assert f'cluster {{\n  name: "{name}"\n' in Path("deploy/nats/a.conf").read_text()
