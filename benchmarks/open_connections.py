"""Updates per minute of a run while many clients hold connections open, against the same run without them.

One run as processes under the supervisor: real services and nats-server; engine and trainer are fakes. A step of the
engine takes `STEP_S` and the run is on-policy, so that an update waits for generation instead of for a core. The load
is `STREAMS` WatchRun streams through the gateway, which are read, and `HALF_OPEN` HTTP requests without an end to
/metrics of the coordinator. It is opened before its window and held through it. A stream that is rejected is counted
and not repeated; a half request that the server closes is sent again after `AGAIN_S`. Windows without and with load
alternate in one mesh, and the order changes from pair to pair.

How to read it: `ratio` is the rate with load over that without it. Clients and services share the machine, so the ratio
contains the CPU time of the clients; the notes say how many cores clients, gateway and coordinator used in each.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.progress import until_update
from benchmarks.report import BenchTarget, Report
from rollmesh.demo.tokenizer import build_tokenizer
from rollmesh.mesh import MeshConfig
from rollmesh.mesh.run_layout import RunLayout
from rollmesh.mesh.supervisor import Supervisor
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.errors import MeshError
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.rpc.status import typed_errors
from rollmesh.shared.telemetry.prometheus import FOLDER
from rollmesh.trainer.model_files import save_tokenizer
from rollmesh.v1 import run_pb2, run_pb2_grpc

STREAMS, STREAMS_PER_CONNECTION = 1024, 256
HALF_OPEN = 1000
AGAIN_S = 5.0
OPEN_S_MAX = 30.0
"""Limit of the time until each stream has its first message or its rejection."""
PROBE_S = 0.2
"""Pause between the GetRun calls whose latency is measured."""
CALL_S_MAX = 10.0
STEP_S = 0.02
WARM = 3
LIMIT_S = 180.0
"""Limit of a window."""


@dataclass(slots=True)
class Load:
    """What became of the connections, and what they did to other calls and to the coordinator."""

    opened: int = 0
    rejected: int = 0
    ended: int = 0
    """Streams that were open and ended before the load did."""
    sent: int = 0
    """Half requests, the repeated ones included."""
    refused: int = 0
    """Attempts to connect for a half request that failed."""
    get_run_s: list[float] = field(default_factory=list)
    get_run_failed: int = 0
    threads: int = 0
    """Threads of the coordinator at the end of the window."""
    cores: dict[str, tuple[float, float]] = field(default_factory=dict)
    """CPU seconds per second of the windows without and with load, by process."""


def run(quick: bool) -> Report:
    pairs, updates = (1, 5) if quick else (5, 15)
    report = Report(
        "open_connections",
        f"windows of {updates} updates; load: {STREAMS} WatchRun streams, {HALF_OPEN} half requests to /metrics",
    )
    with TemporaryDirectory(prefix="rollmesh-bench-") as folder:
        rates, loads, threads = asyncio.run(_measure(Path(folder), pairs, updates))
    ratios = [loaded / free for free, loaded in rates]
    report.rows = [
        {"pair": i, "updates/min without": free, "with": loaded, "ratio": ratio}
        for i, ((free, loaded), ratio) in enumerate(zip(rates, ratios, strict=True), 1)
    ]
    report.notes = [_note(i, load, threads) for i, load in enumerate(loads, 1)]
    report.targets = [BenchTarget("median ratio", median(ratios), 0.9, at_most=False)]
    return report


def _note(pair: int, load: Load, threads_before: int) -> str:
    calls = "no call of GetRun was answered"
    if load.get_run_s:
        calls = f"GetRun {1e3 * median(load.get_run_s):.0f} ms (max {1e3 * max(load.get_run_s):.0f})"
    return (
        f"pair {pair}, under load: {calls}, {load.get_run_failed} calls failed; streams: {load.opened} open, "
        f"{load.rejected} rejected, {load.ended} ended early; {load.sent} half requests sent, {load.refused} refused; "
        f"threads of the coordinator: {threads_before} before, {load.threads} during; cores: "
        f"{', '.join(f'{name} {free:.2f} -> {loaded:.2f}' for name, (free, loaded) in load.cores.items())}"
    )


async def _measure(folder: Path, pairs: int, updates: int) -> tuple[list[tuple[float, float]], list[Load], int]:
    model = folder / "model"
    model.mkdir()
    save_tokenizer(build_tokenizer(), model)
    rates: list[tuple[float, float]] = []
    loads: list[Load] = []
    async with Supervisor(_config(model), run_dir=folder / "run", base_dir=folder) as mesh:
        await until_update(mesh.layout, WARM, limit_s=LIMIT_S)
        threads = _num_threads(mesh.pids["coordinator"])
        with _many_files():  # after the start, because processes inherit the limit
            for pair in range(pairs):
                found: dict[bool, float] = {}
                cores: dict[bool, dict[str, float]] = {}
                for loaded in (False, True) if pair % 2 == 0 else (True, False):
                    async with AsyncExitStack() as stack:
                        if loaded:
                            loads.append(await stack.enter_async_context(_load(mesh.layout)))
                        begin_s, begin_cpu_s = time.perf_counter(), _cpu_s(mesh)
                        found[loaded] = await _updates_per_minute(mesh.layout, updates)
                        wall_s = time.perf_counter() - begin_s
                        cores[loaded] = {n: (s - begin_cpu_s[n]) / wall_s for n, s in _cpu_s(mesh).items()}
                        if loaded:
                            loads[-1].threads = _num_threads(mesh.pids["coordinator"])
                loads[-1].cores = {name: (free, cores[True][name]) for name, free in cores[False].items()}
                rates.append((found[False], found[True]))
    return rates, loads, threads


async def _updates_per_minute(layout: RunLayout, num: int) -> float:
    newest = await until_update(layout, 0, limit_s=LIMIT_S)
    first = await until_update(layout, newest + 1, limit_s=LIMIT_S)
    begin_s = time.perf_counter()
    last = await until_update(layout, first + num, limit_s=LIMIT_S)
    return 60 * (last - first) / (time.perf_counter() - begin_s)


@asynccontextmanager
async def _load(layout: RunLayout) -> AsyncIterator[Load]:
    """The connections while entered."""
    load = Load()
    targets = json.loads((layout.run_dir / FOLDER / "coordinator.json").read_text())
    host, _, port = targets[0]["targets"][0].rpartition(":")
    tasks: list[asyncio.Task[None]] = []
    begun = [asyncio.Event() for _ in range(STREAMS + HALF_OPEN)]
    async with AsyncExitStack() as stack:
        try:
            for at in range(0, STREAMS, STREAMS_PER_CONNECTION):
                channel = await stack.enter_async_context(open_channel(layout.gateway, access=layout.access))
                stub: Any = run_pb2_grpc.RunServiceStub(channel)
                of_stub = begun[at : min(at + STREAMS_PER_CONNECTION, STREAMS)]
                tasks += [asyncio.create_task(_watch(stub, layout.run, load, event)) for event in of_stub]
            tasks += [asyncio.create_task(_half_request(host, int(port), load, event)) for event in begun[STREAMS:]]
            async with asyncio.timeout(OPEN_S_MAX):
                for event in begun:
                    await event.wait()
            tasks.append(asyncio.create_task(_probe(layout, load)))
            yield load
        finally:
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
    for end in ends:
        if isinstance(end, Exception):
            raise end


async def _watch(stub: Any, run: str, load: Load, begun: asyncio.Event) -> None:
    """Read a stream until it ends."""
    is_open = False
    try:
        with typed_errors():
            async for _ in stub.WatchRun(run_pb2.WatchRunRequest(run=run)):
                if not is_open:
                    load.opened += 1
                    is_open = True
                    begun.set()
    except MeshError:
        load.rejected += not is_open
    load.ended += is_open
    begun.set()


async def _half_request(host: str, port: int, load: Load, begun: asyncio.Event) -> None:
    """Hold a request without an end, again and again."""
    while True:
        try:
            reader, writer = await asyncio.open_connection(host, port)
        except OSError:
            load.refused += 1
            begun.set()
        else:
            try:
                writer.write(b"GET /metrics HTTP/1.1\r\nHost: bench\r\n")
                load.sent += 1
                begun.set()
                await reader.read()  # until the server closes it
            except OSError:
                pass  # the server aborted it
            finally:
                writer.close()
        await asyncio.sleep(AGAIN_S)


async def _probe(layout: RunLayout, load: Load) -> None:
    async with open_channel(layout.gateway, access=layout.access) as channel:
        stub: Any = run_pb2_grpc.RunServiceStub(channel)
        while True:
            begin_s = time.perf_counter()
            try:
                with typed_errors():
                    await stub.GetRun(run_pb2.GetRunRequest(run=layout.run), timeout=CALL_S_MAX)
                load.get_run_s.append(time.perf_counter() - begin_s)
            except MeshError:
                load.get_run_failed += 1
            await asyncio.sleep(PROBE_S)


@contextmanager
def _many_files() -> Iterator[None]:
    """Let this process open as many files as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _num_threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def _cpu_s(mesh: Supervisor) -> dict[str, float]:
    """CPU seconds of the clients (this process, with the supervisor), the gateway and the coordinator."""
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    found = {"clients": time.process_time()}
    for name in ("gateway", "coordinator"):
        after_name = Path(f"/proc/{mesh.pids[name]}/stat").read_text().rpartition(")")[2].split()
        found[name] = tick_s * (int(after_name[11]) + int(after_name[12]))  # utime and stime
    return found


def _config(model: Path) -> MeshConfig:
    return config_from_dict(
        MeshConfig,
        {
            "run": {
                "name": "bench", "batch_groups": 4, "group_size": 8,
                "updates_max": 0, "eval_every": 0, "max_staleness": 0,
            },
            "counts": {"sandbox": 0},
            "telemetry": {"metrics": "prometheus"},
            "inference": {
                "engine": {"name": "fake", "options": {"vocab_size": 112, "slots_max": 64, "step_s": STEP_S}},
            },
            "data": {"source": {"name": "calc", "options": {"tools": []}}},
            "rollout": {
                "agent": "benchmarks.turns:Talking", "model_dir": str(model), "sampling": {"max_tokens": 20},
            },
            "reward": {"finalizers": ["keep_all"]},
            "learner": {
                "engine": "fake", "tensorboard": False,
            },
        },
    )  # fmt: skip
