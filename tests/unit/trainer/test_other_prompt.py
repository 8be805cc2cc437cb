"""Features: log-probs after another prompt, and equal requests, which are computed once."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from rollmesh.demo.tiny_model import TinyModelConfig, build_tiny_model
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import Role, Source, TrainingSample
from rollmesh.shared.errors import ConfigError
from rollmesh.trainer import feature_pass
from rollmesh.trainer.config import (
    FeatureChoice,
    OptimizerConfig,
    PackingConfig,
    ReferenceConfig,
    UpdateConfig,
)
from rollmesh.trainer.feature_pass import computed_features
from rollmesh.trainer.features import FEATURES, Feature, FeatureInputs, FeatureRequest
from rollmesh.trainer.forward import ForwardPlan
from rollmesh.trainer.losses import LossInputs, LossTerm
from rollmesh.trainer.model_files import published_state
from rollmesh.trainer.other_prompt import OtherPromptLogprob, OtherPromptOptions
from rollmesh.trainer.samples import DropReason, build_table
from rollmesh.trainer.sequences import Sequence1D
from rollmesh.trainer.update import BatchTrainer
from rollmesh.trainer.vocabulary_features import Entropy, KeptLogprob, KeptOptions

from .builders import action, group, member, minibatches, prompt, training_sample

PARTS = Path(__file__).with_name("port_parts.py")
SMALL = TinyModelConfig(hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48)


def hinted(sample_id: str, of: str = "g0", seed: int = 0, temperature: float = 1.0) -> TrainingSample:
    """Return a sample of two turns: prompt, hint, answer, tool result, forced beginning, answer."""
    rng = np.random.default_rng(seed)

    def tokens(n: int) -> list[int]:
        return list(rng.integers(13, 109, n).tolist())

    def logprobs(n: int) -> list[float]:
        return [-4.7] * n

    segments = [
        prompt(tokens(6)),
        replace(prompt(tokens(4)), source=Source.HINT),
        action(tokens(5), logprobs(5)),
        replace(prompt(tokens(3)), role=Role.OBSERVATION, source=Source.TOOL),
        replace(prompt(tokens(2)), role=Role.ACTION),
        action(tokens(7), logprobs(7)),
    ]
    made = training_sample(sample_id, segments, of=of)
    return replace(made, sampling_params=(replace(made.sampling_params[0], temperature=temperature),))


def batch_of_hinted(num: int = 6, **values: Any) -> tuple[list[TrainingSample], list[Any]]:
    samples = [hinted(f"s{n}", seed=n, **values) for n in range(num)]
    return samples, [group("g0", *(member(s.sample.sample_id, {"r": float(i % 2)}) for i, s in enumerate(samples)))]


def feature(**options: Any) -> OtherPromptLogprob:
    made = OtherPromptLogprob(options=OtherPromptOptions(**options))
    made.use_tokenizer(lambda text: [20 + ord(c) % 50 for c in text])
    return made


def sequences(of: OtherPromptLogprob, sample: TrainingSample) -> list[tuple[list[int], list[int]]]:
    found = of.sequences_of(sample)
    assert found is not None
    return [(s.token_ids.tolist(), np.flatnonzero(s.target_mask).tolist()) for s in found]


def path(sample: TrainingSample, *numbers: int) -> list[int]:
    return [int(t) for n in numbers for t in sample.segments[n].token_ids]


# Which sequences ------------------------------------------------------------------------------------------------------


def test_segments_are_omitted_by_source_and_by_role() -> None:
    sample = hinted("a")
    (found,) = sequences(feature(omit_sources=["hint"]), sample)
    assert found == (path(sample, 0, 2, 3, 4, 5), [6, 7, 8, 9, 10, 16, 17, 18, 19, 20, 21, 22])
    (found,) = sequences(feature(omit_roles=["observation"], omit_sources=["hint"]), sample)
    assert found == (path(sample, 0, 2, 4, 5), [6, 7, 8, 9, 10, 13, 14, 15, 16, 17, 18, 19])


def test_an_omission_of_answers_gives_every_turn_a_sequence_with_its_whole_answer() -> None:
    sample = hinted("a")
    first, second = sequences(feature(omit_roles=["action", "observation"]), sample)
    assert first == (path(sample, 0, 1, 2), [10, 11, 12, 13, 14])
    assert second == (path(sample, 0, 1, 4, 5), [12, 13, 14, 15, 16, 17, 18]), "the forced beginning is of the answer"


def test_a_prefix_is_text_ids_or_from_a_file_by_task(tmp_path: Path) -> None:
    sample = hinted("a")
    own = path(sample, *range(6))
    ((ids, targets),) = sequences(feature(prefix="ab"), sample)
    assert (ids, targets[0]) == ([20 + 97 % 50, 20 + 98 % 50, *own], 12)
    ((ids, _),) = sequences(feature(prefix_ids=[5, 6, 7], omit_roles=["context"]), sample)
    assert ids == [5, 6, 7, *path(sample, 2, 3, 4, 5)]
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"task": "task-of-g0", "token_ids": [8, 9]}\n\n{"task": "task-of-g1", "text": "a"}\n')
    given = feature(prompts=str(file), omit_roles=["context"])
    assert sequences(given, sample)[0][0] == [8, 9, *path(sample, 2, 3, 4, 5)]
    assert sequences(given, hinted("b", of="g1"))[0][0][0] == 20 + 97 % 50
    assert given.sequences_of(hinted("c", of="g2")) is None, "no prompt for the task"


def test_no_token_before_the_answer_is_no_prompt() -> None:
    assert feature(omit_roles=["context"]).sequences_of(hinted("a")) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "at least one of the options must be set"),
        (
            {"prefix": "a", "prefix_ids": [1]},
            "at most one of `prefix`, `prefix_ids` and `prompts` may be set, got prefix and",
        ),
        ({"prompts": "here.jsonl"}, "`prompts` must be an absolute path, got 'here.jsonl'"),
        ({"omit_sources": ["hints"]}, "hints"),
        ({"prompts": "/nowhere/p.jsonl"}, "the file cannot be read"),
    ],
)
def test_wrong_options_are_errors_of_the_configuration(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FEATURES.make(Extension("other_prompt_logprob", options))


@pytest.mark.parametrize(
    ("line", "message"),
    [('{"task": "t"}', "line 2: exactly one of"), ("{", "line 2"), ('{"task": "t", "txt": "a"}', "line 2.*txt")],
)
def test_a_wrong_line_is_named(line: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"task": "a", "text": "b"}\n' + line + "\n")
    with pytest.raises(ConfigError, match=message):
        FEATURES.make(Extension("other_prompt_logprob", {"prompts": str(file)}))


def test_a_text_needs_the_tokenizer() -> None:
    choice = FeatureChoice("other_prompt_logprob", {"prefix": "Be brief. "})
    with pytest.raises(ConfigError, match="the folder of the model has no tokenizer"):
        trainer({"brief": choice})
    assert BatchTrainer(
        build_tiny_model(SMALL, seed=1), UpdateConfig(features={"brief": choice}), seed=1, encode=lambda text: [20]
    ).plugins.rewrites


# Values ---------------------------------------------------------------------------------------------------------------


def trainer(features: dict[str, FeatureChoice], **settings: Any) -> BatchTrainer:
    config = UpdateConfig(
        **{
            "features": features,
            "update_rule": minibatches(1),
            "packing": PackingConfig(row_tokens=64, micro_batch_tokens=64),
            "optimizer": OptimizerConfig(lr=1e-3, warmup_updates=0),
            **settings,
        }
    )
    return BatchTrainer(build_tiny_model(SMALL, seed=1), config, seed=7)


def direct(model: Any, found: Sequence[Sequence1D], temperature: float) -> Tensor:
    """Return the log-probs of all targets, from one plain forward per sequence."""
    made = []
    for sequence in found:
        ids = torch.as_tensor(sequence.token_ids, dtype=torch.long)
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1] / temperature
        every = logits.log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1)
        made.append(every[torch.as_tensor(sequence.target_mask[1:] == 1)])
    return torch.cat(made)


OMISSIONS: list[dict[str, Any]] = [
    {"omit_sources": ["hint"]},
    {"omit_roles": ["action", "observation"]},
    {"omit_roles": ["context"], "prefix_ids": [20, 21, 22]},
]


@pytest.mark.parametrize("options", OMISSIONS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_equal_those_of_a_direct_forward_whatever_the_packing(
    options: dict[str, Any], temperature: float
) -> None:
    made = trainer({})
    samples, _ = batch_of_hinted(temperature=temperature)
    of = feature(**options)
    request = FeatureRequest(of)
    table = build_table(samples, update=1, rewrites={request.function: of.sequences_of})
    with torch.no_grad():
        expected = torch.cat([direct(made.model, of.sequences_of(s) or (), temperature) for s in samples])
    for size in (64, 4096):
        packing = PackingConfig(row_tokens=64, micro_batch_tokens=size)
        found = computed_features(
            made.model,
            table,
            {"other": request, "plain": FeatureRequest(Entropy())},
            ForwardPlan(made.forward_choice.mode, packing),
        )
        np.testing.assert_allclose(found["other"], expected.numpy(), atol=1e-5)
        assert found["plain"].shape == found["other"].shape


def test_a_selected_part_of_the_table_has_the_values_of_its_tokens() -> None:
    made = trainer({})
    samples, _ = batch_of_hinted()
    of = feature(omit_roles=["action", "observation"])
    request = FeatureRequest(of)
    table = build_table(samples, update=1, rewrites={request.function: of.sequences_of})
    mask = table.columns["turn"] == 1
    mask[table.columns["sample"] == 2] = False
    whole = computed_features(made.model, table, {"other": request}, made.forward_plan)["other"]
    part = table.select([4, 2, 1], mask)
    assert [len(others) for others in part.others[request.function]] == [1, 1], "sequences without a target are gone"
    found = computed_features(made.model, part, {"other": request}, made.forward_plan)["other"]
    at = [np.flatnonzero(mask & (table.columns["sample"] == n)) for n in (4, 1)]
    np.testing.assert_allclose(found, whole[np.concatenate(at)], atol=1e-5)


class Recording(LossTerm):
    """A loss term that keeps what it reads."""

    needs = ()

    def __init__(self) -> None:
        self.seen: list[LossInputs] = []

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        self.seen.append(inputs)
        return (inputs["token_weight"] * inputs["other"]).sum() + 0 * inputs.logprobs.sum(), {}


def recording(made: BatchTrainer) -> Recording:
    term = Recording()
    made.plugins.loss._terms[0].loss = term
    return term


@pytest.mark.parametrize("under", ["start", "reference", "step", "current"])
def test_the_other_prompt_is_scored_under_every_weights(under: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"omit_roles": ["action", "observation"]}  # the second turn of a sample is the longer one
    other = build_tiny_model(SMALL, seed=5)
    other.save_pretrained(tmp_path)
    choice = FeatureChoice("other_prompt_logprob", options, under=under)
    made = trainer({"other": choice}, reference=ReferenceConfig(kind="path", path=str(tmp_path)))
    term = recording(made)
    samples, groups = batch_of_hinted()
    model = other if under == "reference" else build_tiny_model(SMALL, seed=1)
    with torch.no_grad():
        expected = [direct(model, feature(**options).sequences_of(s) or (), 1.0) for s in samples]
    made.update(1, samples, groups)
    assert len(term.seen) > 1, "several micro-batches"
    for seen in term.seen:
        numbers = list(dict.fromkeys(seen["sample"].tolist()))
        torch.testing.assert_close(seen["other"], torch.cat([expected[n] for n in numbers]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("options", OMISSIONS)
def test_under_the_current_policy_the_gradient_equals_that_of_a_direct_forward(options: dict[str, Any]) -> None:
    choice = FeatureChoice("other_prompt_logprob", options, under="current", grad=True)
    made = trainer({"other": choice}, optimizer=OptimizerConfig(clip_norm=1e9))
    recording(made)
    caught: dict[str, Tensor] = {}

    def catch(*_: object) -> None:
        caught.update({n: p.grad.clone() for n, p in made.model.named_parameters() if p.grad is not None})

    made.optimizer.register_step_pre_hook(catch)
    samples, groups = batch_of_hinted()
    plain = build_tiny_model(SMALL, seed=1)
    of = feature(**options)
    total = torch.cat([direct(plain, of.sequences_of(s) or (), 1.0) for s in samples]).mean()
    total.backward()  # type: ignore[no-untyped-call]
    result = made.update(1, samples, groups)
    assert result.metrics["loss"] == pytest.approx(float(total.detach()), abs=1e-4)
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(caught[name], parameter.grad, atol=1e-6, rtol=1e-3)


def test_without_grad_the_feature_changes_no_weights() -> None:
    made = trainer({"other": FeatureChoice("other_prompt_logprob", {"omit_sources": ["hint"]}, under="current")})
    recording(made)
    before = {name: tensor.clone() for name, tensor in published_state(made.model).items()}
    made.update(1, *batch_of_hinted())
    assert all(torch.equal(tensor, before[name]) for name, tensor in published_state(made.model).items())


# Drops ----------------------------------------------------------------------------------------------------------------


def test_a_sample_without_the_other_prompt_is_dropped_with_a_reason(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    long = [20] * 5000
    file.write_text(
        f'{{"task": "task-of-g0", "token_ids": [20]}}\n{{"task": "task-of-g1", "token_ids": {long}}}\n'
        '{"task": "task-of-g2", "token_ids": [999999]}\n'
    )
    made = trainer({"other": FeatureChoice("other_prompt_logprob", {"prompts": str(file)})})
    samples = [hinted(f"s{n}", of=f"g{n}", seed=n) for n in range(4)]
    groups = [group(s.group, member(s.sample.sample_id, {"r": 1.0})) for s in samples]
    result = made.update(1, samples, groups)
    expected = [None, DropReason.TOO_LONG, DropReason.UNKNOWN_TOKEN, DropReason.NO_OTHER_PROMPT]
    assert [v.reason for v in result.verdicts] == expected


class Wrong(Feature):
    """Marks the first answer only."""

    def __call__(self, inputs: FeatureInputs) -> Tensor:
        return inputs.logprobs

    def sequences_of(self, sample: TrainingSample) -> list[Sequence1D]:
        ids = np.concatenate([s.token_ids for s in sample.segments[:3]])
        return [Sequence1D(ids, np.array([0] * 10 + [1] * 5, np.uint8))]


def test_a_rewrite_with_other_targets_is_an_error() -> None:
    with pytest.raises(
        ValueError, match="rewrites sample a into sequences whose targets are not its 12 trained tokens"
    ):
        build_table([hinted("a")], update=1, rewrites={"wrong": Wrong().sequences_of})


# Equal requests -------------------------------------------------------------------------------------------------------


class Counted(KeptLogprob):
    """Counts its calls."""

    calls = 0

    def __call__(self, inputs: FeatureInputs) -> Tensor:
        type(self).calls += 1
        return super().__call__(inputs)


def test_equal_requests_under_different_names_are_computed_once() -> None:
    made = trainer({})
    samples, _ = batch_of_hinted()
    table = build_table(samples, update=1)
    of = [FeatureRequest(Counted(options=KeptOptions(threshold=t))) for t in (0.0, 0.0, 0.0087)]
    packing = PackingConfig(row_tokens=64, micro_batch_tokens=4096)
    requests = dict(zip("abc", of, strict=True))
    Counted.calls = 0
    found = computed_features(made.model, table, requests, ForwardPlan(made.forward_choice.mode, packing))
    assert Counted.calls == 2, "one micro-batch and two different requests"
    assert np.array_equal(found["a"], found["b"])
    assert not np.array_equal(found["a"], found["c"])


@pytest.mark.parametrize(("under", "grad"), [("start", False), ("step", False), ("current", False), ("current", True)])
def test_two_parts_of_an_update_share_an_equal_request(under: Any, grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def calls(*names: str) -> int:
        Counted.calls = 0
        choice = FeatureChoice(f"{__file__}:Counted", {"threshold": 0.0}, under=under, grad=grad)
        monkeypatch.setattr(FEATURES, "find", lambda name, base_dir=None: Counted)
        made = trainer(dict.fromkeys(names, choice))
        made.update(1, *batch_of_hinted())
        return Counted.calls

    assert calls("one", "two", "three") == calls("one") > 0


def test_two_features_of_other_prompts_cost_two_passes_and_equal_ones_cost_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer({})
    samples, _ = batch_of_hinted()
    forwards: list[int] = []
    inner = feature_pass.forward_features

    def counting(*args: Any, **more: Any) -> Any:
        forwards.append(1)
        return inner(*args, **more)

    monkeypatch.setattr(feature_pass, "forward_features", counting)

    def passes(*options: dict[str, Any]) -> int:
        forwards.clear()
        requests = {str(n): FeatureRequest(feature(**o)) for n, o in enumerate(options)}
        rewrites = {r.function: r.feature.sequences_of for r in requests.values()}
        table = build_table(samples, update=1, rewrites=rewrites)
        plan = ForwardPlan(made.forward_choice.mode, PackingConfig(row_tokens=64, micro_batch_tokens=4096))
        computed_features(made.model, table, requests, plan)
        return len(forwards)

    one, other = {"omit_sources": ["hint"]}, {"omit_roles": ["observation"]}
    assert (passes(one), passes(one, one), passes(one, other)) == (1, 1, 2)


class Stateful(Feature):
    """A feature of a user, without options."""

    def __init__(self, shift: float = 0.0) -> None:
        self.shift = shift

    def __call__(self, inputs: FeatureInputs) -> Tensor:
        return inputs.logprobs + self.shift


def test_which_requests_are_equal() -> None:
    def key(feature: Any, *args: Any, **more: Any) -> Any:
        return FeatureRequest(feature, *args, **more).key

    kept = [KeptLogprob(options=KeptOptions(threshold=t)) for t in (0.1, 0.1, 0.2)]
    assert key(Entropy()) == key(Entropy())
    assert key(kept[0]) == key(kept[1]) != key(kept[2])
    assert key(Entropy()) != key(Entropy(), "reference")
    assert key(Entropy(), "current") != key(Entropy(), "current", grad=True)
    assert key(Stateful(1.0)) != key(Stateful(2.0)), "attributes that are not options are not compared"
    made = Stateful(1.0)
    assert key(made) == key(made)
