"""Queries and conversations of samples: unusual folders, names and conditions, evaluations, and modes of files."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from rollmesh.app.lake.conversations import write_atif, write_sft
from rollmesh.app.lake.export import export_samples
from rollmesh.app.lake.query import opened
from rollmesh.services.coordinator.core import facts as f
from rollmesh.shared.errors import ConfigError, InvalidInput

from .test_lake import bus_of, mixed, query


def exported(folder: Path, change: Callable[[f.Fact], f.Fact] = lambda fact: fact) -> Path:
    """Export a run with changed facts to the folder."""

    async def export() -> None:
        run = mixed()
        for at, record in enumerate(run.records):
            run.records[at] = replace(record, facts=tuple(map(change, record.facts)))
        await export_samples(await bus_of(run), "r", folder)

    asyncio.run(export())
    return folder


def with_second_name(fact: f.Fact) -> f.Fact:
    """Return a score with a reward whose name differs in case."""
    if not isinstance(fact, f.EpisodeScored):
        return fact
    (meta,) = fact.samples
    (reward,) = meta.rewards
    second = msgspec.structs.replace(reward, name="Correct", value=9.0)
    return msgspec.structs.replace(fact, samples=(msgspec.structs.replace(meta, rewards=(reward, second)),))


def evaluated(fact: f.Fact) -> f.Fact:
    if isinstance(fact, f.GroupReserved) and fact.group in ("g2", "g5"):
        return msgspec.structs.replace(fact, purpose=f.Purpose.EVAL)
    return fact


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(tmp_path_factory.mktemp("lake") / "weight=0.1/run=zz/samples", evaluated)


def test_columns_come_from_the_folders_of_the_export_only(lake: Path) -> None:
    assert query(lake, "SELECT DISTINCT run, weight FROM samples WHERE stored") == [("r", 1.0)]
    (lake / "run=r/update=1/part-9.parquet").write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match="weight=0.1/run=zz/samples/run=r/update=1/part-9.parquet"):
        query(lake, "SELECT 1")
    (lake / "run=r/update=1/part-9.parquet").unlink()


def test_reward_names_that_differ_in_case_are_one_field(tmp_path: Path) -> None:
    folder = exported(tmp_path, with_second_name)
    assert query(folder, "SELECT DISTINCT reward.correct IN (0, 1), reward.correct = reward.CORRECT FROM samples") == [
        (True, True)
    ]


def test_conversations_are_private_and_have_no_evaluations_unless_the_condition_names_them(lake: Path) -> None:
    with opened(lake) as tables:
        assert write_sft(tables, lake / "a.jsonl") == 8
        assert write_sft(tables, lake / "a.parquet", "purpose = 'eval' -- only these", run="r") == 4
        assert write_atif(tables, lake / "b.jsonl", run="r") == 12
        assert write_sft(tables, lake / "b.parquet", run="it's another") == 0
    modes = {path.name: path.stat().st_mode & 0o777 for path in lake.iterdir()}
    assert modes == {"run=r": 0o700} | dict.fromkeys(("a.jsonl", "a.parquet", "b.jsonl", "b.parquet"), 0o600)
    assert lake.stat().st_mode & 0o777 == 0o700


def test_a_condition_cannot_be_another_statement(lake: Path, tmp_path: Path) -> None:
    with opened(lake) as tables:
        for where in (
            f"true)) TO '{tmp_path}/stolen' (FORMAT JSON) --",
            f"true); COPY samples TO '{tmp_path}/stolen'; --",
        ):
            with pytest.raises(InvalidInput):
                write_sft(tables, tmp_path / "out.jsonl", where)
    assert list(tmp_path.iterdir()) == []
