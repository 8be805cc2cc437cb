"""Metrics of a coordinator: per run the state of its core, read between two decisions, and the fleet."""

from __future__ import annotations

from rollmesh.shared.telemetry.metrics import LATENCY_S, counter, gauge, histogram

SAMPLES = gauge(
    "rollmesh_coordinator_samples",
    "Reserved samples by state: live, or their end. Their sum only grows; a roll-back moves trained to stale.",
    "run", "purpose", "end",
)  # fmt: skip
DROPPED = gauge("rollmesh_coordinator_samples_by_reason", "Samples that ended, by end and reason.", "run", "reason")
GROUPS = gauge("rollmesh_coordinator_groups", "Training groups by state.", "run", "state")
AHEAD = gauge(
    "rollmesh_coordinator_admission_ahead_groups",
    "Groups ahead of the update after the published step, by limit: admitted now, demand of the learner, bound.",
    "run", "limit",
)  # fmt: skip
LEASES = gauge(
    "rollmesh_coordinator_leases", "Held leases: of episodes, of batches, of batches in doubt.", "run", "kind"
)
PENDING = gauge("rollmesh_coordinator_episodes_pending", "Episodes that wait for a worker.", "run", "purpose")
WAITING = gauge(
    "rollmesh_coordinator_waiting", "Waiting callers: workers for episodes, trainers for a batch.", "run", "who"
)
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
STEP = gauge(
    "rollmesh_coordinator_step", "The policy's steps: applied, published (-1: none), checkpoint.", "run", "state"
)
TOKENS = counter(
    "rollmesh_coordinator_tokens_total",
    "Tokens of scored samples (whole, prompts included), and trained on in committed updates.",
    "run",
    "use",
)
REWARD = gauge(
    "rollmesh_coordinator_reward_mean", "Mean of a reward over the groups of the last update.", "run", "reward"
)
POSITION = gauge("rollmesh_coordinator_ledger_position", "Newest stored ledger record.", "run")
APPEND_SECONDS = histogram(
    "rollmesh_coordinator_ledger_append_seconds", "Time from decision to stored record.", "run", buckets=LATENCY_S
)
NODES = gauge("rollmesh_coordinator_nodes", "Nodes of the fleet.", "kind", "state")
METRICS = (
    SAMPLES, DROPPED, GROUPS, AHEAD, LEASES, PENDING, WAITING, ACQUIRE_SECONDS, STALENESS, STEP, TOKENS, REWARD, POSITION,
    APPEND_SECONDS, NODES,
)  # fmt: skip
