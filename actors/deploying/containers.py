"""The image of an application, and the Compose file that runs it on one machine."""

from __future__ import annotations

import json
import os.path
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from dynbus.actors.documents.yaml_text import yaml_text

from .application import HEALTH_PORT, Application, Workload

USER: Final = 10001
"""Of the processes in a container, and their group."""
HOME: Final = "/app"
KEYS: Final = "/etc/dynbus/keys"
REQUIREMENTS: Final = "/tmp/requirements.txt"
NATS_IMAGE: Final = "nats:2.14-alpine"
"""The one of the official images that the tested server is nearest to."""

_READY: Final = (
    "import urllib.request as u; "
    f"u.urlopen('http://127.0.0.1:{HEALTH_PORT}/ready', timeout=2).close()"
)


def dockerfile(application: Application, requirements: str, heading: str) -> str:
    """The Dockerfile: what is installed is built where compilers are, and runs where none are.

    Args:
        requirements: a file of pip's in the project; empty for none.
    """
    extras = ",".join(["metrics", *(["nkeys"] if application.keys else [])])
    version = metadata.version("dynbus")
    more = f" -r {REQUIREMENTS}" if requirements else ""
    lines = [
        f"# {heading}",
        "ARG PYTHON=3.12",
        "",
        "FROM python:${PYTHON}-bookworm AS build",
        *([f"COPY {json.dumps([requirements, REQUIREMENTS])}"] if requirements else []),
        "RUN python -m venv /opt/venv \\",
        f"    && /opt/venv/bin/pip install --no-cache-dir 'dynbus[{extras}]=={version}'{more}",
        "",
        "FROM python:${PYTHON}-slim-bookworm",
        "COPY --from=build /opt/venv /opt/venv",
        f"WORKDIR {HOME}",
        "COPY . .",
        "# Where the run has its socket: a file system in memory is mounted there.",
        f"RUN install -d -m 0700 -o {USER} -g {USER} {HOME}/.dynbus",
        'ENV PATH="/opt/venv/bin:${PATH}" PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 HOME=/tmp',
        f"USER {USER}:{USER}",
        'ENTRYPOINT ["dynbus"]',
    ]
    return "\n".join(lines) + "\n"


def ignored(folder: str, heading: str) -> str:
    """The parts of the project that are not in the image: above all, keys.

    Args:
        folder: that of the deployment, in the project.
    """
    names = [".git", ".venv", "**/.dynbus", "**/__pycache__", "**/*.nk", "**/*.creds", "**/seeds"]
    names += ["**/.env", "**/secrets", folder]
    return "\n".join([f"# {heading}", *names]) + "\n"


def compose(application: Application, image: str, folder: Path, heading: str) -> str:
    """The Compose file, which lies in `folder`.

    Args:
        image: the name of what is built.
        folder: in the project, whose root is the current folder.
    """
    up = os.path.relpath(".", folder)
    services: dict[str, Any] = {}
    secrets: dict[str, Any] = {}
    volumes: dict[str, Any] = {}
    configs: dict[str, Any] = {}
    if not application.servers:
        services["nats"] = _nats(application)
        volumes["nats"] = {}
        if application.server_users:
            configs["nats-users"] = {"content": application.server_users}
            configs["nats-server"] = {"content": _server_config()}
    build = {"context": up, "dockerfile": os.path.relpath(folder / "Dockerfile", ".")}
    for each in application.workloads:
        services[each.name] = _service(application, each, image, build)
        if application.keys:
            secrets[each.user] = {"file": f"{up}/{application.keys}/{application.key_file(each)}"}
    for name in application.secret_files:
        secrets[name] = {"file": f"{up}/secrets/{name}"}
    document: dict[str, Any] = {"name": application.name, "services": services}
    for key, value in (("configs", configs), ("secrets", secrets), ("volumes", volumes)):
        if value:
            document[key] = value
    return f"# {heading}\n{yaml_text(document)}"


