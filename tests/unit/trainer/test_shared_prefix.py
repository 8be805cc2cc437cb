"""Sequences that share a prefix: which ones do, and the equality of log-probs, gradients and updates with those of
separate sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from rollmesh.demo.tiny_model import TinyModelConfig, build_tiny_model
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.errors import ConfigError
from rollmesh.trainer.config import ComputeConfig, LossTermChoice, OptimizerConfig, PackingConfig, UpdateConfig
from rollmesh.trainer.forward import ForwardMode, target_logits, target_logprobs
from rollmesh.trainer.packing import MicroBatch, pack, saved_ratio
from rollmesh.trainer.self_test import choose_forward
from rollmesh.trainer.sequences import Sequence1D
from rollmesh.trainer.shared_prefix import SharedPrefix, shared_prefixes, square_tokens
from rollmesh.trainer.update import BatchTrainer, UpdateResult
from tests.models.architectures import build_model

from .builders import action, group, member, minibatches, prompt, training_sample

SMALL = TinyModelConfig(hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48)
SHARED = PackingConfig(row_tokens=64, micro_batch_tokens=256, shared_row_tokens=96)
SEPARATE = msgspec.structs.replace(SHARED, shared_row_tokens=0)


def up_to(shared_row_tokens: int, row_tokens: int = 1) -> PackingConfig:
    return PackingConfig(row_tokens=row_tokens, micro_batch_tokens=4096, shared_row_tokens=shared_row_tokens)


def sequence(token_ids: Sequence[int], targets: Sequence[int]) -> Sequence1D:
    mask = np.zeros(len(token_ids), np.uint8)
    mask[list(targets)] = 1
    return Sequence1D(np.asarray(token_ids, np.int32), mask)


def of_groups(seed: int = 0) -> list[Sequence1D]:
    """Return two groups with a prompt of 30 and 20 tokens, of which one has targets in its prompt, a member that has no
    more tokens than the prompt, and two equal members; and a sequence of another prompt."""
    rng = np.random.default_rng(seed)
    first, second = rng.integers(0, 96, 30).tolist(), rng.integers(0, 96, 20).tolist()
    made = []
    for length in (12, 1, 7, 12):
        made.append(sequence(first + rng.integers(0, 96, length).tolist(), range(30, 30 + length)))
    made.append(made[2])
    for length in (5, 0, 9):
        made.append(sequence(second + rng.integers(0, 96, length).tolist(), (4, 19, *range(20, 20 + length))))
    made.append(sequence(rng.integers(0, 96, 25).tolist(), range(1, 25)))
    return [made[i] for i in rng.permutation(len(made))]


def through(
    model: PreTrainedModel, sequences: Sequence[Sequence1D], packing: PackingConfig
) -> tuple[Tensor, list[Tensor]]:
    """Return the log-probs of all targets, and the gradients of a weighting of them."""
    parts = torch.zeros(sum(int(s.target_mask.sum()) for s in sequences))
    for batch in pack(sequences, packing):
        values = target_logprobs(target_logits(model, batch), batch)
        parts = parts.index_add(0, batch.target_index, values)
    return parts.detach(), gradients(model, parts)


def plain(model: PreTrainedModel, sequences: Sequence[Sequence1D]) -> tuple[Tensor, list[Tensor]]:
    """Return the same of the model's own forward, sequence by sequence."""
    parts = []
    for one in sequences:
        ids = torch.as_tensor(one.token_ids).long()
        logprobs = model(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        parts.append(logprobs[torch.arange(len(ids) - 1), ids[1:]][torch.as_tensor(one.target_mask[1:]).bool()])
    return torch.cat(parts).detach(), gradients(model, torch.cat(parts))


def gradients(model: PreTrainedModel, values: Tensor) -> list[Tensor]:
    loss = (values * torch.linspace(-1.0, 1.5, len(values))).sum()
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return [torch.zeros(()) if g is None else g for g in found]


def test_a_group_is_one_row_with_its_prompt_once() -> None:
    prompt_ids = list(range(10))
    made = [sequence([*prompt_ids, 20 + i, 30, 31], (10, 11, 12)) for i in range(3)]
    other = sequence([50, 51, 52, 53], (3,))
    batch, alone = pack(
        [made[0], other, made[1], made[2]], PackingConfig(row_tokens=32, micro_batch_tokens=64, shared_row_tokens=32)
    )
    assert batch.token_ids.tolist() == [[*prompt_ids, 20, 30, 31, 21, 30, 31, 22, 30, 31]]
    assert batch.position_ids.tolist() == [[*range(13), 10, 11, 12, 10, 11, 12]]
    assert batch.sequences == (0, 2, 3)
    assert batch.target_ids.tolist() == [20, 30, 31, 21, 30, 31, 22, 30, 31]
    assert batch.target_col.tolist() == [9, 10, 11, 9, 13, 14, 9, 16, 17]
    assert batch.target_index.tolist() == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    assert batch.num_tokens == 19
    assert (alone.token_ids.tolist(), alone.target_index.tolist(), alone.parts) == ([[50, 51, 52, 53]], [3], None)
    assert saved_ratio([batch, alone], [*made, other]) == pytest.approx(20 / 43)


def test_the_length_of_a_row_with_a_mask_is_limited() -> None:
    """The mask of a row of T tokens has T^2 numbers, so neither a longer sequence nor further groups are placed beside
    a group."""
    groups = [sequence([*range(g, g + 100), 900 + i, 30], (100, 101)) for g in range(100, 600, 100) for i in range(4)]
    longest = sequence([7] * 1000, (999,))
    for row_tokens in (64, 1024):
        config = PackingConfig(row_tokens=row_tokens, micro_batch_tokens=2048, shared_row_tokens=256)
        found = pack([*groups, longest], config)
        assert sorted(i for batch in found for i in batch.sequences) == list(range(21))
        assert all(batch.token_ids.shape[1] <= 256 for batch in found if batch.parts is not None)
        assert sum(batch.parts is not None for batch in found) == 1


def test_a_group_that_does_not_fit_is_divided_between_rows() -> None:
    made = [sequence([*range(10), 20 + i, 30], (10, 11)) for i in range(5)]
    found = shared_prefixes(made, up_to(14))
    assert sorted(one.num_tokens for one in found) == [12, 14, 14]
    assert [one.prefix_tokens for one in found].count(10) == 2
    assert shared_prefixes(made, up_to(11)) == [SharedPrefix((i,), 0, 12) for i in range(5)]


def test_few_common_tokens_and_rows_with_more_targets_than_tokens_are_not_shared() -> None:
    short = [sequence([1, 2, *range(10 * i, 10 * i + 40)], (41,)) for i in range(2, 5)]
    assert all(one.prefix_tokens == 0 for one in shared_prefixes(short, up_to(1000)))
    trained = [sequence([*range(40), 50 + i], range(1, 41)) for i in range(3)]
    assert all(one.prefix_tokens == 0 for one in shared_prefixes(trained, up_to(1000)))


def test_samples_share_only_where_it_saves_work() -> None:
    """With a width of 256 attention takes as long as the linear layers for rows of 1,024 tokens, and with 4,096 for
    rows of 16,384."""

    def rows(prompt_tokens: int, response_tokens: int, width: int, row_tokens: int = 1) -> list[int]:
        question, rng = list(range(prompt_tokens)), np.random.default_rng(0)
        answers = [[1000 + i, *rng.integers(0, 96, response_tokens - 1).tolist()] for i in range(8)]
        made = [sequence(question + answer, range(prompt_tokens, prompt_tokens + 9)) for answer in answers]
        found = shared_prefixes(made, up_to(4096, row_tokens), square_tokens(width))
        return sorted((len(one.sequences) for one in found), reverse=True)

    assert rows(512, 128, 256) == [8]
    assert rows(512, 256, 256) == [4] * 2
    assert rows(128, 384, 256) == [1] * 8
    assert rows(512, 512, 256) == [1] * 8
    assert rows(512, 512, 4096) == [4] * 2
    assert rows(24, 24, 128) == rows(24, 24, 128, row_tokens=128) == [4] * 2


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), max_size=12), st.integers(1, 40))
@settings(max_examples=150, deadline=None)
def test_every_sequence_is_placed_once_after_its_own_prefix(made: list[list[int]], limit: int) -> None:
    sequences = [sequence(ids, [len(ids) - 1] if len(ids) > 1 else []) for ids in made]
    found = shared_prefixes(sequences, up_to(limit))
    assert sorted(i for one in found for i in one.sequences) == list(range(len(made)))
    for one in found:
        prefixes = {tuple(made[i][: one.prefix_tokens]) for i in one.sequences}
        assert prefixes == {tuple(made[one.sequences[0]][: one.prefix_tokens])}
        assert one.num_tokens == one.prefix_tokens + sum(len(made[i]) - one.prefix_tokens for i in one.sequences)
        assert len(one.sequences) == 1 or one.num_tokens <= limit
        assert (len(one.sequences) > 1) == (one.prefix_tokens > 0)


