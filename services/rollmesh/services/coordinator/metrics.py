"""Metrics of a coordinator: per run the state of its core, read between two decisions, and the fleet."""

from __future__ import annotations

from typing import get_args

from rollmesh.services.coordinator.core.facts import SampleEnd
from rollmesh.services.coordinator.core.fleet import NodeKind, NodeState
from rollmesh.services.coordinator.core.records import SubmittedSource
from rollmesh.services.coordinator.run_state import GROUP_STATES
from rollmesh.shared.telemetry.metrics import LATENCY_S, counter, gauge, histogram

_KINDS = [kind.name.lower() for kind in NodeKind]
_NODE_STATES = [state.name.lower() for state in NodeState]
SAMPLES = gauge(
    "rollmesh_coordinator_samples",
    "Reserved samples by state: live, or their end. Their sum only grows; a roll-back moves trained to stale. "
    "Submitted samples have their source in place of a purpose.",
    "run", "purpose", "end",
    purpose=("train", "eval", "replay", *get_args(SubmittedSource)), end=[end.name.lower() for end in SampleEnd],
)  # fmt: skip
DROPPED = gauge("rollmesh_coordinator_samples_by_reason", "Samples that ended, by end and reason.", "run", "reason")
GROUPS = gauge("rollmesh_coordinator_groups", "Training groups by state.", "run", "state", state=GROUP_STATES)
AHEAD = gauge(
    "rollmesh_coordinator_admission_ahead_groups",
    "Groups ahead of the update after the published step, by limit: admitted now, demand of the learner, bound.",
    "run", "limit",
    limit=("admitted", "demand", "bound"),
)  # fmt: skip
SUBMITTED = gauge(
    "rollmesh_coordinator_submitted_tasks",
    "Tasks that clients submitted, by state: open waits for admission, drawn is in progress, answered is decided.",
    "run", "state",
    state=("open", "drawn", "answered"),
)  # fmt: skip
LEASES = gauge(
    "rollmesh_coordinator_leases", "Held leases: of episodes, of batches, of batches in doubt.", "run", "kind",
    kind=("episode", "batch", "in_doubt"),
)  # fmt: skip
PENDING = gauge(
    "rollmesh_coordinator_episodes_pending", "Episodes that wait for a worker.", "run", "purpose",
    purpose=("train", "eval"),
)  # fmt: skip
WAITING = gauge(
    "rollmesh_coordinator_waiting", "Waiting callers: workers for episodes, trainers for a batch.", "run", "who",
    who=("workers", "trainers"),
)  # fmt: skip
ACQUIRE_SECONDS = histogram(
    "rollmesh_coordinator_acquire_wait_seconds",
    "Time that a worker waited for episodes.",
    "run",
)
STALENESS = histogram(
    "rollmesh_coordinator_trained_staleness_updates",
    "Samples of committed updates by staleness: updates between their oldest trained token and their update.",
    "run",
    buckets=(0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0),
)
REPLAY_STALENESS = histogram(
    "rollmesh_coordinator_replayed_staleness_updates",
    "Replayed samples of committed updates by staleness, which the metric of trained samples does not count.",
    "run",
    buckets=(0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0),
)
REPLAY_GROUPS = gauge("rollmesh_coordinator_replay_log_groups", "Groups in the replay log.", "run")
REPLAY_BYTES = gauge("rollmesh_coordinator_replay_log_bytes", "Bytes of the payloads of the replay log.", "run")
REPLAY_LEFT = counter(
    "rollmesh_coordinator_replay_log_left_total",
    "Groups that left the replay log because it was full, or because no later update may train them. With the priority "
    "compensation, their samples are never trained.",
    "run",
    "cause",
    cause=("capacity", "bound"),
)
STEP = gauge(
    "rollmesh_coordinator_step", "The policy's steps: applied, published (-1: none), checkpoint.", "run", "state",
    state=("applied", "published", "checkpoint"),
)  # fmt: skip
TOKENS = counter(
    "rollmesh_coordinator_tokens_total",
    "Tokens of scored samples (whole, prompts included), and trained on in committed updates.",
    "run",
    "use",
    use=("scored", "trained"),
)
REWARD = gauge(
    "rollmesh_coordinator_reward_mean", "Mean of a reward over the groups of the last update.", "run", "reward"
)
HELDOUT = gauge(
    "rollmesh_coordinator_heldout_success_ratio",
    "Mean of the run's success reward over the scored samples of the newest complete evaluation.",
    "run",
)
IDLE_SECONDS = gauge(
    "rollmesh_coordinator_idle_seconds",
    "Seconds since the last progress: a scored sample, a decided group, a commit, a checkpoint or a publication. 0 "
    "after the end.",
    "run",
)
STALLED = gauge("rollmesh_coordinator_stalled", "1 while the run is stalled (run.stall_s), otherwise 0.", "run")
REJECTED = gauge(
    "rollmesh_coordinator_rejected_versions", "Published versions that the nodes rejected, of the newest 100.", "run"
)
FAILED_ATTEMPTS = counter(
    "rollmesh_coordinator_failed_attempts_total",
    "Attempts of episodes that failed since the coordinator started.",
    "run",
)
POSITION = gauge("rollmesh_coordinator_ledger_position", "Newest stored ledger record.", "run")
LEDGER_USED = gauge(
    "rollmesh_coordinator_ledger_used_ratio",
    "Share of coordinator.streams.ledger_bytes_max that the stream of a live run's ledger uses. At 1 the run ends. 0 "
    "after the end.",
    "run",
)
APPEND_SECONDS = histogram(
    "rollmesh_coordinator_ledger_append_seconds", "Time from decision to stored record.", "run", buckets=LATENCY_S
)
NODES = gauge("rollmesh_coordinator_nodes", "Nodes of the fleet.", "kind", "state", kind=_KINDS, state=_NODE_STATES)
NODE_CHANGES = counter(
    "rollmesh_coordinator_node_changes_total",
    "Changes of the state of a node, by its new state. A node that left cleanly does not count as dead.",
    "kind", "state",
    kind=_KINDS, state=_NODE_STATES,
)  # fmt: skip
METRICS = (
    SAMPLES, DROPPED, GROUPS, AHEAD, LEASES, PENDING, WAITING, ACQUIRE_SECONDS, STALENESS, REPLAY_STALENESS,
    REPLAY_GROUPS, SUBMITTED, STEP, TOKENS, REWARD, HELDOUT,
    IDLE_SECONDS, STALLED, REJECTED, FAILED_ATTEMPTS, POSITION, LEDGER_USED, APPEND_SECONDS, NODES, NODE_CHANGES,
)  # fmt: skip
