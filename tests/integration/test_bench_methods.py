"""`python -m benchmarks methods` with real processes: budget, resumption, and a process that ends."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import pytest

from benchmarks.methods.arm import MODEL_SEED
from benchmarks.methods.bench import MethodsOptions, run_methods
from benchmarks.methods.records import read_records
from benchmarks.methods.tasks import TASKS
from rollmesh.demo.config import MadeModelConfig
from rollmesh.demo.tiny_model import TinyModelConfig, build_tiny_model
from rollmesh.demo.tokenizer import build_tokenizer
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.trainer.model_files import write_model_folder


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Return a folder with an untrained model in the place of the model of `calc`."""
    plan = config_from_dict(MadeModelConfig, dict(TASKS["calc"].model))
    digest = hashlib.sha256(msgspec.json.encode([msgspec.to_builtins(plan), MODEL_SEED])).hexdigest()[:16]
    folder = tmp_path / "out" / "models" / digest
    folder.mkdir(parents=True)
    model = build_tiny_model(TinyModelConfig(hidden_size=16, num_layers=1, num_heads=1, num_kv_heads=1), seed=0)
    write_model_folder(model, build_tokenizer(), folder)
    return tmp_path / "out"


@pytest.mark.slow
async def test_a_call_ends_at_its_budget_and_the_next_one_runs_the_other_arms(out: Path) -> None:
    lines: list[str] = []

    async def call(cpu_s: float) -> tuple[int, int]:
        lines.clear()
        chosen = MethodsOptions(
            methods=("dr_grpo",),
            tasks=("calc",),
            seeds=(0, 1),
            lrs=(5e-4,),
            cpu_s=cpu_s,
            out=out,
            quick=True,
            processes=2,
        )
        outcome = await run_methods(chosen, lines.append)
        assert outcome.crashed == []
        return len(outcome.records), len(outcome.missing)

    assert await call(0.0) == (0, 4)
    done, left = await call(0.01)
    assert (done + left, done) in {(4, 1), (4, 2)}, "both processes start before the cost of an arm is known"
    assert await call(1000.0) == (4, 0)
    assert lines[0] == f"{done} arms have a record, {left} to run, budget 1000 CPU s"
    assert len(lines) == 1 + left
    before = (out / "records.jsonl").read_bytes()
    assert await call(1000.0) == (4, 0)
    assert lines == ["4 arms have a record, 0 to run, budget 1000 CPU s"]
    assert (out / "records.jsonl").read_bytes() == before


@pytest.mark.slow
async def test_an_arm_whose_process_ends_has_no_record_and_the_next_arm_runs(out: Path, tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text(
        "import os\nfrom rollmesh.trainer.estimators.grpo import Grpo\n\n\nclass Ends(Grpo):\n"
        "    def __call__(self, batch):\n        os._exit(3)\n"
    )
    mine = tmp_path / "mine.yaml"
    mine.write_text("learner: {estimator: 'ends.py:Ends'}\n")
    chosen = MethodsOptions(
        methods=(str(mine), "dr_grpo"), tasks=("calc",), seeds=(0,), lrs=(5e-4,), out=out, quick=True
    )
    outcome = await run_methods(chosen, lambda _: None)
    assert [cause.partition(";")[0] for cause in outcome.crashed] == [
        f"{mine} on calc at lag 0, seed 0, lr 0.0005: its process ended"
    ]
    assert [record.arm.method for record in read_records(out / "records.jsonl")] == ["grpo", "dr_grpo"]
