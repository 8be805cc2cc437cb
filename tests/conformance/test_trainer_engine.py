"""The contract of the learner's trainer port, tested on every trainer through the port alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from rollmesh.demo.tiny_model import TinyModelConfig, build_tiny_model
from rollmesh.demo.tokenizer import build_tokenizer
from rollmesh.services.inference.engines.common.weights_buffer import read_state
from rollmesh.services.learner.config import LearnerConfig, PublishConfig
from rollmesh.services.learner.engine import Position, Restored, StepResult, find_engine
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.ledger_head import LedgerHead
from rollmesh.shared.domain.trajectory import (
    GroupContext,
    MemberOutcome,
    Outcome,
    Reward,
    Role,
    Sample,
    SamplingParams,
    Segment,
    Source,
    TrainingSample,
)
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.errors import ConfigError
from rollmesh.shared.weights.manifest import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    ROUNDED_PROBE_TOLERANCE,
    build_manifest,
    parse_manifest,
)
from rollmesh.shared.weights.precision import dtypes_of
from rollmesh.trainer.config import ComputeConfig, LoraSettings
from rollmesh.trainer.forward import score
from rollmesh.trainer.model_files import write_model_folder
from rollmesh.trainer.trained_log import read_trained
from tests.unit.trainer.test_precision import end_process_group

HEAD = LedgerHead(position=7, hash="ab" * 32)
SMALL = TinyModelConfig(hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48, num_layers=1)
MakeConfig = Callable[[str], LearnerConfig]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model_folder(build_tiny_model(SMALL, seed=1), build_tokenizer(), folder)
    return folder


@pytest.fixture(params=["fake", "torch", "torch with adapters", "torch in bfloat16"])
def make_config(request: pytest.FixtureRequest, tmp_path: Path, model: Path) -> Iterator[MakeConfig]:
    """Return a config with a separate folder per learner."""

    def make(name: str) -> LearnerConfig:
        directory = str(tmp_path / name)
        if request.param != "fake":
            lora = LoraSettings(rank=4 if "adapters" in request.param else 0)
            compute = ComputeConfig(precision="bfloat16" if "bfloat16" in request.param else "float32")
            return LearnerConfig(directory=directory, model=str(model), keep_last=2, lora=lora, compute=compute)
        return LearnerConfig(directory=directory, engine=Extension("fake", {"vocab_size": 112}), keep_last=2)

    yield make
    end_process_group()


def opened(config: LearnerConfig) -> Restored:
    return find_engine(config.engine)(config)


def sample(
    k: int, group: int, index: int, *, trainable: bool = True, tokens: int = 8, logprob: float = -4.7
) -> TrainingSample:
    draws = np.random.default_rng([k, group, index])
    given = Segment(
        parent=-1, role=Role.CONTEXT, source=Source.PROMPT, token_ids=draws.integers(13, 109, 6).astype(np.int32)
    )
    action = Segment(
        parent=0,
        role=Role.ACTION,
        source=Source.POLICY,
        token_ids=draws.integers(13, 109, tokens).astype(np.int32),
        logprobs=np.full(tokens, logprob, np.float32),
        loss_mask=np.ones(tokens, np.uint8),
        version=PolicyVersion(policy="main", step=k - 1),
        kv_step_oldest=k - 1,
        sampling=0,
    )
    return TrainingSample(
        sample=Sample(sample_id=f"s{k}.{group}.{index}", leaf=1, trainable=trainable),
        segments=(given, action),
        group=f"g{group}",
        task="t",
        staleness=0,
        sampling_params=(SamplingParams(),),
    )


def batch(k: int, *, outcome: Outcome = Outcome.OK) -> tuple[list[TrainingSample], list[GroupContext]]:
    samples = [sample(k, group, index) for group in range(2) for index in range(3)]
    groups = [
        GroupContext(
            group=f"g{group}",
            task="t",
            members=tuple(
                MemberOutcome(
                    sample_id=f"s{k}.{group}.{index}",
                    rewards=(Reward(name="correct", value=float(index % 2), outcome=outcome),),
                    end="ready",
                )
                for index in range(3)
            ),
        )
        for group in range(2)
    ]
    return samples, groups


def train(restored: Restored, updates: int) -> StepResult | None:
    """Make updates as the learner does, and append each to the list of trained samples."""
    result = None
    for k in range(restored.engine.step + 1, restored.engine.step + updates + 1):
        result = restored.engine.update(k, *batch(k))
        restored.log.append(k, result.used_ids, incarnation=0, outcome="APPLIED" if result.applied else "SKIPPED")
    return result


def save(restored: Restored, *, incarnation: int = 0, snapshot: bytes = b"") -> Path:
    position = Position(update=restored.engine.step, incarnation=incarnation, digest=restored.log.digest, head=HEAD)
    return restored.engine.save(restored.log, position, data_snapshot=snapshot)


def weights(restored: Restored, folder: Path) -> dict[str, bytes]:
    folder.mkdir(exist_ok=True)
    exported = restored.engine.export_weights(folder)
    return {name: path.read_bytes() for name, path in (*exported.files.items(), *exported.adapter.items())}


def test_a_first_opening_has_no_history(make_config: MakeConfig) -> None:
    restored = opened(make_config("a"))
    assert (restored.engine.step, restored.log.update, restored.position) == (0, 0, Position())


def test_equal_inputs_make_equal_weights_and_each_update_others(make_config: MakeConfig, tmp_path: Path) -> None:
    one, two = opened(make_config("a")), opened(make_config("b"))
    seen = [weights(one, tmp_path / "w")]
    for _ in range(3):
        train(one, 1)
        train(two, 1)
        assert weights(one, tmp_path / "w") == weights(two, tmp_path / "v")
        assert weights(one, tmp_path / "w") not in seen
        seen.append(weights(one, tmp_path / "w"))


def test_other_samples_make_other_weights(make_config: MakeConfig, tmp_path: Path) -> None:
    one, two = opened(make_config("a")), opened(make_config("b"))
    samples, groups = batch(1)
    one.engine.update(1, samples, groups)
    two.engine.update(1, samples[:-1], groups)
    assert weights(one, tmp_path / "w") != weights(two, tmp_path / "v")


def test_the_update_after_a_restore_is_the_one_that_would_have_come(make_config: MakeConfig, tmp_path: Path) -> None:
    straight, first = opened(make_config("a")), opened(make_config("b"))
    expected = train(straight, 4)
    train(first, 2)
    save(first)
    second = opened(make_config("b"))
    assert second.engine.step == second.log.update == second.position.update == 2
    found = train(second, 2)
    assert weights(second, tmp_path / "w") == weights(straight, tmp_path / "v")
    assert second.log.digest == straight.log.digest
    assert found is not None
    assert expected is not None
    assert found == expected


def test_a_checkpoint_tells_its_position_its_list_and_the_data_snapshot(make_config: MakeConfig) -> None:
    restored = opened(make_config("a"))
    train(restored, 3)
    folder = save(restored, incarnation=2, snapshot=b"\x00pool")
    position = opened(make_config("a")).position
    assert position == Position(update=3, incarnation=2, digest=restored.log.digest, head=HEAD)
    assert [line.update for line in read_trained(folder / "trained.jsonl")] == [1, 2, 3]
    assert (folder / "data_snapshot.bin").read_bytes() == b"\x00pool"


def test_the_newest_incarnation_is_restored_and_old_checkpoints_go(make_config: MakeConfig) -> None:
    restored = opened(make_config("a"))
    for incarnation in (0, 0, 1):
        train(restored, 1)
        save(restored, incarnation=incarnation)
    assert opened(make_config("a")).position.incarnation == 1
    assert len(list(make_config("a").checkpoints.glob("update-*"))) == 2


def test_a_checkpoint_cut_short_by_a_crash_is_passed_over(make_config: MakeConfig) -> None:
    restored = opened(make_config("a"))
    train(restored, 1)
    folder = save(restored)
    cut = folder.parent / ".tmp-checkpoint-update-00000002.0"
    cut.mkdir()
    (cut / "trained.jsonl").write_bytes(b"{")
    again = opened(make_config("a"))
    assert again.engine.step == 1
    train(again, 1)
    save(again)
    assert opened(make_config("a")).engine.step == 2


def test_a_checkpoint_of_another_seed_or_with_another_history_is_refused(make_config: MakeConfig) -> None:
    config = make_config("a")
    restored = opened(config)
    train(restored, 1)
    with pytest.raises(ValueError, match="position"):
        restored.engine.save(restored.log, Position(update=2, digest=restored.log.digest), data_snapshot=b"")
    save(restored)
    other = {name: getattr(config, name) for name in config.__struct_fields__} | {"seed": 9}
    with pytest.raises(ConfigError, match="seed"):
        opened(LearnerConfig(**other))


def test_a_skipped_update_counts_and_changes_no_weights(make_config: MakeConfig, tmp_path: Path) -> None:
    restored = opened(make_config("a"))
    train(restored, 1)
    before = weights(restored, tmp_path / "w")
    result = restored.engine.update(2, *batch(2, outcome=Outcome.INFRA_FAILURE))
    assert (result.applied, result.used_ids, restored.engine.step) == (False, [], 2)
    assert {reason for _, reason in result.verdicts} == {"UNSCORED"}
    assert weights(restored, tmp_path / "w") == before
    assert restored.engine.update(3, [], []).applied is False
    assert weights(restored, tmp_path / "w") == before


def test_what_cannot_be_trained_on_is_left_out_with_a_reason_in_the_order_given(make_config: MakeConfig) -> None:
    restored = opened(make_config("a"))
    samples, groups = batch(1)
    samples[1] = sample(1, 0, 1, trainable=False)
    samples[3] = sample(1, 1, 0, tokens=0)
    result = restored.engine.update(1, samples, groups)
    assert [sample_id for sample_id, _ in result.verdicts] == [s.sample.sample_id for s in samples]
    assert [reason for _, reason in result.verdicts] == [None, "NOT_TRAINABLE", None, "NO_TRAINED_TOKENS", None, None]
    assert result.metrics["samples/used"] == 4.0


def test_updates_follow_each_other(make_config: MakeConfig) -> None:
    restored = opened(make_config("a"))
    with pytest.raises(ValueError, match="does not follow"):
        restored.engine.update(2, *batch(2))


def test_scores_are_log_probs_of_the_present_weights(make_config: MakeConfig) -> None:
    config = make_config("a")
    restored = opened(config)
    assert restored.engine.vocab_size == 112
    prompt = np.array([20, 33, 47, 5, 90, 61], np.int32)
    (first,) = restored.engine.score([prompt])
    assert first.dtype == np.float32
    assert first[0] == 0.0
    assert (first[1:] < 0).all()
    total = sum(np.exp(row[1]) for row in restored.engine.score([np.array([20, t], np.int32) for t in range(112)]))
    assert total == pytest.approx(1.0, abs=1e-4)
    train(restored, 1)
    second, *others = restored.engine.score([prompt, prompt[:3], np.array([7, 8], np.int32)])
    for row, alone in zip(others, [prompt[:3], np.array([7, 8], np.int32)], strict=True):
        np.testing.assert_allclose(row, restored.engine.score([alone])[0], atol=1e-5)
    np.testing.assert_allclose(second, restored.engine.score([prompt])[0], atol=1e-5)
    assert (second != first).any()
    save(restored)
    np.testing.assert_array_equal(opened(config).engine.score([prompt])[0], restored.engine.score([prompt])[0])


def test_published_weights_are_rounded_on_request_and_the_manifest_says_so(model: Path, tmp_path: Path) -> None:
    publish = PublishConfig(dtype="bfloat16")
    config = LearnerConfig(directory=str(tmp_path / "a"), model=str(model))
    exact, rounded = (opened(c).engine.export_weights(tmp_path) for c in (config, replace(config, publish=publish)))
    manifest = parse_manifest(build_manifest(rounded.files, probe_tolerance=rounded.probe_tolerance).data)
    assert (manifest.dtype, list(manifest.exceptions)) == ("bfloat16", [])
    assert manifest.probe_tolerance == rounded.probe_tolerance > exact.probe_tolerance


def test_the_base_of_a_published_adapter_is_rounded_on_request_and_the_adapter_is_not(
    model: Path, tmp_path: Path
) -> None:
    publish = PublishConfig(dtype="bfloat16")
    config = LearnerConfig(directory=str(tmp_path / "a"), model=str(model), lora=LoraSettings(rank=4), publish=publish)
    restored = opened(config)
    first = restored.engine.export_weights(tmp_path)
    train(restored, 1)
    second = restored.engine.export_weights(tmp_path)
    assert (set(first.adapter), set(second.adapter)) == (set(), {ADAPTER_CONFIG, ADAPTER_WEIGHTS})
    for exported in (first, second):
        assert set(dtypes_of(exported.files.values()).values()) == {"bfloat16"}
        assert exported.probe_tolerance == ROUNDED_PROBE_TOLERANCE
    assert set(dtypes_of([second.adapter[ADAPTER_WEIGHTS]]).values()) == {"float32"}
    prompt = np.arange(20, 60, dtype=np.int32)
    served = build_tiny_model(SMALL, seed=0)
    served.load_state_dict(read_state({**second.files, **second.adapter}), strict=False)
    (expected,) = restored.engine.score([prompt])
    assert 1e-6 < np.abs(score(served, prompt) - expected).max() < 0.01


def test_the_measurements_of_groups_are_finite_and_of_groups_with_used_samples(make_config: MakeConfig) -> None:
    samples, groups = batch(1)
    samples = [s if s.group == "g1" else replace(s, sample=replace(s.sample, trainable=False)) for s in samples]
    (measured,) = opened(make_config("a")).engine.update(1, samples, groups).groups
    assert (measured.group, measured.num_tokens) == ("g1", 3 * 8)
    assert 0 < measured.mean_abs_advantage < 10
    assert -10 < measured.policy_loss < 10
    failed = opened(make_config("b")).engine.update(1, *batch(1, outcome=Outcome.INFRA_FAILURE))
    assert (failed.applied, failed.groups) == (False, ())
