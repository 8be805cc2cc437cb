"""Export of every sample of a run to Parquet, SQL over the files, and a scorer that adds a column: samples per second,
bytes, and memory.

The facts of an ordinary run (`history`) are in the ledger of a real nats-server, and its payloads, of 450 tokens each,
in payload files. The baseline in the same run reads the same ledger twice and the same payloads, without decoding the
payloads or writing anything. The scorer is `exact`, in one process. A second column of the smaller runs is by a judge:
an endpoint that answers after a second, with 64 calls at once.

How to read it: `peak MB` is that of the export, of which the process had `before MB`; it must not grow with the number
of samples. Samples per second are limited by one CPU core. `open s` is what every query needs before its statement.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from msgspec.structs import replace as replace_fields

from benchmarks.history import CHECKPOINT_EVERY, SAMPLES_PER_UPDATE, SPEC, History
from benchmarks.judge import OPEN, judge_server
from benchmarks.report import Report
from rollmesh.app.lake.export import READS_MAX, export_samples
from rollmesh.app.lake.query import SampleTables, opened
from rollmesh.app.lake.rescore import score_exported
from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.ledger import Ledger, read_ledger
from rollmesh.shared.bus.bus import Bus
from rollmesh.shared.bus.embedded_server import EmbeddedServer
from rollmesh.shared.bus.jetstream_bus import JetStreamBus
from rollmesh.shared.bus.login import BusLogin
from rollmesh.shared.bus.payload_bus import PayloadBus
from rollmesh.shared.bus.payload_writer import PayloadWriter
from rollmesh.shared.bus.run_streams import StreamLimits, run_streams
from rollmesh.shared.clock import SystemClock
from rollmesh.shared.domain.ids import RandomIds
from rollmesh.shared.domain.ledger_head import EMPTY
from rollmesh.shared.store.payload_files import PayloadFiles
from rollmesh.v1 import types_pb2

NUM_SAMPLES = (10_000, 100_000)
NUM_TURNS = 3
NUM_TASKS = 1024
CONFIG = """
model: model
data: {source: {name: jsonl, options: {path: tasks.jsonl}}}
reward: {scorers: [{name: exact, reward: again, options: {pattern: '-?[0-9]+'}}]}
"""
"""The scorer that adds a column."""
JUDGED_CONFIG = """
model: model
data: {{source: {{name: jsonl, options: {{path: tasks.jsonl}}}}}}
endpoints: {{judge: {{kind: openai, base_url: "{url}", model: judge, concurrency: {num_open}}}}}
reward:
  concurrency_max: {num_open}
  scorers: [{{name: rubric, reward: judged, options: {{criteria: [{{criterion: It is right.}}]}}}}]