@pytest.mark.parametrize("name", ["qwen3", "llama", "qwen3_window", "mistral_window", "gemma3", "mixtral", "gpt2"])
def test_log_probs_and_gradients_equal_those_of_separate_forwards(name: str) -> None:
    model, sequences = build_model(name).train(False), of_groups()
    assert any(batch.parts is not None for batch in pack(sequences, SHARED))
    found, found_gradients = through(model, sequences, SHARED)
    expected, expected_gradients = plain(model, sequences)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)
    scale = max(float(g.abs().max()) for g in expected_gradients)
    for one, other in zip(found_gradients, expected_gradients, strict=True):
        assert float((one - other).abs().max()) <= 1e-4 * scale


def test_members_do_not_see_each_other() -> None:
    model = build_tiny_model(SMALL, seed=1)
    made = [sequence([*range(20), *range(30 + 5 * i, 35 + 5 * i)], range(20, 25)) for i in range(3)]
    changed = [made[0], sequence([*range(20), *range(60, 65)], range(20, 25)), made[2]]
    with torch.no_grad():
        before, after = (torch.zeros(15), torch.zeros(15))
        for into, sequences in ((before, made), (after, changed)):
            (batch,) = pack(sequences, SHARED)
            assert batch.parts is not None
            into[batch.target_index] = target_logprobs(target_logits(model, batch), batch)
    assert torch.equal(before[:5], after[:5])
    assert torch.equal(before[10:], after[10:])
    assert not torch.allclose(before[5:10], after[5:10])


