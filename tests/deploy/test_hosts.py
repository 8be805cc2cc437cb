"""compose.yaml, the systemd units and the Slurm scripts: the same commands and limits as the Kubernetes manifests."""

from __future__ import annotations

import re

import pytest
import yaml

from rollmesh.cli.commands.serve import STOP_S
from rollmesh.mesh.joining import KINDS

from .manifests import DEPLOY, workloads
from .test_kubernetes import drain_s

COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
SERVICES = {"coordinator", *KINDS}


def keys(arguments: list[str]) -> set[str]:
    """Return the keys of settings and the names of options."""
    return {arg.partition("=")[0] for arg in arguments if "=" in arg or arg.startswith("--")}


def test_compose_runs_every_service_with_the_settings_of_kubernetes() -> None:
    assert COMPOSE.keys() == {*SERVICES, "nats"}
    for name, one in workloads("single-node").items():
        if name != "nats":
            wanted = keys(one.container["args"]) - {
                "--name",
                "depot.quota_bytes",
            }  # ids are random, and the disk is that of the host
            assert keys(COMPOSE[name]["command"]) == wanted, name
            assert COMPOSE[name]["stop_grace_period"] == f"{one.grace_s}s", name


def test_containers_of_compose_can_write_to_their_volume_only() -> None:
    for name, one in COMPOSE.items():
        assert one["read_only"] is True, name
        assert (one["user"] == "10001:10001") == (name != "sandbox"), name
        writable = [volume for volume in one["volumes"] if not volume.endswith(":ro")]
        assert len(writable) == 1, name


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_units_wait_for_the_drain_of_their_kind(kind: str) -> None:
    text = (DEPLOY / "systemd" / "rollmesh@.service").read_text()
    own = DEPLOY / "systemd" / f"rollmesh@{kind}.service.d"
    text += "".join(path.read_text() for path in own.glob("*.conf"))
    assert int(re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)[-1]) >= drain_s(kind) + STOP_S
    assert "KillMode=mixed" in text


@pytest.mark.parametrize("unit", ["rollmesh-coordinator", "rollmesh-nats", "rollmesh@"])
def test_files_of_units_are_private(unit: str) -> None:
    """They contain samples, answers and weights."""
    text = (DEPLOY / "systemd" / f"{unit}.service").read_text()
    assert "UMask=0077" in text
    assert "StateDirectoryMode=0700" in text


def test_slurm_warns_before_the_limit_for_long_enough() -> None:
    text = (DEPLOY / "slurm" / "workers.sbatch").read_text()
    (warned_s,) = re.findall(r"--signal=TERM@(\d+)", text)
    assert int(warned_s) >= drain_s("rollout") + STOP_S
