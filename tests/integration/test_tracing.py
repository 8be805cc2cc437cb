"""Traces of a whole mesh in one process, and over several: one episode's is a connected tree that ends in its
commit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from rollmesh.app.episode_trace import load_trace, to_json, to_text
from rollmesh.cli.__main__ import app
from rollmesh.mesh import Mesh, MeshConfig
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.errors import NotFound
from rollmesh.shared.telemetry import TelemetryConfig
from rollmesh.shared.telemetry.span_file import FOLDER, SpanRecord, read_spans
from rollmesh.shared.telemetry.tracing import EPISODE

from ..chaos.world import mesh_config, save_model_folder, world
from .test_mesh import Operator

NUM_TURNS, NUM_CALLS = 3, 2
"""Turns and tool calls of an episode of the agent in tests/chaos/agent.py."""
HOSTS = {
    "rest": ("nats", "coordinator", "gateway", "depot", "data"),
    "inference": ("inference-0",),
    "rollout": ("rollout-0",),
    "scoring": ("reward", "sandbox-0"),
    "learner": ("learner",),
}
LIMIT_S = 100.0


def config(model: Path, **telemetry: object) -> MeshConfig:
    made = mesh_config(model, batch_groups=2, group_size=2, updates_max=2)
    return msgspec.structs.replace(
        made,
        telemetry=TelemetryConfig(**telemetry),  # type: ignore[arg-type]
        counts=msgspec.structs.replace(made.counts, inference=1),
        data=msgspec.structs.replace(made.data, source=Extension("calc")),
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model_folder(tmp_path_factory.mktemp("model"))


async def run_through(made: MeshConfig, run_dir: Path) -> None:
    async with Mesh(made, run_dir=run_dir) as mesh:
        await Operator(mesh).finished()


def assert_whole(spans: Sequence[SpanRecord]) -> None:
    """A connected tree with everything that is done for an episode, from its lease to its commit."""
    root, ids = spans[0], {span.span for span in spans}
    assert [span.name for span in spans if not span.parent] == ["episode"]
    assert all(span.parent in ids for span in spans[1:]), to_text(spans)
    names = [span.name for span in spans]
    for once in (
        "lease",
        "init",
        "run",
        "score",
        "scorers",
        "store",
        "report",
        "record",
        "batch lease",
        "train",
        "commit",
    ):
        assert names.count(once) == 1, (once, to_text(spans))
    for name, num in {
        "generate": NUM_TURNS,
        "engine": NUM_TURNS,
        "decode": NUM_TURNS,
        "tool": NUM_CALLS,
        "call": NUM_CALLS,
    }.items():
        assert names.count(name) == num, (name, to_text(spans))
    parents = {span.span: span.name for span in spans}
    below = {(parents.get(span.parent, ""), span.name) for span in spans}
    assert {
        ("generate", "engine"),
        ("engine", "queue"),
        ("tool", "call"),
        ("report", "record"),
        ("run", "generate"),
    } <= below
    assert max(spans, key=lambda span: span.start_unix_ns).name == "commit"
    assert not any(span.error for span in spans), to_text(spans)
    assert root.attributes["rollmesh.run"] == "chaos"


async def test_an_episodes_trace_is_one_tree_from_lease_to_commit(tmp_path: Path, model: Path) -> None:
    await run_through(config(model, traces="file"), tmp_path)
    spans = load_trace(tmp_path)
    assert_whole(spans)
    episode = str(spans[0].attributes[EPISODE])
    assert load_trace(tmp_path, episode) == load_trace(tmp_path, spans[0].trace) == spans
    assert len(json.loads(to_json(spans))) == len(spans)
    printed = CliRunner().invoke(app, ["trace", str(tmp_path), episode])
    assert (printed.exit_code, printed.output) == (0, to_text(spans) + "\n")
    refused = CliRunner().invoke(app, ["trace", str(tmp_path), "nobody"])
    assert refused.exit_code != 0
    assert "holds no trace of episode 'nobody'" in refused.output


async def test_an_update_is_linked_with_its_episodes_and_holds_the_coordinators_commit(
    tmp_path: Path, model: Path
) -> None:
    await run_through(config(model, traces="file"), tmp_path)
    spans = list(read_spans(tmp_path / FOLDER))
    roots = {(span.trace, span.span) for span in spans if span.name == "episode"}
    updates = [span for span in spans if span.name == "update"]
    assert [len(span.links) for span in updates] == [4, 4]  # two groups of two
    assert {tuple(link) for span in updates for link in span.links} <= roots
    commits = [span for span in spans if span.name == "commit" and span.trace in {trace for trace, _ in roots}]
    assert {tuple(link) for span in commits for link in span.links} == {(span.trace, span.span) for span in updates}
    calls = [span.name for span in spans if span.trace == updates[0].trace and span.service == "rpc"]
    assert calls == ["RunService/CommitUpdate"] * 2  # gateway and coordinator


@pytest.mark.parametrize("telemetry", [{"traces": "none"}, {"traces": "file", "sample_ratio": 0.0}])
async def test_what_is_off_or_not_sampled_leaves_no_span(
    tmp_path: Path, model: Path, telemetry: dict[str, object]
) -> None:
    await run_through(config(model, **telemetry), tmp_path)
    assert list(read_spans(tmp_path / FOLDER)) == []
    with pytest.raises(NotFound, match="telemetry.traces=file"):
        load_trace(tmp_path)


async def test_the_tree_holds_over_processes(tmp_path: Path, model: Path) -> None:
    made = config(model, traces="file", log_format="json")
    async with world(tmp_path, made, HOSTS) as mesh:
        await mesh.until("the run is over", mesh.done.is_set, limit_s=LIMIT_S)
        run_dir = mesh.layout.run_dir
        await mesh.until("the spans are written", lambda: _is_whole(run_dir), limit_s=20.0)
        spans = load_trace(run_dir)
    assert_whole(spans)
    assert len({span.process for span in spans}) == len(HOSTS), to_text(spans)


def _is_whole(run_dir: Path) -> bool:
    """Whether every process has written its spans, which each does once a second."""
    try:
        spans = load_trace(run_dir)
        assert_whole(spans)
    except (NotFound, AssertionError):
        return False
    return len({span.process for span in spans}) == len(HOSTS)