def updated(packing: PackingConfig, **more: Any) -> tuple[BatchTrainer, UpdateResult]:
    rng = np.random.default_rng(3)
    samples, groups = [], []
    for g in range(2):
        question, members = rng.integers(13, 109, 24).tolist(), []
        for i in range(4):
            answer = rng.integers(13, 109, rng.integers(3, 9)).tolist()
            segments = [prompt(question), action(answer, [-4.7] * len(answer))]
            samples.append(training_sample(f"s{g}-{i}", segments, of=f"g{g}"))
            members.append(member(f"s{g}-{i}", {"correct": float(i % 2)}, of=samples[-1]))
        groups.append(group(f"g{g}", *members))
    chosen: dict[str, Any] = {
        "packing": packing,
        "loss": (
            LossTermChoice("ppo_clip"),
            LossTermChoice("kl", weight=0.1),
            LossTermChoice("progress", {"through": True}),
        ),
        "optimizer": OptimizerConfig(lr=1e-3, warmup_updates=0),
        "update_rule": minibatches(1),
    }
    config = UpdateConfig(**(chosen | more))
    trainer = BatchTrainer(build_tiny_model(SMALL, seed=1), config, seed=7)
    return trainer, trainer.update(1, samples, groups)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"compute": ComputeConfig(logprob_chunk_tokens=8, gradient_checkpointing=True)},
        {"update_rule": Extension("minibatches", {"num_minibatches": 2, "whole_groups": True})},
    ],
    ids=["plain", "in parts and computed again", "whole groups"],
)
def test_an_update_is_the_same_and_computes_fewer_tokens(more: dict[str, Any]) -> None:
    shared, result = updated(SHARED, **more)
    separate, expected = updated(SEPARATE, **more)
    assert result.metrics["tokens/prefix_saved_share"] > 0.5
    assert expected.metrics["tokens/prefix_saved_share"] == 0.0
    assert result.used_ids == expected.used_ids
    for name in ("loss", "grad_norm", "entropy", "tokens/trained"):
        assert result.metrics[name] == pytest.approx(expected.metrics[name], rel=1e-3, abs=1e-5)
    for one, other in zip(shared.model.parameters(), separate.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=2e-4, rtol=2e-3)


