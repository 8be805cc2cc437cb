"""Conversations that are chosen among rated samples: by difficulty, and as critiques of solutions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollmesh.demo.tiny_model import TinyModelConfig, build_tiny_model
from rollmesh.services.rollout.tokenizer import Tokenizer, load_tokenizer
from rollmesh.sft.chats import read_chats
from rollmesh.sft.config import SftLearnerConfig
from rollmesh.sft.rated import RatedConfig, chosen_lines
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.domain.trajectory import (
    FinishReason,
    GroupContext,
    MemberOutcome,
    Role,
    Sample,
    Segment,
    Source,
    TrainingSample,
)
from rollmesh.shared.errors import ConfigError, InvalidInput
from rollmesh.trainer.update import BatchTrainer
from tests.unit.rollout.chat_tokenizers import save_all


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(save_all(tmp_path_factory.mktemp("models"))["qwen3"])


def line(task: str, answer: str, correct: float | None, critique: str = "") -> dict[str, Any]:
    """Return a sample as `rollmesh rollout --out` writes it, as far as it is read."""
    outcome = "ok" if correct is not None else "infra_failure"
    return {
        "sample_id": f"{task}-{answer}",
        "run": "r",
        "task": task,
        "messages": [{"role": "user", "content": f"Question {task}"}, {"role": "assistant", "content": answer}],
        "rewards": [
            {"name": "correct", "value": correct or 0.0, "outcome": outcome, "evidence": "compared"},
            {"name": "judged", "value": 0.5, "evidence": critique},
            {"name": "correct", "value": 1.0, "segment": 1},
        ],
        "segments": [],
    }


def write(folder: Path, *lines: dict[str, Any]) -> Path:
    path = folder / "samples.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path


EASY = [line("easy", f"e{n}", 1.0) for n in range(4)]
MEDIUM = [line("medium", f"m{n}", float(n < 2)) for n in range(4)]
HARD = [line("hard", f"h{n}", 0.0) for n in range(4)]


def answers(path: Path, **settings: Any) -> list[str]:
    found = [json.loads(text) for _, text in chosen_lines(path, config_from_dict(RatedConfig, settings))]
    return [one["messages"][-1]["content"] for one in found]


@pytest.mark.row("S116")
def test_right_answers_to_tasks_of_medium_difficulty_are_chosen(tmp_path: Path) -> None:
    path = write(tmp_path, *EASY, *MEDIUM, *HARD, line("broken", "b0", None))
    assert answers(path, reward="correct") == ["e0", "e1", "e2", "e3", "m0", "m1"]
    assert answers(path, reward="correct", share_min=0.1, share_max=0.7) == ["m0", "m1"]
    assert answers(path, reward="correct", reward_min=0.0, share_min=0.9) == [
        *(f"{task}{n}" for task in "emh" for n in range(4))
    ], "the share is that of `reward_min`"
    assert len(answers(path)) == 13, "without a reward all are chosen"


@pytest.mark.row("S108")
def test_solutions_with_critiques_are_trained_on_the_critique_alone(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write(
        tmp_path,
        line("one", "The answer is 4.", 1.0, "It is right: 2 + 2 = 4."),
        line("one", "The answer is 5.", 0.0, "It is wrong in the sum."),
        line("one", "no critique", 0.0),
    )
    chats = read_chats(path, tokenizer, RatedConfig(critique="judged"))
    assert [chat.name for chat in chats] == ["samples:1", "samples:2"]
    context, answer = chats[1].sample.segments
    asked = tokenizer.decode(context.token_ids)
    assert "Question one" in asked
    assert "The answer is 5." in asked
    assert context.num_trainable == 0
    assert answer.role is Role.ACTION
    trained = tokenizer.decode(answer.token_ids[np.asarray(answer.loss_mask, dtype=bool)])
    assert tokenizer.format.without_end(trained) == "It is wrong in the sum."


def test_the_cause_of_a_reward_without_a_value_is_no_critique(tmp_path: Path) -> None:
    judged, unjudged = line("one", "4", 1.0, "It is right."), line("one", "5", 0.0, "the judge did not answer")
    unjudged["rewards"][1]["outcome"] = "not_applicable"
    assert answers(write(tmp_path, judged, unjudged), critique="judged") == ["It is right."]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"share_min": 0.8, "share_max": 0.2, "reward": "correct"}, "`share_min` must be <= share_max = 0.2, got 0.8"),
        ({"share_max": 0.2}, "`reward` must name the reward"),
        ({"share_max": 1.5}, "share_max"),
    ],
)
def test_settings_that_choose_nothing_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_dict(RatedConfig, settings)


def test_a_line_without_rewards_and_a_choice_of_nothing_name_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, {"messages": []})
    with pytest.raises(InvalidInput, match=r"samples.jsonl:1: not a rated sample: .*remove `rated` for plain"):
        answers(path)
    for reward in ({"name": "correct"}, {"name": "judged", "value": 1.0, "evidence": None}):
        with pytest.raises(InvalidInput, match=r"samples.jsonl:1: not a rated sample: .*`\$.rewards\[0\]"):
            answers(write(tmp_path, {**line("t", "a", 1.0), "rewards": [reward]}), critique="judged")
    with pytest.raises(InvalidInput, match="none of 4 samples is chosen by `rated`"):
        answers(write(tmp_path, *HARD), reward="correct")
    no_solution = {**line("t", "a", 1.0, "good"), "messages": [{"role": "user", "content": "q"}]}
    with pytest.raises(
        InvalidInput, match=r"samples.jsonl:1: messages` must have a problem of the user and a solution"
    ):
        answers(write(tmp_path, no_solution), critique="judged")


@pytest.mark.row("S116")
def test_a_conversation_of_16384_tokens_is_trained_without_truncation() -> None:
    num, shape = (
        16_384,
        TinyModelConfig(
            hidden_size=16,
            num_heads=1,
            num_kv_heads=1,
            head_dim=8,
            intermediate_size=16,
            num_layers=1,
            context_max=16_512,
        ),
    )
    ids = np.random.default_rng(0).integers(0, 90, num + 20).astype(np.int32)
    segments = tuple(
        Segment(
            parent=place - 1,
            role=role,
            source=Source.DATASET,
            token_ids=part,
            loss_mask=mask,
            finish=FinishReason.STOP,
        )
        for place, (role, part, mask) in enumerate(
            ((Role.CONTEXT, ids[:20], None), (Role.ACTION, ids[20:], np.ones(num, np.uint8)))
        )
    )
    sample = TrainingSample(
        sample=Sample(sample_id="a", leaf=1), segments=segments, group="a", task="a", staleness=None
    )
    member = MemberOutcome(sample_id="a", rewards=(), end="ready")
    trainer = BatchTrainer(build_tiny_model(shape, seed=1), SftLearnerConfig(), seed=0, sources=[Source.DATASET])
    result = trainer.update(1, [sample], [GroupContext(group="a", task="a", members=(member,))])
    assert result.metrics["tokens/trained"] == num
    assert result.metrics["tokens/truncated_share"] == 0.0
