"""Checkpoints resume bit for bit, are atomic and verified, and load with plain transformers."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollmesh.demo.tiny_model import TinyModelConfig, build_tiny_model
from rollmesh.demo.tokenizer import build_tokenizer
from rollmesh.shared.domain.digest import next_digest
from rollmesh.shared.domain.ledger_head import LedgerHead
from rollmesh.trainer import checkpoint as module
from rollmesh.trainer.checkpoint import Checkpoint, copy_checkpoint, latest_checkpoint, save_checkpoint
from rollmesh.trainer.checkpoint_files import CheckpointError, CheckpointPosition, list_checkpoints
from rollmesh.trainer.config import LossTermChoice, OptimizerConfig, ParameterGroup, UpdateConfig
from rollmesh.trainer.model_files import load_model, published_state
from rollmesh.trainer.trained_log import TrainedLog, read_trained
from rollmesh.trainer.update import BatchTrainer

from .builders import random_batch

SMALL = TinyModelConfig(hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48)
CONFIG = UpdateConfig(optimizer=OptimizerConfig(decay_updates=8))


def fresh(seed: int = 5) -> tuple[BatchTrainer, TrainedLog]:
    return BatchTrainer(build_tiny_model(SMALL, seed=1), CONFIG, seed=seed), TrainedLog()


def advance(trainer: BatchTrainer, log: TrainedLog, updates: int) -> None:
    for k in range(trainer.step + 1, trainer.step + updates + 1):
        result = trainer.update(k, *random_batch(seed=k, step=k - 1))
        log.append(k, result.used_ids, incarnation=0, outcome=result.outcome.name)


def save(root: Path, trainer: BatchTrainer, log: TrainedLog, **kwargs: object) -> Checkpoint:
    incarnation = int(str(kwargs.pop("incarnation", 0)))
    position = CheckpointPosition(
        update=trainer.step,
        digest=log.digest,
        seed=trainer.seed,
        head=LedgerHead(position=17, hash="ab" * 32),
        incarnation=incarnation,
    )
    return save_checkpoint(root, trainer, build_tokenizer(), log, position, **kwargs)  # type: ignore[arg-type]


def test_training_continues_bit_for_bit_after_a_checkpoint(tmp_path: Path) -> None:
    straight, straight_log = fresh()
    advance(straight, straight_log, 6)

    first, log = fresh()
    advance(first, log, 3)
    save(tmp_path, first, log)
    found = latest_checkpoint(tmp_path)
    assert found is not None
    second = BatchTrainer(load_model(found.path), CONFIG, seed=found.meta.seed)
    found.restore(second)
    log = found.trained_log()
    torch.manual_seed(123)
    advance(second, log, 3)

    left, right = published_state(straight.model), published_state(second.model)
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert log.digest == straight_log.digest
    for one, two in zip(straight.optimizer.state.values(), second.optimizer.state.values(), strict=True):
        assert all(torch.equal(one[key], two[key]) for key in one)


def test_a_copy_that_is_written_later_is_the_checkpoint_of_its_update(tmp_path: Path) -> None:
    settings = UpdateConfig(loss=(LossTermChoice("ppo_clip"), LossTermChoice("progress", {"through": True})))

    def made() -> tuple[BatchTrainer, TrainedLog]:
        return BatchTrainer(build_tiny_model(SMALL, seed=1), settings, seed=5), TrainedLog()

    trainer, log = made()
    advance(trainer, log, 2)
    position = CheckpointPosition(update=2, digest=log.digest, seed=trainer.seed)
    expected = save_checkpoint(tmp_path / "at once", trainer, build_tokenizer(), log.copy(), position)
    write = copy_checkpoint(tmp_path / "later", trainer, build_tokenizer(), log, position)
    advance(trainer, log, 2)
    found = write()
    assert found.meta.files.keys() == expected.meta.files.keys()
    for name, digest in expected.meta.files.items():
        assert found.meta.files[name] == digest or name.endswith(".pt"), name

    log.rebase(found.trained, 2)
    log.write_to(tmp_path / "whole")
    assert [line.update for line in read_trained(tmp_path / "whole")] == [1, 2, 3, 4]

    resumed = BatchTrainer(load_model(found.path), settings, seed=5)
    found.restore(resumed)
    resumed_log = found.trained_log()
    advance(resumed, resumed_log, 2)
    assert resumed_log.digest == log.digest
    left, right = published_state(trainer.model), published_state(resumed.model)
    assert all(torch.equal(left[name], right[name]) for name in left)
    for one, two in zip(trainer.optimizer.state.values(), resumed.optimizer.state.values(), strict=True):
        assert all(torch.equal(one[key], two[key]) for key in one)
    for name, value in trainer.modules.state_dict().items():
        assert torch.equal(value, resumed.modules.state_dict()[name])


def test_a_resumed_trainer_keeps_the_present_settings_of_the_optimizer(tmp_path: Path) -> None:
    first, log = fresh()
    advance(first, log, 2)
    found = save(tmp_path, first, log)
    present = OptimizerConfig(lr=1e-3, betas=(0.5, 0.6), epsilon=1e-4, weight_decay=0.1)
    second = BatchTrainer(load_model(found.path), UpdateConfig(optimizer=present), seed=5)
    changed = found.restore(second)
    decays = []
    for group in second.optimizer.param_groups:
        assert (group["betas"], group["eps"]) == ((0.5, 0.6), 1e-4)
        decays.append(group["weight_decay"])
    assert decays == [0.1, 0.0]
    assert sorted(changed) == ["betas (0.9, 0.95) -> (0.5, 0.6)", "eps 1e-08 -> 0.0001", "weight_decay 0.0 -> 0.1"]
    assert len(second.optimizer.state) == len(first.optimizer.state)


@pytest.mark.parametrize("names", ["*.o_proj.*", "*.gate_proj.*", None])
def test_moments_stay_with_their_parameters_if_the_groups_change(tmp_path: Path, names: str | None) -> None:
    """Groups of other parameters with the same sizes (o_proj), with other sizes (gate_proj), and no groups."""

    def trainer(model: Any, pattern: str | None) -> BatchTrainer:
        groups = () if pattern is None else (ParameterGroup(names=pattern, lr_factor=0.5),)
        return BatchTrainer(model, UpdateConfig(optimizer=OptimizerConfig(groups=groups)), seed=5)

    first, log = trainer(build_tiny_model(SMALL, seed=1), "*.q_proj.*"), TrainedLog()
    advance(first, log, 2)
    found = save(tmp_path, first, log)
    second = trainer(load_model(found.path), names)
    found.restore(second)
    expected, parameters = first.optimizer.state, dict(first.model.named_parameters())
    for name, parameter in second.model.named_parameters():
        assert second.optimizer.state[parameter].keys() == expected[parameters[name]].keys()
        for key, value in second.optimizer.state[parameter].items():
            assert torch.equal(value, expected[parameters[name]][key]), f"{name} {key}"


def test_moments_of_an_older_checkpoint_are_loaded_in_the_order_of_its_groups(tmp_path: Path) -> None:
    first, log = fresh()
    advance(first, log, 2)
    found = save(tmp_path, first, log)
    state = torch.load(found.path / module.OPTIMIZER_NAME, weights_only=True)
    for group in state["param_groups"]:
        del group["param_names"]
    torch.save(state, found.path / module.OPTIMIZER_NAME)
    second = BatchTrainer(load_model(found.path), CONFIG, seed=5)
    found.restore(second)
    for one, two in zip(first.optimizer.state.values(), second.optimizer.state.values(), strict=True):
        assert all(torch.equal(one[key], two[key]) for key in one)
    grouped = UpdateConfig(optimizer=OptimizerConfig(groups=(ParameterGroup(names="*.q_proj.*"),)))
    with pytest.raises(CheckpointError, match="groups of other sizes"):
        found.restore(BatchTrainer(load_model(found.path), grouped, seed=5))


def test_position_and_snapshot_come_back(tmp_path: Path) -> None:
    trainer, log = fresh()
    advance(trainer, log, 2)
    save(tmp_path, trainer, log, data_snapshot=b"\x00pool")
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert (found.meta.update, found.meta.incarnation, found.meta.head) == (
        2,
        0,
        LedgerHead(position=17, hash="ab" * 32),
    )
    assert found.meta.digest == log.digest
    assert found.data_snapshot() == b"\x00pool"


def test_plain_transformers_loads_a_checkpoint_and_generates(tmp_path: Path) -> None:
    trainer, log = fresh()
    advance(trainer, log, 1)
    folder = save(tmp_path, trainer, log).path
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer("<|user|>1+2<|end|><|assistant|>", return_tensors="pt")
    assert torch.equal(model(prompt.input_ids).logits, trainer.model.train(False)(prompt.input_ids).logits)
    assert model.generate(**prompt, max_new_tokens=4).shape[1] > prompt.input_ids.shape[1]


def test_trained_list_holds_every_update_and_chains(tmp_path: Path) -> None:
    trainer, log = fresh()
    advance(trainer, log, 2)
    save(tmp_path, trainer, log)
    advance(trainer, log, 2)
    found = save(tmp_path, trainer, log)
    lines = list(read_trained(found.trained))
    assert [line.update for line in lines] == [1, 2, 3, 4]
    assert lines[-1].digest == found.meta.digest == log.digest
    assert set(lines[2].sample_ids) == {s.sample.sample_id for s in random_batch(seed=3)[0]}
    assert lines[0].digest == next_digest("", 1, lines[0].sample_ids)


@pytest.mark.parametrize(
    "damage", ["garbage\n", '{"update":9,"incarnation":0,"outcome":"APPLIED","digest":"","sample_ids":[]}\n']
)
def test_a_damaged_trained_list_is_named_with_its_line(tmp_path: Path, damage: str) -> None:
    trainer, log = fresh()
    advance(trainer, log, 1)
    log.write_to(tmp_path / "trained.jsonl")
    with (tmp_path / "trained.jsonl").open("a") as file:
        file.write(damage)
    with pytest.raises(ValueError, match=r"trained.jsonl:2: "):
        list(read_trained(tmp_path / "trained.jsonl"))


def test_log_rejects_a_gap() -> None:
    with pytest.raises(ValueError, match="update 2 does not follow update 0"):
        TrainedLog().append(2, [], incarnation=0, outcome="APPLIED")


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "trained.jsonl", "tokenizer.json"])
@pytest.mark.parametrize("how", ["flip", "truncate", "remove"])
def test_a_damaged_newest_checkpoint_is_set_aside_and_reported(tmp_path: Path, name: str, how: str) -> None:
    trainer, log = fresh()
    advance(trainer, log, 1)
    save(tmp_path, trainer, log)
    advance(trainer, log, 1)
    file = save(tmp_path, trainer, log).path / name
    content = file.read_bytes()
    if how == "remove":
        file.unlink()
    else:
        half = len(content) // 2
        file.write_bytes(content[:half] + (bytes([content[half] ^ 1]) + content[half + 1 :] if how == "flip" else b""))
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert (found.path.name, found.trained_log().update) == ("update-00000001.0", 1)
    (message,) = found.passed_by
    assert str(file) in message
    assert message.endswith("is set aside as corrupt-update-00000002.0, going back to update-00000001.0")
    assert (tmp_path / "corrupt-update-00000002.0").is_dir()
    again = latest_checkpoint(tmp_path)
    assert again is not None
    assert again.passed_by == ()


def test_without_an_intact_checkpoint_nothing_is_moved_or_started(tmp_path: Path) -> None:
    trainer, log = fresh()
    for _ in range(2):
        advance(trainer, log, 1)
        (save(tmp_path, trainer, log).path / "optimizer.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"optimizer.pt is corrupt.*no checkpoint in .* is intact: restore one"):
        latest_checkpoint(tmp_path)
    assert len(list_checkpoints(tmp_path)) == 2


def test_an_unreadable_position_is_named(tmp_path: Path) -> None:
    trainer, log = fresh()
    path = save(tmp_path, trainer, log).path / "rollmesh.json"
    whole = path.read_bytes()
    at = whole.index(log.digest.encode())
    for content in (b"{", whole[:at] + b"\xff" + whole[at + 1 :]):  # cut off; not UTF-8
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"rollmesh.json cannot be read.*start from the initial weights"):
            latest_checkpoint(tmp_path)


@pytest.mark.parametrize("moment", ["_write_files", "write_meta", "rename"])
def test_a_half_written_checkpoint_is_never_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    trainer, log = fresh()
    advance(trainer, log, 1)
    save(tmp_path, trainer, log)
    advance(trainer, log, 1)

    def die(*_: object, **__: object) -> None:
        raise OSError("power cut")

    with monkeypatch.context() as patch:
        patch.setattr(os if moment == "rename" else module, moment, die)
        with pytest.raises(OSError, match="power cut"):
            save(tmp_path, trainer, log)
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert found.meta.update == 1
    assert save(tmp_path, trainer, log).meta.update == 2
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["update-00000001.0", "update-00000002.0"]
    assert [line.update for line in read_trained(tmp_path / "update-00000002.0" / "trained.jsonl")] == [1, 2]


def test_only_the_newest_are_kept_and_strangers_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    trainer, log = fresh()
    for _ in range(4):
        advance(trainer, log, 1)
        save(tmp_path, trainer, log, keep_last=2)
    assert [p.name for p in list_checkpoints(tmp_path)] == ["update-00000003.0", "update-00000004.0"]
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_newer_incarnation_outranks_a_higher_update(tmp_path: Path) -> None:
    trainer, log = fresh()
    advance(trainer, log, 1)
    going_back = save(tmp_path, trainer, log)
    advance(trainer, log, 2)
    save(tmp_path, trainer, log)
    other = BatchTrainer(load_model(going_back.path), CONFIG, seed=5)
    going_back.restore(other)
    log = going_back.trained_log()
    advance(other, log, 1)
    save(tmp_path, other, log, incarnation=1)
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert (found.meta.update, found.meta.incarnation) == (2, 1)


def test_restore_rejects_another_seed_or_model(tmp_path: Path) -> None:
    trainer, log = fresh()
    found = save(tmp_path, trainer, log)
    with pytest.raises(CheckpointError, match="seed 5, not 6"):
        found.restore(fresh(seed=6)[0])
    wider = BatchTrainer(build_tiny_model(TinyModelConfig(), seed=0), CONFIG, seed=5)
    with pytest.raises(CheckpointError, match="does not fit"):
        found.restore(wider)


def test_save_rejects_a_position_that_contradicts_trainer_or_list(tmp_path: Path) -> None:
    trainer, log = fresh()
    with pytest.raises(ValueError, match="position at 3"):
        save_checkpoint(tmp_path, trainer, None, log, CheckpointPosition(update=3, seed=5))
    with pytest.raises(ValueError, match="must equal the digest"):
        save_checkpoint(tmp_path, trainer, None, log, CheckpointPosition(update=0, seed=5, digest="beef"))
    save(tmp_path, trainer, log)
    with pytest.raises(ValueError, match="exists already"):
        save(tmp_path, trainer, log)
    assert len(list_checkpoints(tmp_path)) == 1


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "absent") is None
