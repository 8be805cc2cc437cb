"""A run whose learner trains adapters and whose inference node is a real vLLM: only the first version has whole
weights."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from typer.testing import CliRunner

from rollmesh.cli.__main__ import app
from rollmesh.demo.config import MadeModelConfig
from rollmesh.demo.make_model import make_model
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.errors import InvalidInput
from rollmesh.shared.weights.manifest import ADAPTER_WEIGHTS, parse_manifest
from rollmesh.trainer.model_files import WEIGHTS_NAME

from ..vllm_process import PYTHON, needs_vllm_server

pytest.importorskip("peft")
pytestmark = [needs_vllm_server, pytest.mark.slow, pytest.mark.timeout(900)]
UPDATES = 3
TASKS: dict[str, Any] = {"level_max": 3, "num_validation": 64}


def config(model: Path) -> dict[str, Any]:
    """A run in which each update trains samples of the version before it, so that every adapter must have reached the
    node."""
    return {
        "model": str(model),
        "run": {
            "name": "lora",
            "max_staleness": 0,
            "batch_groups": 2,
            "group_size": 4,
            "updates_max": UPDATES,
            "eval_every": 0,
            "eval_tasks": 4,
        },
        "data": {"source": {"name": "calc", "options": {**TASKS, "num_train": 256, "num_test": 16}}},
        "rollout": {
            "agent": "tool_calling",
            "sampling": {"max_tokens": 48},
            "limits": {"turns_max": 8, "tokens_max": 200, "context_tokens_max": 256},
        },
        "reward": {"scorers": [{"name": "exact", "reward": "correct"}]},
        "inference": {
            "python": PYTHON,
            "engine": {"name": "vllm", "options": {"slots_max": 16, "context_max": 256, "kv_bytes": 1 << 27}},
        },
        "learner": {
            "lora": {"rank": 4},
            "optimizer": {"lr": 3.0e-3, "warmup_updates": 0},
            "publish": {"num_probes": 2},
            "tensorboard": False,
        },
    }


def command(*arguments: object) -> Any:
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert result.exit_code == 0, result.output
    return msgspec.json.decode(result.stdout)


def manifests(depot: Path) -> list[Any]:
    """Return the manifests among the blobs of a depot."""
    found = []
    for blob in depot.iterdir():
        if blob.is_file() and len(blob.name) == 64 and blob.stat().st_size < 1 << 16:
            with suppress(InvalidInput):
                found.append(parse_manifest(blob.read_bytes()))
    return found


def test_adapters_of_a_learner_are_served_by_vllm(tmp_path: Path) -> None:
    plan = MadeModelConfig(warm_start={"levels": 3, "target_success": 0.3}, tasks=Extension("calc", dict(TASKS)))
    make_model(plan, tmp_path / "model", seed=0, on_step=lambda progress: None)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config(tmp_path / "model")))
    summary = command("train", tmp_path / "config.yaml", "--out", tmp_path / "run")
    assert (summary["updates"], summary["outcome"]) == (UPDATES, "finished")
    assert command("audit", tmp_path / "run")["holds"]
    kept = manifests(tmp_path / "run" / "depot")
    assert [one for one in kept if ADAPTER_WEIGHTS in {file.name for file in one.files}], "adapters were published"
    bases = {chunk.digest for one in kept for file in one.files if file.name == WEIGHTS_NAME for chunk in file.chunks}
    whole = (tmp_path / "run" / "base" / WEIGHTS_NAME).stat().st_size
    stored = sum((tmp_path / "run" / "depot" / digest).stat().st_size for digest in bases)
    assert stored <= whole, "one base for all versions"
