"""Units of systemd: a service for each workload on one machine, and a target for all of them."""

from __future__ import annotations

from typing import Final

from .application import HEALTH_PORT, OVERHEAD_BYTES, Application, Workload

SECRETS: Final = "secrets"
_SPECIAL: Final = set(" \t\"'\\$%;#")


def units(application: Application, prefix: str, heading: str) -> dict[str, str]:
    """The unit files by their names.

    Args:
        prefix: the folder on that machine where the project and its environment `.venv` are.
    """
    target = f"{application.name}.target"
    names = [f"{application.name}-{each.name}.service" for each in application.workloads]
    files = {
        target: _file(
            heading,
            ("Unit", [("Description", f"All of {application.name}"), ("Wants", " ".join(names))]),
            ("Install", [("WantedBy", "multi-user.target")]),
        )
    }
    for index, (name, each) in enumerate(zip(names, application.workloads, strict=True)):
        files[name] = _service(application, each, prefix, HEALTH_PORT + index, target, heading)
    return files


def _service(
    application: Application, workload: Workload, prefix: str, port: int, target: str, heading: str
) -> str:
    command = application.command(workload, workers=workload.replicas, health=f"127.0.0.1:{port}")
    unit = [
        ("Description", f"{workload.address} of {application.name}"),
        ("PartOf", target),
        ("Wants", "network-online.target"),
        ("After", "network-online.target nats-server.service"),
    ]
    service = [
        ("Type", "exec"),
        ("User", application.name),
        ("WorkingDirectory", prefix),
        ("Environment", f"NATS_URL={','.join(application.servers) or 'nats://127.0.0.1:4222'}"),
    ]
    if application.keys:
        key = application.key_file(workload)
        # Root reads it, and only this service sees it.
        service += [
            ("LoadCredential", f"{key}:/etc/{application.name}/keys/{key}"),
            ("Environment", f"DYNBUS_CREDENTIALS=%d/{key}"),
        ]
    if application.variables:
        service.append(("EnvironmentFile", f"/etc/{application.name}/{SECRETS}.env"))
    words = [f"{prefix}/.venv/bin/dynbus", *command]
    service += [
        ("ExecStart", " ".join(map(_word, words))),
        # The signal goes to `dynbus run`, which tells its instances; what is left is killed.
        ("KillMode", "mixed"),
        ("TimeoutStopSec", str(workload.grace)),
        ("Restart", "on-failure"),
        ("RestartSec", "2"),
        ("NoNewPrivileges", "yes"),
        ("ProtectSystem", "strict"),
        ("ReadWritePaths", f"-{prefix}/.dynbus"),
        ("ProtectHome", "yes"),
        ("PrivateTmp", "yes"),
        ("ProtectKernelTunables", "yes"),
        ("ProtectControlGroups", "yes"),
        ("RestrictSUIDSGID", "yes"),
        ("CapabilityBoundingSet", ""),
    ]
    if not workload.resources.gpu:
        service.append(("PrivateDevices", "yes"))
    if workload.resources.memory is not None:
        most = workload.replicas * workload.resources.memory + OVERHEAD_BYTES
        service.append(("MemoryMax", str(most)))
    return _file(heading, ("Unit", unit), ("Service", service), ("Install", [("WantedBy", target)]))


def _word(word: str) -> str:
    """A word of `ExecStart`, in quotes where it needs them."""
    if word and not _SPECIAL & set(word):
        return word
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$").replace("%", "%%")
    return f'"{escaped}"'


def _file(heading: str, *sections: tuple[str, list[tuple[str, str]]]) -> str:
    parts = [
        "\n".join([f"[{name}]", *(f"{key}={value}" for key, value in lines)])
        for name, lines in sections
    ]
    return f"# {heading}\n" + "\n\n".join(parts) + "\n"
