"""Translate replies and ends of sessions to results. Replies are hostile; see `jail_session`."""

from __future__ import annotations

import signal
from collections.abc import Callable

from rollmesh.sandbox_runtime.limits import Limits
from rollmesh.services.sandbox.engine import RunOutcome, RunResult
from rollmesh.services.sandbox.engines.exit_cause import used_up
from rollmesh.services.sandbox.engines.jail_session import ProtocolBroken, SessionReply
from rollmesh.services.sandbox.engines.zygote_process import SessionExit


def to_result(reply: SessionReply, killed_for_memory: Callable[[], bool]) -> RunResult:
    """Translate a reply. A SIGKILL that the kernel sent for memory is a memory limit, whatever the session reports."""
    try:
        outcome, files = RunOutcome(reply.outcome), reply.decoded_files()
    except (ValueError, ProtocolBroken):
        return exited("the session's protocol was broken: unknown outcome or bad files")
    if reply.exit_status == -signal.SIGKILL and killed_for_memory():
        outcome = RunOutcome.MEMORY
    return RunResult(
        outcome=outcome,
        stdout=reply.stdout,
        stderr=reply.stderr,
        result=reply.result,
        error_type=reply.error_type,
        error_message=reply.error_message,
        traceback=reply.traceback,
        truncated=reply.truncated,
        wall_s=reply.wall_s,
        cpu_s=reply.cpu_s,
        exit_status=reply.exit_status,
        files=files,
        # After a process limit, leftover processes would compete with every later call.
        session_alive=outcome is not RunOutcome.PROCESSES,
    )


def explain(ended: SessionExit, limits: Limits) -> RunResult:
    """Explain why a session ended by itself: the kernel's memory or CPU limit, or its program."""
    if ended.status < 0 and ended.out_of_memory:
        return killed(RunOutcome.MEMORY)
    if ended.status < 0 and used_up(ended.cpu_s, limits.cpu_total_s):
        return killed(RunOutcome.TIME)
    how = f"signal {-ended.status}" if ended.status < 0 else f"status {ended.status}"
    return exited(f"the program ended its session ({how})")


def killed(outcome: RunOutcome, wall_s: float = 0.0) -> RunResult:
    """Return the result of a session that was killed for a limit."""
    message = f"the session was killed: out of {outcome.value}"
    return RunResult(
        outcome=outcome, error_type="LimitReached", error_message=message, wall_s=wall_s, session_alive=False
    )


def exited(message: str) -> RunResult:
    """Return the result of a session that its program ended."""
    return RunResult(outcome=RunOutcome.EXITED, error_type="SessionEnded", error_message=message, session_alive=False)
