"""A source of several sources: order, ids, labels, agents and scorers of its tasks, its digest, and its errors."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from rollmesh.app.checks import task_survey
from rollmesh.mesh import MeshConfig
from rollmesh.mesh.mesh_services import reward_config
from rollmesh.services.data.config import DataConfig, build_pools
from rollmesh.services.data.engine import DataEngine
from rollmesh.services.data.mixture_pool import MixturePart, MixturePool
from rollmesh.services.data.mixture_source import single_sources
from rollmesh.services.data.pool import MemoryPool
from rollmesh.services.data.task import PoolTask, Split, StoredPool, TaskPool
from rollmesh.shared.bus.bus import Bus
from rollmesh.shared.clock import ManualClock
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.endpoints.blocking import BlockingEndpoints
from rollmesh.shared.endpoints.config import EndpointConfig
from rollmesh.shared.errors import ConfigError

from ..shared.chat_server import chat_server
from .builders import factory, pool

KEY = "data.source.options.sources"


def calc(train: int, test: int = 0, **options: Any) -> dict[str, Any]:
    return {"name": "calc", "options": {"num_train": train, "num_validation": 0, "num_test": test, **options}}


def mixture(**entries: Any) -> dict[str, Any]:
    return {"source": {"name": "mixture", "options": {"sources": entries}}}


def pools(base_dir: Path | None = None, **entries: Any) -> dict[Split, TaskPool]:
    return build_pools(config_from_dict(DataConfig, mixture(**entries)), base_dir)


def ids(found: TaskPool) -> list[str]:
    return [found.task(position).task_id for position in range(len(found))]


def test_sources_take_turns_and_a_task_is_found_by_its_id() -> None:
    sizes = {"a": 3, "b": 1, "empty": 0, "c": 2}
    mixed = MixturePool([MixturePart(source=name, pool=pool(size)) for name, size in sizes.items()])
    assert ids(mixed) == ["a/t0", "b/t0", "c/t0", "a/t1", "c/t1", "a/t2"]
    assert [mixed.position(task_id) for task_id in ids(mixed)] == list(range(6))
    assert [mixed.position(name) for name in ("t0", "d/t0", "a/t3", "empty/t0", "")] == [None] * 5
    assert [mixed.label(position, "source") for position in range(6)] == ["a", "b", "c", "a", "c", "a"]
    assert [mixed.label(position, "level") for position in range(6)] == ["0", "0", "0", "1", "1", "2"]
    for position in (-1, 6):
        with pytest.raises(IndexError, match=rf"position must be in \[0, 6\), got {position}"):
            mixed.task(position)


class Listed(MemoryPool, StoredPool):
    """Counts calls of `read`, which leaves out private extras."""

    def __init__(self, num_tasks: int) -> None:
        tasks = map(pool(num_tasks).task, range(num_tasks))
        super().__init__(replace(task, private_extras={"solution": task.task_id}) for task in tasks)
        self.calls: list[list[int]] = []

    def read(self, positions: Sequence[int]) -> list[PoolTask]:
        self.calls.append(list(positions))
        return [replace(self.task(position), private_extras={}) for position in positions]


async def test_stored_tasks_are_read_by_one_call_per_source_without_private_extras() -> None:
    stored, others = Listed(3), Listed(2)
    parts = [("a", stored), ("b", pool(3)), ("c", others)]
    mixed = MixturePool([MixturePart(source=name, pool=one, agent="x") for name, one in parts])
    engine = DataEngine(pools={Split.TEST: mixed}, new_selector=factory(), bus=Mock(spec=Bus), clock=ManualClock())
    drawn = await engine.tasks_in_order(split="test", first_draw=0, num=8)
    assert [task.task_id for _, task in drawn] == ids(mixed)
    assert (stored.calls, others.calls) == ([[0, 1, 2]], [[0, 1]])
    assert {(task.agent, task.labels["source"], str(task.private_extras)) for _, task in drawn} == {
        ("x", name, "{}") for name in "abc"
    }
    found = await engine.private_extras(split="test", task_id="c/t1", names=["solution"])
    assert found == {"solution": "t1"}


def test_a_sample_of_the_tasks_has_every_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second position of two sources that take turns is of one of them."""
    monkeypatch.setattr(task_survey, "STORED_TASKS_MAX", 100)
    stored = Listed(100)
    parts = [("a", stored), ("b", pool(100))]
    mixed = MixturePool([MixturePart(source=name, pool=one, agent=name) for name, one in parts])
    survey = task_survey.survey_tasks({Split.TRAIN: mixed})
    assert set(survey.by_agent) == {"a", "b"}
    assert sum(map(len, stored.calls)) < 100


