"""The objects of an application in Kubernetes, as a kustomization of plain files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from dynbus.actors.documents.yaml_text import yaml_text
from dynbus.bus.work_queue import CONSUMER

from .application import HEALTH_PORT, Application, Queue, Workload
from .pods import Json, config_name, joining_template, labels, object_name, pod_template

NATS_CHART: Final = "2.14.2"
CHARTS: Final = "https://nats-io.github.io/k8s/helm/charts/"
USERS_FOLDER: Final = "nats-users"
NATS_PORT: Final = 4222
MONITOR_PORT: Final = 8222


class Cluster(NamedTuple):
    """The facts of the cluster that a deployment depends on.

    Attributes:
        image: the name of the application's image, with its tag or digest.
        gpu: the name of the resource that is a GPU.
        prometheus: the URL that KEDA asks; empty where nothing scales by calls.
        nats_monitor: HOST:PORT of the monitoring of servers that are there already, for KEDA.
    """

    image: str
    gpu: str = "nvidia.com/gpu"
    prometheus: str = ""
    nats_monitor: str = ""


def kubernetes(application: Application, cluster: Cluster, heading: str) -> dict[str, str]:
    """The files of the kustomization, by their names."""
    files: dict[str, list[Json]] = {}
    for each in application.workloads:
        files[f"{each.name}.yaml"] = list(_objects(application, each, cluster))
    files["metrics.yaml"] = list(_metrics(application))
    if application.configs:
        files["config.yaml"] = [_config(application)]
    kustomization: Json = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": application.name,
        "resources": ["namespace.yaml", *sorted(files)],
    }
    files["namespace.yaml"] = [_namespace(application)]
    if not application.servers:
        if application.server_users:
            files["nats-users.yaml"] = [_server_users(application)]
            kustomization["resources"].append("nats-users.yaml")
        kustomization["helmCharts"] = [
            {
                "name": "nats",
                "repo": CHARTS,
                "version": NATS_CHART,
                "releaseName": "nats",
                "namespace": application.name,
                "valuesFile": "nats-values.yaml",
            }
        ]
        files["nats-values.yaml"] = [_nats_values(application)]
    files["kustomization.yaml"] = [kustomization]
    return {name: f"# {heading}\n{yaml_text(*each)}" for name, each in files.items()}


def _object(kind: str, name: str, spec: Json, marks: dict[str, str]) -> Json:
    version, _, kind = kind.rpartition("/")
    metadata = {"name": name, **({"labels": marks} if marks else {})}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}


def _namespace(application: Application) -> Json:
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": application.name}}


def _config(application: Application) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": f"{application.name}-config",
            "labels": {"app.kubernetes.io/part-of": application.name},
        },
        "data": {config_name(path): text for path, text in application.configs.items()},
    }


def _objects(application: Application, workload: Workload, cluster: Cluster) -> Iterator[Json]:
    name, marks = object_name(application, workload), labels(application, workload)
    yield _runner(application, workload, cluster)
    if workload.port:
        port = {"name": "http", "port": workload.port, "targetPort": "http"}
        yield _object("v1/Service", name, {"selector": marks, "ports": [port]}, marks)
    budget = {"maxUnavailable": 1, "selector": {"matchLabels": marks}}
    yield _object("policy/v1/PodDisruptionBudget", name, budget, marks)
    yield _network(application, workload)
    if workload.scale is not None:
        yield _scaled(application, workload, cluster)


def _runner(application: Application, workload: Workload, cluster: Cluster) -> Json:
    """The object that keeps the pods running."""
    name, marks = object_name(application, workload), labels(application, workload)
    template = pod_template(application, workload, image=cluster.image, gpu=cluster.gpu)
    # With a ScaledObject the number is not ours: it would be set back at each change.
    replicas = {} if workload.scale is not None else {"replicas": workload.replicas}
    if workload.hosts is not None:
        joining = joining_template(
            application, workload, workload.hosts, image=cluster.image, gpu=cluster.gpu
        )
        group = {
            "size": workload.hosts.number,
            "restartPolicy": "RecreateGroupOnPodRestart",
            "leaderTemplate": template,
            "workerTemplate": joining,
        }
        spec = {**replicas, "leaderWorkerTemplate": group}
        return _object("leaderworkerset.x-k8s.io/v1/LeaderWorkerSet", name, spec, marks)
    # GPUs for one pod more are rarely free, and the others serve meanwhile.
    spare = {"maxSurge": 0, "maxUnavailable": 1}
    update = spare if workload.resources.gpu else {"maxSurge": 1, "maxUnavailable": 0}
    spec = {
        **replicas,
        "selector": {"matchLabels": marks},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": update},
        "template": template,
    }
    return _object("apps/v1/Deployment", name, spec, marks)


def _network(application: Application, workload: Workload) -> Json:
    """The peers of its pods: the bus, and little else."""
    marks = labels(application, workload)
    anywhere_in_cluster: list[Json] = [{"namespaceSelector": {}}]
    ingress: list[Json] = [{"from": anywhere_in_cluster, "ports": [_tcp(HEALTH_PORT)]}]
    if workload.port:
        ingress.append({"ports": [_tcp(workload.port)]})
    egress: list[Json] = [{"ports": [{"protocol": "UDP", "port": 53}, _tcp(53)]}]
    if application.servers:
        egress.append({"ports": [_tcp(port) for port in _ports(application)]})
    else:
        nats = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "nats"}}}
        egress.append({"to": [nats], "ports": [_tcp(NATS_PORT)]})
    if application.egress:
        egress.append({"ports": [_tcp(port) for port in application.egress]})
    peers = [
        {"podSelector": {"matchLabels": labels(application, each)}}
        for each in application.workloads
        if (each is workload and each.hosts is not None)
        or (each.reaches_peers and workload.reaches_peers)
    ]
    if peers:
        ingress.append({"from": peers})
        egress.append({"to": peers})
    spec = {
        "podSelector": {"matchLabels": marks},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": ingress,
        "egress": egress,
    }
    name = object_name(application, workload)
    return _object("networking.k8s.io/v1/NetworkPolicy", name, spec, marks)


def _tcp(port: int) -> Json:
    return {"protocol": "TCP", "port": port}


def _ports(application: Application) -> list[int]:
    return sorted({urlsplit(server).port or NATS_PORT for server in application.servers})


def _metrics(application: Application) -> Iterator[Json]:
    """The pages of all pods, for Prometheus to scrape."""
    marks = {"app.kubernetes.io/part-of": application.name}
    name = f"{application.name}-metrics"
    service = {
        "clusterIP": "None",
        # A pod that is not ready yet has something to tell, too.
        "publishNotReadyAddresses": True,
        "selector": marks,
        "ports": [{"name": "health", "port": HEALTH_PORT, "targetPort": "health"}],
    }
    yield _object("v1/Service", name, service, marks | {"dynbus/scrape": "true"})
    monitor = {
        "selector": {"matchLabels": marks | {"dynbus/scrape": "true"}},
        "endpoints": [{"port": "health", "path": "/metrics", "interval": "15s"}],
        "podTargetLabels": ["app.kubernetes.io/component"],
    }
    yield _object("monitoring.coreos.com/v1/ServiceMonitor", name, monitor, marks)


def _scaled(application: Application, workload: Workload, cluster: Cluster) -> Json:
    scale = workload.scale
    assert scale is not None
    name = object_name(application, workload)
    triggers = [
        _by_queue(application, queue, lane, cluster)
        for queue in workload.queues
        for lane in queue.lanes
    ]
    if workload.is_called:
        triggers.append(_by_calls(workload, scale.calls, cluster))
    kind = "LeaderWorkerSet" if workload.hosts is not None else "Deployment"
    version = "leaderworkerset.x-k8s.io/v1" if workload.hosts is not None else "apps/v1"
    spec = {
        "scaleTargetRef": {"apiVersion": version, "kind": kind, "name": name},
        "minReplicaCount": scale.least,
        "maxReplicaCount": scale.most,
        "pollingInterval": 5,
        "cooldownPeriod": 300,
        "triggers": triggers,
    }
    return _object("keda.sh/v1alpha1/ScaledObject", name, spec, labels(application, workload))


def _by_queue(application: Application, queue: Queue, lane: str, cluster: Cluster) -> Json:
    """By the jobs of a lane that wait or are held: the server has them while no taker is there."""
    monitor = cluster.nats_monitor or f"nats.{application.name}.svc:{MONITOR_PORT}"
    return {
        "type": "nats-jetstream",
        "metadata": {
            "natsServerMonitoringEndpoint": monitor,
            "account": "$G",
            "stream": queue.stream,
            "consumer": f"{CONSUMER}-{lane}",
            "lagThreshold": str(queue.jobs),
        },
    }


def _by_calls(workload: Workload, calls: int, cluster: Cluster) -> Json:
    """By the calls of all callers that run or wait for an instance."""
    namespace, _, component = workload.address.partition(".")
    labelled = f'{{dynbus_namespace="{namespace}",dynbus_component="{component}"'
    terms = [
        f'sum(dynbus_calls_in_flight{labelled},dynbus_side="client"}}) or vector(0)',
        f"sum(dynbus_calls_waiting{labelled}}}) or vector(0)",
    ]
    return {
        "type": "prometheus",
        "metadata": {
            "serverAddress": cluster.prometheus,
            "query": " + ".join(f"({term})" for term in terms),
            "threshold": str(calls),
        },
    }


def _server_users(application: Application) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": USERS_FOLDER},
        "data": {"nats-users.conf": application.server_users},
    }


def _nats_values(application: Application) -> Json:
    """The values of NATS's own chart: three servers that keep streams, spread over the zones."""
    config: Json = {
        "cluster": {"enabled": True, "replicas": 3},
        "jetstream": {"enabled": True, "fileStore": {"pvc": {"size": "10Gi"}}},
        # Of the lost peers and clients they learn within seconds.
        "merge": {"ping_interval": "5s", "ping_max": 2},
    }
    spread = {"maxSkew": 1, "whenUnsatisfiable": "ScheduleAnyway"}
    values: Json = {
        "config": config,
        "service": {"ports": {"monitor": {"enabled": True}}},
        "podTemplate": {"topologySpreadConstraints": {"topology.kubernetes.io/zone": spread}},
        "promExporter": {"enabled": True, "podMonitor": {"enabled": True}},
        "natsBox": {"enabled": False},
    }
    if application.server_users:
        config["merge"]["$include"] = f"../{USERS_FOLDER}/nats-users.conf"
        mount = {"name": USERS_FOLDER, "mountPath": f"/etc/{USERS_FOLDER}"}
        added = {"op": "add", "path": "/volumeMounts/-", "value": mount}
        volume = {"name": USERS_FOLDER, "configMap": {"name": USERS_FOLDER}}
        values["container"] = {"patch": [added]}
        values["podTemplate"]["patch"] = [{"op": "add", "path": "/spec/volumes/-", "value": volume}]
    return values
