"""Fine-tuning: its loss is that of transformers, the held-out loss falls, and a resumed run equals one that was not
stopped."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from rollmesh.sft.config import SftConfig, SftLearnerConfig
from rollmesh.sft.training import FineTuning, SftProgress
from rollmesh.shared.errors import ConfigError, InvalidInput
from rollmesh.trainer import memory_plan
from rollmesh.trainer.config import ComputeConfig, LoraSettings, LossTermChoice, OptimizerConfig, PackingConfig
from tests.newcomer.chat_models import save_chat_model

WORDS = ("red", "green", "blue", "black", "white", "brown")


def conversations() -> list[dict[str, Any]]:
    """Each answer repeats the question, so the answer can be learned."""
    pairs = [(one, two) for one in WORDS for two in WORDS]
    return [
        {"messages": [{"role": "user", "content": f"{a} {b}"}, {"role": "assistant", "content": f"{b} {a}"}]}
        for a, b in pairs
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_chat_model("chatml", folder, [(a, b) for a in WORDS for b in WORDS], steps=1)
    return folder


def config(model: Path, folder: Path, **settings: Any) -> SftConfig:
    data = folder / "chats.jsonl"
    data.write_text("\n".join(map(json.dumps, conversations())))
    values: dict[str, Any] = {
        "batch_size": 8,
        "eval_every": 4,
        "checkpoint_every": 2,
        "heldout_share": 0.2,
        "learner": SftLearnerConfig(optimizer=OptimizerConfig(lr=3e-3, warmup_updates=0), tensorboard=False),
    }
    return SftConfig(model=str(model), data=str(data), **(values | settings))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model" / "model.safetensors")


def test_the_first_loss_is_that_of_transformers(model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    session = FineTuning(config(model, tmp_path), tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(model)
    nats, tokens = 0.0, 0
    for chat in session.batches[0]:
        ids = torch.from_numpy(chat.sequence.token_ids.astype(np.int64))
        labels = torch.where(torch.from_numpy(chat.sequence.target_mask == 1), ids, -100)
        nats += theirs(input_ids=ids[None], labels=labels[None]).loss.item() * chat.num_trained
        tokens += chat.num_trained
    seen: list[SftProgress] = []
    session.run(seen.append, stopping=lambda: True)
    assert seen[0].loss == pytest.approx(nats / tokens, rel=1e-5)


def test_the_held_out_loss_falls_and_the_result_loads(model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    session = FineTuning(config(model, tmp_path, epochs=4), tmp_path)
    summary = session.run()
    assert (summary.outcome, summary.updates, summary.conversations) == ("finished", 16, 29)
    assert summary.heldout_loss is not None
    assert summary.heldout_loss_before is not None
    assert summary.heldout_loss < 0.7 * summary.heldout_loss_before
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines if "heldout_loss" in line["metrics"]] == [4, 8, 12, 16]
    assert lines[-1]["metrics"]["heldout_loss"] == summary.heldout_loss
    assert json.loads((tmp_path / "summary.json").read_text())["model"] == str(tmp_path / "model")
    AutoModelForCausalLM.from_pretrained(summary.model)
    assert AutoTokenizer.from_pretrained(summary.model).chat_template
    assert [p.name for p in sorted((tmp_path / "checkpoints").iterdir())] == [f"update-{k:08d}.0" for k in (12, 14, 16)]


def test_single_token_rollouts_lower_the_held_out_loss_and_continue_bit_for_bit(model: Path, tmp_path: Path) -> None:
    """Their draws depend on the count of optimizer steps, which a checkpoint holds."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder in (whole, parts):
        folder.mkdir()
    learner = SftLearnerConfig(
        loss=(LossTermChoice("one_token_rollout", options={"draws": 64}),),
        optimizer=OptimizerConfig(lr=3e-3, warmup_updates=0),
        tensorboard=False,
    )
    settings = config(model, tmp_path, learner=learner)
    summary = FineTuning(settings, whole).run()
    assert summary.heldout_loss is not None
    assert summary.heldout_loss_before is not None
    assert summary.heldout_loss < summary.heldout_loss_before
    stopped = FineTuning(settings, parts)
    assert stopped.run(stopping=lambda: stopped.trainer.step == 3).outcome == "interrupted"
    assert FineTuning(settings, parts).run().heldout_loss == summary.heldout_loss
    left, right = weights(whole), weights(parts)
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_a_stopped_run_continues_bit_for_bit(model: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder in (whole, parts):
        folder.mkdir()
    settings = config(model, tmp_path, epochs=2)
    FineTuning(settings, whole).run()
    stopped = FineTuning(settings, parts)
    first = stopped.run(stopping=lambda: stopped.trainer.step == 3)
    assert (first.outcome, first.updates, first.model) == ("interrupted", 3, "")
    second = FineTuning(settings, parts)
    assert second.trainer.step == 3
    last = second.run()
    assert (last.outcome, last.updates) == ("finished", 8)
    assert last.heldout_loss_before == first.heldout_loss_before
    left, right = weights(whole), weights(parts)
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_a_finished_run_trains_more_epochs(model: Path, tmp_path: Path) -> None:
    first = FineTuning(config(model, tmp_path), tmp_path).run()
    again = FineTuning(config(model, tmp_path), tmp_path).run()
    assert (again.outcome, again.updates, again.tokens_trained) == ("finished", 4, 0)
    assert again.heldout_loss == first.heldout_loss
    more = FineTuning(config(model, tmp_path, epochs=2), tmp_path).run()
    assert more.updates == 8


def test_conversations_longer_than_the_context(model: Path, tmp_path: Path) -> None:
    settings = config(model, tmp_path, heldout_share=0.0)
    data = Path(settings.data)
    long = {"messages": [{"role": "user", "content": "red " * 4000}, {"role": "assistant", "content": "blue"}]}
    data.write_text(f"{data.read_text()}\n{json.dumps(long)}")
    with pytest.raises(
        InvalidInput, match=r"1 conversations are longer .* 2048 tokens, first chats:37 .*too_long: drop"
    ):
        FineTuning(settings, tmp_path)
    session = FineTuning(config_with(settings, too_long="drop"), tmp_path)
    assert (len(session.data.train), session.data.num_dropped) == (36, 1)


def config_with(config: SftConfig, **changes: Any) -> SftConfig:
    return msgspec.structs.replace(config, **changes)


def test_unusable_models_and_settings_are_named(model: Path, tmp_path: Path) -> None:
    settings = config(model, tmp_path)
    with pytest.raises(ConfigError, match="no model can be loaded from"):
        FineTuning(config_with(settings, model=str(tmp_path / "none")), tmp_path)
    FineTuning(config_with(settings, epochs=2), tmp_path).run()
    with pytest.raises(ConfigError, match="has 8 updates, more than the 4"):
        FineTuning(settings, tmp_path)
    with pytest.raises(ConfigError, match="seed"):
        FineTuning(config_with(settings, seed=5), tmp_path)


@pytest.mark.parametrize(
    ("changes", "key", "message"),
    [
        ({"batch_size": 4}, "batch_size", "another batch size: batch_size 8 -> 4"),
        ({"heldout_share": 0.1}, "data", "other trained conversations"),
        ({"heldout": "more.jsonl", "heldout_share": 0.0}, "data", "other trained conversations"),
    ],
)
def test_a_resumed_run_keeps_its_batches(
    model: Path, tmp_path: Path, changes: dict[str, Any], key: str, message: str
) -> None:
    (tmp_path / "more.jsonl").write_text(json.dumps(conversations()[0]))
    settings = config(model, tmp_path)
    FineTuning(settings, tmp_path).run(stopping=lambda: True)
    with pytest.raises(ConfigError, match=message) as caught:
        FineTuning(config_with(settings, **changes).located(tmp_path), tmp_path)
    assert caught.value.metadata["key"] == key
    assert FineTuning(settings, tmp_path).notes == ()


def test_a_changed_data_file_is_noticed_at_a_resume(model: Path, tmp_path: Path) -> None:
    settings = config(model, tmp_path, heldout_share=0.0)
    FineTuning(settings, tmp_path).run(stopping=lambda: True)
    data = Path(settings.data)
    lines = data.read_text().splitlines()
    data.write_text("\n".join([lines[1], lines[0], *lines[2:]]))
    with pytest.raises(ConfigError, match="other trained conversations"):
        FineTuning(settings, tmp_path)
    data.write_text("\n\n".join(lines))  # the same conversations
    FineTuning(settings, tmp_path)


def test_changed_settings_of_the_learner_are_reported(model: Path, tmp_path: Path) -> None:
    settings = config(model, tmp_path)
    FineTuning(settings, tmp_path).run(stopping=lambda: True)
    other = SftLearnerConfig(optimizer=OptimizerConfig(lr=1e-3, warmup_updates=0), tensorboard=False)
    assert FineTuning(config_with(settings, learner=other), tmp_path).notes == (
        "changed since the checkpoint: learner.optimizer.lr 0.003 -> 0.001",
    )


def test_only_the_long_conversations_are_dropped_where_files_have_one_name(model: Path, tmp_path: Path) -> None:
    settings = config(model, tmp_path, too_long="drop", heldout="heldout/chats.jsonl").located(tmp_path)
    Path(settings.heldout).parent.mkdir()
    long = {"messages": [{"role": "user", "content": "red " * 4000}, {"role": "assistant", "content": "blue"}]}
    Path(settings.heldout).write_text("\n".join(map(json.dumps, [long, conversations()[0]])))
    data = FineTuning(settings, tmp_path).data
    assert (len(data.train), len(data.heldout), data.num_dropped) == (len(conversations()), 1, 1)


def test_a_resumed_run_keeps_the_initial_model_as_its_reference(model: Path, tmp_path: Path) -> None:
    learner = SftLearnerConfig(
        loss=(LossTermChoice("imitation"), LossTermChoice("kl")), optimizer=OptimizerConfig(lr=3e-3), tensorboard=False
    )
    settings = config(model, tmp_path, learner=learner)
    first = FineTuning(settings, tmp_path)
    before = first.trainer.reference.model.state_dict()  # type: ignore[union-attr]
    first.run(stopping=lambda: first.trainer.step == 2)
    after = FineTuning(settings, tmp_path).trainer.reference.model.state_dict()  # type: ignore[union-attr]
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_held_out_loss_does_not_depend_on_the_parts_of_the_output_layer(model: Path, tmp_path: Path) -> None:
    losses = []
    for number, chunk in enumerate((0, 7)):
        learner = SftLearnerConfig(compute=ComputeConfig(logprob_chunk_tokens=chunk), tensorboard=False)
        (folder := tmp_path / str(number)).mkdir()
        summary = FineTuning(config(model, folder, learner=learner), folder).run(stopping=lambda: True)
        losses.append(summary.heldout_loss_before)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_the_memory_is_planned_for_the_longest_conversation_before_the_model_is_loaded(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_plan, "is_small", lambda *_: False)
    settings = config(model, tmp_path)
    learner = msgspec.structs.replace(settings.learner, packing=PackingConfig(row_tokens=8, micro_batch_tokens=8))
    session = FineTuning(msgspec.structs.replace(settings, learner=learner), tmp_path)
    longest = max(chat.num_tokens for chat in session.data.train)
    assert longest > 8
    assert f"for micro-batches of 1 x {longest} tokens" in session.notes[0]

    monkeypatch.setattr(memory_plan, "device_bytes", lambda _: 1 << 10)
    with pytest.raises(
        ConfigError, match=r"training needs .* and the device cpu has 0\.0 MiB; .*gradient_checkpointing"
    ):
        FineTuning(settings, tmp_path)


def test_several_ranks_are_rejected() -> None:
    with pytest.raises(ValueError, match="`compute.ranks` must be 1, got 2"):
        SftLearnerConfig(compute=ComputeConfig(ranks=2))


def test_adapters_are_trained_and_written_beside_the_merged_model(model: Path, tmp_path: Path) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    learner = SftLearnerConfig(
        optimizer=OptimizerConfig(lr=1e-2, warmup_updates=0), tensorboard=False, lora=LoraSettings(rank=4)
    )
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
    summary = FineTuning(config(model, one, learner=learner, epochs=2), one).run()
    assert summary.heldout_loss is not None
    assert summary.heldout_loss_before is not None
    assert summary.heldout_loss < 0.97 * summary.heldout_loss_before
    calls = iter([False, True])
    FineTuning(config(model, two, learner=learner, epochs=2), two).run(stopping=lambda: next(calls))
    FineTuning(config(model, two, learner=learner, epochs=2), two).run()
    mine, resumed = weights(one), weights(two)
    assert all(torch.equal(mine[name], resumed[name]) for name in mine)
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), one / "adapter")
    merged = theirs.merge_and_unload().state_dict()
    for name, tensor in mine.items():
        torch.testing.assert_close(merged[name], tensor, rtol=0, atol=1e-6)


