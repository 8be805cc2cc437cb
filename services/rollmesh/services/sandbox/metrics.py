"""Metrics of a sandbox node."""

from __future__ import annotations

from rollmesh.services.sandbox.egress import metrics as egress
from rollmesh.services.sandbox.engine import RunOutcome, RunResult
from rollmesh.services.sandbox.sessions import SessionEnd
from rollmesh.shared.telemetry.metrics import count, counter, gauge, histogram, observe

_LIMITS = (RunOutcome.TIME, RunOutcome.MEMORY, RunOutcome.PROCESSES, RunOutcome.OUTPUT)
_OUTCOMES = [outcome.name.lower() for outcome in RunOutcome]
CREATED = counter("rollmesh_sandbox_sessions_created_total", "Admitted sessions.")
LIVE = gauge("rollmesh_sandbox_sessions_live", "Sessions open or being opened.")
ENDED = counter(
    "rollmesh_sandbox_sessions_ended_total",
    "Sessions by end: closed, exited (by their program), expired (lease), lost (with the jail), rejected.",
    "end",
    end=[end.value for end in SessionEnd],
)
START_SECONDS = histogram("rollmesh_sandbox_session_start_seconds", "Time to open a session.")
QUEUED = gauge("rollmesh_sandbox_starts_queued", "Sessions that wait for their start.")
START_WAIT_SECONDS = histogram("rollmesh_sandbox_start_wait_seconds", "Time that a session waits for its start.")
READY = gauge("rollmesh_sandbox_pool_ready", "Ready sessions by profile.", "profile")
POOL_OPENS = counter(
    "rollmesh_sandbox_pool_opens_total",
    "Opens that a ready session can serve: hit if one existed, otherwise miss.",
    "found",
    found=("hit", "miss"),
)
POOL_MADE = counter("rollmesh_sandbox_pool_made_total", "Ready sessions created: made = hits + dropped + ready.")
POOL_DROPPED = counter("rollmesh_sandbox_pool_dropped_total", "Ready sessions that ended unused.")
COMMANDS = counter("rollmesh_sandbox_commands_total", "Runs and calls by outcome.", "outcome", outcome=_OUTCOMES)
COMMAND_SECONDS = histogram("rollmesh_sandbox_command_seconds", "Wall time of runs and calls in the jail.", "outcome")
KILLS = counter(
    "rollmesh_sandbox_kills_total",
    "Sessions ended because a command reached a limit.",
    "reason",
    reason=[outcome.name.lower() for outcome in _LIMITS],
)
SHARED_PENDING = gauge("rollmesh_sandbox_stateless_calls_pending", "Stateless calls that wait or run.")
SHARED_CALLS = histogram("rollmesh_sandbox_stateless_calls_per_request", "Stateless calls that a session ran at once.")
SHARED_ENDED = counter(
    "rollmesh_sandbox_shared_sessions_ended_total",
    "Shared sessions ended before they were idle: worn (number of calls or CPU time), fault (a limit, or the end of "
    "its process), changed (a call left state), drained.",
    "reason",
    reason=("worn", "fault", "changed", "drained"),
)
METRICS = (
    CREATED,
    LIVE,
    ENDED,
    START_SECONDS,
    QUEUED,
    START_WAIT_SECONDS,
    READY,
    POOL_OPENS,
    POOL_MADE,
    POOL_DROPPED,
    COMMANDS,
    COMMAND_SECONDS,
    KILLS,
    SHARED_PENDING,
    SHARED_CALLS,
    SHARED_ENDED,
    *egress.METRICS,
)


def note_result(result: RunResult) -> None:
    """Count the outcome of a command."""
    outcome = result.outcome.name.lower()
    count(COMMANDS, outcome)
    observe(COMMAND_SECONDS, result.wall_s, outcome)
    if result.outcome in _LIMITS and not result.session_alive:
        count(KILLS, outcome)
