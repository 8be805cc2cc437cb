"""Private extras of a task at a worker: the values of one episode, and the error of a task that lacks one.

An agent declares the names that it reads, and `rollout.private_extras` permits them (`agent.permitted_extras`). The
worker requests the values from the data service before INIT. In an evaluation, which must not depend on a solution, it
requests only those that the agent declares to be a part of the environment. They are only in the memory of the episode:
no segment, tool call, report or log line has them unless the agent writes them there.
"""

from __future__ import annotations

from collections.abc import Mapping

from rollmesh.services.rollout.agent_types import Task
from rollmesh.shared.errors import InvalidInput, PermissionDenied


class PrivateExtras:
    """The private extras of the task of an episode that its agent may read. Its repr has no values."""

    __slots__ = ("_names", "_task", "_values", "_withheld")

    def __init__(
        self, task: Task, names: tuple[str, ...], values: Mapping[str, object], withheld: tuple[str, ...] = ()
    ) -> None:
        """`names` are those that the agent declares, `withheld` those of them that it does not get in an evaluation,
        and `values` has those of the others that the task has. Values of other names cannot be read."""
        self._task, self._names, self._values, self._withheld = task, names, values, withheld

    def read(self, name: str) -> object:
        """Return a value. Raise PermissionDenied for a name that the agent does not declare, and in an evaluation, and
        InvalidInput if the task does not have it."""
        if name not in self._names:
            raise PermissionDenied(
                f"the agent does not declare the private extra `{name}`; add it to `private_extras` of its class and "
                "to rollout.private_extras"
            )
        if name in self._withheld:
            raise PermissionDenied(
                f"an evaluation has no private extras, because its result must not depend on a solution; read `{name}` "
                "only if `env.purpose` is not EVAL, or make it a public extra; if it is a part of the environment, add "
                "it to `environment_extras` of the class of the agent"
            )
        if name not in self._values:
            raise InvalidInput(missing_extra_error(self._task.task_id, self._task.labels, name))
        return self._values[name]

    def text(self, name: str) -> str:
        """Return a value that is a text; empty for null. Raise as `read`, and InvalidInput for another value."""
        value = self.read(name)
        if value is not None and not isinstance(value, str):
            raise InvalidInput(
                f"the private extra `{name}` of the task {self._task.task_id} must be a text or null for its agent, "
                f"got a {type(value).__name__}"
            )
        return value or ""


def missing_extra_error(task_id: str, labels: Mapping[str, str], name: str) -> str:
    """Return the error of a task that has no private extra `name`, with the remedy."""
    remedy = "name its field in data.source.options.private_extras"
    if name in labels:
        remedy += f", and remove the label `{name}`, which every process of the run can read"
    return f"the task {task_id} has no private extra `{name}`; {remedy}"
