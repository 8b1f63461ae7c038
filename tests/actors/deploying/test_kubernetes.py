"""Objects of Kubernetes: by the official schemas of three versions, and what they promise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import yaml
from tests.actors.deploying.literals import ELSEWHERE, ENGINE, PLAIN, WHOLE

from dynbus.actors.deploying.application import Application
from dynbus.actors.deploying.kubernetes import Cluster, kubernetes

kubernetes_validate = pytest.importorskip("kubernetes_validate")

VERSIONS = ("1.35", "1.36", "1.37")
CLUSTER = Cluster("registry.example/chat:1", prometheus="http://prometheus:9090")
NO_OBJECTS = {"kustomization.yaml", "nats-values.yaml"}
EXTENSIONS = {"ServiceMonitor", "ScaledObject", "LeaderWorkerSet"}
"""Kinds whose schemas come with what is installed into a cluster."""


def objects(application: Application) -> Iterator[dict[str, Any]]:
    for name, text in kubernetes(application, CLUSTER, "made").items():
        if name not in NO_OBJECTS:
            yield from yaml.safe_load_all(text)


def one(application: Application, kind: str, name: str) -> Any:
    (found,) = [
        each
        for each in objects(application)
        if (each["kind"], each["metadata"]["name"]) == (kind, name)
    ]
    return found


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("application", [PLAIN, WHOLE, ELSEWHERE], ids=["plain", "whole", "nats"])
def test_every_object_fits_the_official_schema(application: Application, version: str) -> None:
    checked = [each for each in objects(application) if each["kind"] not in EXTENSIONS]

    for each in checked:
        kubernetes_validate.validate(each, version, strict=True)
    assert {"Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy", "Namespace"} <= {
        each["kind"] for each in checked
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_the_pods_of_several_hosts_fit_it_too(version: str) -> None:
    group = one(WHOLE, "LeaderWorkerSet", "chat-large")["spec"]["leaderWorkerTemplate"]

    assert group["size"] == 2
    for key in ("leaderTemplate", "workerTemplate"):
        named: dict[str, Any] = {"name": "large"} | group[key]["metadata"]
        pod = {"apiVersion": "v1", "kind": "Pod"} | group[key] | {"metadata": named}
        kubernetes_validate.validate(pod, version, strict=True)
    (leader,) = group["leaderTemplate"]["spec"]["containers"]
    assert leader["command"][:2] == ["sh", "-c"]
    assert leader["command"][2] == 'ray start --head && exec dynbus "$@"'


def test_what_is_listed_is_there_and_the_same_each_time() -> None:
    files = kubernetes(WHOLE, CLUSTER, "made")

    listed = yaml.safe_load(files["kustomization.yaml"])
    assert sorted(listed["resources"]) == sorted(set(files) - NO_OBJECTS)
    assert kubernetes(WHOLE, CLUSTER, "made") == files


def test_a_pod_is_confined_and_ends_in_its_grace() -> None:
    for each in objects(WHOLE):
        if each["kind"] != "Deployment":
            continue
        pod = each["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert not pod["automountServiceAccountToken"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    printer = one(WHOLE, "Deployment", "chat-printer")["spec"]["template"]["spec"]
    front = one(WHOLE, "Deployment", "chat-front")["spec"]["template"]["spec"]
    assert printer["terminationGracePeriodSeconds"] == 95
    assert "lifecycle" not in printer["containers"][0]
    # A Service still sends to a pod that ends.
    assert front["terminationGracePeriodSeconds"] == 65 + 5
    assert front["containers"][0]["lifecycle"] == {"preStop": {"sleep": {"seconds": 5}}}


def test_an_engine_has_its_gpus_and_what_it_declares() -> None:
    deployment = one(WHOLE, "Deployment", "chat-engine")["spec"]

    (container,) = deployment["template"]["spec"]["containers"]
    assert container["resources"] == {
        "requests": {"cpu": "3500m", "memory": "8448Mi"},
        "limits": {"memory": "8448Mi", "nvidia.com/gpu": 2},
    }
    assert deployment["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    assert "replicas" not in deployment, "KEDA's"


def test_secrets_are_named_and_none_is_written() -> None:
    (container,) = one(WHOLE, "Deployment", "chat-front")["spec"]["template"]["spec"]["containers"]

    variables = {each["name"]: each for each in container["env"]}
    assert variables["HF_TOKEN"]["valueFrom"] == {
        "secretKeyRef": {"name": "chat-secrets", "key": "HF_TOKEN"}
    }
    assert variables["DYNBUS_CREDENTIALS"]["value"] == "/etc/dynbus/keys/chat_Front.nk"
    assert variables["DYNBUS_HOST"]["valueFrom"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}
    assert variables["DYNBUS_ZONE"]["valueFrom"] == {
        "fieldRef": {"fieldPath": "metadata.labels['topology.kubernetes.io/zone']"}
    }
    assert "Secret" not in {each["kind"] for each in objects(WHOLE)}


def test_a_changed_configuration_replaces_the_pods() -> None:
    changed = replace(WHOLE, configs={"etc/chat.yaml": "Front: {port: 8001}\n"})

    before, after = (
        one(each, "Deployment", "chat-front")["spec"]["template"]["metadata"]["annotations"]
        for each in (WHOLE, changed)
    )

    assert before != after


def test_pods_reach_the_bus_and_little_else() -> None:
    def ports(application: Application, name: str) -> list[int]:
        rules = one(application, "NetworkPolicy", name)["spec"]["egress"]
        return sorted({port["port"] for rule in rules for port in rule.get("ports", [])})

    assert ports(PLAIN, "chat-printer") == [53, 4222]
    assert ports(ELSEWHERE, "chat-printer") == [53, 4222, 4333]
    assert ports(WHOLE, "chat-printer") == [53, 443, 4222]
    *_, peers = one(WHOLE, "NetworkPolicy", "chat-engine")["spec"]["egress"]
    assert [
        each["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for each in peers["to"]
    ] == ["engine", "large"]


def test_keda_goes_by_the_jobs_that_the_server_keeps_and_by_calls() -> None:
    printer = one(WHOLE, "ScaledObject", "chat-printer")["spec"]
    engine = one(WHOLE, "ScaledObject", "chat-engine")["spec"]

    assert (printer["minReplicaCount"], printer["maxReplicaCount"]) == (0, 4)
    assert [each["metadata"]["consumer"] for each in printer["triggers"]] == [
        "takers-high",
        "takers-normal",
        "takers-low",
    ]
    assert printer["triggers"][0]["metadata"] | {"consumer": ""} == {
        "natsServerMonitoringEndpoint": "nats.chat.svc:8222",
        "account": "$G",
        "stream": "DYNBUS_WORK_chat+Printer+print",
        "consumer": "",
        "lagThreshold": "16",
    }
    (by_calls,) = engine["triggers"]
    assert by_calls["type"] == "prometheus"
    assert by_calls["metadata"]["threshold"] == "16"
    for metric in ("dynbus_calls_in_flight", "dynbus_calls_waiting"):
        assert (
            f'{metric}{{dynbus_namespace="chat",dynbus_component="Engine"'
            in (by_calls["metadata"]["query"])
        )


def test_prometheus_finds_the_pages_of_all_pods() -> None:
    service, monitor = (one(WHOLE, kind, "chat-metrics") for kind in ("Service", "ServiceMonitor"))

    labels = service["metadata"]["labels"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]


def test_users_of_the_server_are_included_where_there_are_some() -> None:
    plain, whole = (
        yaml.safe_load(kubernetes(each, CLUSTER, "made")["nats-values.yaml"])
        for each in (PLAIN, WHOLE)
    )

    assert "$include" not in plain["config"]["merge"]
    assert whole["config"]["merge"]["$include"] == "../nats-users/nats-users.conf"
    assert one(WHOLE, "ConfigMap", "nats-users")["data"] == {"nats-users.conf": WHOLE.server_users}
    assert "nats-values.yaml" not in kubernetes(ELSEWHERE, CLUSTER, "made")


def test_an_engine_that_is_scaled_over_hosts_is_found_by_its_kind() -> None:
    several = replace(ENGINE, hosts=WHOLE.workloads[2].hosts)

    scaled = one(replace(WHOLE, workloads=(several,)), "ScaledObject", "chat-engine")

    assert scaled["spec"]["scaleTargetRef"]["kind"] == "LeaderWorkerSet"
