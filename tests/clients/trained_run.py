"""Train a warm-started model through the programs of examples/openai_agent, and compare what the engine, the scorer and
the trainer saw.

A run has all of its services in this process, so that the counters of the OpenAI-compatible server can be read, unless
its engine needs another interpreter.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml
from typer.testing import CliRunner

from rollmesh.app.run_folder import RunFolder
from rollmesh.app.views.series import read_series
from rollmesh.cli.__main__ import app
from rollmesh.demo.config import MadeModelConfig
from rollmesh.demo.make_model import make_model
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.telemetry import metrics

from .recording import GENERATED, SCORED, TRAINED, GeneratedTurn, ScoredSample, TrainedSample

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "openai_agent"
MODULES = Path(os.environ.get("ROLLMESH_NPM_CLIENTS") or ROOT / ".tools" / "clients" / "node_modules")
"""The npm packages `openai` and `node`, which `make suite NAME=clients` installs."""
LEVELS = 3
_TASKS: dict[str, Any] = {"level_max": LEVELS, "num_validation": 240}
_SERVICE_S_MAX = 30.0
Line = TypeVar("Line", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class ClientArm:
    """An agent of the example."""

    package: str
    """`python` or `npm`."""
    stream: bool
    kind: str = "program"
    """`program`: one process per episode. `url`: one service for all."""

    def __str__(self) -> str:
        return f"{self.package}{'-stream' if self.stream else ''}-{self.kind}"

    def command(self, folder: Path) -> list[str]:
        """Copy the program to `folder` and return the command that runs it there."""
        python = self.package == "python"
        name = "agent.py" if python else "agent.mjs"
        shutil.copy(EXAMPLE / name, folder)
        if not python and not (folder / "node_modules").exists():
            (folder / "node_modules").symlink_to(MODULES)
        runtime = sys.executable if python else str(MODULES / ".bin" / "node")
        return [runtime, str(folder / name), *(["--stream"] if self.stream else [])]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Size of a run."""

    updates: int
    batch_groups: int = 4
    group_size: int = 4
    eval_every: int = 0
    eval_tasks: int = 0
    lr: float = 3.0e-4
    seed: int = 0


@dataclass(frozen=True, slots=True)
class TrainedRun:
    """What a run did."""

    out: Path
    summary: dict[str, Any]
    audit: dict[str, Any]
    generated: list[GeneratedTurn]
    scored: list[ScoredSample]
    trained: list[TrainedSample]
    counted: Counter[str] | None
    """Counters of the server: `chains first`, `reencoded`, `requests 200` and so on; None if it ran in another
    process."""

    @property
    def success(self) -> dict[int, float]:
        """Held-out success by step."""
        return {point.step: point.success for point in read_series(RunFolder(self.out).series).evals_by_step}


class ServerCounts:
    """Adds up the counters of the OpenAI-compatible server."""

    def __init__(self) -> None:
        self.sums: Counter[str] = Counter()

    def count(self, metric: metrics.Metric, node: str, labels: tuple[str, ...], amount: float) -> None:
        if metric.name.startswith("rollmesh_openai_"):
            name = metric.name.removeprefix("rollmesh_openai_").removesuffix("_total")
            self.sums[" ".join((name.removesuffix("_tokens"), *labels))] += int(amount)

    def observe(self, metric: metrics.Metric, node: str, labels: tuple[str, ...], value: float) -> None:
        pass


def warm_model(folder: Path, *, seed: int = 0, target: float = 0.45) -> Path:
    """Make a model that writes calls of the calculator and solves about `target` of the tasks."""
    plan = MadeModelConfig(
        warm_start={"levels": LEVELS, "target_success": target}, tasks=Extension("calc", dict(_TASKS))
    )
    make_model(plan, folder, seed=seed, on_step=lambda progress: None)
    return folder


