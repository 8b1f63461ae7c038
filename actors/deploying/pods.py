"""The pod of a workload: how its processes are started, looked after, confined and ended."""

from __future__ import annotations

import hashlib
from typing import Any, Final

from dynbus.actors.declaring.resources import memory_text

from .application import HEALTH_PORT, Application, Hosts, Workload
from .containers import HOME, KEYS, USER, environment

CONFIGS: Final = "/etc/dynbus/config"
ZONE_LABEL: Final = "topology.kubernetes.io/zone"
PRE_STOP_SECONDS: Final = 5
"""Until no load balancer sends anything more to a port of a pod that ends."""

Json = dict[str, Any]


def object_name(application: Application, workload: Workload) -> str:
    return f"{application.name}-{workload.name}"


def labels(application: Application, workload: Workload) -> dict[str, str]:
    """The labels of what belongs to a workload, by which it is selected."""
    return {
        "app.kubernetes.io/part-of": application.name,
        "app.kubernetes.io/component": workload.name,
    }


def config_name(path: str) -> str:
    """The key of a YAML file in the ConfigMap."""
    return path.replace("/", "-").lstrip(".-")


def pod_template(application: Application, workload: Workload, *, image: str, gpu: str) -> Json:
    """The template of the pods that serve a workload.

    Args:
        gpu: the name of the resource that is a GPU.
    """
    config = "\n".join(f"{path}\n{text}" for path, text in application.configs.items())
    annotations = {"dynbus.config/sha256": hashlib.sha256(config.encode()).hexdigest()}
    return {
        "metadata": {
            "labels": labels(application, workload),
            # A changed configuration replaces the pods, as a changed image does.
            **({"annotations": annotations} if config else {}),
        },
        "spec": _spec(application, workload, _container(application, workload, image, gpu)),
    }


def joining_template(
    application: Application, workload: Workload, hosts: Hosts, *, image: str, gpu: str
) -> Json:
    """The template of the pods on the further hosts of an instance, which serve nothing."""
    serving = _container(application, workload, image, gpu)
    container = {key: serving[key] for key in ("name", "image", "securityContext", "volumeMounts")}
    container |= {"command": ["sh", "-c", hosts.join]}
    if "resources" in serving:
        container["resources"] = serving["resources"]
    return {
        "metadata": {"labels": labels(application, workload)},
        "spec": _spec(application, workload, container),
    }


def _spec(application: Application, workload: Workload, container: Json) -> Json:
    spread = {
        "maxSkew": 1,
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": labels(application, workload)},
    }
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": grace_seconds(workload),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "topologySpreadConstraints": [
            {"topologyKey": key, **spread} for key in (ZONE_LABEL, "kubernetes.io/hostname")
        ],
        "containers": [container],
        "volumes": _volumes(application, workload),
    }


def grace_seconds(workload: Workload) -> int:
    """Seconds from the moment when a pod is to end until it is killed."""
    return workload.grace + (PRE_STOP_SECONDS if workload.port else 0)


def _container(application: Application, workload: Workload, image: str, gpu: str) -> Json:
    container: Json = {
        "name": "dynbus",
        "image": image,
        **_start(application, workload),
        "env": _variables(application, workload),
        "ports": [
            {"name": "health", "containerPort": HEALTH_PORT},
            *([{"name": "http", "containerPort": workload.port}] if workload.port else []),
        ],
        # `/live` answers once the targets are planned; how long a model loads, only `/ready` tells.
        "startupProbe": _probe("/live", period=2, failures=60),
        "livenessProbe": _probe("/live", period=10, failures=3),
        "readinessProbe": _probe("/ready", period=5, failures=2),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": _mounts(application, workload),
    }
    if workload.port:
        # On the bus an instance is no longer called before it drains; a Service learns it later.
        container["lifecycle"] = {"preStop": {"sleep": {"seconds": PRE_STOP_SECONDS}}}
    if resources := _resources(workload, gpu):
        container["resources"] = resources
    return container


def _start(application: Application, workload: Workload) -> Json:
    command = application.command(
        workload,
        configs=[f"{CONFIGS}/{config_name(path)}" for path in application.configs],
        health=f"0.0.0.0:{HEALTH_PORT}",
    )
    if workload.hosts is None or not workload.hosts.lead:
        return {"args": command}
    script = f'{workload.hosts.lead} && exec dynbus "$@"'
    return {"command": ["sh", "-c", script, "dynbus"], "args": command}


def _probe(path: str, *, period: int, failures: int) -> Json:
    return {
        "httpGet": {"path": path, "port": "health"},
        "periodSeconds": period,
        "timeoutSeconds": 2,
        "failureThreshold": failures,
    }


def _variables(application: Application, workload: Workload) -> list[Json]:
    plain = [
        {"name": name, "value": value} for name, value in environment(application, workload).items()
    ]
    places = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in (
            ("DYNBUS_HOST", "spec.nodeName"),
            ("DYNBUS_ZONE", f"metadata.labels['{ZONE_LABEL}']"),
        )
    ]
    secrets = [
        {
            "name": name,
            "valueFrom": {"secretKeyRef": {"name": secrets_name(application), "key": name}},
        }
        for name in application.variables
    ]
    return [*plain, *places, *secrets]


def secrets_name(application: Application) -> str:
    """The Secret that the operator makes, with the variables and files of all workloads."""
    return f"{application.name}-secrets"


def key_secret(application: Application, workload: Workload) -> str:
    """The Secret that the operator makes with the key of a workload."""
    return f"{object_name(application, workload)}-key"


def _volumes(application: Application, workload: Workload) -> list[Json]:
    volumes: list[Json] = [
        {"name": "tmp", "emptyDir": {}},
        {"name": "run", "emptyDir": {"medium": "Memory", "sizeLimit": "16Mi"}},
    ]
    if workload.resources.gpu:
        # What the processes of one engine share; it counts as memory of the container.
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory"}})
    if application.configs:
        name = f"{application.name}-config"
        volumes.append({"name": "config", "configMap": {"name": name}})
    if application.keys:
        name = key_secret(application, workload)
        volumes.append({"name": "key", "secret": {"secretName": name, "defaultMode": 0o440}})
    if application.secret_files:
        items = [{"key": name, "path": name} for name in application.secret_files]
        secret = {"secretName": secrets_name(application), "defaultMode": 0o440, "items": items}
        volumes.append({"name": "secrets", "secret": secret})
    return volumes


def _mounts(application: Application, workload: Workload) -> list[Json]:
    mounts: list[Json] = [
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "run", "mountPath": f"{HOME}/.dynbus"},
    ]
    if workload.resources.gpu:
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    if application.configs:
        mounts.append({"name": "config", "mountPath": CONFIGS, "readOnly": True})
    if application.keys:
        mounts.append({"name": "key", "mountPath": KEYS, "readOnly": True})
    for name, path in application.secret_files.items():
        mounts.append({"name": "secrets", "mountPath": path, "subPath": name, "readOnly": True})
    return mounts


def _resources(workload: Workload, gpu: str) -> Json:
    declared, memory = workload.resources, workload.memory_limit
    requests: Json = {}
    limits: Json = {}
    if declared.cpu is not None:
        requests["cpu"] = f"{round(declared.cpu * 1000)}m"
    if memory is not None:
        requests["memory"] = limits["memory"] = memory_text(memory)
    if declared.gpu:
        limits[gpu] = declared.gpu
    return {key: each for key, each in (("requests", requests), ("limits", limits)) if each}
