"""Metrics and spans of nodes that joined from elsewhere are found beside those of the run's own processes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from rollmesh.app.episode_trace import load_trace
from rollmesh.app.mesh_client import MeshStatus
from rollmesh.app.views.status_view import status_json, status_view
from rollmesh.mesh.joined_nodes import keep_joined, read_joined_folders
from rollmesh.shared.clock import ManualClock
from rollmesh.shared.errors import NotFound
from rollmesh.shared.telemetry.span_file import SpanRecord
from rollmesh.shared.telemetry.tracing import EPISODE
from rollmesh.v1 import coordinator_pb2 as pb
from rollmesh.v1 import run_pb2


def node(name: str, *, metrics: str = "", traces: str = "", state: int = pb.NODE_STATE_READY) -> pb.FleetNode:
    process = pb.ProcessInfo(version="0.1.0", host="elsewhere", metrics_address=metrics, traces_folder=traces)
    return pb.FleetNode(node_id=name, state=pb.NodeState.ValueType(state), process=process)


async def written(nodes: list[pb.FleetNode], run_dir: Path) -> asyncio.Task[None]:
    """The task that keeps the files, after its first look."""
    clock = ManualClock()
    task = asyncio.create_task(keep_joined(lambda: nodes, run_dir, clock))
    async with asyncio.timeout(10):
        while not clock.num_sleepers():  # noqa: ASYNC110 (the clock has no event)
            await asyncio.sleep(0)
    return task


async def test_prometheus_finds_nodes_that_joined_and_each_target_once(tmp_path: Path) -> None:
    own = tmp_path / "metrics" / "mesh.json"
    own.parent.mkdir()
    own.write_text(json.dumps([{"targets": ["127.0.0.1:1"]}]))
    gone = node("reward-b", metrics="10.0.0.3:9", state=pb.NODE_STATE_DEAD)
    nodes = [node("inference-0", metrics="127.0.0.1:1"), node("reward-a", metrics="10.0.0.2:9"), node("data-0"), gone]
    task = await written(nodes, tmp_path)
    found = json.loads((tmp_path / "metrics" / "joined.json").read_text())
    assert found == [{"targets": ["10.0.0.2:9"], "labels": {"process": "reward-a", "host": "elsewhere"}}]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not (tmp_path / "metrics" / "joined.json").exists(), "a stale target would be scraped without effect"


async def test_a_trace_includes_the_spans_of_nodes_that_joined(tmp_path: Path) -> None:
    span = SpanRecord(
        trace="a" * 32, span="b" * 16, name="episode", service="rollout", start_unix_ns=1, duration_ns=1,
        attributes={EPISODE: "g0.0"},
    )  # fmt: skip
    theirs = tmp_path / "node" / "traces"
    theirs.mkdir(parents=True)
    (theirs / "rollout-x.jsonl").write_bytes(msgspec.json.encode(span) + b"\n")
    lost = "/nowhere/traces"
    task = await written([node("rollout-x", traces=str(theirs)), node("rollout-y", traces=lost)], tmp_path / "run")
    assert [one.node for one in read_joined_folders(tmp_path / "run")] == ["rollout-x", "rollout-y"]
    assert load_trace(tmp_path / "run", "g0.0") == [span]
    with pytest.raises(NotFound, match=f"or rollout-y ran it, whose spans are on host elsewhere in {lost}"):
        load_trace(tmp_path / "run", "g9.9")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_status_shows_node_ids_whole_on_a_narrow_terminal() -> None:
    name = "inference-a-host-with-a-long-name-2ea41f07"
    console = Console(width=60, record=True)
    console.print(status_view(MeshStatus(nodes=[node(name)], runs=[])))
    assert name in console.export_text()


def test_status_reports_how_many_nodes_it_does_not_list() -> None:
    status = MeshStatus(nodes=[node("reward")], runs=[], nodes_omitted=3)
    console = Console(width=80, record=True)
    console.print(status_view(status))
    assert "3 nodes not listed: the response has no room for more" in console.export_text()
    assert json.loads(status_json(status))["nodes_omitted"] == 3


def test_status_reports_a_wrong_clock_once_per_host() -> None:
    nodes = [node("rollout-b"), node("inference-b"), node("reward")]
    for one in nodes[:2]:
        one.clock_ahead_s, one.waiting_for = 90.0, "an episode"
    console = Console(width=80, record=True)
    console.print(status_view(MeshStatus(nodes=nodes, runs=[])))
    text = " ".join(console.export_text().split())
    assert text.count("the clock of elsewhere (inference-b, rollout-b) is 90 s ahead of the coordinator's") == 1
    assert text.count("synchronize the clocks") == 1
    assert text.count("inference-b, rollout-b: waiting: an episode") == 1, "a wait is shown beside it"


def test_status_fits_on_80_columns_with_a_line_per_cause() -> None:
    nodes = [node(name) for name in ("inference-0", "rollout-0", "rollout-1")]
    for one in nodes:
        one.process.version, one.protocol.major, one.protocol.minor = "0.1.0.dev0", 1, 1
        one.active.policy, one.active.step, one.active.incarnation = "main", 12345, 2
        one.num_running, one.capacity = 64, 64
    nodes[1].waiting_for = nodes[2].waiting_for = "admission"
    console = Console(width=80, record=True)
    console.print(status_view(MeshStatus(nodes=nodes, runs=[])))
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    assert sum(line.startswith(("inference-0 ", "rollout-0 ", "rollout-1 ")) for line in lines) == 3
    assert "rollout-0, rollout-1: waiting: admission" in lines
    assert "every node: release 0.1.0.dev0, protocol 1.1" in lines
    nodes[0].process.version = "0.2.0"
    console.print(status_view(MeshStatus(nodes=nodes, runs=[])))
    assert "inference-0: release 0.2.0, protocol 1.1" in console.export_text()


def test_status_shows_where_payloads_of_a_live_run_go() -> None:
    runs = [run_pb2.RunState(run="live"), run_pb2.RunState(run="over", ended="UPDATES_MAX")]
    console = Console(width=100, record=True)
    console.print(status_view(MeshStatus(nodes=[], runs=runs, payloads="files")))
    assert console.export_text().count("payloads go to files of the run folder") == 1


def test_status_shows_the_submitted_tasks_of_a_run_that_has_some() -> None:
    tasks = run_pb2.SubmittedTasks(open=3, drawn=1, answered=5)
    runs = [run_pb2.RunState(run="served", submitted=tasks), run_pb2.RunState(run="drawn")]
    console = Console(width=100, record=True)
    console.print(status_view(MeshStatus(nodes=[], runs=runs)))
    text = console.export_text()
    assert "submitted tasks: 3 open, 1 drawn, 5 answered; clients may submit more" in text
    assert text.count("submitted tasks") == 1
    runs[0].submitted.finished = True
    console.print(status_view(MeshStatus(nodes=[], runs=runs)))
    assert "5 answered; no further ones follow" in console.export_text()
