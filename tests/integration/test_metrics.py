"""Metrics of a whole mesh as Prometheus gets them: they agree with the run's books, keep the rules of names, and are
documented."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import urllib.request
from collections import defaultdict
from pathlib import Path

import msgspec
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from rollmesh.mesh import Mesh, MeshConfig
from rollmesh.mesh.mesh import create_run
from rollmesh.mesh.mesh_services import service_names
from rollmesh.mesh.observe import catalog, to_markdown
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.errors import ConfigError

from ..chaos.world import save_model_folder
from .test_mesh import Operator
from .test_tracing import config

ROOT = Path(__file__).parents[2]
Series = dict[str, dict[tuple[tuple[str, str], ...], float]]
UNITS = ("milliseconds", "minutes", "hours", "kilobytes", "megabytes", "percent", "_ms", "_kb", "_mb")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model_folder(tmp_path_factory.mktemp("model"))


async def scrape(mesh: Mesh) -> str:
    return await asyncio.to_thread(_get, f"http://{mesh.telemetry.metrics_address}/metrics")


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10.0) as answer:
        return str(answer.read().decode())


def series_of(text: str) -> Series:
    found: Series = defaultdict(dict)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name][tuple(sorted(sample.labels.items()))] = sample.value
    return found


def value(series: Series, name: str, **labels: str) -> float:
    """The sum of the series that have these labels."""
    chosen = [v for have, v in series[name].items() if labels.items() <= dict(have).items()]
    assert chosen, (name, labels, series[name])
    return sum(chosen)


async def test_metrics_agree_with_the_books_of_a_run(tmp_path: Path, model: Path) -> None:
    made = config(model, metrics="prometheus")
    made = msgspec.structs.replace(
        made, bus=msgspec.structs.replace(made.bus, payloads="stream")
    )  # the gateway sends them
    async with Mesh(made, run_dir=tmp_path) as mesh:
        operator = Operator(mesh)
        await operator.finished()
        state, text = await operator.state(), await scrape(mesh)
        (target,) = json.loads((tmp_path / "metrics" / "mesh.json").read_text())
        assert target["targets"] == [mesh.telemetry.metrics_address]
    assert list((tmp_path / "metrics").iterdir()) == []
    series = series_of(text)
    assert value(series, "rollmesh_coordinator_samples", purpose="train") == state.samples.reserved
    assert value(series, "rollmesh_coordinator_samples", purpose="train", end="trained") == state.samples.trained == 8
    assert value(series, "rollmesh_coordinator_ledger_position") == state.ledger_position
    assert value(series, "rollmesh_coordinator_trained_staleness_updates_count") == 8
    assert value(series, "rollmesh_learner_updates_total", outcome="applied") == 2
    assert value(series, "rollmesh_learner_tokens_total") == state.policies[0].tokens_trained
    assert value(series, "rollmesh_gateway_episodes_total", node="gateway") >= 8, (
        "payloads loaded ahead may be sent twice"
    )
    assert value(series, "rollmesh_rollout_episodes_total", outcome="completed") >= 8
    assert value(series, "rollmesh_rpc_calls_total", service="RunService", method="CommitUpdate", code="OK") == 4
    assert value(series, "rollmesh_rpc_calls_total", node="gateway", method="CommitUpdate") == 2
    created = value(series, "rollmesh_sandbox_sessions_created_total")
    live, ended = (
        value(series, "rollmesh_sandbox_sessions_live"),
        value(series, "rollmesh_sandbox_sessions_ended_total"),
    )
    assert created == live + ended >= 1  # all episodes share it
    calls = value(series, "rollmesh_sandbox_stateless_calls_per_request_sum")
    assert calls == value(series, "rollmesh_sandbox_commands_total") >= 8
    assert value(series, "rollmesh_inference_tokens_total", work="generated") >= state.policies[0].tokens_trained
    _assert_complete(series, service_names(made))
    _assert_promtool_content(text)


def _assert_complete(series: Series, services: list[str]) -> None:
    """Every metric of the catalog has been seen, and every service has a separate series."""
    seen = {name.removesuffix("_bucket") for name in series}
    absent = {
        "rollmesh_coordinator_heldout_success_ratio",
        "rollmesh_coordinator_submitted_tasks",
        "rollmesh_data_dropped_records_total",
        "rollmesh_data_source_share_ratio",
        "rollmesh_rollout_failures_total",
        "rollmesh_rollout_score_calls_total",
        "rollmesh_learner_effective_sample_size_ratio",
        "rollmesh_sandbox_egress_requests_total",
        "rollmesh_sandbox_egress_bytes_total",
        "rollmesh_sandbox_start_wait_seconds",
        "rollmesh_sandbox_pool_ready",
        "rollmesh_sandbox_kills_total",
        "rollmesh_sandbox_shared_sessions_ended_total",
        "rollmesh_certificate_expiry_timestamp_seconds",
    }
    unused = (
        "rollmesh_endpoint_",
        "rollmesh_openai_",
        "rollmesh_gateway_page_",
    )  # no endpoints, no programs, no browser
    absent |= {metric.name for metric in catalog() if metric.name.startswith(unused)}
    assert {metric.name for metric in catalog()} - seen == absent
    # No attempt failed, and no client submits tasks. The fake trainer has no importance weights. No profile has egress,
    # and the fake sandbox starts nothing. The tasks are neither a mixture nor read from a file.
    _assert_fixed_values(series)
    nodes = {dict(labels).get("node", "") for of_name in series.values() for labels in of_name}
    assert nodes == set(services)


def _assert_fixed_values(series: Series) -> None:
    """Dashboards and alerts are checked against the fixed values, so no series may have another one."""
    for metric in catalog():
        for label, fixed in metric.values.items():
            seen = {dict(labels)[label] for labels in series[metric.name]}
            assert seen <= set(fixed), (metric.name, label)


def _assert_promtool_content(text: str) -> None:
    """Where Prometheus' own checker is at hand, it has nothing to say; `test_names_follow_promtools_rules` stands in
    elsewhere."""
    if promtool := shutil.which("promtool"):
        checked = subprocess.run(
            [promtool, "check", "metrics"], check=False, input=text, text=True, capture_output=True, timeout=30.0
        )
        assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


async def test_a_refused_call_is_counted_with_its_code(tmp_path: Path, model: Path) -> None:
    made = config(model, metrics="prometheus")
    async with Mesh(made, run_dir=tmp_path, services=["coordinator", "gateway"]) as mesh:
        from rollmesh.shared.errors import MeshError
        from rollmesh.v1 import run_pb2

        with pytest.raises(MeshError):
            await Operator(mesh).call("GetRun", run_pb2.GetRunRequest(run="nobody"))
        series = series_of(await scrape(mesh))
    for node in ("gateway", "coordinator"):
        assert value(series, "rollmesh_rpc_calls_total", node=node, method="GetRun", code="NOT_FOUND") == 1


async def test_only_one_mesh_of_a_process_has_metrics_and_a_later_one_may(tmp_path: Path, model: Path) -> None:
    made = config(model, metrics="prometheus")
    async with Mesh(made, run_dir=tmp_path / "a", services=["coordinator"]):
        with pytest.raises(ConfigError, match="another mesh"):
            await Mesh(made, run_dir=tmp_path / "b", services=["coordinator"]).__aenter__()
    async with Mesh(made, run_dir=tmp_path / "b", services=["coordinator"]) as mesh:
        await create_run(mesh.layout)
        assert value(series_of(await scrape(mesh)), "rollmesh_rpc_calls_total", method="CreateRun") == 1


@pytest.mark.parametrize("metric", catalog(), ids=lambda metric: metric.name)
def test_names_follow_promtools_rules(metric: object) -> None:
    """The rules of `promtool check metrics` (promlint) that apply to ours."""
    from rollmesh.shared.telemetry.metrics import Metric

    assert isinstance(metric, Metric)
    assert re.fullmatch(r"rollmesh_[a-z]+(_[a-z]+)+", metric.name)
    assert metric.help
    assert (metric.kind == "counter") == metric.name.endswith("_total")
    assert not any(metric.name.removesuffix("_total").endswith(unit) for unit in UNITS)
    assert not metric.name.endswith(("_count", "_sum", "_bucket", "_info"))
    assert not any(kind in metric.name.split("_") for kind in ("counter", "gauge", "histogram", "summary"))
    assert all(re.fullmatch(r"[a-z_]+", label) and label not in ("le", "quantile", "node") for label in metric.labels)
    assert (metric.kind == "histogram") == bool(metric.buckets)
    assert list(metric.buckets) == sorted(metric.buckets)


def test_the_documentation_lists_every_metric() -> None:
    assert to_markdown() in (ROOT / "docs" / "observability.md").read_text(), f"the table should be\n{to_markdown()}"


def test_the_documented_section_is_a_valid_one() -> None:
    text = (ROOT / "docs" / "observability.md").read_text()
    section = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    assert config_from_dict(MeshConfig, section).telemetry.traces == "file"
