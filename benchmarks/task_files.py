"""Task files beyond memory: memory, time to the first draw, and draws per second of the source `files`.

Each arm is a new process that builds the pools of a data service as it starts: the files are hashed and scanned, and
the selector `uniform` draws. The baseline has 100,000 tasks in memory (source `jsonl`). Tasks have a prompt of about
170 characters, an answer and a label of 7 values; 90 % are in the training split. Files are written to a temporary
folder (`TMPDIR`), which needs 2 GB, and are in the page cache.

How to read it: `start` is the memory of the process with its imports, `peak` its greatest memory, up to the last draw.
Memory of mapped files counts, though the kernel can take it back. `first draw` is the time from the configuration to a
task. `single` and `batch` are random tasks per second of CPU time, read one by one and 64 at a time. A batch is what
the data service reads for one request.
"""

from __future__ import annotations

import multiprocessing
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

from benchmarks.report import BenchTarget, Report

BATCH = 64
CHUNK_ROWS = 500_000
PEAK_MB_MAX = 500.0
ARM_S_MAX = 1200.0


@dataclass(frozen=True, slots=True)
class FileArm:
    """One way to store tasks."""

    name: str
    file: str
    share: float
    """Number of tasks, as a share of the largest file."""
    source: str = "files"
    split: str = ""


ARMS = (
    FileArm("in memory (jsonl)", "small.jsonl", 0.01, source="jsonl"),
    FileArm("Parquet, groups of 10,000 rows", "tasks.parquet", 1.0),
    FileArm("the same, splits by a column", "tasks.parquet", 1.0, split="split"),
    FileArm("Parquet, groups of 1,048,576 rows", "groups.parquet", 0.1),
    FileArm("Arrow stream", "tasks.arrow", 0.1),
    FileArm("JSONL", "tasks.jsonl", 0.1),
)


def run(quick: bool) -> Report:
    num, lap_s = (100_000, 0.3) if quick else (10_000_000, 5.0)
    report = Report("task_files", f"{num:,} tasks in the largest file; draws for {lap_s} CPU s each")
    folder = Path(tempfile.mkdtemp(prefix="task-files-"))
    try:
        for arm in ARMS:
            size = int(num * arm.share)
            if not (folder / arm.file).exists():
                write(folder / arm.file, size)
            measured = _in_process(measure, arm, folder, lap_s)
            size_mb = (folder / arm.file).stat().st_size / 2**20
            report.rows.append({"tasks": f"{size:,}", "stored as": arm.name, "file, MB": round(size_mb), **measured})
    finally:
        shutil.rmtree(folder)
    for row in report.rows[1:3]:
        report.targets.append(BenchTarget(f"peak memory, MB: {row['stored as']}", row["peak, MB"], PEAK_MB_MAX))
    return report


def measure(arm: FileArm, folder: Path, lap_s: float) -> dict[str, Any]:
    """Return the figures of an arm, for its own process."""
    import numpy as np

    from rollmesh.services.data.config import DataConfig, build_pools, build_selector
    from rollmesh.services.data.task import Split, read_tasks
    from rollmesh.shared.config.registry import Extension

    options = {"path": arm.file, "labels": {"level": "level"}, "split": arm.split}
    config = DataConfig(source=Extension(arm.source, options))
    start_mb, began, began_cpu = _memory_mb("VmRSS"), perf_counter(), process_time()
    pool = build_pools(config, folder)[Split.TRAIN]
    selector = build_selector(config, pool)
    pool.task(selector.draw(0, frozenset()))
    first_s, first_cpu_s = perf_counter() - began, process_time() - began_cpu
    rng = np.random.default_rng(0)

    def read(positions: list[int]) -> object:
        return read_tasks(pool, positions)

    def rate(size: int) -> float:
        began, num = process_time(), 0
        while process_time() < began + lap_s:
            read(rng.integers(len(pool), size=size).tolist())
            num += size
        return num / (process_time() - began)

    rates = {"single, tasks/CPU s": round(rate(1)), f"batch of {BATCH}, tasks/CPU s": round(rate(BATCH))}
    return {
        "start, MB": round(start_mb),
        "peak, MB": round(_memory_mb("VmHWM")),
        "first draw, s": round(first_s, 1),
        "the same, CPU s": round(first_cpu_s, 1),
        **rates,
    }


def write(path: Path, num: int) -> None:
    """Write a file with `num` tasks in parts."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    parts = _parts(num)
    if path.suffix == ".jsonl":
        import json

        with path.open("w") as file:
            for part in parts:
                file.writelines(json.dumps(row) + "\n" for row in part.to_pylist())
    elif path.suffix == ".arrow":
        with pa.ipc.new_stream(str(path), next(_parts(1)).schema) as writer:
            for part in parts:
                writer.write_table(part, max_chunksize=1000)
    else:
        group_rows = 10_000 if path.stem == "tasks" else 2**20
        table = pa.concat_tables(parts) if group_rows > CHUNK_ROWS else None
        with pq.ParquetWriter(path, next(_parts(1)).schema, compression="zstd") as writer:
            for part in parts if table is None else [table]:
                writer.write_table(part, row_group_size=group_rows)


def _parts(num: int) -> Iterator[Any]:
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    rng = np.random.default_rng(0)
    for start in range(0, num, CHUNK_ROWS):
        size = min(CHUNK_ROWS, num - start)
        first, second = (pa.array(rng.integers(10**8, size=size)) for _ in range(2))
        numbers = [column.cast(pa.string()) for column in (pa.array(np.arange(start, start + size)), first, second)]
        texts = (
            "Problem ",
            ": a warehouse has ",
            " boxes on its shelves, and a truck brings ",
            " more of them in the morning. How many boxes does the warehouse have at noon, if none is sold?",
        )
        words = [texts[0], numbers[0], texts[1], numbers[1], texts[2], numbers[2], texts[3]]
        yield pa.table(
            {
                "question": pc.binary_join_element_wise(*words, ""),
                "answer": pc.add(first, second).cast(pa.string()),
                "level": pa.array(np.arange(size) % 7),
                "split": pa.array(np.asarray(["train"] * 18 + ["validation", "test"])[np.arange(size) % 20]),
            }
        )


def _in_process(target: Callable[..., dict[str, Any]], *args: object) -> dict[str, Any]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply_async(target, args).get(ARM_S_MAX)


def _memory_mb(key: str) -> float:
    """Return a size of this process in /proc/self/status."""
    found = re.search(rf"^{key}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1]) / 1024 if found else 0.0