def test_the_digest_changes_with_names_agents_scorers_order_and_tasks() -> None:
    def digest(*parts: tuple[str, int], **fields: Any) -> str:
        return MixturePool([MixturePart(source=name, pool=pool(size), **fields) for name, size in parts]).digest

    digests = [
        digest(("a", 2), ("b", 2)),
        digest(("a", 2), ("c", 2)),
        digest(("b", 2), ("a", 2)),
        digest(("a", 2), ("b", 3)),
        digest(("a", 2), ("b", 2), agent="x"),
        digest(("a", 2), ("b", 2), scorers=("x",)),
    ]
    assert len(set(digests)) == len(digests)
    assert digest(("a", 2), ("b", 2)) == digests[0]


def test_a_task_has_agent_and_scorers_of_its_entry_unless_it_names_them() -> None:
    found = pools(
        one={"source": calc(1), "agent": "calculator", "scorers": ["right"]},
        other={"source": calc(1, agent="mine", scorers=["own"]), "agent": "calculator", "scorers": ["right"]},
    )
    first, second = (found[Split.TRAIN].task(position) for position in range(2))
    assert (first.task_id, first.agent, first.scorers) == ("one/calc-0-train-0", "calculator", ("right",))
    assert (second.task_id, second.agent, second.scorers) == ("other/calc-0-train-0", "mine", ("own",))
    assert (dict(first.labels), first.oracle_ref) == ({"level": "1", "source": "one"}, second.oracle_ref)


def test_a_source_may_be_for_training_or_for_evaluation_only() -> None:
    found = pools(
        a={"source": calc(2, 2), "splits": ["train"]},
        b={"source": calc(2, 2, seed=1)},
        c={"source": calc(2, 1), "splits": ["test"]},
    )
    names = {
        split: Counter(one.label(position, "source") for position in range(len(one))) for split, one in found.items()
    }
    assert names == {Split.TRAIN: {"a": 2, "b": 2}, Split.VALIDATION: {}, Split.TEST: {"b": 2, "c": 1}}


