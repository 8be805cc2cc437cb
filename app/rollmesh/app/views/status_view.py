"""Show the state of a mesh as text or JSON: the fleet, then per run its clocks, leases, queues, waits and sample
counts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from rollmesh.app.mesh_client import MeshStatus
from rollmesh.app.views.causes import failed_attempts_text, no_update_text
from rollmesh.shared.clock import clock_warning
from rollmesh.shared.domain.text import count_of
from rollmesh.v1 import coordinator_pb2, run_pb2, types_pb2

_COLORS = {"READY": "green", "STALE": "yellow", "JOINING": "yellow", "DRAINING": "cyan", "DEAD": "dim"}
_COLUMNS = ("kind", "state", "active", "work", "silent")
_PAYLOADS = {"files": "files of the run folder", "stream": "the sample stream"}
_ENDS = ("trained", "stale", "filtered", "failed", "cancelled", "exported")


def status_json(status: MeshStatus) -> bytes:
    """Return {"nodes": [...], "nodes_omitted": 0, "runs": [...], "payloads": "files"} with the messages of GetFleet and
    GetRun: fields as in the protos, zeros included."""
    found = {
        "nodes": [_as_dict(node) for node in status.nodes],
        "nodes_omitted": status.nodes_omitted,
        "runs": [_as_dict(run) for run in status.runs],
        "payloads": status.payloads,
    }
    return msgspec.json.format(msgspec.json.encode(found), indent=2)


def _as_dict(message: Message) -> dict[str, Any]:
    found: dict[str, Any] = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return found


def status_view(status: MeshStatus) -> RenderableType:
    """Return the text for a terminal."""
    parts: list[RenderableType] = [_fleet_table(status), *_fleet_lines(status), *_clock_lines(status.nodes)]
    for run in status.runs:
        parts += [Text(), *_run_lines(run)]
        if status.payloads and not run.ended:
            parts.append(Text(f"  payloads go to {_PAYLOADS.get(status.payloads, status.payloads)}"))
    if not status.runs:
        parts += [Text(), Text("no run: create one with CreateRun at the gateway")]
    return Group(*parts)


# Fleet ----------------------------------------------------------------------------------------------------------------


def _fleet_table(status: MeshStatus) -> Table:
    widest = max([len(node.node_id) for node in status.nodes], default=0)
    identity = Column("node", no_wrap=True, min_width=widest)  # never truncated: `rollmesh drain` needs it
    table = Table(identity, *_COLUMNS, box=None, pad_edge=False)
    for node in sorted(status.nodes, key=lambda n: (n.kind, n.node_id)):
        state = _name(coordinator_pb2.NodeState.Name(node.state), "NODE_STATE_")
        kind = _name(coordinator_pb2.NodeKind.Name(node.kind), "NODE_KIND_").lower()
        table.add_row(
            node.node_id,
            kind,
            Text(state, style=_COLORS.get(state, "red")),
            _version(node.active) if node.HasField("active") else "-",
            _work(node),
            f"{node.silent_s:.0f} s",
        )
    return table


def _fleet_lines(status: MeshStatus) -> Iterator[Text]:
    """Report causes, waits and builds, each once with its nodes, because a table with them does not fit on a narrow
    terminal."""
    if status.nodes_omitted:
        yield Text(
            f"{count_of(status.nodes_omitted, 'node')} not listed: the response has no room for more", style="yellow"
        )
    whys: dict[str, list[str]] = {}
    builds: dict[str, list[str]] = {}
    for node in sorted(status.nodes, key=lambda n: (n.kind, n.node_id)):
        if why := _why(node, status):
            whys.setdefault(why, []).append(node.node_id)
        builds.setdefault(_build(node), []).append(node.node_id)
    for why, names in whys.items():
        yield Text(f"{', '.join(names)}: {why}")
    if len(builds) == 1:
        yield Text(f"every node: release {next(iter(builds))}", style="dim")
    else:
        yield from (Text(f"{', '.join(names)}: release {build}", style="yellow") for build, names in builds.items())


def _build(node: coordinator_pb2.FleetNode) -> str:
    """Return package version and protocol, e.g. `0.2.0, protocol 1.1`. A coordinator before protocol 1.1 reports no
    protocol."""
    protocol = f", protocol {node.protocol.major}.{node.protocol.minor}" if node.HasField("protocol") else ""
    return f"{node.process.version or 'unknown'}{protocol}"


def _work(node: coordinator_pb2.FleetNode) -> str:
    if node.kind not in (
        coordinator_pb2.NODE_KIND_INFERENCE,
        coordinator_pb2.NODE_KIND_ROLLOUT,
        coordinator_pb2.NODE_KIND_SANDBOX,
    ):
        return "-"
    waiting = f" +{node.num_waiting}" if node.num_waiting else ""
    return f"{node.num_running}/{node.capacity}{waiting}"


def _why(node: coordinator_pb2.FleetNode, status: MeshStatus) -> str:
    """Return the cause or the wait of a node; for a stale node, what it lacks."""
    if node.cause or node.waiting_for:
        return node.cause or f"waiting: {node.waiting_for}"
    if node.state != coordinator_pb2.NODE_STATE_STALE:
        return ""
    live = [policy for run in status.runs if not run.ended for policy in run.policies]
    return f"waiting: {f'an active version that update {live[0].applied_step + 1} may use' if live else 'a run'}"


def _clock_lines(nodes: Sequence[coordinator_pb2.FleetNode]) -> Iterator[Text]:
    """Report each host with a wrong clock once, with its nodes."""
    hosts: dict[str, list[coordinator_pb2.FleetNode]] = {}
    for node in sorted(nodes, key=lambda n: n.node_id):
        if clock_warning(node.clock_ahead_s, ""):
            hosts.setdefault(node.process.host, []).append(node)
    for host, found in sorted(hosts.items()):
        names = ", ".join(node.node_id for node in found)
        yield Text(clock_warning(found[0].clock_ahead_s, f"{host} ({names})"), style="yellow")


def _version(version: types_pb2.PolicyVersion) -> str:
    incarnation = f".{version.incarnation}" if version.incarnation else ""
    return f"{version.policy}@{version.step}{incarnation}"


# Runs -----------------------------------------------------------------------------------------------------------------


def _run_lines(run: run_pb2.RunState) -> Iterator[RenderableType]:
    yield Text(f"run {run.run}: {f'ended, {run.ended}' if run.ended else 'running'}", style="bold")
    for policy in run.policies:
        yield Text(
            f"  {policy.policy}: applied {policy.applied_step}, published {_published(policy.published_step)}, "
            f"checkpoint {policy.checkpoint_update}, incarnation {policy.incarnation}, trainer epoch "
            f"{policy.trainer_epoch}"
        )
        yield Text(f"  groups: {_counts(policy.groups) or 'none'}")
    yield Text(f"  leases: {_leases(run.leases)}")
    yield Text(f"  samples: {_sample_counts(run.samples)}")
    for account in run.submitted_samples:
        yield Text(
            f"  submitted by {account.source}: {count_of(account.groups, 'group')}, {account.waiting} waiting, "
            f"{account.dropped} dropped; {_sample_counts(account.samples)}"
        )
    if failure := failed_attempts_text(run.failed_attempts.num, run.failed_attempts.cause):
        yield Text(f"  {failure}", style="red")
    if not any(policy.applied_step for policy in run.policies) and (
        words := no_update_text(0, run.samples.reasons, run.recent)
    ):
        yield Text(f"  {words}", style="yellow")
    if run.stalled:
        yield Text(f"  stalled: {run.stalled}", style="red")
    for process, cause in sorted(run.waiting.items()):
        yield Text(f"  {process} waits for {cause}")


def _published(step: int) -> str:
    return "nothing" if step < 0 else str(step)


def _leases(leases: run_pb2.LeaseCounts) -> str:
    evals = f", {leases.eval_episodes_pending} pending for evaluation" if leases.eval_episodes_pending else ""
    return (
        f"{count_of(leases.episodes_leased, 'episode')} leased, {leases.episodes_pending} pending{evals}; "
        f"{count_of(leases.batches_leased, 'batch', 'batches')} leased, {leases.batches_in_doubt} in doubt"
    )


def _sample_counts(samples: run_pb2.SampleCounts) -> str:
    ends = {name: getattr(samples, name) for name in _ENDS}
    return f"{samples.reserved} reserved = {samples.live} live + {_counts(ends) or '0 ended'}"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{num} {name}" for name, num in counts.items() if num)


def _name(name: str, prefix: str) -> str:
    return name.removeprefix(prefix)
