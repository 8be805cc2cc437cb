"""The declared lower bounds hold: the wheel with the lowest version of each dependency, in a separate environment.

The versions are those of pyproject.toml, `>=X` read as `==X`, of the core and of every extra that needs no torch.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]
EXTRAS = ("rollout", "verify", "sandbox", "telemetry")
CONFIG = """
model: model
counts: {sandbox: 0}
data: {source: {name: jsonl, options: {path: tasks.jsonl}}}
rollout: {agent: "agent.py:Agent"}
reward: {scorers: [{name: "scorer.py:Scorer", reward: correct}]}
inference:
  engine: fake
learner: {engine: fake}
"""


def floors() -> list[str]:
    """Return NAME==FLOOR of each dependency."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    declared = [*project["dependencies"], *(dependency for name in EXTRAS for dependency in extras[name])]
    found = [re.fullmatch(r"([A-Za-z0-9._-]+)>=([0-9.]+)(,<.+)?", dependency) for dependency in declared]
    assert all(found), f"a dependency without a floor: {declared}"
    return [f"{match[1]}=={match[2]}" for match in found if match]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the bin folder of a virtual environment with the wheel and the lowest versions."""
    folder = tmp_path_factory.mktemp("floors")
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True, timeout=120)
    pip = [str(folder / "venv" / "bin" / "pip"), "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", ROOT, "--no-deps", "--wheel-dir", folder], check=True, timeout=300)
    (wheel,) = folder.glob("rollmesh-*.whl")
    (folder / "floors.txt").write_text("\n".join(floors()))
    named = f"{wheel}[{','.join(EXTRAS)}]"
    subprocess.run([*pip, "install", named, "--requirement", folder / "floors.txt"], check=True, timeout=600)
    subprocess.run([*pip, "check"], check=True, timeout=60)
    return folder / "venv" / "bin"


def rollmesh(environment: Path, *arguments: str, cwd: Path) -> str:
    """Run a command that must succeed, and return its output."""
    done = subprocess.run(
        [environment / "rollmesh", *arguments], cwd=cwd, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("command", [(), ("train",), ("serve",), ("bench",)], ids=" ".join)
def test_help(environment: Path, tmp_path: Path, command: tuple[str, ...]) -> None:
    assert "Usage" in rollmesh(environment, *command, "--help", cwd=tmp_path)


def test_check_reads_a_configuration_that_needs_no_torch(environment: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    make = (
        "from tokenizers import Tokenizer, models; import json\n"
        "Tokenizer(models.BPE({'a': 0, '<|end|>': 1}, [])).save('model/tokenizer.json')\n"
        "settings = {'chat_template': '{% for m in messages %}{{ m.content }}<|end|>{% endfor %}', 'eos_token': '<|end|>'}\n"
        "open('model/tokenizer_config.json', 'w').write(json.dumps(settings))\n"
    )
    subprocess.run([environment / "python", "-c", make], cwd=tmp_path, check=True, timeout=60)
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "agent.py").write_text(
        "class Agent:\n    async def run(self, task, env):\n        await env.generate()\n"
    )
    (tmp_path / "scorer.py").write_text("class Scorer:\n    async def score(self, item):\n        return 1.0\n")
    (tmp_path / "tasks.jsonl").write_text("".join(f'{{"question": "{n}", "answer": "a"}}\n' for n in range(40)))
    (tmp_path / "mine.yaml").write_text(CONFIG)
    shown = rollmesh(environment, "check", "mine.yaml", cwd=tmp_path)
    assert re.search(r"^learner:\n(?:  .*\n)*?  engine:\n    name: fake$", shown, re.MULTILINE)


def test_without_torch_the_remedy_is_named(environment: Path, tmp_path: Path) -> None:
    (tmp_path / "torch.yaml").write_text(
        "inference: {engine: 'rollmesh.services.inference.engines.torch.engine:TorchEngine'}\n"
    )
    done = subprocess.run(
        [environment / "rollmesh", "check", "torch.yaml"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "pip install 'rollmesh[trainer]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_ledger_runs_over_grpc_and_nats(environment: Path, tmp_path: Path) -> None:
    rollmesh(environment, "bench", "ledger", "--quick", cwd=tmp_path)


def test_the_host_is_looked_at(environment: Path, tmp_path: Path) -> None:
    assert "nats-server" in rollmesh(environment, "doctor", cwd=tmp_path)


def test_telemetry_is_exported(environment: Path, tmp_path: Path) -> None:
    code = (
        "import asyncio\n"
        "from pathlib import Path\n"
        "from rollmesh.shared.telemetry import Telemetry, TelemetryConfig\n"
        "async def main():\n"
        "    config = TelemetryConfig(traces='otlp', otlp_endpoint='http://127.0.0.1:9', metrics='prometheus')\n"
        "    async with Telemetry(config, folder=Path('.'), process='p') as telemetry:\n"
        "        assert telemetry.metrics_address\n"
        "asyncio.run(main())\n"
    )
    subprocess.run([environment / "python", "-c", code], cwd=tmp_path, check=True, timeout=120)
