"""CPU seconds per episode turn outside model code, by hop, of the whole mesh on one host.

A real Mesh: every service behind its gRPC stubs, a real nats-server, jailed tool sessions; only engine and trainer are
fakes, which compute almost nothing and are excluded. Agents make 6 turns of 20 tokens, with no tool or with a
calculator call after each turn but the last. All costs of an episode are divided by its turns: admission, lease,
prompt, sandbox session, scores, payload, report, ledger, batch, fetch, commit, weights.

How to read it: all values are CPU of all processes together, so that other load on the machine matters little. The
baseline is gRPC itself: an empty unary call through the mesh's client and server, both sides together, measured before
and after the meshes of the same run. A turn may cost at most `TARGETS` of these calls; the bench fails if it costs
more. A hop is the nearest frame of a service. `grpc, asyncio` is the time of the libraries between handlers, which
cannot be assigned to a service. The share of the jail is fork, exec and exit of sessions and calls, in the zygote and
its children.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.cpu_profile import WAITING, CpuProfile, Profile, by_source
from benchmarks.report import BenchTarget, Report
from benchmarks.turns import TURNS
from rollmesh.demo.tokenizer import build_tokenizer
from rollmesh.mesh import Mesh, MeshConfig
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.rpc.server import RpcServer
from rollmesh.trainer.model_files import save_tokenizer

MODEL = "model (fakes, left out)"
NEW_TOKENS = 20
LIMIT_S = 240.0
TARGETS = {"no tool": 1.4, "tool call": 4.2}
"""Most CPU of a turn outside the model, in empty unary calls of the same run."""
SHOWN_S = 1e-5
"""Hops below this time per turn in every column are only in the total."""
NUM_PINGS, PINGS_AT_ONCE = 2000, 16
PROCESSES = {Path(sys.executable).resolve().name: "zygote and jails"}


def run(quick: bool) -> Report:
    warm, measured = (300, 600) if quick else (1500, 6000)
    report = Report(
        "mesh_turn",
        f"6 turns of {NEW_TOKENS} tokens per episode; {measured:,} turns after {warm:,}; ms of CPU per turn",
    )
    pings_s = [asyncio.run(asyncio.wait_for(_ping_cpu_s(), LIMIT_S))]
    columns: dict[str, Profile] = {}
    for name in TARGETS:
        with TemporaryDirectory(prefix="rollmesh-bench-") as folder:
            measuring = _measure(Path(folder), name == "tool call", warm, measured)
            columns[name] = asyncio.run(asyncio.wait_for(measuring, LIMIT_S))
    pings_s.append(asyncio.run(asyncio.wait_for(_ping_cpu_s(), LIMIT_S)))
    call_s = sum(pings_s) / len(pings_s)
    hops = {name: _by_hop(profile) for name, profile in columns.items()}
    calls = {name: _outside_s(column) / measured / call_s for name, column in hops.items()}
    report.rows = [
        _row("empty unary call", dict.fromkeys(columns, call_s), 1),
        {"hop": "a turn outside the model, in empty unary calls", **calls},
        *_table(hops, measured),
    ]
    report.notes = [f"empty unary calls, before and after: {' and '.join(f'{1e3 * s:.2f}' for s in pings_s)} ms"]
    report.notes += [_dearest(name, profile, measured) for name, profile in columns.items()]
    report.targets = [
        BenchTarget(f"a turn outside the model, {name}, in empty unary calls", calls[name], bound)
        for name, bound in TARGETS.items()
    ]
    return report


async def _ping_cpu_s() -> float:
    """Return the CPU seconds of one empty unary call, both sides."""
    async with RpcServer(access=Access(token="bench")) as server:
        await server.start()
        async with open_channel(server.address, access=Access(token="bench")) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)

            async def pings(num: int) -> None:
                for _ in range(num):
                    await stub.Check(health_pb2.HealthCheckRequest(), timeout=10.0)

            await pings(50)
            start_s = time.process_time()
            await asyncio.gather(*(pings(NUM_PINGS // PINGS_AT_ONCE) for _ in range(PINGS_AT_ONCE)))
            return (time.process_time() - start_s) / NUM_PINGS


async def _measure(folder: Path, tools: bool, warm: int, measured: int) -> Profile:
    async with _mesh(folder, tools):
        start = TURNS.value
        await TURNS.until(start + warm)
        with CpuProfile(owner_of) as profile:
            await TURNS.until(start + warm + measured)
    return profile


@asynccontextmanager
async def _mesh(folder: Path, tools: bool) -> AsyncIterator[Mesh]:
    model = folder / "model"
    model.mkdir()
    save_tokenizer(build_tokenizer(), model)
    async with Mesh(_config(model, tools), run_dir=folder / "run", base_dir=folder) as mesh:
        yield mesh


def _config(model: Path, tools: bool) -> MeshConfig:
    return config_from_dict(
        MeshConfig,
        {
            "run": {"name": "bench", "batch_groups": 8, "group_size": 16, "updates_max": 0, "eval_every": 0},
            "counts": {"sandbox": int(tools)},
            "inference": {
                "engine": {"name": "fake", "options": {"vocab_size": 112, "slots_max": 256}},
            },
            "data": {"source": {"name": "calc", "options": {"tools": ["calculator"] if tools else []}}},
            "rollout": {
                "agent": f"benchmarks.turns:{'Calling' if tools else 'Talking'}", "model_dir": str(model),
                "sampling": {"max_tokens": NEW_TOKENS},
            },
            "reward": {"finalizers": ["keep_all"]},
            "learner": {
                "engine": "fake", "tensorboard": False,
            },
        },
    )  # fmt: skip


owner_of = by_source(
    (r"rollmesh/services/(?:inference|learner)/engines/|rollmesh/testing/fake_", MODEL),
    (r"rollmesh/services/(\w+)/", r"\1"),
    (r"rollmesh/shared/(\w+)", r"shared.\1"),
    (r"benchmarks/turns\.py", "rollout"),
    (r"/selectors\.py", WAITING),
    (r"/(?:grpc|asyncio)/", "grpc, asyncio"),
    (r"/(nats|tokenizers)/", r"\1"),
)


def _by_hop(profile: Profile) -> dict[str, float]:
    hops = dict(profile.owners)
    for name, seconds in profile.threads.items():
        hop = "thread gRPC" if "poll" in name or name.startswith("native") else "other threads"
        hops[hop] = hops.get(hop, 0.0) + seconds
    for name, seconds in profile.children.items():
        hop = f"process {PROCESSES.get(name, name)}"
        hops[hop] = hops.get(hop, 0.0) + seconds
    return hops


def _outside_s(hops: dict[str, float]) -> float:
    return sum(seconds for name, seconds in hops.items() if name != MODEL)


def _table(hops: dict[str, dict[str, float]], turns: int) -> list[dict[str, Any]]:
    names = sorted(
        {hop for column in hops.values() for hop in column}, key=lambda hop: -hops["tool call"].get(hop, 0.0)
    )
    shown = [
        name for name in names if name != MODEL and any(h.get(name, 0.0) >= SHOWN_S * turns for h in hops.values())
    ]
    total = _row("a turn outside the model", {name: _outside_s(column) for name, column in hops.items()}, turns)
    return [total] + [
        _row(hop, {name: column.get(hop, 0.0) for name, column in hops.items()}, turns) for hop in [*shown, MODEL]
    ]


def _row(hop: str, seconds: dict[str, float], turns: int) -> dict[str, Any]:
    return {"hop": hop} | {name: 1e3 * value / turns for name, value in seconds.items()}


def _dearest(name: str, profile: Profile, turns: int) -> str:
    functions = sorted(profile.functions.items(), key=lambda item: -item[1])
    own = [f"{owner} {function} {1e3 * s / turns:.2f}" for (owner, function), s in functions if owner != MODEL][:12]
    return f"{name}, {turns / profile.wall_s:,.0f} turns/s; dearest functions, ms per turn: " + "; ".join(own)
