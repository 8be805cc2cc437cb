"""Describe why a run is stalled: the newest failure of an episode, samples without an update, and runs in which all
samples fail.

All views read it from GetRun and WatchRun (`RunState.failed_attempts`, `SampleCounts.reasons`), so they show the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rollmesh.app.run_folder import shown
from rollmesh.shared.domain.application_reasons import NOT_USED, REWARD_LATE
from rollmesh.shared.domain.text import count_of
from rollmesh.shared.errors import FailedPrecondition
from rollmesh.v1 import run_pb2

_HINTS = {
    "filtered/ZERO_VARIANCE": "all answers to a task got the same reward",
    "filtered/NO_SAMPLES": "the agent did not generate tokens",
    f"filtered/{NOT_USED}": "no application used the served episode within idle_s_max",
    f"filtered/{REWARD_LATE}": "no application finished the episode within reward_s_max",
}
_CAUSE_CHARS_MAX = 300


class AllFailed(FailedPrecondition):
    """The first samples of a session all failed with the same kind of error; the message has the traceback."""

    reason = "ALL_FAILED"


def failed_attempts_text(num_failed: int, cause: str) -> str:
    """Return the newest failure in a line, or an empty string if no attempt failed."""
    if not num_failed:
        return ""
    line = " ".join(cause.split())
    return f"{count_of(num_failed, 'attempt')} failed, the newest: {line[:_CAUSE_CHARS_MAX]}"


def no_update_text(
    update: int, reasons: Mapping[str, int], recent: run_pb2.RecentEpisodes, *, folder: Path | None = None
) -> str:
    """Return why there is no update: the samples that ended without one, by reason, the means of the newest, and the
    command that shows one. Empty if no sample ended. `folder` is that of the run."""
    ended = {
        reason: num for reason, num in reasons.items() if num > 0 and not reason.startswith(("trained", "exported"))
    }
    if not ended:
        return ""
    total = sum(ended.values())
    since = f"since update {update}" if update else "yet"
    if len(ended) == 1:
        (reason,) = ended
        what = f", all {_reason(reason)}"
    else:
        by_num = sorted(ended.items(), key=lambda item: -item[1])
        what = ": " + ", ".join(f"{num:,} {_reason(reason)}" for reason, num in by_num)
    text = f"no update {since}: {total:,} samples ended{what}"
    if not recent.num_samples:
        return text
    facts = [f"mean {name} {value:.3g}" for name, value in sorted(recent.mean_rewards.items())]
    facts.append(f"{recent.mean_sampled_tokens:.0f} sampled tokens")
    if recent.num_tool_calls:
        facts.append(f"{recent.num_tool_calls_failed:,} of {count_of(recent.num_tool_calls, 'tool call')} failed")
    run = shown(folder) if folder is not None else "RUN"
    return (
        f"{text}; the newest {count_of(recent.num_samples, 'sample')}: {', '.join(facts)}; "
        f"see `rollmesh show {run} {recent.newest_sample_id}`"
    )


def _reason(reason: str) -> str:
    end, _, why = reason.partition("/")
    words = why or end
    return f"{words} ({_HINTS[reason]})" if reason in _HINTS else words


def refuse_if_all_failed(
    state: run_pb2.RunState,
    num_max: int,
    *,
    folder: Path | None = None,
    failed_before: int = 0,
    tokens_before: int = 0,
) -> None:
    """Raise AllFailed if `num_max` samples failed with the same kind of error and none was scored since the given
    counts.

    The same holds if `num_max` scored samples failed because no decision on a group succeeded. `num_max` 0 disables it.
    `folder` is that of a run that can be resumed; the message names its commands.
    """
    failed = state.failed_attempts
    num = state.samples.failed - failed_before
    scored = any(policy.tokens_generated > tokens_before for policy in state.policies)
    if not num_max:
        return
    if failed.num_undecided >= num_max:
        what = f"the last {failed.num_undecided:,} samples all failed in the decision on their group"
    elif scored or min(num, failed.num_alike) < num_max:
        return
    else:
        what = f"the first {num:,} samples all failed with the same kind of error"
    remedy = "fix the cause, then run the command again"
    if folder is not None:
        run = shown(folder)
        remedy = (
            f"fix the cause, then resume with `rollmesh train {run}`; `rollmesh dead replay {run} --all` retries "
            "the tasks"
        )
    raise AllFailed(f"{what}: {failure_text(failed)}\n{remedy}", run=state.run)


def failure_text(failed: run_pb2.FailedAttempts) -> str:
    """Return the newest cause with its traceback."""
    return f"{failed.cause}\n{failed.traceback}" if failed.traceback else failed.cause
