"""Exported samples: each ended sample once, the same files from any earlier export, and SQL over them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest

from rollmesh.app.lake.conversations import trajectory, write_atif, write_sft
from rollmesh.app.lake.export import LakeExport, export_samples
from rollmesh.app.lake.files import FolderBusy, Partitions, owned
from rollmesh.app.lake.query import opened
from rollmesh.app.lake.rows import sample_line
from rollmesh.app.samples.samples import sample_lines
from rollmesh.app.samples.stored_samples import stored_lines
from rollmesh.services.coordinator.audit import audit_run
from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.fact_codec import encode
from rollmesh.shared.bus.run_streams import run_streams
from rollmesh.shared.domain.plans import Plan, Variant
from rollmesh.shared.errors import ConfigError, InvalidInput
from rollmesh.testing.memory_bus import MemoryBus
from rollmesh.v1 import types_pb2
from tests.tamper.ledger_copy import made, store

from ..coordinator import test_core_foreign_samples as foreign
from ..coordinator.core_run import CoreRun
from ..coordinator.test_audit import honest, rolled_back
from ..coordinator.test_core_replay import Replaying

Rows = list[dict[str, Any]]


class Mixed(CoreRun):
    """Rewards 0 and 1 in turn, and every third group is filtered."""

    def reward(self, episode: str) -> float:
        return float(episode.endswith("1"))

    def decide(self, group: str) -> Any:
        kept = super().decide(group)
        if int(group[1:]) % 3 != 2:
            return kept
        return replace(kept, decision=f.GroupDecision.FILTER, reason="SAME")


def mixed() -> CoreRun:
    """Two updates with checkpoints; their groups and filtered ones."""
    run = Mixed()
    run.begin()
    for update in (1, 2):
        run.generate(8, step=update - 1)
        run.checkpoint(update, run.commit(update, run.lease(update).lease_id))
        run.publish(update)
    return run


def payload(fact: f.EpisodeScored, task: str) -> types_pb2.Episode:
    """Return an episode as the ledger describes it: a prompt of 4 tokens and an answer of 4."""
    (meta,) = fact.samples
    (span,) = meta.steps
    version = types_pb2.PolicyVersion(
        policy="main", step=span.step, incarnation=span.incarnation, weights_digest="ab" * 32
    )
    prompt = types_pb2.Segment(
        parent=-1, role=types_pb2.SEGMENT_ROLE_CONTEXT, source=types_pb2.SEGMENT_SOURCE_PROMPT, token_ids=numbers(4, "<i4"),
        sampling=-1, messages=[types_pb2.Message(role="user", content=f"solve {task}")],
    )  # fmt: skip
    answer = types_pb2.Segment(
        parent=0, role=types_pb2.SEGMENT_ROLE_ACTION, source=types_pb2.SEGMENT_SOURCE_POLICY, token_ids=numbers(4, "<i4"),
        logprobs=numbers(4, "<f4", -0.5), loss_mask=bytes([1] * 4), version=version, kv_step_oldest=span.step, finish=types_pb2.FINISH_REASON_STOP,
        messages=[types_pb2.Message(role="assistant", content=f"answer of {fact.episode}")],
    )  # fmt: skip
    return types_pb2.Episode(
        key=types_pb2.EpisodeKey(run="r", task=task, group=fact.group, episode=fact.episode, attempt=1),
        purpose=types_pb2.PURPOSE_TRAIN,
        segments=[prompt, answer],
        samples=[types_pb2.Sample(sample_id=meta.sample_id, policy="main", leaf=1, trainable=True, weight=1.0)],
        sampling_params=[types_pb2.SamplingParams(temperature=1.0, top_p=1.0, max_tokens=4, seed=1 << 63)],
        variant=meta.summary.variant,
    )


def numbers(num: int, dtype: str, factor: float = 1) -> bytes:
    import numpy as np

    return (np.arange(num) * factor).astype(dtype).tobytes()


async def bus_of(run: CoreRun, num_records: int = 0) -> MemoryBus:
    """Return a bus with the first records of the ledger, and all payloads."""
    bus = await store(made([record.facts for record in run.records[: num_records or None]]))
    samples = await bus.create(run_streams("r").samples)
    tasks = {fact.group: fact.task.task_id for fact in run.facts if isinstance(fact, f.GroupReserved)}
    for fact in run.facts:
        if isinstance(fact, f.EpisodeScored):
            at = await samples.append(payload(fact, tasks[fact.group]).SerializeToString(), msg_id=fact.episode)
            assert at == fact.payload.sequence
    return bus


def rows_of(folder: Path) -> Rows:
    """Return all rows, with their update, in an order that does not depend on the files."""
    rows = [
        {**row, "update": path.parent.name.removeprefix("update=")}
        for path in folder.glob("run=*/update=*/*.parquet")
        for row in pq.ParquetFile(path).read().to_pylist()
    ]
    return sorted(rows, key=lambda row: (row["episode"], row["sample_id"] or ""))


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"}


def times_of(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*.parquet")}


def replaying() -> CoreRun:
    """Three updates, of which two train samples again."""
    run = Replaying()
    for update in (1, 2, 3):
        run.step(update)
    return run


@pytest.mark.parametrize("make", [honest, rolled_back, mixed, replaying])
async def test_every_ended_sample_is_one_row_by_the_counts_of_the_audit(make: Any, tmp_path: Path) -> None:
    bus = await bus_of(make())
    result, audit, rows = await export_samples(bus, "r", tmp_path), await audit_run(bus, "r"), rows_of(tmp_path)
    assert audit.holds
    ends = msgspec.structs.asdict(audit.samples)
    for end, num in msgspec.structs.asdict(audit.replay.samples).items() if audit.replay is not None else ():
        ends[end] += num
    assert result.num_live == ends.pop("live")
    assert len(rows) + result.num_live == ends.pop("reserved")
    counted = {end: sum(row["ended_as"] == end for row in rows) for end in ends}
    assert counted == ends
    assert (result.num_rows, result.num_new) == (len(rows), len(rows))
    assert len({row["sample_id"] or row["episode"] for row in rows}) == len(rows)
    assert {row["ended_as"] for row in rows if row["update"] != "none"} <= {"trained"}


async def test_a_row_has_the_tokens_of_the_payload_and_the_lineage_of_the_ledger(tmp_path: Path) -> None:
    run = honest()
    await export_samples(await bus_of(run), "r", tmp_path)
    scored = next(
        fact for fact in run.facts if isinstance(fact, f.EpisodeScored) and fact.samples[0].steps[0].step == 1
    )
    group = next(fact for fact in run.facts if isinstance(fact, f.GroupReserved) and fact.group == scored.group)
    row = next(row for row in rows_of(tmp_path) if row["episode"] == scored.episode)
    (expected,) = sample_lines(payload(scored, group.task.task_id), encode(group.task, types_pb2.Task))
    found = sample_line({**row, "run": "r"})
    assert msgspec.structs.replace(found, rewards=[], finish="") == expected
    assert [(r.name, r.value) for r in found.rewards] == [("correct", 1.0)]
    assert (row["update"], row["staleness"], row["incarnation"], row["applied"]) == ("2", 0, 0, True)
    assert row["steps"] == [{"step": 1, "incarnation": 0, "num_tokens": 4}]
    assert row["logprobs"] == [None] * 4 + [0.0, -0.5, -1.0, -1.5]
    assert row["loss_mask"] == [0] * 4 + [1] * 4


class Planned(CoreRun):
    """One update of a group with two variants and of one as the run has it."""

    def plan(self, draw: int) -> Plan | None:
        variants = (Variant(name="plain"), Variant(name="hot", count=2))
        return Plan(variants=variants, propensity=0.25) if draw == 0 else None


async def test_rows_have_the_variant_of_the_episode_and_the_propensity_of_the_group(tmp_path: Path) -> None:
    run = Planned()
    run.begin()
    run.generate(5, step=0)
    run.checkpoint(1, run.commit(1, run.lease(1).lease_id))
    await export_samples(await bus_of(run), "r", tmp_path)
    found = [(row["episode"], row["variant"], row["propensity"]) for row in rows_of(tmp_path)]
    assert found == [
        ("g0.0", "plain", 0.25),
        ("g0.1", "hot", 0.25),
        ("g0.2", "hot", 0.25),
        ("g1.0", "", None),
        ("g1.1", "", None),
    ]
    lines = [sample_line({**row, "run": "r"}).variant for row in rows_of(tmp_path)]
    assert lines == ["plain", "hot", "hot", "", ""]


async def test_a_replayed_sample_is_a_row_that_names_its_original(tmp_path: Path) -> None:
    await export_samples(await bus_of(replaying()), "r", tmp_path)
    rows = {row["sample_id"]: row for row in rows_of(tmp_path)}
    again = [row for row in rows.values() if row["replay_of"]]
    assert len(again) == 8
    for row in again:
        original = rows[row["replay_of"]]
        assert (row["purpose"], row["ended_as"], row["stored"]) == ("replay", "trained", False)
        assert (original["purpose"], original["stored"], original["replay_of"]) == ("train", True, None)
        assert row["steps"] == original["steps"]
        assert row["staleness"] == int(row["update"]) - 1 - original["steps"][0]["step"]


async def test_a_submitted_sample_has_the_key_and_the_provenance_that_its_client_gave(tmp_path: Path) -> None:
    run = foreign.begun(foreign.peer(max_age=0), max_staleness=0, batch_groups=2)
    origin = f.Provenance(mesh="north", run="n1", step=12)
    foreign.submit(run, foreign.group("north/12"), foreign.group("too-old"), provenance=origin)
    foreign.roll(run, 8)
    assert foreign.train(run, 1) == ["g0", "g1"]
    foreign.submit(run, foreign.group("unknown"))
    foreign.roll(run, 8, step=1)
    foreign.train(run, 2)
    run.checkpoint(2, run.core.state.the_clock.digest)
    bus = await store(made([record.facts for record in run.records]))
    await bus.create(run_streams("r").samples)
    await export_samples(bus, "r", tmp_path)
    rows = rows_of(tmp_path)
    found = {row["submitted_key"]: row["provenance"] for row in rows}
    assert found == {"north/12": {"mesh": "north", "run": "n1", "step": 12}, "unknown": None, None: None}
    assert all(bool(row["external"]) is bool(row["submitted_key"]) for row in rows)
    with opened(tmp_path) as tables:
        (trained,) = tables.query("SELECT count(*) FROM samples WHERE provenance.mesh = 'north'").rows
    assert trained == (2,)


@pytest.mark.parametrize("make", [honest, rolled_back, mixed, replaying])
async def test_exports_in_between_give_the_same_rows_as_one_export(make: Any, tmp_path: Path) -> None:
    run = make()
    whole = await bus_of(run)
    await export_samples(whole, "r", tmp_path / "once")
    expected = rows_of(tmp_path / "once")
    for cut in range(1, len(run.records), 4):
        folder = tmp_path / f"cut-{cut}"
        await export_samples(await bus_of(run, cut), "r", folder)
        await export_samples(whole, "r", folder)
        assert rows_of(folder) == expected, f"after an export of {cut} records"


async def test_a_second_export_adds_nothing_and_one_after_more_updates_adds_those(tmp_path: Path) -> None:
    run = mixed()
    bus = await bus_of(run)
    first = await export_samples(bus, "r", tmp_path)
    before = times_of(tmp_path)
    again = await export_samples(bus, "r", tmp_path)
    assert again == msgspec.structs.replace(first, num_new=0)
    assert times_of(tmp_path) == before
    run.generate(8, step=2)
    run.checkpoint(3, run.commit(3, run.lease(3).lease_id))
    updates: list[int] = []
    more = await export_samples(await bus_of(run), "r", tmp_path, updates.append)
    assert updates == [3]
    assert more.num_rows == first.num_rows + more.num_new


async def test_an_interrupted_export_leaves_whole_files_only_and_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = await bus_of(mixed())
    await export_samples(bus, "r", tmp_path / "once")
    reads = 0

    async def fails(*arguments: Any) -> Any:
        nonlocal reads
        reads += 1
        if reads == 6:
            raise OSError("the disk is gone")
        return await stored_lines(*arguments)

    monkeypatch.setattr("rollmesh.app.lake.export.stored_lines", fails)
    with pytest.raises(OSError, match="the disk is gone"):
        await export_samples(bus, "r", tmp_path / "cut")
    assert files_of(tmp_path / "cut") == {"run=r/update=1/part-0.parquet"}
    (tmp_path / "cut/run=r/update=2").mkdir(exist_ok=True)
    (tmp_path / "cut/run=r/update=2/part-0.parquet.partial").write_bytes(b"of a killed process")
    monkeypatch.undo()
    await export_samples(bus, "r", tmp_path / "cut")
    assert rows_of(tmp_path / "cut") == rows_of(tmp_path / "once")
    assert files_of(tmp_path / "cut") == files_of(tmp_path / "once")


async def test_samples_without_a_payload_have_their_lineage_and_rewards(tmp_path: Path) -> None:
    bus = await bus_of(mixed())
    await (await bus.open(run_streams("r").samples.name)).purge_below(9)
    result = await export_samples(bus, "r", tmp_path)
    rows = rows_of(tmp_path)
    assert result.num_stored == sum(row["stored"] for row in rows) == len(rows) - 8
    purged = next(row for row in rows if not row["stored"])
    assert purged["token_ids"] is purged["messages"] is None
    assert [reward["name"] for reward in purged["rewards"]] == ["correct"]


async def test_files_of_another_run_or_another_program_are_rejected(tmp_path: Path) -> None:
    await export_samples(await bus_of(mixed()), "r", tmp_path)
    with pytest.raises(ConfigError, match="has samples of an earlier run of the name 'r'; export to another folder"):
        await export_samples(await bus_of(CoreRun(max_staleness=2)), "r", tmp_path)
    with owned(Partitions(tmp_path, "r").folder), pytest.raises(FolderBusy, match="another call writes to it"):
        await export_samples(await bus_of(mixed()), "r", tmp_path)
    (tmp_path / "run=r/update=9").mkdir()
    (tmp_path / "run=r/update=9/part-0.parquet").write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match="update=9/part-0.parquet: not a file that rollmesh wrote"):
        await export_samples(await bus_of(mixed()), "r", tmp_path)


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two updates of four samples; the groups g2 and g5 are filtered. Rewards are 0 and 1 in turn."""
    folder = tmp_path_factory.mktemp("lake") / "a[1] b*"

    async def export() -> LakeExport:
        return await export_samples(await bus_of(mixed()), "r", folder)

    asyncio.run(export())
    return folder


