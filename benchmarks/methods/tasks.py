"""The tasks of `python -m benchmarks methods`: small, and each for one kind of difference between methods.

Most are calculator tasks of `rollmesh.demo.families.calc` with a tiny warm-started model; `sources` and `gym` have the
others. Tasks with the same `model` share it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SCORERS = "benchmarks.methods.scorers"
SOURCES = "benchmarks.methods.sources"
GYM = "benchmarks.methods.gym"
NUM_TEST = 64
"""Tasks in the test range, from which evaluations take the first ones."""
SHAPE = {"hidden_size": 64, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 160}
SETTINGS: dict[str, Any] = {
    "run": {"eval_every": 0},
    "rollout": {
        "sampling": {"temperature": 1.0, "max_tokens": 24},
        "limits": {"turns_max": 6, "tokens_max": 96, "context_tokens_max": 160},
    },
    "inference": {
        "engine": {"options": {"slots_max": 128, "context_max": 160, "resident_slots_max": 128, "flush_tokens": 24}}
    },
    "learner": {"tensorboard": False},
}
"""Settings of all tasks, above those of the recipe. The arm adds the learning rate."""


def _model(levels: int, target_success: float, source: str = "calc", **options: float) -> dict[str, Any]:
    """Return a model that imitates demonstrations of levels 1 to `levels` until it has the target success on them."""
    return {
        "shape": SHAPE,
        "warm_start": {"levels": levels, "levels_first": min(levels, 2), "target_success": target_success},
        "tasks": {"name": source, "options": {"level_max": levels, "num_validation": 64 * levels, **options}},
    }


def _source(level_min: int, level_max: int, *, source: str = "calc", weights: Sequence[float] = ()) -> dict[str, Any]:
    options = {
        "level_min": level_min,
        "level_max": level_max,
        "level_weights": list(weights),
        "num_train": 1024,
        "num_validation": 0,
        "num_test": NUM_TEST,
    }
    return {"source": {"name": source, "options": options}}


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOfMethods:
    """One task: what it shows, its settings above `SETTINGS`, and the model from which all arms start."""

    summary: str
    data: Mapping[str, Any]
    model: Mapping[str, Any]
    """Settings of `MadeModelConfig`."""
    reward: Mapping[str, Any]
    agent: str = "tool_calling"
    """Agent for recipes that learn from given solutions. The others have `tool_calling`, or the agent that the recipe
    names."""
    success: str = "correct"
    """Reward that evaluations measure as success; it is not always one that is trained on."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of all sections above `SETTINGS`."""
    updates: float = 1.0
    """Share of the updates of an arm: below 1 for a task whose episodes cost more than those of the others."""


