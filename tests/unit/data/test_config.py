"""Building the data service from configuration."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rollmesh.services.data.config import DataConfig, build_engine, build_pools
from rollmesh.services.data.task import Split
from rollmesh.shared.clock import ManualClock
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.endpoints.blocking import BlockingEndpoints
from rollmesh.shared.endpoints.config import EndpointConfig
from rollmesh.shared.errors import ConfigError, OutOfRange, UnknownEndpoint, UnknownSplit
from rollmesh.testing.memory_bus import MemoryBus

from ..shared.chat_server import chat_server


def config(**settings: Any) -> DataConfig:
    return config_from_dict(DataConfig, settings)


def test_a_jsonl_file_is_a_matter_of_configuration(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text('{"question": "1+1", "answer": "#### 2"}\n' * 2)
    options = {"path": "mine.jsonl", "answer_pattern": r"#### (\S+)", "validation_share": 0.0, "test_share": 0.0}
    source = {"name": "jsonl", "options": options}
    pools = build_pools(config(source=source, selector={"name": "thompson", "options": {"target": 0.3}}), tmp_path)
    assert len(pools[Split.TRAIN]) == 2


def test_a_source_without_training_tasks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text('{"question": "1+1", "answer": "2", "split": "test"}\n')
    with pytest.raises(ConfigError, match="no task is in the train split"):
        build_pools(
            config(source={"name": "jsonl", "options": {"path": str(tmp_path / "mine.jsonl"), "split": "split"}})
        )


async def test_the_source_submitted_has_no_task_and_says_what_a_run_without_them_needs() -> None:
    made = config(source="submitted")
    assert not any(map(len, build_pools(made).values()))
    engine = build_engine(made, bus=MemoryBus(), clock=ManualClock())
    with pytest.raises(OutOfRange, match="create the run with `submitted_tasks: true`"):
        await engine.next_tasks(run="r", policy="main", first_draw=0, num=1)
    with pytest.raises(UnknownSplit):
        await engine.tasks_in_order(split="test", first_draw=0, num=1)


def test_a_selector_cannot_choose_between_submitted_tasks() -> None:
    with pytest.raises(ConfigError, match=r"`data\.selector` must be uniform, got 'sec'"):
        build_engine(config(source="submitted", selector="sec"), bus=MemoryBus(), clock=ManualClock())


OWN = """
class Last:
    def __init__(self, *, pool, seed):
        self.num_tasks = len(pool)
    def draw(self, index, in_flight):
        return self.num_tasks - 1
    def observe(self, result): ...
    def snapshot(self): return b""
    def restore(self, state): ...
"""


def test_a_users_own_selector_is_loaded_from_its_file(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    made = config(source={"name": "calc", "options": {"num_train": 10}}, selector={"name": "own.py:Last"})
    build_engine(made, bus=MemoryBus(), clock=ManualClock(), base_dir=tmp_path)


OWN_SOURCE = """
from rollmesh.services.data.task import PoolTask, Split
from rollmesh.shared.domain.trajectory import Message

class Twice:
    def __init__(self, *, base_dir):
        self.text = (base_dir / "prompt.txt").read_text()
    def tasks(self):
        for split in ("train", "test"):
            yield PoolTask(task_id="a", messages=(Message(role="user", content=self.text),), split=split)

class Broken(Twice):
    def tasks(self):
        yield from super().tasks()
        raise KeyError("mine")
"""


def test_a_users_own_source_is_loaded_from_its_file_and_its_errors_name_its_line(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_SOURCE)
    (tmp_path / "prompt.txt").write_text("hello")
    pools = build_pools(config(source="own.py:Twice"), tmp_path)
    assert {split: len(pool) for split, pool in pools.items()} == {"train": 1, "validation": 0, "test": 1}
    assert pools[Split.TEST].task(0).messages[0].content == "hello"
    with pytest.raises(ConfigError, match=r"(?s)source `own.py:Broken` failed: KeyError: 'mine'.*own.py\", line 15"):
        build_pools(config(source="own.py:Broken"), tmp_path)


POOLED_SOURCE = """
from rollmesh.services.data.pool import MemoryPool
from rollmesh.services.data.source import TaskSource
from rollmesh.services.data.task import PoolTask, Split
from rollmesh.shared.domain.trajectory import Message

class Pooled(TaskSource):
    def __init__(self, *, base_dir): ...
    def tasks(self):
        raise AssertionError("only the pools are read")
    def pools(self):
        task = PoolTask(task_id="a", messages=(Message(role="user", content="1+1"),))
        return {split: MemoryPool([task] if split is Split.TRAIN else []) for split in Split}

class Lacking(Pooled):
    def pools(self):
        return {"train": super().pools()["train"]}
"""


def test_a_source_may_give_pools_instead_of_tasks(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(POOLED_SOURCE)
    pools = build_pools(config(source="own.py:Pooled"), tmp_path)
    assert {split: len(pool) for split, pool in pools.items()} == {"train": 1, "validation": 0, "test": 0}
    with pytest.raises(ConfigError, match="source `own.py:Lacking` failed: KeyError"):
        build_pools(config(source="own.py:Lacking"), tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"selector": {"name": "thomson"}}, "no selector `thomson`; known: uniform, thompson"),
        ({"selector": {"name": "thompson", "options": {"taget": 1}}}, "taget.*did you mean `target`"),
        (
            {"selector": {"name": "uniform", "options": {"x": 1}}},
            "selector `uniform` has no options, got x; remove them",
        ),
        ({"source": "jsonk"}, "no source `jsonk`; known: jsonl, .*calc, code, sql.*did you mean `jsonl`"),
        ({"source": "jsonl"}, "options of source `jsonl`.*path.*required"),
        ({"source": {"options": {"level_max": 99}}}, r"`level_max` must be in \[`level_min` = 1, 32\], got 99"),
        ({"epochs_max": -1}, "epochs_max.*-1"),
        ({"catch_up_s_max": 1e9}, "catch_up_s_max"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_engine(config(**settings), bus=MemoryBus(), clock=ManualClock())


ASKING_SOURCE = """
from rollmesh.services.data.task import PoolTask
from rollmesh.shared.domain.trajectory import Message

class Written:
    def __init__(self, *, base_dir):
        pass
    def use_endpoints(self, endpoints):
        self.endpoints = endpoints
    def tasks(self):
        for n in range(2):
            text = self.endpoints.ask("writer", f"Write task {n}.").text
            yield PoolTask(task_id=f"t{n}", messages=(Message(role="user", content=text),), split="train")
"""


async def test_a_source_asks_once_and_reads_the_recorded_answers_later(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(ASKING_SOURCE)
    numbers = iter(range(100))
    async with chat_server(lambda body: f"{body['messages'][0]['content']} {next(numbers)}") as server:
        entry = {"kind": "openai", "base_url": server.url, "model": "m", "record": "answers", "replay": "answers"}
        table = {"writer": config_from_dict(EndpointConfig, entry)}

        def read() -> list[str]:
            pool = build_pools(config(source="own.py:Written"), tmp_path, BlockingEndpoints(table, base_dir=tmp_path))
            return [pool[Split.TRAIN].task(n).messages[0].content for n in range(2)]

        first = await asyncio.to_thread(read)
    assert first == ["Write task 0. 0", "Write task 1. 1"]
    assert await asyncio.to_thread(read) == first  # the server is gone
    with pytest.raises(UnknownEndpoint, match="endpoint `writer` is not configured; known: none"):
        build_pools(config(source="own.py:Written"), tmp_path)