def train(
    arm: ClientArm,
    model: Path,
    folder: Path,
    sizes: Sizes,
    *,
    engine: str = "RecordingTorch",
    python: str = "",
    **options: Any,
) -> TrainedRun:
    """Train in `folder`. `options` are further ones of the engine. Raise AssertionError if a command fails.

    With `python`, the interpreter of the engine, the services run in other processes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(Path(__file__).with_name("recording.py"), folder)
    counts, out = ServerCounts(), folder / "run"
    with ExitStack() as stack:
        command = arm.command(folder)
        agent = {"name": "program", "options": {"command": command}}
        if arm.kind == "url":
            agent = {"name": "url", "options": {"url": stack.enter_context(_service(command))}}
        config = _config(agent, model, folder, sizes, engine, python, options)
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        metrics.use(counts)
        stack.callback(metrics.use, None)
        summary = _command("train", folder / "config.yaml", "--out", out)
    return TrainedRun(
        out,
        summary,
        _command("audit", out),
        _lines(folder / GENERATED, GeneratedTurn),
        _lines(folder / SCORED, ScoredSample),
        _lines(next(out.rglob(TRAINED)), TrainedSample),
        None if python else counts.sums,
    )


def check(run: TrainedRun, updates: int) -> None:
    """Raise AssertionError unless the run is complete and each turn of each sample is what the engine generated from
    its prompt."""
    summary, counted = run.summary, run.counted
    assert (summary["updates"], summary["outcome"], summary["samples"]["live"]) == (updates, "finished", 0)
    assert run.audit["holds"], run.audit

    generated = {(tuple(turn.prompt), tuple(turn.tokens)) for turn in run.generated}
    for sample in run.scored:
        for prompt, turn in zip(sample.prompts, sample.turns, strict=True):
            assert (tuple(prompt), tuple(turn)) in generated, sample.sample_id
    scored = {sample.sample_id: sample.tokens for sample in run.scored}
    assert run.trained
    for trained in run.trained:
        assert scored[trained.sample_id] == trained.tokens, trained.sample_id

    episodes = {sample.episode for sample in run.scored}
    assert len(episodes) == len(run.scored), "each episode is one conversation"
    assert {sample.first_segment for sample in run.scored} == {0}
    assert any(len(sample.turns) > 1 for sample in run.scored), "the model calls the tool"
    if counted is None:
        return
    assert counted["reencoded"] == 0
    # 400: after a limit of the episode; 401: after an attempt that failed and was retried
    assert set(counted) <= {"chains first", "requests 200", "requests 400", "requests 401"}, counted
    assert counted["chains first"] >= len(episodes)
    assert counted["requests 200"] >= sum(len(sample.turns) for sample in run.scored)


def _config(
    agent: dict[str, Any], model: Path, folder: Path, sizes: Sizes, engine: str, python: str, options: dict[str, Any]
) -> dict[str, Any]:
    return {
        "model": str(model),
        "run": {
            "name": "clients",
            "seed": sizes.seed,
            "max_staleness": 0,
            "batch_groups": sizes.batch_groups,
            "group_size": sizes.group_size,
            "updates_max": sizes.updates,
            "eval_every": sizes.eval_every,
            "eval_tasks": sizes.eval_tasks or 4,
        },
        "processes": {"enabled": False},
        "data": {"source": {"name": "calc", "options": {**_TASKS, "num_train": 1024, "num_test": 240}}},
        "rollout": {
            "agent": agent,
            "sampling": {"max_tokens": 48},
            "limits": {"turns_max": 8, "tokens_max": 200, "context_tokens_max": 256},
            "stages": {"run_max": 4 if agent["name"] == "program" else 64},
        },
        "reward": {
            "scorers": [
                {"name": "recording.py:RecordingScorer", "reward": "correct", "options": {"record": str(folder)}}
            ],
            "finalizers": ["keep_all"],
        },
        "inference": {
            "python": python,
            "engine": {
                "name": f"recording.py:{engine}",
                "options": {"record": str(folder), "slots_max": 64, "context_max": 256, **options},
            },
        },
        "learner": {
            "engine": "recording.py:RecordingTrainer",
            "optimizer": {"lr": sizes.lr, "decay_updates": max(sizes.updates, 40)},
            "tensorboard": False,
        },
    }


@contextmanager
def _service(command: list[str]) -> Iterator[str]:
    """Start the program as a service; yield its address."""
    process = subprocess.Popen([*command, "--serve", "0"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        assert port, f"{command} exited with {process.wait(_SERVICE_S_MAX)}"
        yield f"http://127.0.0.1:{port}/run"
    finally:
        process.terminate()
        process.wait(_SERVICE_S_MAX)


def _command(*arguments: object) -> dict[str, Any]:
    done = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert done.exit_code == 0, done.output
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def _lines(path: Path, kind: type[Line]) -> list[Line]:
    return [msgspec.json.decode(line, type=kind) for line in path.read_bytes().splitlines()]