ATTEMPT = "<(?:tool_call|answer)>(.*?)</(?:tool_call|answer)>"
"""Pattern of an answer of `guess`, whose demonstrations have the first attempts between the marks of a call."""
LATE_FILLERS = 0.5**3
"""Probability of reproducing the turns of `late` that do not matter, by which the target of its model is measured."""
AGENTS: Mapping[str, str] = {"prefix": "benchmarks.methods.agents:FirstTurnsGiven"}
"""Agents in place of built-in ones that a recipe names: those that know the solutions of calculator tasks."""
SUPPLIED: Mapping[str, Mapping[str, Any]] = {
    "prior": {"name": f"{SCORERS}:LevelPrior", "reward": "prior"},
    "called": {"name": "turn_success", "reward": "called"},
    "attempts": {"name": "try_again", "reward": "attempts", "options": {"pattern": ATTEMPT}},
    "process": {"name": f"{SCORERS}:RatedCalls", "reward": "process"},
    "process_raw": {"name": f"{SCORERS}:RatedCalls", "reward": "process_raw", "options": {"form": "raw"}},
}
"""Scorers by reward that tasks have only for a recipe whose `reward.weights` names the reward."""
CALC = _model(levels=2, target_success=0.4)
EXACT = {"name": "exact", "reward": "correct"}
TASKS: Mapping[str, TaskOfMethods] = {
    "calc": TaskOfMethods(
        summary="Expressions with one or two operators; the reward is 1 for the right answer.",
        data=_source(1, 2),
        model=CALC,
        reward={"scorers": [EXACT]},
    ),
    "noisy": TaskOfMethods(
        summary="The same, but a fifth of the training rewards is flipped. Success is measured without flips.",
        data=_source(1, 2),
        model=CALC,
        reward={
            "scorers": [
                {"name": f"{SCORERS}:FlippedExact", "reward": "correct", "options": {"share": 0.2}},
                {"name": "exact", "reward": "truth"},
            ],
            "weights": {"correct": 1.0},
        },
        success="truth",
    ),
    "two_rewards": TaskOfMethods(
        summary="The same with a second reward for brevity, minus one for 64 sampled tokens, whose weight is a tenth.",
        data=_source(1, 2),
        model=CALC,
        reward={
            "scorers": [
                EXACT,
                {"name": "length", "reward": "short", "options": {"form": "linear", "scale_tokens": 64}},
            ],
            "weights": {"correct": 1.0, "short": 0.1},
        },
    ),
    "turns": TaskOfMethods(
        summary="Expressions with two or three operators; besides the answer, every turn has a reward if it is the "
        "ideal one.",
        data=_source(2, 3),
        model=_model(levels=3, target_success=0.4),
        reward={"scorers": [{"name": f"{SCORERS}:IdealTurns", "reward": "correct"}]},
    ),
    "sparse": TaskOfMethods(
        summary="Expressions with three operators, of which the model solves few at first: most groups have no "
        "success.",
        data=_source(3, 3),
        model=_model(levels=3, target_success=0.3),
        reward={"scorers": [EXACT]},
    ),
    "given": TaskOfMethods(
        summary="The same. One member of each group is the ideal episode, for recipes that learn from given solutions.",
        data=_source(3, 3),
        model=_model(levels=3, target_success=0.3),
        reward={"scorers": [EXACT]},
        agent="benchmarks.methods.agents:FirstGiven",
    ),
    "late": TaskOfMethods(
        summary="Five turns: the first must be the largest of four digits, the next three do not matter, and the last "
        "one has the only reward, which the first one decides. No observation shows whether it was right.",
        data=_source(1, 1, source=f"{SOURCES}:LateSource"),
        model=_model(levels=1, target_success=0.4 * LATE_FILLERS, source=f"{SOURCES}:LateSource"),
        reward={
            "scorers": [{"name": f"{SCORERS}:FirstTurn", "reward": "correct"}],
            "oracles": {"late": f"{SOURCES}:LateOracle"},
        },
    ),
    "long": TaskOfMethods(
        summary="Count from one number to another: answers of 160 to 240 tokens, whose length the prompt determines.",
        data=_source(2, 3, source=f"{SOURCES}:CountSource"),
        model=_model(levels=3, target_success=0.25, source=f"{SOURCES}:CountSource"),
        reward={"scorers": [EXACT], "oracles": {"count": f"{SOURCES}:CountOracle"}},
        settings={
            "rollout": {
                "sampling": {"max_tokens": 288},
                "limits": {"tokens_max": 288, "context_tokens_max": 320},
            },
            "inference": {"engine": {"options": {"context_max": 320}}},
        },
        updates=0.375,
    ),
    "confident": TaskOfMethods(
        summary="Expressions with one or two operators, and an initial policy that swaps the operands of a leading "
        "subtraction nine times of ten: it is confident, and wrong.",
        data=_source(1, 2),
        model=_model(levels=2, target_success=0.5, source=f"{SOURCES}:ConfidentSource"),
        reward={"scorers": [EXACT]},
    ),
    "agree": TaskOfMethods(
        summary="Expressions with one operator. The initial policy solves sums and products nearly always and "
        "subtractions nearly never, because it swaps their operands: the rewards of most groups agree.",
        data=_source(1, 1),
        model=_model(levels=1, target_success=0.85, source=f"{SOURCES}:ConfidentSource", swapped_share=0.97),
        reward={"scorers": [EXACT]},
    ),
    "skewed": TaskOfMethods(
        summary="Three tenths of the pool have one or two operators. The others have seven, which the limit of six "
        "turns makes impossible: most draws of a selector that ignores results are wasted.",
        data=_source(1, 7, weights=(0.15, 0.15, 0, 0, 0, 0, 0.7)),
        model=CALC,
        reward={"scorers": [EXACT]},
    ),
    "drifting": TaskOfMethods(
        summary="Expressions with one or two operators. The training reward of two is 0 in the first 256 draws, and "
        "that of one afterwards: what a selector has learned becomes wrong. Success is measured by the true reward.",
        data=_source(1, 2),
        model=CALC,
        reward={
            "scorers": [
                {
                    "name": f"{SCORERS}:DriftingExact",
                    "reward": "correct",
                    "options": {"switch_draw": 256, "easy_level_max": 1},
                },
                {"name": "exact", "reward": "truth"},
            ],
            "weights": {"correct": 1.0},
        },
        success="truth",
    ),
    "guess": TaskOfMethods(
        summary="Answers of one digit without tools, for the agent `try_again`: the largest of four digits, or, after "
        "a question mark, one of them that cannot be known, so that other answers must be tried.",
        data=_source(1, 2, source=f"{SOURCES}:GuessSource"),
        model=_model(levels=2, target_success=0.06, source=f"{SOURCES}:GuessSource"),
        reward={
            "scorers": [{**EXACT, "options": {"pattern": ATTEMPT}}],
            "oracles": {"guess": f"{SOURCES}:GuessOracle"},
        },
        settings={
            "rollout": {"limits": {"context_tokens_max": 256}},
            "inference": {"engine": {"options": {"context_max": 256}}},
        },
        updates=0.25,
    ),
    "gym": TaskOfMethods(
        summary="`chain_sum` of reasoning-gym with its own verifier: sums and differences of two or three numbers.",
        data=_source(1, 2, source=f"{GYM}:ChainSumSource"),
        model=_model(levels=2, target_success=0.4, source=f"{GYM}:ChainSumSource"),
        reward={
            "scorers": [{"name": f"{GYM}:ChainSumScorer", "reward": "correct"}],
            "oracles": {"chain_sum": f"{GYM}:ChainSumOracle"},
        },
        settings={
            "rollout": {"limits": {"context_tokens_max": 224}},
            "inference": {"engine": {"options": {"context_max": 224}}},
        },
    ),
}