def query(folder: Path, sql: str) -> Sequence[tuple[Any, ...]]:
    with opened(folder) as tables:
        return list(tables.query(sql).rows)


def test_sql_finds_what_is_counted_by_hand(lake: Path) -> None:
    rows = rows_of(lake)
    trained = [row for row in rows if row["update"] == "2"]
    mean = sum(row["rewards"][0]["value"] for row in trained) / len(trained)
    sql = "SELECT count(*), avg(reward.correct), max(staleness) FROM samples WHERE update = 2"
    assert query(lake, sql) == [(len(trained), mean, max(row["staleness"] for row in trained))]
    filtered = sum(row["ended_as"] == "filtered" for row in rows)
    assert query(lake, "SELECT reason, count(*) FROM samples WHERE ended_as = 'filtered' GROUP BY ALL") == [
        ("SAME", filtered)
    ]
    assert query(lake, "SELECT update, num_samples, num_tokens FROM updates ORDER BY update") == [
        (1, 4, 32),
        (2, 4, 32),
    ]
    assert query(lake, "SELECT DISTINCT name, scorer, outcome FROM rewards") == [("correct", "exact@1", "ok")]


def test_wrong_sql_is_answered_with_the_columns_and_an_empty_folder_with_the_command(
    lake: Path, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInput, match=r'(?s)"tokens" not found.*samples: run, update, sample_id, .*token_ids'):
        query(lake, "SELECT tokens FROM samples")
    with pytest.raises(InvalidInput, match="syntax error"):
        query(lake, "SELEC")
    for wrong in ("", "SELECT 1; SELECT 2"):
        with pytest.raises(InvalidInput, match="must be one statement, got [02]"):
            query(lake, wrong)
    with pytest.raises(ConfigError, match="has no exported samples; run `rollmesh export"):
        query(tmp_path, "SELECT 1")
    (tmp_path / "run=r/update=1").mkdir(parents=True)
    (tmp_path / "run=r/update=1/part-0.parquet").write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match="cannot be read: .*part-0.parquet"):
        query(tmp_path, "SELECT 1")


