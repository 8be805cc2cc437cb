"""Dashboards of Grafana and alert rules of Prometheus, generated from the metrics of the services.

`python -m tools.dashboards deploy [RUNBOOKS]` writes `grafana/*.json` and `alerts.yml` into the folder `deploy`.
RUNBOOKS is the address of docs/runbooks.md at your site, for the links of the alerts. Default: docs/runbooks.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rollmesh.mesh.observe import CERTIFICATE_EXPIRY, DISK_FREE
from rollmesh.services.coordinator import metrics as co
from rollmesh.services.data import metrics as data
from rollmesh.services.gateway import metrics as gateway
from rollmesh.services.inference import metrics as inference
from rollmesh.services.learner import metrics as learner
from rollmesh.services.reward import metrics as reward
from rollmesh.services.rollout import metrics as rollout
from rollmesh.services.sandbox import metrics as sandbox
from rollmesh.services.sandbox.egress import metrics as egress
from rollmesh.shared.endpoints import metrics as endpoints
from rollmesh.shared.rpc.metrics_interceptor import CALL_SECONDS, CALLS
from rollmesh.shared.telemetry.metrics import Metric
from tools.alerts import to_yaml
from tools.queries import LabelValue, Not, select

COLUMNS = 24
HEIGHT = 8
SOURCE = {"type": "prometheus", "uid": "${source}"}
RATE = "$__rate_interval"
LAST_UPDATE_SCOPE = 'job="$job",metric=~"$metric"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """A PromQL expression and the legend of its series."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A panel of a dashboard."""

    title: str
    queries: Sequence[Query]
    text: str = ""
    """What to read from it."""
    unit: str = "short"
    """Unit of Grafana: short, s, bytes, percentunit, reqps, ..."""
    kind: Literal["timeseries", "stat", "heatmap"] = "timeseries"
    stacked: bool = False
    width: int = 8
    """Columns of 24."""
    rare: str = ""
    """Why a run may have no data here; empty if every run has some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A row of a dashboard with its panels."""

    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """A dashboard. `variables` are labels to choose from, beside the data source and the job."""

    name: str
    title: str
    text: str
    variables: Mapping[str, Metric]
    sections: Sequence[Section]


def _of(metric: Metric, suffix: str = "", **labels: LabelValue) -> str:
    """Return a selector with the chosen job, and the chosen runs if the metric has a run."""
    runs = ',run=~"$run"' if "run" in metric.labels else ""
    return select(metric, suffix, scope=f'job="$job"{runs}', **labels)


def _sum(metric: Metric, by: str, **labels: LabelValue) -> Query:
    return Query(expr=f"sum by ({by}) ({_of(metric, '', **labels)})", legend=_legend(by))


def _max(metric: Metric, by: str, **labels: LabelValue) -> Query:
    return Query(expr=f"max by ({by}) ({_of(metric, '', **labels)})", legend=_legend(by))


def _rate(metric: Metric, by: str, suffix: str = "", **labels: LabelValue) -> Query:
    return Query(expr=f"sum by ({by}) (rate({_of(metric, suffix, **labels)}[{RATE}]))", legend=_legend(by))


def _quantile(metric: Metric, by: str, share: float = 0.99) -> Query:
    groups = f"{by}, le" if by else "le"
    buckets = f"sum by ({groups}) (rate({_of(metric, '_bucket')}[{RATE}]))"
    return Query(expr=f"histogram_quantile({share}, {buckets})", legend=f"p{share * 100:.0f} {_legend(by)}".strip())


def _mean(metric: Metric, by: str) -> Query:
    total, num = (f"sum by ({by}) (rate({_of(metric, suffix)}[{RATE}]))" for suffix in ("_sum", "_count"))
    return Query(expr=f"{total} / {num}", legend=f"mean {_legend(by)}".strip())


def _ratio(part: Query, whole: Query, legend: str) -> Query:
    return Query(expr=f"{part.expr} / {whole.expr}", legend=legend)


def _legend(by: str) -> str:
    return " ".join(f"{{{{{label.strip()}}}}}" for label in by.split(",") if label)


