"""Every alert fires for the series of its case, and not before."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools.alerts import ALERTS, Alert

from .promtool import ROOT, tool

RULES = ROOT / "deploy" / "alerts.yml"
RUN = 'job="rollmesh",run="r"'


@dataclass(frozen=True, kw_only=True)
class Case:
    """Series with one value per minute, the time at which the alert does not fire yet, and the time at which it
    does."""

    series: dict[str, str]
    quiet: str
    fires: str
    labels: dict[str, str] = field(default_factory=lambda: {"run": "r"})
    """Labels of the alert beside job and severity."""
    summary: str


def co(name: str, labels: str = "") -> str:
    return f"rollmesh_coordinator_{name}{{{','.join(filter(None, [RUN, labels]))}}}"


TRAIN = 'purpose="train",end='
CASES = {
    "NoProgress": Case(
        series={co("stalled"): "0x5 1x5"},
        quiet="5m",
        fires="6m",
        summary="Run r has made no progress for run.stall_s.",
    ),
    "StalenessGrows": Case(
        series={
            co("trained_staleness_updates_sum"): "0+10x120 1220+300x40",
            co("trained_staleness_updates_count"): "0+100x160",
        },
        quiet="120m",
        fires="150m",
        summary="The mean staleness of trained samples of run r is 3 and grows.",
    ),
    "SamplesStale": Case(
        series={co("samples", TRAIN + '"stale"'): "0x40 0+25x60", co("samples", TRAIN + '"trained"'): "0+75x100"},
        quiet="40m",
        fires="90m",
        summary="25% of the samples of run r end as stale.",
    ),
    "SamplesFiltered": Case(
        series={co("samples", TRAIN + '"filtered"'): "0x60 0+95x180", co("samples", TRAIN + '"trained"'): "0+5x240"},
        quiet="80m",
        fires="200m",
        summary="95% of the samples of run r are filtered.",
    ),
    "HeldoutFalls": Case(
        series={co("heldout_success_ratio"): "0.9x60 0.6x60"},
        quiet="60m",
        fires="75m",
        summary="Held-out success of run r fell to 60%.",
    ),
    "DeadLetters": Case(
        series={co("samples", TRAIN + '"failed"'): "0x60 6x60"},
        quiet="59m",
        fires="90m",
        summary="6 samples of run r failed in all attempts in the last hour.",
    ),
    "AttemptsFail": Case(
        series={
            'rollmesh_rollout_episodes_total{job="rollmesh",node="rollout-0",outcome="failed"}': "0x30 0+1x90",
            'rollmesh_rollout_episodes_total{job="rollmesh",node="rollout-0",outcome="completed"}': "0+3x120",
        },
        quiet="30m",
        fires="80m",
        labels={},
        summary="25% of the attempts of episodes fail.",
    ),
    "TrainerStuck": Case(
        series={co("leases", 'kind="batch"'): "1x60", co("step", 'state="applied"'): "0+1x20 20x40"},
        quiet="30m",
        fires="40m",
        summary="The trainer of run r holds a batch and commits no update.",
    ),
    "TrainerAbsent": Case(
        series={
            co("groups", 'state="ready"'): "4x60",
            co("leases", 'kind="batch"'): "1x20 0x40",
            co("waiting", 'who="trainers"'): "0x60",
        },
        quiet="24m",
        fires="26m",
        summary="Run r has groups for a trainer, and no trainer leases or waits.",
    ),
    "RolledBack": Case(
        series={co("step", 'state="applied"'): "0+1x30 25+1x30"},
        quiet="30m",
        fires="31m",
        summary="Run r was rolled back to an older checkpoint.",
    ),
    "TargetDown": Case(
        series={'up{job="rollmesh",instance="10.0.0.1:9000"}': "1x10 0x10"},
        quiet="12m",
        fires="13m",
        labels={"instance": "10.0.0.1:9000"},
        summary="Prometheus cannot read 10.0.0.1:9000.",
    ),
    "CoordinatorAbsent": Case(
        series={
            'rollmesh_disk_free_bytes{job="rollmesh",instance="10.0.0.1:9000",node="depot"}': "1e12x30",
            'rollmesh_coordinator_nodes{job="rollmesh",kind="depot",state="ready"}': "1x10 _x20",
        },
        quiet="16m",
        fires="18m",
        labels={},
        summary="Nodes of rollmesh are up and no coordinator reports a fleet.",
    ),
    "CertificateExpires": Case(
        series={'rollmesh_certificate_expiry_timestamp_seconds{job="rollmesh",node="depot"}': "1216800x300"},
        quiet="119m",
        fires="126m",
        labels={"node": "depot"},
        summary="The certificate of depot or its CA expires in 13d 23h 54m 0s.",
    ),
    "KindMissing": Case(
        series={
            # The empty fleet is reported as no learner.
            'rollmesh_coordinator_nodes{job="rollmesh",kind="learner",state="ready"}': "0x60",
            'rollmesh_coordinator_nodes{job="rollmesh",kind="reward",state="ready"}': "1x20 stale",
            'rollmesh_coordinator_nodes{job="rollmesh",kind="reward",state="dead"}': "_x20 1x2 stale",
        },
        quiet="22m",
        fires="40m",
        labels={"kind": "reward"},
        summary="No reward node of rollmesh is READY.",
    ),
    "NodeFlapping": Case(
        series={
            'rollmesh_coordinator_nodes{job="rollmesh",kind="inference",state="ready"}': "1x60",
            'rollmesh_coordinator_node_changes_total{job="rollmesh",kind="inference",state="suspect"}': "0x30 0+1x30",
        },
        quiet="30m",
        fires="45m",
        labels={"kind": "inference"},
        summary="inference nodes lost their connection 14 times in 15 minutes.",
    ),
    "NodeSuspect": Case(
        series={'rollmesh_coordinator_nodes{job="rollmesh",kind="inference",state="suspect"}': "_x10 1x10"},
        quiet="10m",
        fires="12m",
        labels={"kind": "inference"},
        summary="1 inference nodes stay SUSPECT: they reported weights that they cannot have.",
    ),
    "NodeQuarantined": Case(
        series={'rollmesh_coordinator_nodes{job="rollmesh",kind="inference",state="quarantined"}': "_x10 2x10"},
        quiet="9m",
        fires="11m",
        labels={"kind": "inference"},
        summary="2 inference nodes are QUARANTINED: they scored the probes of a version differently.",
    ),
    "VersionRejected": Case(
        series={co("rejected_versions"): "0x30 1x30"},
        quiet="30m",
        fires="45m",
        summary="The nodes rejected 1 versions of run r in 30 minutes.",
    ),
    "OldWeights": Case(
        series={
            co("step", 'state="published"'): "0+1x60",
            co("idle_seconds"): "1x60",
            # A run that has ended at a higher step, and is still led.
            'rollmesh_coordinator_step{job="rollmesh",run="ended",state="published"}': "500x60",
            'rollmesh_coordinator_idle_seconds{job="rollmesh",run="ended"}': "0x60",
            'rollmesh_inference_version_step{job="rollmesh",node="inference-0"}': "0+1x60",
            'rollmesh_inference_version_step{job="rollmesh",node="inference-1"}': "0+1x20 20x40",
        },
        quiet="32m",
        fires="34m",
        labels={"node": "inference-1"},
        summary="inference-1 serves weights that are 14 steps old.",
    ),
    "DiskNearlyFull": Case(
        series={
            'rollmesh_disk_free_bytes{job="rollmesh",instance="10.0.0.1:9000",node="depot"}': "2147483648x10 536870912x10"
        },
        quiet="11m",
        fires="12m",
        labels={"host": "10.0.0.1"},
        summary="10.0.0.1 has 512MiB left on the disk of the run.",
    ),
    "DiskFillsUp": Case(
        series={
            'rollmesh_disk_free_bytes{job="rollmesh",instance="10.0.0.1:9000",node="depot"}': "20e9x60 20e9-100e6x120",
        },
        quiet="60m",
        fires="150m",
        labels={"node": "depot", "instance": "10.0.0.1:9000"},
        summary="The disk of depot is full within four hours.",
    ),
    "LedgerNearlyFull": Case(
        series={co("ledger_used_ratio"): "0.5x10 0.83x10"},
        quiet="10m",
        fires="12m",
        summary="The ledger of run r is 83% full. At 100% the run ends.",
    ),
    "LedgerSlow": Case(
        series={
            co("ledger_append_seconds_bucket", 'le="1.0"'): "0+10x30 300x30",
            co("ledger_append_seconds_bucket", 'le="2.5"'): "0+10x60",
            co("ledger_append_seconds_bucket", 'le="+Inf"'): "0+10x60",
        },
        quiet="30m",
        fires="45m",
        summary="Storing a ledger record of run r takes 2.485s.",
    ),
    "DataBehind": Case(
        series={
            co("ledger_position"): "0+100x60",
            'rollmesh_data_ledger_position{job="rollmesh",node="data",run="r"}': "0+100x20 2000x40",
        },
        quiet="40m",
        fires="50m",
        summary="The data service is 3000 ledger records behind run r.",
    ),
    "EnginesSaturated": Case(
        series={
            'rollmesh_inference_requests{job="rollmesh",node="inference-0",state="waiting"}': "8x20 100x20",
            'rollmesh_inference_slots{job="rollmesh",node="inference-0"}': "64x40",
        },
        quiet="30m",
        fires="32m",
        labels={},
        summary="100 requests wait at the engines, more than run.",
    ),
    "EpisodesPending": Case(
        series={
            co("episodes_pending", 'purpose="train"'): "5x60",
            co("waiting", 'who="workers"'): "1x20 0x40",
        },
        quiet="35m",
        fires="37m",
        summary="5 episodes of run r wait, and every rollout worker is full.",
    ),
    "RewardQueueGrows": Case(
        series={'rollmesh_reward_samples_queued{job="rollmesh",node="reward"}': "10x10 3000x20"},
        quiet="15m",
        fires="17m",
        labels={"node": "reward"},
        summary="3000 samples wait at reward; at reward.queue_samples_max it rejects more.",
    ),
    "SandboxStartsQueued": Case(
        series={'rollmesh_sandbox_starts_queued{job="rollmesh",node="sandbox-0"}': "0x10 200x20"},
        quiet="15m",
        fires="17m",
        labels={"node": "sandbox-0"},
        summary="200 sessions wait for their start at sandbox-0; at sandbox.starts_queued_max it rejects more.",
    ),
    "RpcErrors": Case(
        series={
            'rollmesh_rpc_calls_total{job="rollmesh",service="RewardService",method="Score",code="INTERNAL"}': "_x20 1x20",
            'rollmesh_rpc_calls_total{job="rollmesh",service="RewardService",method="Score",code="UNAVAILABLE"}': "0+1x40",
        },
        quiet="19m",
        fires="26m",
        labels={"service": "RewardService", "method": "Score"},
        summary="RewardService/Score fails with an error that the service does not expect.",
    ),
    "ScorerFails": Case(
        series={
            'rollmesh_reward_scores_total{job="rollmesh",node="reward",scorer="exact@1",outcome="failed"}': "0x20 0+1x60",
            'rollmesh_reward_scores_total{job="rollmesh",node="reward",scorer="exact@1",outcome="ok"}': "0+1x80",
        },
        quiet="20m",
        fires="60m",
        labels={"scorer": "exact@1"},
        summary="Scorer exact@1 fails for 50% of the samples.",
    ),
    "EndpointFails": Case(
        series={
            'rollmesh_endpoint_calls_total{job="rollmesh",node="reward",endpoint="judge",outcome="failed"}': "0x20 0+1x60",
            'rollmesh_endpoint_calls_total{job="rollmesh",node="reward",endpoint="judge",outcome="ok"}': "0+1x80",
        },
        quiet="20m",
        fires="60m",
        labels={"endpoint": "judge"},
        summary="50% of the requests to endpoint judge fail.",
    ),
    "SandboxSessionsLost": Case(
        series={
            'rollmesh_sandbox_sessions_ended_total{job="rollmesh",node="sandbox-0",end="expired"}': "0x40 0+1x80",
            'rollmesh_sandbox_sessions_ended_total{job="rollmesh",node="sandbox-0",end="closed"}': "0+3x120",
        },
        quiet="40m",
        fires="100m",
        labels={},
        summary="25% of the sandbox sessions expire or are lost.",
    ),
}


def test_every_alert_has_a_case() -> None:
    assert [alert.name for alert in ALERTS] == list(CASES)


def test_promtool_accepts_the_rules() -> None:
    done = _promtool("check", "rules", "--lint=all", str(RULES))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_an_alert_fires_for_its_series_and_not_before(tmp_path: Path, alert: Alert) -> None:
    path = tmp_path / "test.yml"
    path.write_text(yaml.safe_dump(_unit_test(alert, CASES[alert.name])))
    done = _promtool("test", "rules", str(path))
    assert done.returncode == 0, done.stdout + done.stderr


def _promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([tool("promtool"), *arguments], check=False, capture_output=True, text=True, timeout=60.0)


def _unit_test(alert: Alert, case: Case) -> dict[str, Any]:
    """Return the case as a file of `promtool test rules`."""
    expected = {
        "exp_labels": {"job": "rollmesh", "severity": alert.severity, **case.labels},
        "exp_annotations": {"summary": case.summary, "runbook_url": f"docs/runbooks.md#{alert.runbook}"},
    }
    name = f"Rollmesh{alert.name}"
    return {
        "rule_files": [str(RULES)],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": series, "values": values} for series, values in case.series.items()],
                "alert_rule_test": [
                    {"eval_time": case.quiet, "alertname": name, "exp_alerts": []},
                    {"eval_time": case.fires, "alertname": name, "exp_alerts": [expected]},
                ],
            }
        ],
    }
