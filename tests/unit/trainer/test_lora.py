"""Low-rank adapters train as plain peft does, alone, and their checkpoints resume bit for bit and load with plain
peft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from typer.testing import CliRunner

from rollmesh.cli.__main__ import app
from rollmesh.demo.tiny_model import TinyModelConfig, build_tiny_model
from rollmesh.demo.tokenizer import build_tokenizer
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import Role, TrainingSample
from rollmesh.shared.errors import ConfigError
from rollmesh.trainer.checkpoint import Checkpoint, save_checkpoint
from rollmesh.trainer.checkpoint_files import CheckpointError, CheckpointPosition
from rollmesh.trainer.config import (
    ComputeConfig,
    LoraSettings,
    LossTermChoice,
    OptimizerConfig,
    ReferenceConfig,
    UpdateConfig,
)
from rollmesh.trainer.memory_plan import plan_memory
from rollmesh.trainer.merge import merge_checkpoint
from rollmesh.trainer.model_files import (
    WEIGHTS_NAME,
    load_model,
    load_tokenizer,
    published_state,
    write_model_folder,
    write_weights,
)
from rollmesh.trainer.plugins import Plugins
from rollmesh.trainer.trained_log import TrainedLog
from rollmesh.trainer.update import BatchTrainer
from tests.models.architectures import build_model

from .builders import minibatches, random_batch
from .mixtures import tiny_mixture

peft = pytest.importorskip("peft")
SMALL = TinyModelConfig(hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48, num_layers=2)
LORA = LoraSettings(rank=4, alpha=12.0, targets=("q_proj", "down_proj"))
CONFIG = UpdateConfig(
    lora=LORA, optimizer=OptimizerConfig(lr=1e-2, warmup_updates=0), update_rule=minibatches(1), report_entropy=False
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    write_model_folder(build_tiny_model(SMALL, seed=1), build_tokenizer(), folder)
    return folder


def opened(base: Path, config: UpdateConfig = CONFIG, **options: Any) -> BatchTrainer:
    return BatchTrainer(load_model(base), config, seed=5, **options)


def advance(trainer: BatchTrainer, log: TrainedLog, updates: int) -> None:
    for k in range(trainer.step + 1, trainer.step + updates + 1):
        result = trainer.update(k, *random_batch(seed=k, step=k - 1))
        log.append(k, result.used_ids, incarnation=0, outcome=result.outcome.name)


def saved(root: Path, trainer: BatchTrainer, log: TrainedLog) -> Checkpoint:
    position = CheckpointPosition(update=trainer.step, digest=log.digest, seed=trainer.seed)
    return save_checkpoint(root, trainer, build_tokenizer(), log, position)


def imitated(model: Any, samples: list[TrainingSample]) -> torch.Tensor:
    """Return the negative log-likelihood of the trained tokens, per token, by the model's own forward, one sample at a
    time."""
    total, count = torch.zeros(()), 0
    for sample in samples:
        ids = torch.cat([torch.from_numpy(s.token_ids).long() for s in sample.segments])
        kept = [torch.full((len(s.token_ids),), s.role is Role.ACTION) for s in sample.segments]
        mask = torch.cat(kept)[1:]
        rows = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        total, count = total - rows[mask].sum(), count + int(mask.sum())
    return total / count


def test_an_update_is_that_of_plain_peft_with_adamw(base: Path) -> None:
    """Three steps on the same batch: values of the loss, and A and B of every layer."""
    config = UpdateConfig(
        lora=LORA,
        estimator=Extension("none"),
        loss=(LossTermChoice("imitation", where="all"),),
        update_rule=minibatches(1),
        optimizer=OptimizerConfig(lr=1e-2, warmup_updates=0, clip_norm=1e9),
    )
    made = opened(base, config)
    theirs = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(base),
        peft.LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "down_proj"]),
    )
    parameters = {n.replace(".default.", "."): p for n, p in theirs.named_parameters() if p.requires_grad}
    assert made.adapters is not None
    with torch.no_grad():
        for name, tensor in made.adapters.tensors().items():
            parameters[name].copy_(tensor)
    settings = config.optimizer
    adamw = torch.optim.AdamW(
        parameters.values(), lr=settings.lr, betas=settings.betas, eps=settings.epsilon, weight_decay=0.0
    )
    samples, groups = random_batch(seed=3)
    for k in (1, 2, 3):
        loss = imitated(theirs, samples)
        result = made.update(k, samples, groups)
        assert result.metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
        adamw.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        adamw.step()
    found = made.adapters.tensors()
    assert found.keys() == parameters.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, parameters[name].detach(), rtol=1e-3, atol=2e-5)
    assert all(float(t.abs().max()) > 1e-3 for t in found.values())


def test_only_adapters_change_and_the_merged_weights_are_base_plus_scaled_b_a(base: Path, tmp_path: Path) -> None:
    trainer = opened(base)
    assert trainer.adapters is not None
    before = load_file(base / WEIGHTS_NAME)
    advance(trainer, TrainedLog(), 2)
    write_weights(trainer.model, tmp_path / "base", merged=False)
    trainer.export_weights(tmp_path / "merged")
    unchanged, merged = load_file(tmp_path / "base"), load_file(tmp_path / "merged")
    assert before.keys() == unchanged.keys() == merged.keys()
    adapters = trainer.adapters.tensors()
    for name, weight in before.items():
        assert torch.equal(unchanged[name], weight)
        module = "base_model.model." + name.removesuffix(".weight")
        if f"{module}.lora_A.weight" in adapters:
            a, b = (adapters[f"{module}.lora_{part}.weight"] for part in "AB")
            assert float((b @ a).abs().max()) > 0
            torch.testing.assert_close(merged[name], weight + 12 / 4 * (b @ a), rtol=0, atol=1e-7)
        else:
            assert torch.equal(merged[name], weight)
    assert len(adapters) == 2 * 2 * 2
    optimized = sum(p.numel() for g in trainer.optimizer.param_groups for p in g["params"])
    assert optimized == sum(t.numel() for t in adapters.values())
    whole = build_tiny_model(SMALL, seed=0)
    whole.load_state_dict(merged, strict=False)
    ids = random_batch(seed=9)[0][0].segments[0].token_ids
    alone = BatchTrainer(whole, UpdateConfig(), seed=0).score(ids)
    assert trainer.score(ids) == pytest.approx(alone, abs=1e-5)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_resumed_trainer_continues_bit_for_bit(base: Path, tmp_path: Path, checkpointing: bool) -> None:
    compute = ComputeConfig(gradient_checkpointing=checkpointing, logprob_chunk_tokens=8)
    config = UpdateConfig(lora=LORA, compute=compute)
    straight, straight_log = opened(base, config), TrainedLog()
    advance(straight, straight_log, 4)
    first, log = opened(base, config), TrainedLog()
    advance(first, log, 2)
    found = saved(tmp_path, first, log)
    torch.manual_seed(99)
    second = BatchTrainer(load_model(found.model_folder(LORA, "")), config, seed=5)
    found.restore(second)
    advance(second, found.trained_log(), 2)
    assert straight.adapters is not None
    assert second.adapters is not None
    left, right = straight.adapters.tensors(), second.adapters.tensors()
    assert all(torch.equal(left[name], right[name]) for name in left)
    for one, two in zip(straight.optimizer.state.values(), second.optimizer.state.values(), strict=True):
        assert all(torch.equal(one[key], two[key]) for key in one)


def test_plain_peft_loads_a_checkpoint_on_the_base(base: Path, tmp_path: Path) -> None:
    trainer, log = opened(base), TrainedLog()
    advance(trainer, log, 2)
    folder = saved(tmp_path, trainer, log).path
    assert not (folder / WEIGHTS_NAME).exists()
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    assert theirs.peft_config["default"].base_model_name_or_path == str(base)
    merged, mine = theirs.merge_and_unload().state_dict(), published_state(trainer.model)
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, merged[name], rtol=0, atol=1e-7)


def test_a_checkpoint_is_merged_into_one_model_folder(base: Path, tmp_path: Path) -> None:
    trainer, log = opened(base), TrainedLog()
    advance(trainer, log, 2)
    folder = saved(tmp_path / "run" / "checkpoints", trainer, log).path
    command = ["merge", str(tmp_path / "run"), "--out", str(tmp_path / "merged")]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    merged, mine = load_model(tmp_path / "merged"), published_state(trainer.model)
    for name, tensor in published_state(merged).items():
        assert torch.equal(tensor, mine[name])
    assert load_tokenizer(tmp_path / "merged").get_vocab() == build_tokenizer().get_vocab()

    assert "merged exists; name a new folder" in CliRunner().invoke(app, command).output
    with pytest.raises(ConfigError, match="has whole weights, and is a model folder already"):
        merge_checkpoint(tmp_path / "merged", tmp_path / "again")
    write_model_folder(build_tiny_model(SMALL, seed=2), None, other := made(tmp_path / "other"))
    with pytest.raises(ConfigError, match="its adapters belong to the weights that"):
        merge_checkpoint(folder, tmp_path / "again", other)
    (folder / "base.json").write_text('{"model": "/absent", "sha256": ""}')
    with pytest.raises(
        ConfigError, match="adapters of the model /absent, which is not a model folder on this host; .* --base"
    ):
        merge_checkpoint(folder, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def kl_config(kind: str = "initial", path: str = "") -> UpdateConfig:
    reference = ReferenceConfig(kind=kind, path=path)  # type: ignore[arg-type]
    return UpdateConfig(
        lora=LORA,
        loss=(LossTermChoice("ppo_clip"), LossTermChoice("kl", weight=0.1)),
        reference=reference,
        optimizer=OptimizerConfig(lr=1e-2, warmup_updates=0),
    )


def test_the_initial_reference_is_the_policy_without_adapters(base: Path) -> None:
    """It gives the updates of a second model with the weights of the base, and has no second model."""
    one, two = opened(base, kl_config()), opened(base, kl_config("path", str(base)))
    assert one.reference is not None
    assert two.reference is not None
    assert one.reference.model is one.model
    for k in (1, 2, 3):
        batch = random_batch(seed=k, step=k - 1)
        mine, theirs = one.update(k, *batch), two.update(k, *batch)
        assert mine.metrics == pytest.approx(theirs.metrics, rel=1e-6)
    assert one.adapters is not None
    assert two.adapters is not None
    left, right = one.adapters.tensors(), two.adapters.tensors()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_adapters_do_not_depend_on_the_global_generator(base: Path) -> None:
    made = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        made.append(opened(base).adapters)
        assert torch.equal(torch.get_rng_state(), before)
    assert made[0] is not None
    assert made[1] is not None
    left, right = made[0].tensors(), made[1].tensors()
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert all(bool(t.any()) == (".lora_A." in name) for name, t in left.items())


def test_without_targets_every_linear_layer_except_the_output_layer_is_adapted(base: Path) -> None:
    adapters = opened(base, UpdateConfig(lora=LoraSettings(rank=2))).adapters
    assert adapters is not None
    names = {name.split(".")[-3] for name in adapters.tensors()}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (
            LoraSettings(rank=2, targets=("q_proj", "query")),
            r"targets`: no linear layer .* matches 'query'; it has .*q_proj",
        ),
        (LoraSettings(rank=2, targets=("embed_tokens",)), "matches 'embed_tokens'"),
        (LoraSettings(rank=17), r"rank` must be <= 16, the smaller side of .*k_proj \[16, 32\], got 17"),
    ],
)
def test_settings_that_do_not_fit_the_model_are_rejected(base: Path, lora: LoraSettings, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        opened(base, UpdateConfig(lora=lora))


def test_stacked_experts_without_adapters_are_named(caplog: pytest.LogCaptureFixture) -> None:
    config = UpdateConfig(lora=LoraSettings(rank=2))
    made = BatchTrainer(tiny_mixture(), config, seed=7)
    assert made.adapters is not None
    assert not any("experts" in name for name in made.adapters.tensors())
    assert "experts get no low-rank adapter" in caplog.text
    assert "tensors=4 first=model.layers.0.mlp.experts.gate_up_proj share_of_weights=0.4" in caplog.text
    with pytest.raises(
        ConfigError, match=r"targets`: 'gate_up_proj' of Qwen3MoeForCausalLM is a stack of the matrices of experts"
    ):
        BatchTrainer(tiny_mixture(), UpdateConfig(lora=LoraSettings(rank=2, targets=("gate_up_proj",))), seed=7)


def test_layers_that_peft_cannot_adapt_are_a_config_error() -> None:
    with pytest.raises(
        ConfigError, match=r"`learner.lora.targets` \[\]: peft cannot adapt .*Mamba.*; name those to adapt"
    ):
        BatchTrainer(build_model("mamba2"), UpdateConfig(lora=LoraSettings(rank=2)), seed=7)


def test_settings_that_do_not_fit_together_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"`lora.rank` must be 0 with compute.ranks = 2, got 4"):
        UpdateConfig(lora=LORA, compute=ComputeConfig(ranks=2))
    with pytest.raises(ValueError, match=r"`reference.kind` must be initial or path"):
        UpdateConfig(lora=LORA, reference=ReferenceConfig(kind="average"))


def other_base(folder: Path) -> Path:
    write_model_folder(build_tiny_model(SMALL, seed=2), build_tokenizer(), folder)
    return folder


def test_a_checkpoint_of_other_adapters_or_another_base_is_rejected(base: Path, tmp_path: Path) -> None:
    trainer, log = opened(base), TrainedLog()
    advance(trainer, log, 1)
    found = saved(tmp_path / "with", trainer, log)
    other = UpdateConfig(lora=LoraSettings(rank=8, alpha=12.0, targets=("q_proj",)))
    with pytest.raises(CheckpointError, match=r"r 4 -> 8, target_modules \['down_proj', 'q_proj'\] -> \['q_proj'\]"):
        found.restore(opened(base, other))
    (tmp_path / "other").mkdir()
    with pytest.raises(CheckpointError, match="belong to the weights that .* had when the run began"):
        found.restore(opened(other_base(tmp_path / "other")))
    with pytest.raises(CheckpointError, match="has low-rank adapters, and `learner.lora.rank` is 0"):
        found.model_folder(LoraSettings(), base)
    whole = BatchTrainer(build_tiny_model(SMALL, seed=1), UpdateConfig(), seed=5)
    log = TrainedLog()
    advance(whole, log, 1)
    with pytest.raises(CheckpointError, match="has whole weights, and `learner.lora.rank` is 4"):
        saved(tmp_path / "without", whole, log).model_folder(LORA, base)


def test_the_memory_plan_counts_what_adapters_need(base: Path) -> None:
    model: PreTrainedModel = build_tiny_model(SMALL, seed=1)
    whole = UpdateConfig(loss=kl_config().loss)
    plans = [plan_memory(config, model.config, Plugins(config)) for config in (whole, kl_config())]
    assert plans[1].optimizer < plans[0].optimizer / 5
    assert plans[1].gradients < plans[0].gradients / 5
    assert (plans[0].reference > 0, plans[1].reference) == (True, 0)
    assert plans[1].weights > plans[0].weights


def test_groups_of_parameters_apply_to_adapters(base: Path) -> None:
    from rollmesh.trainer.config import ParameterGroup

    group = ParameterGroup(names="*.lora_B.*", lr_factor=16.0)
    trainer = opened(base, UpdateConfig(lora=LORA, optimizer=OptimizerConfig(groups=(group,))))
    assert sorted(g["lr_factor"] for g in trainer.optimizer.param_groups) == [1.0, 16.0]
