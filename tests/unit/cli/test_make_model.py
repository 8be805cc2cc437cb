"""The model of the demo is created in a process, deterministically, and completely or not at all."""

import io
import json
import os
import signal
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from rollmesh.app.config import TrainConfig
from rollmesh.demo import model_process
from rollmesh.demo.config import MadeModelConfig, demonstrated_sources
from rollmesh.demo.make_model import Demonstrator, main, make_model
from rollmesh.demo.model_process import ModelNotMade, WarmStep, make_in_process
from rollmesh.demo.tokenizer import END, build_tokenizer
from rollmesh.services.data.task import Split, split_of
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.errors import ConfigError
from rollmesh.trainer.model_files import load_model, load_tokenizer

OPTIONS = {"level_max": 1, "num_train": 1, "num_validation": 8, "num_test": 1}
SHAPE = {"hidden_size": 32, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "intermediate_size": 48}
QUICK = {"levels": 1, "levels_first": 1, "batch_size": 4, "evaluate_every": 2, "target_success": 1e-12}
CONFIG = MadeModelConfig(shape=SHAPE, warm_start=QUICK, tasks=Extension("calc", OPTIONS))


async def test_model_is_made_in_a_process_that_tells_its_steps(tmp_path: Path) -> None:
    steps: list[WarmStep] = []
    last = await make_in_process(CONFIG, tmp_path / "model", seed=3, limit_s=60, on_step=steps.append)
    assert [step.step for step in steps] == list(range(1, last.step + 1))
    assert last.success is not None
    assert load_tokenizer(tmp_path / "model").decode([1]) == END
    make_model(CONFIG, tmp_path / "again", seed=3, on_step=lambda _: None)
    first, second = load_model(tmp_path / "model").state_dict(), load_model(tmp_path / "again").state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert sorted(os.listdir(tmp_path)) == ["again", "model"]


def test_target_out_of_reach_is_reported_and_leaves_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    config = msgspec.structs.replace(CONFIG, warm_start={**QUICK, "target_success": 1.0, "steps_max": 2})
    given = io.TextIOWrapper(io.BytesIO(msgspec.json.encode(config)))
    monkeypatch.setattr(sys, "stdin", given)
    monkeypatch.setattr(sys, "argv", ["make_model", str(tmp_path / "model"), "0"])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert main() == 1
    assert "success stayed below 1.0 in 2 steps" in json.loads(capfdbinary.readouterr().out.splitlines()[-1])["error"]
    assert os.listdir(tmp_path) == []


async def test_the_error_of_the_process_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program reports it as `main` does above, without the time of an import of torch."""
    program = 'import sys; sys.stdin.read(); print(\'{"error": "below the target"}\'); sys.exit(1)'
    monkeypatch.setattr(model_process, "bound_to_parent", lambda _: [sys.executable, "-c", program])
    with pytest.raises(ModelNotMade, match="below the target"):
        await make_in_process(CONFIG, tmp_path / "model", seed=0, limit_s=60, on_step=lambda _: None)


def test_demonstrations_come_from_the_train_range_and_validation_from_its_own() -> None:
    (source,) = demonstrated_sources(CONFIG)
    maker, tokenizer, rng = Demonstrator([source]), build_tokenizer(), np.random.default_rng(0)
    shares = {"validation_share": source.options.validation_share, "test_share": source.options.test_share}
    for _ in range(30):
        text = str(tokenizer.decode(maker.new(2, rng).token_ids))
        question = text.split("<|user|>")[1].split("<|end|>")[0]
        assert split_of(question, **shares) is Split.TRAIN
    held_out = [tokenizer.decode(demo.token_ids) for demo in maker.validation()]
    tasks = [task for task in source.tasks() if task.split is Split.VALIDATION]
    assert len(tasks) == 8
    for task, shown in zip(tasks, held_out, strict=True):
        assert f"<|user|>{task.messages[0].content}<|end|>" in shown


def test_a_mixture_of_families_demonstrates_each_and_gives_the_hardest_level_that_it_has() -> None:
    sizes = {"num_validation": 2, "num_train": 1, "num_test": 0}
    entries = {name: {"source": {"name": name, "options": sizes}} for name in ("calc", "sql")}
    chosen = Extension("mixture", {"sources": entries})
    sources = demonstrated_sources(msgspec.structs.replace(CONFIG, tasks=chosen))
    maker, tokenizer, rng = Demonstrator(sources), build_tokenizer(), np.random.default_rng(0)
    texts = [str(tokenizer.decode(maker.new(7, rng).token_ids)) for _ in range(20)]
    assert {"select" in text for text in texts} == {True, False}
    assert ["select" in str(tokenizer.decode(demo.token_ids)) for demo in maker.validation()] == [False] * 2 + [
        True
    ] * 2
    mixed = Extension(
        "mixture", {"sources": {"a": {"source": "calc"}, "b": {"source": {"name": "jsonl", "options": {"path": "x"}}}}}
    )
    with pytest.raises(ConfigError, match="`made_model.tasks`: name a generated source"):
        demonstrated_sources(msgspec.structs.replace(CONFIG, tasks=mixed))


def test_the_classes_of_a_mixture_are_found_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that makes the model has another folder than the configuration."""
    (tmp_path / "mine.py").write_text(
        "from rollmesh.demo.families.calc import CalcSource\nclass Mine(CalcSource):\n    name = 'mine'\n"
    )
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    mixture = {"name": "mixture", "options": {"sources": {"own": {"source": "mine.py:Mine"}}}}
    config = config_from_dict(TrainConfig, {"data": {"source": mixture}, "made_model": {}})
    plan = config.model_plan(tmp_path)
    assert plan is not None
    assert [source.name for source in demonstrated_sources(plan)] == ["mine"]
