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
from rollmesh.services.coordinator.core.facts import Task
from rollmesh.services.coordinator.core.state import (
    SUBMITTED_SCHEME,
    GroupPhase,
    State,
    key_bytes,
    submitted_digest,
    task_bytes,
)
from rollmesh.services.coordinator.core.submitted import TASKS, Amount
from rollmesh.shared.domain.text import count_of
from rollmesh.shared.errors import TasksNotAccepted


def submit(ctx: DecisionContext, request: i.SubmitTasks) -> None:
    """Add the tasks that are new. A rejected request adds none."""
    state, spec = ctx.state, ctx.spec
    if not spec.submitted_tasks:
        raise TasksNotAccepted(
            f"run {spec.run} draws its tasks from the data service; create a run with `submitted_tasks: true`"
        )
    keys = {key.task_id: key for key in request.answer_keys}
    new = TASKS.new(
        request.tasks, state.submitted, lambda t: t.task_id, lambda t: submitted_digest(t, keys.get(t.task_id))
    )
    with_key = [keys[task.task_id] for task in new if task.task_id in keys]
    if new:
        TASKS.check_open(ctx)
        if state.submitted_finished:
            raise TasksNotAccepted(
                f"a client has declared that no further tasks follow in run {spec.run} (`finish`); create another run "
                "for further tasks"
            )
        of_tasks, of_keys = sum(map(task_bytes, new)), sum(map(key_bytes, with_key))
        waiting = Amount(len(state.submitted_open), state.submitted_open_bytes)
        to_store = waiting.num_bytes + 2 * of_tasks + of_keys  # the ledger has each task again with its group
        of_call = Amount(len(new), of_tasks + of_keys)
        TASKS.check_quota(spec.run, request.limits, of_call, waiting, len(state.submitted), to_store)
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


def with_reference(task: Task, run: str, submission: str) -> Task:
    """Return a task whose oracle reference names its answer key in this submission."""
    return replace(task, oracle_ref=f"{SUBMITTED_SCHEME}:{run}/{submission}/{task.task_id}")
