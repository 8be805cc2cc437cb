"""Claims about the rendered Kubernetes manifests, and a golden summary of them. No cluster is needed."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollmesh.app.config import TrainConfig
from rollmesh.cli.commands.serve import STOP_S
from rollmesh.mesh.config import MeshConfig
from rollmesh.mesh.joining import KINDS, MANY, SINGLE
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.membership.membership import DRAIN_CALL_S_MAX

from .manifests import DEPLOY, OVERLAYS, Workload, config_of, rendered, workloads

GOLDEN = Path(__file__).parent / "golden"
SERVICES = {"coordinator", *KINDS}
PRE_STOP_S = 3.0
"""Time of the hook: the command starts and makes one call."""


def drain_s(kind: str) -> float:
    """Return how long a node of a kind may drain, by the settings that the manifests leave at their defaults."""
    config = MeshConfig()
    rollout = config.rollout.worker
    limits = {
        "inference": config.inference.drain_s,
        "rollout": rollout.finish_s_max + rollout.drain_s_max,
        "sandbox": config.sandbox.drain_s + config.sandbox.stop_s,
        "learner": 600.0,  # one update, a checkpoint and a publication; docs/deploy.md
    }
    return limits.get(kind, 0.0)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_each_service_is_one_workload_with_its_kind_in_the_command(overlay: str) -> None:
    found = workloads(overlay)
    assert set(found) == SERVICES | {"nats"}
    for name in SERVICES:
        assert found[name].container["args"][:2] == ["serve", name]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_grace_period_covers_hook_drain_and_stop(overlay: str) -> None:
    for name, one in workloads(overlay).items():
        if name != "nats":
            hook = PRE_STOP_S + DRAIN_CALL_S_MAX if "lifecycle" in one.container else 0.0
            assert one.grace_s >= hook + drain_s(name) + STOP_S, name


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kinds_of_which_a_mesh_accepts_one_have_one_replica_and_no_autoscaler(overlay: str) -> None:
    refs = (tree.get("spec", {}).get("scaleTargetRef") for tree in rendered(overlay))
    scaled = {ref["name"] for ref in refs if ref}
    for name in ("coordinator", *SINGLE):
        assert workloads(overlay)[name].tree["spec"]["replicas"] == 1
        assert name not in scaled
    assert scaled <= set(MANY)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_probes_ask_the_plain_health_port_and_every_node_drains_before_it_stops(overlay: str) -> None:
    for name, one in workloads(overlay).items():
        if name == "nats":
            continue
        port = int((one.setting("network.probes") or "").rpartition(":")[2])
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert one.container[probe]["grpc"]["port"] == port, (name, probe)
        assert one.container["livenessProbe"]["grpc"].get("service", "") == ""
        assert one.container["readinessProbe"]["grpc"]["service"] == "ready"
        hook = one.container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [""])[-1]
        assert ("rollmesh drain" in hook) == (name != "coordinator"), name


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_only_the_sandbox_runs_as_root_and_only_the_volume_is_writable(overlay: str) -> None:
    for name, one in workloads(overlay).items():
        pod, container = one.pod, one.container
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"], name
        assert security["capabilities"]["drop"] == ["ALL"], name
        assert pod["automountServiceAccountToken"] is False, name
        if name == "sandbox":
            assert pod["hostUsers"] is False, "root of the pod is not root of the host"
        else:
            assert pod["securityContext"]["runAsNonRoot"] is True, name
            assert security["allowPrivilegeEscalation"] is False, name
        writable = [m["mountPath"] for m in container["volumeMounts"] if not m.get("readOnly")]
        assert [path for path in writable if path != "/dev/shm"] == [
            f"/var/lib/{'nats' if name == 'nats' else 'rollmesh'}"
        ]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_each_pod_requests_measured_resources_and_the_network_reaches_what_is_called(overlay: str) -> None:
    policies = {t["metadata"]["name"]: t for t in rendered(overlay) if t["kind"] == "NetworkPolicy"}
    for name, one in workloads(overlay).items():
        assert {"cpu", "memory"} <= one.container["resources"]["requests"].keys(), name
        served = [port["containerPort"] for port in one.container["ports"] if port["name"] == "grpc"]
        if served:
            allowed = [port["port"] for rule in policies[name]["spec"]["ingress"] for port in rule["ports"]]
            assert served == allowed, name


CALLERS = {
    "coordinator": {"coordinator", "gateway", "depot", "data", "reward", "sandbox", "inference", "rollout", "learner"},
    "gateway": {"learner"},
    "depot": {"coordinator", "inference", "learner"},
    "data": {"coordinator", "learner"},
    "reward": {"coordinator", "rollout"},
    "sandbox": {"rollout", "reward"},
    "inference": {"inference", "rollout", "reward"},
}
"""The services that call each one. Every node joins the coordinator, and a second coordinator looks for the first one;
the coordinator asks the depot for the chunks of a version, and the learner asks the data service for its snapshot."""


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_network_lets_through_exactly_the_calls_of_the_mesh(overlay: str) -> None:
    policies = {t["metadata"]["name"]: t for t in rendered(overlay) if t["kind"] == "NetworkPolicy"}
    for name, callers in CALLERS.items():
        (first, *_) = policies[name]["spec"]["ingress"][0]["from"]
        (allowed,) = first["podSelector"]["matchExpressions"]
        assert (allowed["key"], allowed["operator"]) == ("app.kubernetes.io/name", "In")
        assert set(allowed["values"]) == callers, name


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_service_gets_only_the_login_of_its_kind_at_nats(overlay: str) -> None:
    for name, one in workloads(overlay).items():
        items = [v["secret"]["items"] for v in one.pod["volumes"] if v["name"] == "nats-login"]
        assert items == ([[{"key": name, "path": "login"}]] if one.setting("bus.login_file") else []), name


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_trainer_outside_the_mesh_reaches_the_gateway_and_the_depot_that_takes_its_weights(overlay: str) -> None:
    policies = {t["metadata"]["name"]: t for t in rendered(overlay) if t["kind"] == "NetworkPolicy"}
    trainer = {"namespaceSelector": {}, "podSelector": {"matchLabels": {"rollmesh/trainer": "true"}}}
    allowed = {
        name for name, one in policies.items() if any(trainer in rule["from"] for rule in one["spec"]["ingress"])
    }
    assert allowed == {"gateway", "depot"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_keys_have_the_mode_that_their_process_accepts(overlay: str) -> None:
    """With fsGroup the kubelet adds the right to read for the group. A process of root rejects that, others need it."""
    for name, one in workloads(overlay).items():
        security = one.pod["securityContext"]
        (secret,) = [v["secret"] for v in one.pod["volumes"] if v["name"] == "secret"]
        mode = secret["defaultMode"] | (0o440 if security.get("fsGroup") is not None else 0)
        assert mode == (0o400 if security["runAsUser"] == 0 else 0o440), name


def test_secrets_are_references() -> None:
    for overlay in OVERLAYS:
        assert not [tree for tree in rendered(overlay) if tree["kind"] == "Secret"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_configuration_and_every_setting_in_a_command_are_valid(overlay: str) -> None:
    tree = config_of(overlay)
    for name, one in workloads(overlay).items():
        if name != "nats":
            settings = [_expanded(arg) for arg in one.container["args"] if re.match(r"[a-z_.]+=", arg)]
            config = config_from_dict(TrainConfig, yaml.safe_load(yaml.safe_dump(tree)), settings)
            assert config.network.probes


def _expanded(argument: str) -> str:
    return argument.replace("$(POD_NAME)", "pod-0").replace("$(POD_NAMESPACE)", "rollmesh")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_summary_is_the_recorded_one(overlay: str) -> None:
    """`ROLLMESH_GOLDEN=write` records it again."""
    text, path = yaml.safe_dump(summary(overlay), sort_keys=True, width=120), GOLDEN / f"{overlay}.yaml"
    if os.environ.get("ROLLMESH_GOLDEN") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert yaml.safe_load(path.read_text()) == yaml.safe_load(text)


def summary(overlay: str) -> dict[str, Any]:
    """Return what an operator relies on: kinds, names, images, replicas, probes, grace periods, signals."""
    objects: dict[str, list[str]] = {}
    for tree in rendered(overlay):
        name = re.sub(r"^(rollmesh-config)-\w+$", r"\1", tree["metadata"]["name"])
        objects.setdefault(tree["kind"], []).append(name)
    return {
        "objects": {kind: sorted(names) for kind, names in objects.items()},
        "workloads": {name: _workload(one) for name, one in workloads(overlay).items()},
        "signals": {
            t["metadata"]["name"]: _signal(t) for t in rendered(overlay) if "scaleTargetRef" in t.get("spec", {})
        },
    }


def _workload(one: Workload) -> dict[str, Any]:
    container = one.container
    probes = {key: value for key, value in container.items() if key.endswith("Probe")}
    return {
        "kind": one.tree["kind"],
        "replicas": one.tree["spec"].get("replicas", "scaled"),
        "image": container["image"],
        "grace_s": one.grace_s,
        "pre_stop": container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])[:1],
        "probes": {name: probe.get("grpc") or probe["httpGet"]["path"] for name, probe in probes.items()},
        "requests": container["resources"]["requests"],
    }


def _signal(tree: dict[str, Any]) -> dict[str, Any]:
    spec = tree["spec"]
    if tree["kind"] == "ScaledObject":
        (trigger,) = spec["triggers"]
        return {"query": trigger["metadata"]["query"], "target": trigger["metadata"]["threshold"]}
    (metric,) = spec["metrics"]
    return {"metric": metric["external"]["metric"]["name"], "target": metric["external"]["target"]["averageValue"]}


def test_both_autoscalers_follow_the_same_signals_with_the_same_targets() -> None:
    """The names of external metrics and their queries are in the table of docs/deploy.md."""
    hpa, keda = summary("cpu")["signals"], summary("gpu-cluster")["signals"]
    text = (DEPLOY.parent / "docs" / "deploy.md").read_text()
    assert hpa.keys() == keda.keys() == {"inference", "rollout", "reward", "sandbox"}
    for name in hpa:
        assert hpa[name]["target"] == keda[name]["target"]
        row = next(line for line in text.splitlines() if f"`{hpa[name]['metric']}`" in line)
        assert f"`{keda[name]['query']}`" in row


def test_every_queried_metric_is_defined() -> None:
    known = (DEPLOY.parent / "docs" / "observability.md").read_text()
    for one in summary("gpu-cluster")["signals"].values():
        (metric,) = re.findall(r"rollmesh_\w+", one["query"])
        assert f"`{metric}`" in known
