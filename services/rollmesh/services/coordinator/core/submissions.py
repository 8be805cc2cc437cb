"""Decide on tasks that clients submit. They wait in the state until admission has room, and are drawn once, in order.

A task id is the key of a submission: the state keeps a digest of the content of every submitted task, so a repeated
call adds nothing, and another content is rejected. The fact that adds a task also has its answer key, and is the only
place of it: the state keeps the public parts of waiting tasks alone.
"""

from __future__ import annotations

from msgspec.structs import replace

from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core import messages as m
from rollmesh.services.coordinator.core.decision_context import DecisionContext
from rollmesh.services.coordinator.core.facts import AnswerKey, Task
from rollmesh.services.coordinator.core.state import (
    SUBMITTED_SCHEME,
    GroupPhase,
    State,
    key_bytes,
    submitted_digest,
    task_bytes,
)
from rollmesh.shared.domain.text import count_of
from rollmesh.shared.errors import RunEnded, TaskConflict, TaskQuota, TasksNotAccepted

RETRY_AFTER_S = 1.0


def submit(ctx: DecisionContext, request: i.SubmitTasks) -> None:
    """Add the tasks that are new. A rejected request adds none."""
    state, spec = ctx.state, ctx.spec
    if not spec.submitted_tasks:
        raise TasksNotAccepted(
            f"run {spec.run} draws its tasks from the data service; create a run with `submitted_tasks: true`"
        )
    keys = {key.task_id: key for key in request.answer_keys}
    new = [task for task in request.tasks if not _is_known(state, task, keys.get(task.task_id))]
    with_key = [keys[task.task_id] for task in new if task.task_id in keys]
    if new:
        _check_open(ctx)
        _check_quota(state, new, with_key, request)
    finish = request.finish and not state.submitted_finished and not state.ended
    if new or finish:
        tasks = tuple(
            with_reference(task, spec.run, request.submission) if task.task_id in keys else task for task in new
        )
        ctx.emit(
            f.TasksSubmitted(submission=request.submission, tasks=tasks, answer_keys=tuple(with_key), finish=finish)
        )
    ctx.reply(request, m.SubmitTasksResponse(num_added=len(new), submitted=submitted_tasks(state)))


def submitted_tasks(state: State) -> m.SubmittedTasks:
    """Return the numbers of submitted tasks."""
    num_open = len(state.submitted_open)
    drawn = len(state.training_groups(GroupPhase.OPEN, GroupPhase.FINALIZING))
    return m.SubmittedTasks(
        open=num_open,
        drawn=drawn,
        answered=max(0, len(state.submitted) - num_open - drawn),
        finished=state.submitted_finished,
    )


def why_no_task(state: State) -> str:
    """Return why no submitted task is drawn, for display."""
    if state.submitted_open:
        return f"the next draw: {count_of(len(state.submitted_open), 'submitted task')} open"
    num = count_of(len(state.submitted), "submitted task")
    if state.submitted_finished:
        return f"nothing: all of {num} are drawn, and no further ones follow"
    return f"a client that submits tasks (SubmitTasks): all of {num} are drawn"


def _is_known(state: State, task: Task, key: AnswerKey | None) -> bool:
    """Return whether the task was submitted before. Raises TaskConflict if its content was another one."""
    known = state.submitted.get(task.task_id)
    if known is None:
        return False
    if known != submitted_digest(task, key):
        raise TaskConflict(
            f"task `{task.task_id}` was submitted before with other content; send the same content, or choose another "
            "`task_id`",
            task_id=task.task_id,
        )
    return True


def _check_open(ctx: DecisionContext) -> None:
    state = ctx.state
    if state.ended or state.stopping:
        raise RunEnded(f"run {ctx.spec.run} has ended: {state.ended or state.stopping}; it takes no further task")
    if state.submitted_finished:
        raise TasksNotAccepted(
            f"a client has declared that no further tasks follow in run {ctx.spec.run} (`finish`); create another run "
            "for further tasks"
        )


def _check_quota(state: State, new: list[Task], keys: list[AnswerKey], request: i.SubmitTasks) -> None:
    num, num_open = len(state.submitted) + len(new), len(state.submitted_open) + len(new)
    of_call = sum(map(task_bytes, new)) + sum(map(key_bytes, keys))
    num_bytes = state.submitted_open_bytes + of_call
    to_store = num_bytes + sum(map(task_bytes, new))  # the ledger has each task again with its group
    if to_store > request.limits.ledger_bytes_left:
        raise TaskQuota(
            f"the ledger of run {state.the_spec.run} has room for {max(0, request.limits.ledger_bytes_left)} bytes of "
            f"submitted tasks, and with this call they need {to_store}; create another run for further tasks, or raise "
            "`coordinator.streams.ledger_bytes_max` and resume the run",
            ledger_bytes_left=request.limits.ledger_bytes_left,
        )
    if num > request.limits.tasks_max:
        raise TaskQuota(
            f"the run may get at most {request.limits.tasks_max} tasks (`coordinator.run.submitted.tasks_max`), and "
            f"with this call it would have {num}; create another run for further tasks, or raise the limit",
            tasks_max=request.limits.tasks_max,
        )
    if len(new) > request.limits.open_max or of_call > request.limits.open_bytes_max:
        raise TaskQuota(
            f"{len(new)} tasks with {of_call} bytes can never wait for admission together, because at most "
            f"{request.limits.open_max} with {request.limits.open_bytes_max} bytes may "
            "(`coordinator.run.submitted.open_max`, `open_bytes_max`); submit at most that many per call, or raise the "
            "limits",
            tasks_per_call=request.limits.open_max,
            bytes_per_call=request.limits.open_bytes_max,
        )
    if num_open > request.limits.open_max or num_bytes > request.limits.open_bytes_max:
        raise TaskQuota(
            f"at most {request.limits.open_max} tasks with {request.limits.open_bytes_max} bytes may wait for "
            "admission (`coordinator.run.submitted.open_max`, `open_bytes_max`), and with this call "
            f"{num_open} with {num_bytes} bytes would wait; submit them after others were drawn, or raise the limits",
            retry_after_s=RETRY_AFTER_S,
            open_max=request.limits.open_max,
            open_bytes_max=request.limits.open_bytes_max,
        )


def with_reference(task: Task, run: str, submission: str) -> Task:
    """Return a task whose oracle reference names its answer key in this submission."""
    return replace(task, oracle_ref=f"{SUBMITTED_SCHEME}:{run}/{submission}/{task.task_id}")