def _nats(application: Application) -> dict[str, Any]:
    service: dict[str, Any] = {"image": NATS_IMAGE}
    command = ["-js", "-sd", "/data", "-m", "8222"]
    if application.server_users:
        service["command"] = ["-c", "/etc/nats/server.conf"]
        service["configs"] = [
            {"source": "nats-server", "target": "/etc/nats/server.conf"},
            {"source": "nats-users", "target": "/etc/nats/nats-users.conf"},
        ]
    else:
        service["command"] = command
    return service | {
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "volumes": ["nats:/data"],
        "healthcheck": {
            "test": ["CMD", "wget", "-q", "-O", "-", "http://127.0.0.1:8222/healthz"],
            "interval": "2s",
            "retries": 30,
        },
        "restart": "unless-stopped",
    }


def _server_config() -> str:
    return 'http: 8222\njetstream { store_dir: "/data" }\ninclude "nats-users.conf"\n'


def _service(
    application: Application, workload: Workload, image: str, build: Mapping[str, str]
) -> dict[str, Any]:
    service: dict[str, Any] = {
        "image": image,
        "build": dict(build),
        # At all addresses of the container, which Compose publishes nowhere: a Prometheus that is
        # in the same project reads the metrics there.
        "command": application.command(workload, health=f"0.0.0.0:{HEALTH_PORT}"),
        "environment": environment(application, workload)
        | {name: f"${{{name}:?set it}}" for name in application.variables}
        # As they are where `docker compose` is called, and not at all where they are not set.
        | {"DYNBUS_HOST": None, "DYNBUS_ZONE": None},
        "user": f"{USER}:{USER}",
        "read_only": True,
        "tmpfs": ["/tmp", f"{HOME}/.dynbus:uid={USER},gid={USER},mode=0700"],
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "init": True,
        "stop_grace_period": f"{workload.grace}s",
        "healthcheck": {
            "test": ["CMD", "python", "-c", _READY],
            "interval": "5s",
            "timeout": "5s",
            "start_period": "10m",
            "start_interval": "2s",
        },
        "restart": "on-failure",
    }
    if not application.servers:
        service["depends_on"] = {"nats": {"condition": "service_healthy"}}
    if workload.port:
        # Several cannot have the same port of the machine: they get any.
        own = workload.port if workload.replicas == 1 else ""
        service["ports"] = [f"127.0.0.1:{own}:{workload.port}"]
    secrets = [{"source": name, "target": path} for name, path in application.secret_files.items()]
    if application.keys:
        secrets.append(
            {"source": workload.user, "target": f"{KEYS}/{application.key_file(workload)}"}
        )
    if secrets:
        service["secrets"] = secrets
    deploy = _deploy(workload)
    return service | ({"deploy": deploy} if deploy else {})


def environment(application: Application, workload: Workload) -> dict[str, str]:
    """The variables of a container, beside those that are secrets."""
    servers = ",".join(application.servers) or "nats://nats:4222"
    variables = {"NATS_URL": servers}
    if application.keys:
        variables["DYNBUS_CREDENTIALS"] = f"{KEYS}/{application.key_file(workload)}"
    return variables


def _deploy(workload: Workload) -> dict[str, Any]:
    deploy: dict[str, Any] = {}
    if workload.replicas != 1:
        deploy["replicas"] = workload.replicas
    limits: dict[str, Any] = {}
    if workload.resources.cpu is not None:
        limits["cpus"] = f"{workload.resources.cpu:g}"
    if workload.memory_limit is not None:
        # Compose's units are powers of 1024.
        limits["memory"] = f"{workload.memory_limit}b"
    resources: dict[str, Any] = {"limits": limits} if limits else {}
    if workload.resources.gpu:
        device = {"driver": "nvidia", "count": workload.resources.gpu, "capabilities": ["gpu"]}
        resources["reservations"] = {"devices": [device]}
    return deploy | ({"resources": resources} if resources else {})