"""
NUM_JUDGED_MAX = 20_000
"""Samples of a run that the judge rates: 64 per second."""
LOGIN = BusLogin(user="rollmesh", password="bench")
SQL = 'SELECT "update", count(*), avg(reward.correct), avg(num_tokens) FROM samples GROUP BY "update"'
SQL_TOKENS = "SELECT avg(list_sum(logprobs)) FROM samples"
SQL_SCORES = "SELECT reward.correct, avg(value) FROM samples JOIN scores USING (run, sample_id) GROUP BY 1"
STREAMS = run_streams(SPEC.run, StreamLimits(ledger_bytes_max=8 << 30))


class _StoredHistory(History):
    """A history whose payloads exist."""

    def __init__(self, files: PayloadFiles) -> None:
        super().__init__()
        self._writer = PayloadWriter(files, bytes_max=1 << 40)
        self._random = np.random.default_rng(0)

    def _report(self, lease: i.EpisodeLease) -> i.EpisodeReport:
        report = super()._report(lease)
        payload = self._episode(lease, report.samples[0]).SerializeToString()
        (sequence,) = self._writer.append([payload])
        return replace(report, payload=f.PayloadRef(sequence=sequence, size_bytes=len(payload)))

    def _task(self, draw: int) -> f.Task:
        return replace_fields(super()._task(draw), task_id=f"tasks-{draw % NUM_TASKS + 1}")

    def _episode(self, lease: i.EpisodeLease, meta: f.SampleMeta) -> types_pb2.Episode:
        """Return a prompt of 50 tokens, and turns of 100 tokens with results of 50 between them."""
        version = types_pb2.PolicyVersion(policy="main", step=lease.step_min, weights_digest=f"{lease.step_min:064x}")
        segments: list[types_pb2.Segment] = []
        for turn in range(NUM_TURNS):
            role, source = (
                (types_pb2.SEGMENT_ROLE_OBSERVATION, types_pb2.SEGMENT_SOURCE_TOOL)
                if turn
                else (types_pb2.SEGMENT_ROLE_CONTEXT, types_pb2.SEGMENT_SOURCE_PROMPT)
            )
            text = types_pb2.Message(role="tool" if turn else "user", content="What is (17 + 4) * 3? " * 9)
            segments.append(
                types_pb2.Segment(
                    parent=len(segments) - 1, role=role, source=source, token_ids=self._tokens(50), sampling=-1,
                    messages=[text],
                )
            )  # fmt: skip
            segments.append(
                types_pb2.Segment(
                    parent=len(segments) - 1, role=types_pb2.SEGMENT_ROLE_ACTION,
                    source=types_pb2.SEGMENT_SOURCE_POLICY, token_ids=self._tokens(100),
                    logprobs=self._random.normal(-1, 0.5, 100).astype("<f4").tobytes(), loss_mask=bytes([1]) * 100,
                    version=version, kv_step_oldest=lease.step_min, finish=types_pb2.FINISH_REASON_STOP,
                    messages=[types_pb2.Message(role="assistant", content="The sum is 21, times three is 63. " * 9)],
                )
            )  # fmt: skip
        return types_pb2.Episode(
            key=types_pb2.EpisodeKey(
                run=SPEC.run, task="tasks-1", group=lease.group, episode=lease.episode, attempt=lease.attempt
            ),
            purpose=types_pb2.PURPOSE_TRAIN,
            segments=segments,
            samples=[
                types_pb2.Sample(
                    sample_id=meta.sample_id, policy="main", leaf=len(segments) - 1, trainable=True, weight=1.0
                )
            ],
            sampling_params=[types_pb2.SamplingParams(temperature=1.0, top_p=1.0, max_tokens=100)],
        )

    def _tokens(self, num: int) -> bytes:
        return self._random.integers(0, 50_000, num).astype("<i4").tobytes()


def run(quick: bool) -> Report:
    report = Report("lake", f"groups of 16, batches of 16 groups, payloads of {NUM_TURNS * 150} tokens in files")
    for num in (2_000,) if quick else NUM_SAMPLES:
        with TemporaryDirectory(prefix="rollmesh-bench-") as folder:
            report.rows.append(asyncio.run(_measure(Path(folder), num)))
    return report


async def _measure(folder: Path, num_samples: int) -> dict[str, Any]:
    async with EmbeddedServer(folder / "nats", login=LOGIN) as server:
        bus = PayloadBus(
            await JetStreamBus.connect(server.url, login=LOGIN), folder / "payloads", write=True, bytes_max=1 << 40
        )
        try:
            return await _exported(folder, bus, num_samples)
        finally:
            await bus.close()


async def _exported(folder: Path, bus: Bus, num_samples: int) -> dict[str, Any]:
    await bus.create(STREAMS.samples)
    files = PayloadFiles(folder / "payloads" / SPEC.run)
    await _write(bus, files, num_samples)
    num_payload_bytes = sum(files.sizes().values())
    _, bare_cpu_s = await _timed(_read(bus))
    _reset_peak()
    before_mb = _peak_mb()
    export_s, export_cpu_s = await _timed(export_samples(bus, SPEC.run, folder / "lake"))
    peak_mb = _peak_mb()
    _, again_cpu_s = await _timed(export_samples(bus, SPEC.run, folder / "lake"))
    paths = list((folder / "lake").rglob("*.parquet"))
    score_s, score_cpu_s = await _timed(asyncio.to_thread(_score, folder, "again", CONFIG))
    judged_s, judged_cpu_s = await _timed(_judge(folder)) if num_samples <= NUM_JUDGED_MAX else (math.nan, math.nan)
    begin_s = time.perf_counter()
    with opened(folder / "lake") as tables:
        open_s = time.perf_counter() - begin_s
        (num_rows,) = next(tables.query("SELECT count(*) FROM samples").rows)
        query_s = _query(tables, SQL)
        tokens_s = _query(tables, SQL_TOKENS)
        scores_s = _query(tables, SQL_SCORES)
    return {
        "samples": f"{num_rows:,}",
        "files": len(paths),
        "payloads MB": num_payload_bytes / 1e6,
        "parquet MB": sum(path.stat().st_size for path in paths) / 1e6,
        "export s": export_s,
        "samples/s": num_rows / export_s,
        "CPU s": export_cpu_s,
        "bare read, CPU s": bare_cpu_s,
        "second export, CPU s": again_cpu_s,
        "before MB": before_mb,
        "peak MB": peak_mb,
        "open s": open_s,
        "query s": query_s,
        "query of log-probs s": tokens_s,
        "column s": score_s,
        "column, CPU s": score_cpu_s,
        "query of the column s": scores_s,
        "column by a judge s": judged_s,
        "column by a judge, CPU s": judged_cpu_s,
    }


async def _write(bus: Bus, files: PayloadFiles, num_samples: int) -> None:
    log = await bus.create(STREAMS.ledger)
    ledger = Ledger(log, ids=RandomIds(), clock=SystemClock(), append_s_max=60.0)
    await ledger.begin(EMPTY)
    num_updates = -(-num_samples // SAMPLES_PER_UPDATE)
    num_updates += -num_updates % CHECKPOINT_EVERY  # samples of updates without a checkpoint are live
    for decisions in _StoredHistory(files).updates(num_updates):
        for facts in decisions:
            newest = await ledger.append(facts)
    await newest


async def _read(bus: Bus) -> None:
    ledger, samples = await bus.open(STREAMS.ledger.name), await bus.open(STREAMS.samples.name)
    async for _ in read_ledger(ledger):
        pass
    async for record in read_ledger(ledger):
        scored = [fact.payload.sequence for fact in record.facts if isinstance(fact, f.EpisodeScored)]
        for at in range(0, len(scored), READS_MAX):
            await asyncio.gather(*map(samples.read_direct, scored[at : at + READS_MAX]))


async def _timed(work: Coroutine[Any, Any, object]) -> tuple[float, float]:
    """Return the seconds that the work took, and its CPU seconds in this process."""
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    await work
    return time.perf_counter() - begin_s, time.process_time() - begin_cpu_s


def _score(folder: Path, name: str, config: str) -> None:
    tasks = [{"question": f"{n}?", "answer": "63"} for n in range(NUM_TASKS)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    (folder / f"{name}.yaml").write_text(config)
    scores = score_exported(folder / "lake", folder / f"{name}.yaml", (), name=name, processes=1)
    assert scores.mean_rewards == {name: 1.0}


async def _judge(folder: Path) -> None:
    async with judge_server() as url:
        await asyncio.to_thread(_score, folder, "judged", JUDGED_CONFIG.format(url=url, num_open=OPEN))


def _query(tables: SampleTables, sql: str) -> float:
    begin_s = time.perf_counter()
    assert list(tables.query(sql).rows)
    return time.perf_counter() - begin_s


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _peak_mb() -> float:
    """Return the largest memory of this process since the peak was reset."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1e3