@pytest.mark.parametrize(
    ("entry", "key", "message"),
    [
        ({"source": "calk"}, f"{KEY}.x.source", "there is no source `calk`"),
        ({"source": "mixture"}, f"{KEY}.x.source", "must not be a mixture; list its sources"),
        (
            {"source": "rollmesh.services.data.mixture_source:MixtureSource"},
            f"{KEY}.x.source",
            "must not be a mixture",
        ),
        ({"source": calc(1, level_max=99)}, f"{KEY}.x.source", r"`level_max` must be in .*, got 99"),
        ({"source": calc(1, lvl=9)}, f"{KEY}.x.source.options.lvl", "options of source `calc`: `lvl`: unknown key"),
        ({"source": {"name": "jsonl", "options": {"path": "no"}}}, f"{KEY}.x.source", "cannot read .*no"),
        (
            {"source": {"name": "files", "options": {"path": "folder"}}},
            f"{KEY}.x.source",
            "folders with files must be train, validation, test, got dev",
        ),
        ({"source": "own.py:Broken"}, f"{KEY}.x.source", "own.py:Broken` failed: KeyError: 'mine'"),
        (
            {"source": {"name": "jsonl", "options": {"path": "a.jsonl", "labels": {"source": "from"}}}},
            f"{KEY}.x.source",
            "its tasks must not have the label `source`",
        ),
        (
            {"source": calc(0, 1), "splits": ["train"]},
            f"{KEY}.x",
            "the source has no task in the splits train; change `splits`",
        ),
    ],
)
def test_an_error_names_its_entry(tmp_path: Path, entry: dict[str, Any], key: str, message: str) -> None:
    (tmp_path / "own.py").write_text(BROKEN)
    (tmp_path / "a.jsonl").write_text('{"question": "1+1", "answer": "2", "from": "book"}\n')
    for name in ("train", "dev"):
        (tmp_path / "folder" / name).mkdir(parents=True)
        (tmp_path / "folder" / name / "a.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    with pytest.raises(ConfigError, match=rf"`{key.partition('.source.options.lvl')[0]}.*{message}") as caught:
        pools(tmp_path, x=entry, y={"source": calc(1)})
    assert caught.value.metadata["key"] == key


BROKEN = """
from rollmesh.services.data.source import TaskSource

class Broken(TaskSource):
    def __init__(self, *, base_dir): ...
    def tasks(self):
        raise KeyError("mine")
"""


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({}, "`sources` must have a length >= 1"),
        ({"a/b": {"source": "calc"}}, r"`sources` must have names that match \[A-Za-z0-9_-\]\{1,64\}, got 'a/b'"),
        (
            {"a": {"source": "calc", "splits": ["dev"]}},
            r"`sources.a.splits\[0\]` must be one of train, validation, test",
        ),
        ({"a": {"source": "calc", "splits": []}}, "`sources.a.splits` must not be empty"),
        (
            {"a": {"source": "calc", "splits": ["test", "test"]}},
            "`sources.a.splits` must have different names, got test, test",
        ),
        ({"a": {"source": "calc", "scorers": ["x", "x"]}}, "`sources.a.scorers` must have different names, got x, x"),
    ],
)
def test_a_wrong_option_is_named(entries: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"options of source `mixture`: .*{message}") as caught:
        pools(**entries)
    assert "mistakes" not in caught.value.message


def test_answers_of_every_file_are_read_and_two_files_need_two_names(tmp_path: Path) -> None:
    def entry(path: str, name: str) -> dict[str, Any]:
        return {"source": {"name": "jsonl", "options": {"path": path, "name": name}}}

    def keys(**entries: Any) -> dict[str, str | tuple[str, ...]]:
        made = config_from_dict(MeshConfig, {"data": mixture(**entries)})
        return {name: file.path for name, file in reward_config(made).answer_files.items()}

    assert keys(a=entry("a.jsonl", "a"), b=entry("b.jsonl", "b"), c={"source": "calc"}) == {
        "a": "a.jsonl",
        "b": "b.jsonl",
    }
    assert keys(a=entry("a.jsonl", "a"), b=entry("a.jsonl", "a")) == {"a": "a.jsonl"}
    rows = {"source": {"name": "files", "options": {"path": ["b.parquet", "c.csv"], "name": "b"}}}
    assert keys(a=entry("a.jsonl", "a"), b=rows) == {"a": "a.jsonl", "b": ("b.parquet", "c.csv")}
    with pytest.raises(ConfigError, match=rf"`{KEY}.b.source.options.name` must be another name, .* earlier file, a"):
        keys(a=entry("a.jsonl", "a"), b=entry("b.jsonl", "a"))


def test_a_mixture_by_its_class_has_its_entries() -> None:
    options = {"sources": {"a": {"source": "calc"}}}
    chosen = Extension("rollmesh.services.data.mixture_source:MixtureSource", options)
    assert [(key, one.name) for key, one in single_sources(chosen)] == [(f"{KEY}.a.source", "calc")]


ASKING = """
from rollmesh.services.data.source import TaskSource
from rollmesh.services.data.task import PoolTask
from rollmesh.shared.domain.trajectory import Message

class Written(TaskSource):
    def __init__(self, *, base_dir): ...
    def use_endpoints(self, endpoints):
        self.endpoints = endpoints
    def tasks(self):
        text = self.endpoints.ask("writer", "Write a task.").text
        yield PoolTask(task_id="t", messages=(Message(role="user", content=text),))
"""


async def test_each_source_may_ask_endpoints(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(ASKING)
    made = config_from_dict(DataConfig, mixture(a={"source": "own.py:Written"}, b={"source": calc(1)}))
    async with chat_server(lambda body: "1+1") as server:
        entry = {"kind": "openai", "base_url": server.url, "model": "m", "record": "answers", "replay": "answers"}
        table = {"writer": config_from_dict(EndpointConfig, entry)}
        found = await asyncio.to_thread(build_pools, made, tmp_path, BlockingEndpoints(table, base_dir=tmp_path))
    assert found[Split.TRAIN].task(0).messages[0].content == "1+1"