PROGRESS = Section(
    title="Progress",
    panels=(
        Panel(
            title="Steps of the policy",
            queries=[_max(co.STEP, "run, state")],
            text="applied: committed updates. published: announced weights. checkpoint: what a crash cannot undo.",
        ),
        Panel(
            title="Held-out success",
            queries=[_max(co.HELDOUT, "run")],
            unit="percentunit",
            text="Mean of the run's success reward in the newest complete evaluation.",
        ),
        Panel(
            title="Rewards",
            queries=[_max(co.REWARD, "run, reward")],
            text="Mean over the groups of the last update. It moves with the tasks that are drawn; compare held-out "
            "success.",
        ),
        Panel(
            title="Since the last progress",
            queries=[_max(co.IDLE_SECONDS, "run")],
            unit="s",
            text="At run.stall_s the run counts as stalled, and the coordinator records the cause.",
        ),
        Panel(title="Stalled", queries=[_max(co.STALLED, "run")], kind="stat", width=4),
        Panel(title="Rejected versions", queries=[_max(co.REJECTED, "run")], kind="stat", width=4),
        Panel(
            title="Updates per hour",
            queries=[Query(expr=f"3600 * {_rate(learner.UPDATES, 'outcome').expr}", legend="{{outcome}}")],
            text="Updates that are repeated after a roll-back count again.",
        ),
    ),
)
STALENESS = Section(
    title="Staleness",
    panels=(
        Panel(
            title="Trained samples by staleness",
            queries=[Query(expr=f"sum by (le) (increase({_of(co.STALENESS, '_bucket')}[{RATE}]))", legend="{{le}}")],
            kind="heatmap",
            text="Updates between the oldest trained token of a sample and its update.",
        ),
        Panel(
            title="Staleness of trained samples",
            queries=[_mean(co.STALENESS, "run"), _quantile(co.STALENESS, "run")],
            text="No sample is above run.max_staleness. A mean that approaches it means that samples are about to end "
            "as stale.",
        ),
        Panel(
            title="Staleness of replayed samples",
            queries=[_mean(co.REPLAY_STALENESS, "run"), _quantile(co.REPLAY_STALENESS, "run")],
            text="No sample is above run.replay.max_staleness.",
        ),
        Panel(
            title="Groups in the replay log",
            queries=[_max(co.REPLAY_GROUPS, "run")],
            text="At most run.replay.capacity_groups. A run without replay has none.",
        ),
        Panel(
            title="Groups ahead of the update",
            queries=[_max(co.AHEAD, "run, limit")],
            text="admitted follows the smaller of demand (of the learner) and bound (max_staleness x batch_groups).",
        ),
    ),
)
SAMPLES = Section(
    title="Samples",
    panels=(
        Panel(
            title="Training samples by end",
            queries=[_sum(co.SAMPLES, "run, end", purpose="train")],
            stacked=True,
            text="Every reserved sample is live or has one end.",
        ),
        Panel(
            title="Samples that were not trained, by reason",
            queries=[
                Query(
                    expr=f"topk(10, sum by (run, reason) ({_of(co.DROPPED, reason=Not('trained'))}))",
                    legend="{{run}} {{reason}}",
                )
            ],
            rare="some sample must have ended without training",
        ),
        Panel(title="Groups by state", queries=[_sum(co.GROUPS, "run, state")], stacked=True),
        Panel(
            title="Tokens per second",
            queries=[_rate(co.TOKENS, "run, use")],
            text="scored: whole samples with prompts.",
        ),
        Panel(
            title="Leases and queues",
            queries=[
                _sum(co.LEASES, "run, kind"),
                Query(expr=_sum(co.PENDING, "run, purpose").expr, legend="{{run}} pending {{purpose}}"),
            ],
        ),
        Panel(
            title="Who waits",
            queries=[_sum(co.WAITING, "run, who")],
            text="workers wait: the trainer is the bottleneck. trainers wait: the rollouts are.",
        ),
        Panel(
            title="Failed attempts per minute",
            queries=[Query(expr=f"60 * {_rate(co.FAILED_ATTEMPTS, 'run').expr}", legend="{{run}}")],
        ),
        Panel(title="Wait of workers for episodes", queries=[_quantile(co.ACQUIRE_SECONDS, "run")], unit="s"),
        Panel(title="Tasks per second", queries=[_rate(data.TASKS, "purpose")]),
        Panel(
            title="Submitted tasks",
            queries=[_sum(co.SUBMITTED, "run, state")],
            rare="clients must submit the tasks of the run (`run.submitted_tasks`)",
        ),
        Panel(
            title="Shares of task sources",
            queries=[_max(data.SOURCE_SHARE, "run, source, state")],
            unit="percentunit",
            text="decided differs from requested where episodes of a source take longer or fail.",
            rare="the run must draw with the selector mixture",
        ),
        Panel(
            title="Records of task files that were dropped, by reason",
            queries=[_sum(data.DROPPED, "reason")],
            text="Since the start of the data services, each of which reads the source.",
            rare="a source must drop a record, as masked and templated do",
        ),
    ),
)
TIME = Section(
    title="Where the time goes",
    panels=(
        Panel(
            title="Phases of the learner",
            queries=[_rate(learner.PHASE_SECONDS, "phase")],
            unit="percentunit",
            stacked=True,
            text="Share of time. A large share of wait means that rollouts are the bottleneck. Other phases count when "
            "they end.",
        ),
        Panel(
            title="Stages of an episode",
            queries=[
                Query(
                    expr=f"sum by (stage) (rate({_of(rollout.STAGE_SECONDS)}[{RATE}])) / on () group_left () "
                    f"sum (rate({_of(rollout.EPISODES, outcome='completed')}[{RATE}]))",
                    legend="{{stage}}",
                )
            ],
            unit="s",
            text="Mean seconds per completed episode. generate and tool are parts of run.",
        ),
        Panel(
            title="Steps of the learner",
            queries=[
                _max(learner.STEP, "state"),
                Query(expr=_max(learner.INCARNATION, "job").expr, legend="roll-backs"),
                Query(expr=_max(learner.ATTACHED, "job").expr, legend="attaches"),
            ],
            text="More than one attach means that the learner restarted from a checkpoint.",
        ),
        Panel(title="Tokens trained per second", queries=[_rate(learner.TOKENS, "job")]),
        Panel(
            title="Effective sample size",
            queries=[_max(learner.ESS, "job")],
            unit="percentunit",
            text="Of the last update, over its tokens.",
            rare="the recipe must have importance weights",
        ),
        Panel(
            title="Metrics of the last update",
            queries=[
                Query(
                    expr=f"max by (metric) ({select(learner.LAST_UPDATE, scope=LAST_UPDATE_SCOPE)})",
                    legend="{{metric}}",
                )
            ],
            text="As in metrics.jsonl. Choose them at the top.",
        ),
    ),
)
NODES = Section(
    title="Nodes",
    panels=(
        Panel(title="Nodes by kind and state", queries=[_sum(co.NODES, "kind, state")], stacked=True),
        Panel(
            title="Lost connections",
            queries=[
                Query(
                    expr="sum by (kind, state) (increase("
                    f"{_of(co.NODE_CHANGES, state=('suspect', 'dead', 'quarantined'))}[{RATE}]))",
                    legend="{{kind}} {{state}}",
                )
            ],
            text="Nodes that became SUSPECT, DEAD or QUARANTINED. A drained node does not count.",
        ),
        Panel(
            title="Active versions",
            queries=[
                _max(inference.VERSION, "node"),
                Query(expr=f"max ({_of(co.STEP, state='published')})", legend="published"),
            ],
            text="A node below the published step still fetches it, or cannot load it.",
        ),
        Panel(title="Roll-backs that the nodes have seen", queries=[_max(inference.INCARNATION, "node")]),
        Panel(
            title="Free disk",
            queries=[Query(expr=f"min by (node) ({_of(DISK_FREE)})", legend="{{node}}")],
            unit="bytes",
        ),
        Panel(
            title="Time until certificates expire",
            queries=[Query(expr=f"min by (node) ({_of(CERTIFICATE_EXPIRY)}) - time()", legend="{{node}}")],
            unit="s",
            text="Of the certificate or its CA, whichever is first.",
            rare="a mesh on one host has no certificates by default",
        ),
    ),
)
SATURATION = Section(
    title="Saturation",
    panels=(
        Panel(
            title="Waiting requests per slot of the engines",
            queries=[
                _ratio(_sum(inference.REQUESTS, "node", state="waiting"), _sum(inference.SLOTS, "node"), "{{node}}")
            ],
            text="Above 1 for long: add inference nodes.",
        ),
        Panel(
            title="Episodes that wait for a worker",
            queries=[_sum(co.PENDING, "run, purpose")],
            text="Above 0 for long, while engines have free slots: add rollout workers.",
        ),
        Panel(
            title="Samples in the queues of rewards",
            queries=[_sum(reward.QUEUED, "node")],
            text="Growing: add reward nodes.",
        ),
        Panel(
            title="Sandbox starts that wait",
            queries=[
                _sum(sandbox.QUEUED, "node"),
                Query(expr=_sum(sandbox.SHARED_PENDING, "node").expr, legend="{{node}} stateless calls"),
            ],
            text="Growing: add sandbox nodes.",
        ),
        Panel(title="Episodes by stage", queries=[_sum(rollout.STAGE_EPISODES, "stage, place")], stacked=True),
        Panel(title="Episode leases of workers", queries=[_sum(rollout.LEASES, "node")]),
    ),
)
ENGINES = Section(
    title="Engines",
    panels=(
        Panel(title="Requests", queries=[_sum(inference.REQUESTS, "node, state")]),
        Panel(
            title="Key-value cache in use",
            queries=[
                _ratio(
                    _sum(inference.KV_TOKENS, "node", part="used"),
                    _sum(inference.KV_TOKENS, "node", part="max"),
                    "{{node}}",
                )
            ],
            unit="percentunit",
            text="Routers prefer other nodes above 0.9.",
        ),
        Panel(title="Tokens per second", queries=[_rate(inference.TOKENS, "work")]),
        Panel(
            title="Step of the engine",
            queries=[_ratio(_rate(inference.STEP_SECONDS, "node"), _rate(inference.STEPS, "node"), "{{node}}")],
            unit="s",
        ),
        Panel(
            title="Share of time in which steps are held",
            queries=[_rate(inference.HELD_SECONDS, "node")],
            unit="percentunit",
        ),
        Panel(title="Wait for a slot", queries=[_quantile(inference.QUEUE_SECONDS, "node")], unit="s"),
    ),
)
ROLLOUTS = Section(
    title="Rollouts",
    panels=(
        Panel(title="Episodes per second", queries=[_rate(rollout.EPISODES, "outcome")]),
        Panel(
            title="Turns and tokens per second",
            queries=[
                Query(expr=_rate(rollout.TURNS, "job").expr, legend="turns"),
                Query(expr=_rate(rollout.TOKENS, "job").expr, legend="tokens"),
            ],
        ),
        Panel(
            title="Tool calls per second",
            queries=[_rate(rollout.TOOL_CALLS, "outcome")],
            rare="the agent must call tools",
        ),
        Panel(
            title="Calls of env.score per second",
            queries=[Query(expr=_rate(rollout.SCORE_CALLS, "job").expr, legend="calls")],
            rare="the agent must ask for rewards in its episode",
        ),
        Panel(
            title="Infrastructure failures by boundary",
            queries=[_rate(rollout.FAILURES, "boundary")],
            rare="an attempt must have failed",
        ),
        Panel(
            title="Requests of programs",
            queries=[_rate(rollout.OPENAI_REQUESTS, "status")],
            rare="the agent must be a program",
        ),
        Panel(
            title="Conversations of programs",
            queries=[
                _rate(rollout.OPENAI_CHAINS, "why"),
                Query(expr=_rate(rollout.OPENAI_REENCODED, "job").expr, legend="tokens encoded again"),
                Query(expr=_rate(rollout.OPENAI_ABANDONED, "job").expr, legend="abandoned turns"),
            ],
            rare="the agent must be a program",
        ),
    ),
)
CALLS_SECTION = Section(
    title="Calls",
    panels=(
        Panel(title="Calls per second", queries=[_rate(CALLS, "service")], unit="reqps"),
        Panel(
            title="Calls that failed, by code",
            queries=[_rate(CALLS, "service, code", code=Not("OK"))],
            unit="reqps",
            text="CANCELLED, and UNAVAILABLE during a restart, are normal. INTERNAL and UNKNOWN are not.",
            rare="a call must have failed",
        ),
        Panel(
            title="Slowest methods",
            queries=[
                Query(
                    expr=f"topk(10, {_quantile(CALL_SECONDS, 'service, method').expr})", legend="{{service}}/{{method}}"
                )
            ],
            unit="s",
            text="AcquireEpisodes and LeaseBatch wait for work on purpose.",
        ),
    ),
)
RECORDS = Section(
    title="Ledger and payloads",
    panels=(
        Panel(
            title="Time to store a ledger record",
            queries=[_quantile(co.APPEND_SECONDS, "run", 0.5), _quantile(co.APPEND_SECONDS, "run")],
            unit="s",
            text="From the decision to the acknowledgement of NATS.",
        ),
        Panel(
            title="Use of the ledger",
            queries=[Query(expr=f"max by (run) ({_of(co.LEDGER_USED)})", legend="{{run}}")],
            unit="percentunit",
            text="Share of coordinator.streams.ledger_bytes_max. At 1 the run ends.",
        ),
        Panel(
            title="Ledger records per second",
            queries=[Query(expr=f"sum by (run) (deriv({_of(co.POSITION)}[{RATE}]))", legend="{{run}}")],
        ),
        Panel(
            title="Ledger records that the data service has not read",
            queries=[
                Query(expr=f"max by (run) ({_of(co.POSITION)}) - max by (run) ({_of(data.POSITION)})", legend="{{run}}")
            ],
        ),
        Panel(
            title="Episodes read for trainers",
            queries=[_rate(gateway.EPISODES, "node")],
            rare="payloads must be in the stream, not in files",
        ),
        Panel(
            title="Payload bytes read for trainers",
            queries=[_rate(gateway.BYTES, "node")],
            unit="Bps",
            rare="payloads must be in the stream, not in files",
        ),
        Panel(
            title="Requests of browsers to the live page",
            queries=[_rate(gateway.PAGE_REQUESTS, "status")],
            rare="a browser must open the live page",
        ),
    ),
)
SANDBOX = Section(
    title="Sandbox",
    panels=(
        Panel(title="Open sessions", queries=[_sum(sandbox.LIVE, "node")]),
        Panel(
            title="Sessions per second, by end",
            queries=[_rate(sandbox.ENDED, "end"), Query(expr=_rate(sandbox.CREATED, "job").expr, legend="created")],
            text="expired and lost mean that a worker or a jail was lost.",
        ),
        Panel(title="Time to open a session", queries=[_quantile(sandbox.START_SECONDS, "node")], unit="s"),
        Panel(
            title="Wait for the start",
            queries=[_quantile(sandbox.START_WAIT_SECONDS, "node")],
            unit="s",
            rare="starts must have waited",
        ),
        Panel(title="Commands per second", queries=[_rate(sandbox.COMMANDS, "outcome")]),
        Panel(title="Time of a command", queries=[_quantile(sandbox.COMMAND_SECONDS, "outcome")], unit="s"),
        Panel(
            title="Sessions ended at a limit",
            queries=[_rate(sandbox.KILLS, "reason")],
            rare="a command must have reached a limit",
        ),
        Panel(
            title="Ready sessions", queries=[_sum(sandbox.READY, "profile")], rare="a profile must have ready sessions"
        ),
        Panel(
            title="Ready sessions made and dropped per second",
            queries=[
                Query(expr=_rate(sandbox.POOL_MADE, "job").expr, legend="made"),
                Query(expr=_rate(sandbox.POOL_DROPPED, "job").expr, legend="dropped"),
            ],
            text="A dropped session ended before any episode used it.",
        ),
        Panel(title="Opens that found a ready session", queries=[_rate(sandbox.POOL_OPENS, "found")]),
        Panel(
            title="Stateless calls at once",
            queries=[_mean(sandbox.SHARED_CALLS, "node")],
            rare="tools must be stateless",
        ),
        Panel(
            title="Shared sessions ended",
            queries=[_rate(sandbox.SHARED_ENDED, "reason")],
            rare="a shared session must have ended",
        ),
        Panel(
            title="External requests",
            queries=[_rate(egress.REQUESTS, "policy, outcome")],
            rare="a profile must have egress",
        ),
        Panel(
            title="Bytes of external requests",
            queries=[_rate(egress.BYTES, "policy")],
            unit="Bps",
            rare="a profile must have egress",
        ),
    ),
)
REWARDS = Section(
    title="Rewards and endpoints",
    panels=(
        Panel(title="Scores per second", queries=[_rate(reward.SCORES, "scorer, outcome")]),
        Panel(title="Decisions on groups", queries=[_rate(reward.GROUPS, "decision")]),
        Panel(
            title="Requests to endpoints",
            queries=[_rate(endpoints.CALLS, "endpoint, outcome")],
            rare="the run must ask endpoints",
        ),
        Panel(
            title="Time of a request to an endpoint",
            queries=[_quantile(endpoints.SECONDS, "endpoint")],
            unit="s",
            rare="the run must ask endpoints",
        ),
        Panel(
            title="Tokens of endpoints per second",
            queries=[_rate(endpoints.TOKENS, "endpoint, kind")],
            rare="the run must ask endpoints",
        ),
        Panel(
            title="Price of endpoints", queries=[_sum(endpoints.PRICE, "endpoint")], rare="the run must ask endpoints"
        ),
    ),
)
DASHBOARDS = (
    Dashboard(
        name="run",
        title="rollmesh: run",
        text="Is the run learning, how stale is what it trains on, and where does the time go?",
        variables={"run": co.STEP, "metric": learner.LAST_UPDATE},
        sections=(PROGRESS, STALENESS, SAMPLES, TIME),
    ),
    Dashboard(
        name="fleet",
        title="rollmesh: fleet",
        text="Which nodes are there, which versions do they serve, and which kind is saturated?",
        variables={"run": co.STEP},
        sections=(NODES, SATURATION, ENGINES, ROLLOUTS),
    ),
    Dashboard(
        name="services",
        title="rollmesh: services",
        text="Latencies and errors of the services, the ledger, the sandbox, rewards and endpoints.",
        variables={"run": co.STEP},
        sections=(CALLS_SECTION, RECORDS, SANDBOX, REWARDS),
    ),
)