def test_conversations_of_successful_samples_are_written_as_json_and_parquet(lake: Path, tmp_path: Path) -> None:
    with opened(lake) as tables:
        num = write_sft(tables, tmp_path / "sft.jsonl", "reward.correct >= 1")
        assert write_sft(tables, tmp_path / "sft.parquet", "reward.correct >= 1") == num
        with pytest.raises(InvalidInput, match="syntax error"):
            write_sft(tables, tmp_path / "wrong.jsonl", "reward.correct >")
        with pytest.raises(ConfigError, match="cannot be written"):
            write_sft(tables, tmp_path / "no/sft.jsonl")
    lines = [msgspec.json.decode(line) for line in (tmp_path / "sft.jsonl").read_bytes().splitlines()]
    assert num == len(lines) == sum(row["rewards"][0]["value"] == 1 for row in rows_of(lake))
    for line in lines:
        assert [message["role"] for message in line["messages"]] == ["user", "assistant"]
        assert line["reward"] == {"correct": 1.0}
    table = pq.ParquetFile(tmp_path / "sft.parquet").read()
    assert [row["messages"] for row in table.to_pylist()] == [line["messages"] for line in lines]
    assert files_of(tmp_path) == {"sft.jsonl", "sft.parquet"}


def test_a_trajectory_has_the_steps_tokens_and_weights_of_the_sample(lake: Path, tmp_path: Path) -> None:
    with opened(lake) as tables:
        num = write_atif(tables, tmp_path / "atif.jsonl", "update = 2")
    first = msgspec.json.decode((tmp_path / "atif.jsonl").read_bytes().splitlines()[0])
    assert num == 4
    assert first["schema_version"] == "ATIF-v1.7"
    user, agent = first["steps"]
    assert (user["step_id"], user["source"], agent["step_id"], agent["source"]) == (1, "user", 2, "agent")
    assert agent["model_name"].startswith("main@")
    assert agent["metrics"] == {
        "prompt_tokens": 4, "completion_tokens": 4, "completion_token_ids": [0, 1, 2, 3], "logprobs": [0.0, -0.5, -1.0, -1.5]
    }  # fmt: skip
    assert first["final_metrics"] == {"total_prompt_tokens": 4, "total_completion_tokens": 4, "total_steps": 2}
    assert first["extra"]["update"] == 2


def test_results_of_tools_are_observations_of_the_step_before(lake: Path) -> None:
    with opened(lake) as tables:
        result = tables.query("SELECT * FROM samples WHERE stored LIMIT 1")
        row = dict(zip(result.columns, next(result.rows), strict=True))
    prompt, answer = row["messages"]
    answer_segment = {**row["segments"][1], "index": 3}
    tool = {**row["segments"][0], "index": 2, "role": "observation", "source": "tool"}
    row["messages"] = [prompt, answer, {"role": "tool", "content": "42"}, answer]
    row["segments"] = [*row["segments"], tool, answer_segment]
    for name in ("token_ids", "logprobs", "loss_mask"):
        row[name] = row[name] * 2
    steps = trajectory(row)["steps"]
    assert [step["source"] for step in steps] == ["user", "agent", "agent"]
    assert steps[1]["observation"] == {"results": [{"content": "42"}]}
    assert [step["metrics"]["prompt_tokens"] for step in steps[1:]] == [4, 12]
