"""The rendered overlays of deploy/kubernetes, and what a test needs to know of a workload."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
OVERLAYS = ("single-node", "cpu", "gpu-cluster")
TOOLS = ROOT / ".tools" / "deploy"
_RENDER_S_MAX = 60.0
WORKLOADS = ("StatefulSet", "Deployment")


def tool(name: str) -> str:
    """Return the path of an external tool that `make check` installs, or skip the test and name it."""
    found = shutil.which(name, path=str(TOOLS / "bin")) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed; `make check` installs it")
    return found


@cache
def rendered(overlay: str) -> tuple[dict[str, Any], ...]:
    """Return the objects of an overlay, as kustomize renders them."""
    command = [tool("kubectl"), "kustomize", str(DEPLOY / "kubernetes" / "overlays" / overlay)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_RENDER_S_MAX, check=False)
    assert done.returncode == 0, done.stderr
    return tuple(yaml.load_all(done.stdout, Loader=yaml.CSafeLoader))


@dataclass(frozen=True, slots=True)
class Workload:
    """A StatefulSet or Deployment with one container."""

    tree: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.tree["metadata"]["name"])

    @property
    def pod(self) -> dict[str, Any]:
        found: dict[str, Any] = self.tree["spec"]["template"]["spec"]
        return found

    @property
    def container(self) -> dict[str, Any]:
        (found,) = self.pod["containers"]
        return dict(found)

    @property
    def grace_s(self) -> int:
        return int(self.pod["terminationGracePeriodSeconds"])

    def setting(self, key: str) -> str | None:
        """Return the value of KEY=VALUE among the arguments of the service; None if it is not set."""
        values = [arg.partition("=")[2] for arg in self.container["args"] if arg.startswith(f"{key}=")]
        return values[-1] if values else None


@cache
def workloads(overlay: str) -> dict[str, Workload]:
    """Return the workloads of an overlay by name."""
    found = [Workload(tree) for tree in rendered(overlay) if tree["kind"] in WORKLOADS]
    return {one.name: one for one in found}


@cache
def config_of(overlay: str) -> dict[str, Any]:
    """Return mesh.yaml of an overlay."""
    (text,) = [tree["data"]["mesh.yaml"] for tree in rendered(overlay) if tree["kind"] == "ConfigMap"]
    tree: dict[str, Any] = yaml.safe_load(text)
    return tree