def test_bfloat16_shares_within_its_rounding() -> None:
    rounded = ComputeConfig(precision="bfloat16")
    results = []
    for packing in (SHARED, SEPARATE):
        trainer, result = updated(packing, compute=rounded, loss=(LossTermChoice("ppo_clip"),))
        results.append(result.metrics)
        trainer.close()
    assert results[0]["tokens/prefix_saved_share"] > 0.5
    assert results[0]["grad_norm"] == pytest.approx(results[1]["grad_norm"], rel=0.05)


def ignore_masks(model: PreTrainedModel) -> None:
    """Let the first layer of a model compute causal attention in place of a mask of numbers."""

    def replace_mask(
        _: object, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        mask = kwargs.get("attention_mask")
        if isinstance(mask, Tensor) and mask.is_floating_point():
            kwargs["attention_mask"] = torch.full_like(mask, torch.finfo(mask.dtype).min).triu(1)
        return args, kwargs

    layers: Any = model.base_model.layers
    layers[0].self_attn.register_forward_pre_hook(replace_mask, with_kwargs=True)


def test_a_model_that_does_not_use_the_mask_is_rejected_by_name() -> None:
    model = build_tiny_model(SMALL, seed=1)
    ignore_masks(model)
    assert choose_forward(model).mode is ForwardMode.PACKED
    with pytest.raises(
        ConfigError, match="Qwen3ForCausalLM cannot compute .* once: shared log-probs differ from plain ones by"
    ):
        BatchTrainer(model, UpdateConfig(packing=SHARED), seed=0)


def test_a_model_with_its_own_windows_is_rejected_by_name() -> None:
    with pytest.raises(
        ConfigError, match="GPTNeoForCausalLM cannot compute .*: shared log-probs differ from plain ones by"
    ):
        BatchTrainer(build_model("gpt_neo"), UpdateConfig(packing=SHARED), seed=0)


def test_a_recurrent_model_is_rejected_by_name() -> None:
    with pytest.raises(
        ConfigError, match="MambaForCausalLM cannot compute .* sequences cannot share a row: packed log-probs"
    ):
        BatchTrainer(build_model("mamba"), UpdateConfig(packing=SHARED), seed=0)


def test_settings_that_cannot_work_are_rejected() -> None:
    with pytest.raises(ValueError, match="`micro_batch_tokens` must be >= shared_row_tokens = 2048, got 1024"):
        PackingConfig(shared_row_tokens=2048)
    flash = ComputeConfig(attention="flash_attention_2", precision="bfloat16")
    with pytest.raises(
        ValueError, match="`packing.shared_row_tokens` must be 0 with compute.attention: flash_attention_2, got 96"
    ):
        UpdateConfig(packing=SHARED, compute=flash)


def test_without_the_setting_no_row_has_a_mask() -> None:
    batches: list[MicroBatch] = pack(of_groups(), SEPARATE)
    assert all(batch.parts is None for batch in batches)
    assert all(torch.equal(batch.target_next, batch.target_col + 1) for batch in batches)
