"""What `rollmesh check` finds out about `run.variants`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollmesh.app.checks.config_checks import find_mistakes
from rollmesh.app.checks.config_notes import notes
from rollmesh.app.checks.task_survey import survey_tasks
from rollmesh.app.config import TrainConfig
from rollmesh.services.data.config import build_pools
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.errors import ConfigError, InvalidInput

OPTIONS = {"path": "tasks.jsonl", "split": "split", "agent": "agent"}
AGENTS = {"solver": "single_turn", "opener": {"name": "prefix", "options": {"share_max": 0.5}}}
PERMITTED = {"private_extras": {"opener": ["solution"], "single_turn": ["solution"], "solver": ["solution"]}}


def config(*variants: dict[str, Any], extras: bool = True, size: int = 2, **rollout: Any) -> TrainConfig:
    options = OPTIONS | ({"private_extras": {"solution": "solution"}} if extras else {})
    return config_from_dict(
        TrainConfig,
        {
            "run": {"group_size": size, "variants": list(variants)},
            "data": {"source": {"name": "jsonl", "options": options}},
            "reward": {"scorers": [{"name": "exact", "reward": "correct"}]},
            "rollout": {"agents": AGENTS, "agent": "single_turn", **PERMITTED, **rollout},
            "counts": {"inference": 0, "sandbox": 0},
            "learner": {"engine": "fake"},
        },
    )


def write(folder: Path, *agents: str, **fields: Any) -> None:
    lines = [
        {"question": f"{number}+1", "answer": "1", "split": split, "agent": agent or None, "solution": "1", **fields}
        for number, (split, agent) in enumerate([*(("train", name) for name in agents), ("test", "")])
    ]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def mistakes(folder: Path, settings: TrainConfig) -> list[tuple[str, str]]:
    found = find_mistakes(settings, folder, learner=False)
    return [(one.metadata["key"], one.message) for one in found]


def test_variants_that_work_are_no_mistake_and_their_agents_are_used(tmp_path: Path) -> None:
    write(tmp_path, "", "")
    settings = config(
        {"name": "plain", "sampling": {"temperature": 0.6}, "hint_extra": "solution"},
        {"name": "begun", "agent": "opener", "options": {"share_min": 0.1}},
    )
    assert mistakes(tmp_path, settings) == []
    said = notes(settings, tmp_path, survey_tasks(build_pools(settings.data, tmp_path)))
    assert [line for line in said if "no task names" in line] == [
        "note: rollout.agents.solver: no task names this agent, and rollout.agent is another"
    ]


@pytest.mark.parametrize(
    ("variant", "rollout", "key", "why"),
    [
        (
            {"agent": "solvr"},
            {},
            "run.variants[1].agent",
            (
                "`run.variants[1].agent`: the agent `solvr` does not exist; known: solver, opener; add it to "
                "rollout.agents, or correct the name in the variant"
            ),
        ),
        (
            {"agent": "opener", "options": {"share": 1}},
            {},
            "run.variants[1]",
            "`run.variants[1]`: the options of the variant `b` do not suit its agent `opener`: ",
        ),
        (
            {"agent": "opener", "options": {"share_min": 0.9}},
            {},
            "run.variants[1]",
            "`share_min` must be <= share_max = 0.5, got 0.9",
        ),
        (
            {"hint_extra": "solution"},
            {"private_extras": {"opener": ["solution"]}},
            "run.variants[1]",
            (
                "the variant `b` uses the private extra `solution`, which the configuration does not permit to its agent "
                "`single_turn`; if it may, add `rollout: {private_extras: {single_turn: [solution]}}`"
            ),
        ),
        (
            {"prefix_extra": "proof", "agent": "opener"},
            {"private_extras": {"opener": ["solution", "proof"]}},
            "run.variants[1]",
            (
                "has no private extra `proof`; name its field in data.source.options.private_extras, or use another "
                "variant"
            ),
        ),
        (
            {"agent": "remote", "prefix": "It is "},
            {"agents": AGENTS | {"remote": {"name": "url", "options": {"url": "http://127.0.0.1:9"}}}},
            "run.variants[1]",
            "`run.variants[1]`: the variant `b` must have no prefix, because its agent runs in a process",
        ),
    ],
    ids=["agent", "option", "range", "permission", "solution", "prefix"],
)
def test_a_variant_that_cannot_work_is_named_by_its_key(
    tmp_path: Path, variant: dict[str, Any], rollout: dict[str, Any], key: str, why: str
) -> None:
    write(tmp_path, "", "")
    found = mistakes(tmp_path, config({"name": "a"}, {"name": "b", **variant}, **rollout))
    assert [one for one, _ in found] == [key], found
    assert why in found[0][1]


def test_the_agents_of_all_tasks_are_checked_without_an_agent_of_the_variant(tmp_path: Path) -> None:
    write(tmp_path, "", "opener")
    found = mistakes(tmp_path, config({"name": "a"}, {"name": "b", "options": {"share_min": 0.1}}))
    assert [key for key, _ in found] == ["run.variants[1]"]
    assert "do not suit its agent `single_turn`" in found[0][1], "opener has the option, single_turn has not"


def test_agents_without_training_tasks_are_not_checked(tmp_path: Path) -> None:
    write(tmp_path, "opener", "opener")  # the task of the evaluation has the default agent
    assert mistakes(tmp_path, config({"name": "a"}, {"name": "b", "options": {"share_min": 0.1}})) == []


@pytest.mark.parametrize(
    ("variants", "why"),
    [
        ([{"name": "a"}], "`run.variants` must have counts that sum to the size of the group, 2, got 1"),
        ([{"name": "a"}, {"name": "a"}], r"`run.variants\[1\].name` must be different in each variant, got 'a' twice"),
        ([{"name": "a", "count": 0}, {"name": "b"}], r"run.variants\[0\].count` must be in \[1, 16384\], got 0"),
        (
            [{"name": "a", "count": 2, "sampling": {"temperature": 11}}],
            r"run.variants\[0\].sampling.temperature` must be in \[0, 10\], got 11",
        ),
        ([{"name": "a", "count": 2, "smapling": {}}], r"run.variants\[0\].*smapling"),
        ([{"name": "a", "count": 2, "hint": "x", "hint_extra": "solution"}], "`.*hint` must be empty with hint_extra"),
    ],
    ids=["sum", "name", "count", "sampling", "unknown", "both"],
)
def test_wrong_settings_of_variants_are_named(variants: list[dict[str, Any]], why: str) -> None:
    with pytest.raises((ConfigError, InvalidInput), match=why):
        config(*variants)