def to_json(dashboard: Dashboard) -> str:
    """Return the dashboard in the format of Grafana's import."""
    model = {
        "uid": f"rollmesh-{dashboard.name}",
        "title": dashboard.title,
        "description": dashboard.text,
        "tags": ["rollmesh"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "links": [
            {"type": "dashboards", "title": "rollmesh", "tags": ["rollmesh"], "keepTime": True, "asDropdown": False}
        ],
        "templating": {"list": [_source_variable(), *_variables(dashboard)]},
        "panels": _panels(dashboard.sections),
    }
    return json.dumps(model, indent=1) + "\n"


def _source_variable() -> dict[str, Any]:
    return {"name": "source", "label": "Data source", "type": "datasource", "query": "prometheus"}


def _variables(dashboard: Dashboard) -> list[dict[str, Any]]:
    job = _variable("job", f"label_values({DISK_FREE.name}, job)", many=False)
    scoped = {
        label: f'label_values({metric.name}{{job="$job"}}, {label})' for label, metric in dashboard.variables.items()
    }
    return [job, *(_variable(label, query, many=True) for label, query in scoped.items())]


def _variable(name: str, query: str, *, many: bool) -> dict[str, Any]:
    every = {"includeAll": True, "multi": True, "current": {"text": "All", "value": "$__all"}} if many else {}
    return {
        "name": name,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
        **every,
    }


def _panels(sections: Sequence[Section]) -> list[dict[str, Any]]:
    """Return the panels of all sections from left to right, below a row with the title of their section."""
    made: list[dict[str, Any]] = []
    y = 0
    for section in sections:
        made.append(
            {
                "type": "row",
                "title": section.title,
                "id": len(made) + 1,
                "collapsed": False,
                "panels": [],
                "gridPos": {"h": 1, "w": COLUMNS, "x": 0, "y": y},
            }
        )
        x, y = 0, y + 1
        for panel in section.panels:
            if x + panel.width > COLUMNS:
                x, y = 0, y + HEIGHT
            made.append(
                {"id": len(made) + 1, "gridPos": {"h": HEIGHT, "w": panel.width, "x": x, "y": y}, **_panel(panel)}
            )
            x += panel.width
        y += HEIGHT
    return made


def _panel(panel: Panel) -> dict[str, Any]:
    heat = panel.kind == "heatmap"
    targets = [
        {
            "refId": chr(ord("A") + index),
            "datasource": SOURCE,
            "expr": query.expr,
            "legendFormat": query.legend,
            **({"format": "heatmap"} if heat else {}),
        }
        for index, query in enumerate(panel.queries)
    ]
    text = " ".join(filter(None, [panel.text, f"Without data: {panel.rare}." if panel.rare else ""]))
    defaults: dict[str, Any] = {"unit": panel.unit}
    options: dict[str, Any] = {}
    if panel.kind == "timeseries":
        defaults["custom"] = {
            "fillOpacity": 10,
            "showPoints": "never",
            "stacking": {"mode": "normal" if panel.stacked else "none"},
        }
        options = {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    elif panel.kind == "stat":
        options = {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}}
    else:
        options = {"calculate": False, "yAxis": {"unit": "short"}}
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": text,
        "datasource": SOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
    }


def main() -> None:
    folder = Path(sys.argv[1])
    runbooks = sys.argv[2] if len(sys.argv) > 2 else "docs/runbooks.md"
    (folder / "grafana").mkdir(parents=True, exist_ok=True)
    for dashboard in DASHBOARDS:
        (folder / "grafana" / f"{dashboard.name}.json").write_text(to_json(dashboard))
    (folder / "alerts.yml").write_text(to_yaml(runbooks))


if __name__ == "__main__":
    main()