def test_a_run_in_bfloat16_learns_and_resumes_bit_for_bit(model: Path, tmp_path: Path) -> None:
    learner = SftLearnerConfig(
        optimizer=OptimizerConfig(lr=3e-3, warmup_updates=0),
        tensorboard=False,
        compute=ComputeConfig(precision="bfloat16"),
    )
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder in (whole, parts):
        folder.mkdir()
    with closing(FineTuning(config(model, whole, learner=learner), whole)) as session:
        done = session.run()
    with closing(FineTuning(config(model, parts, learner=learner), parts)) as session:
        session.run(stopping=lambda: True)
    with pytest.raises(ConfigError, match="seed"):
        FineTuning(config(model, parts, learner=learner, seed=5), parts)
    assert not torch.distributed.is_initialized(), "every session ends its process group, also one that cannot begin"
    with closing(FineTuning(config(model, parts, learner=learner), parts)) as session:
        again = session.run()
    assert done.heldout_loss is not None
    assert done.heldout_loss_before is not None
    assert done.heldout_loss < done.heldout_loss_before
    assert again.heldout_loss == done.heldout_loss
    expected = weights(whole)
    assert {values.dtype for values in expected.values()} == {torch.float32}
    assert all(torch.equal(weights(parts)[name], values) for name, values in expected.items())
