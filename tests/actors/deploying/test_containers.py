"""The image and the Compose file, by a linter and by the specification of Compose."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tests.actors.deploying.literals import ELSEWHERE, PLAIN, WHOLE

from dynbus.actors.deploying.application import Application
from dynbus.actors.deploying.containers import compose, dockerfile, ignored

FOLDER = Path("deploy/docker")


def services(application: Application) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = yaml.safe_load(
        compose(application, "chat:1", FOLDER, "made")
    )["services"]
    return found


@pytest.mark.parametrize("requirements", ["", "requirements.txt"])
def test_a_linter_finds_nothing_in_the_dockerfile(requirements: str, tmp_path: Path) -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if hadolint is None:
        pytest.skip("hadolint is not installed")
    path = tmp_path / "Dockerfile"
    path.write_text(dockerfile(WHOLE, requirements, "made"))

    done = subprocess.run([hadolint, path], capture_output=True, text=True, timeout=60, check=False)

    assert (done.returncode, done.stdout) == (0, "")


def test_what_runs_is_not_root_and_has_no_compiler() -> None:
    text = dockerfile(WHOLE, "", "made")

    *_, last = text.split("FROM ")
    assert last.startswith("python:${PYTHON}-slim-bookworm\n")
    assert re.findall("^USER (.*)$", last, re.MULTILINE) == ["10001:10001"]
    assert "pip install" not in last
    assert "'dynbus[metrics,nkeys]==" in text


def test_no_key_is_in_the_image() -> None:
    assert {"**/*.nk", "**/seeds", ".venv", "deploy/docker"} <= set(
        ignored("deploy/docker", "made").splitlines()
    )


@pytest.mark.parametrize("application", [PLAIN, WHOLE, ELSEWHERE], ids=["plain", "whole", "nats"])
def test_the_compose_file_fits_the_specification(application: Application) -> None:
    specification = pytest.importorskip("compose_spec")

    text = compose(application, "chat:1", FOLDER, "made")

    specification.PyCompose.from_yaml(text)
    assert compose(application, "chat:1", FOLDER, "made") == text


def test_services_are_confined_and_have_their_grace() -> None:
    found = services(WHOLE)

    assert set(found) == {"nats", "front", "engine", "large", "printer"}
    assert all(each["read_only"] and each["cap_drop"] == ["ALL"] for each in found.values())
    assert found["printer"]["stop_grace_period"] == "95s"
    assert found["engine"]["deploy"] == {
        "replicas": 4,
        "resources": {
            "limits": {"cpus": "3.5", "memory": f"{8448 * 1024**2}b"},
            "reservations": {
                "devices": [{"driver": "nvidia", "count": 2, "capabilities": ["gpu"]}]
            },
        },
    }
    assert found["front"]["environment"] == {
        "NATS_URL": "nats://nats:4222",
        "DYNBUS_CREDENTIALS": "/etc/dynbus/keys/chat_Front.nk",
        "HF_TOKEN": "${HF_TOKEN:?set it}",
        "DYNBUS_HOST": None,
        "DYNBUS_ZONE": None,
    }


def test_no_server_runs_beside_them_where_there_are_servers() -> None:
    found = services(ELSEWHERE)

    assert "nats" not in found
    assert found["front"]["environment"] == {
        "NATS_URL": "nats://a.example:4222,tls://b.example:4333",
        "DYNBUS_HOST": None,
        "DYNBUS_ZONE": None,
    }
