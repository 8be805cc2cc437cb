"""The rules that submitted tasks and submitted samples share: a key has one content, a run that has ended takes no
more, and quotas bound what waits and what the run gets in total."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from rollmesh.services.coordinator.core.decision_context import DecisionContext
from rollmesh.services.coordinator.core.inputs import SubmissionLimits
from rollmesh.shared.errors import RunEnded, SampleConflict, SampleQuota, TaskConflict, TaskQuota

T = TypeVar("T")
RETRY_AFTER_S = 1.0


class Amount(NamedTuple):
    """A number of tasks or groups, and their bytes."""

    num: int
    num_bytes: int

    def may_wait(self, limits: SubmissionLimits) -> bool:
        return self.num <= limits.waiting_max and self.num_bytes <= limits.waiting_bytes_max


class Submitted(NamedTuple):
    """A kind of submission, by its names in errors, in metadata, and in the settings `coordinator.run.SECTION`."""

    unit: str
    what: str
    key: str
    section: str
    waiting: str
    conflict: type[TaskConflict | SampleConflict]
    quota: type[TaskQuota | SampleQuota]

    def new(
        self, given: Iterable[T], known: Mapping[str, str], key_of: Callable[[T], str], digest_of: Callable[[T], str]
    ) -> list[T]:
        """Return those whose key is not among the `known` digests. Raises `conflict` for another content of one."""
        found = []
        for one in given:
            if (key := key_of(one)) not in known:
                found.append(one)
            elif known[key] != digest_of(one):
                metadata: dict[str, Any] = {self.key.partition(".")[0]: key}
                raise self.conflict(
                    f"{self.unit} `{key}` was submitted before with other content; send the same content, or choose "
                    f"another `{self.key}`",
                    **metadata,
                )
        return found

    def check_open(self, ctx: DecisionContext) -> None:
        if why := ctx.state.ended or ctx.state.stopping:
            raise RunEnded(f"run {ctx.spec.run} has ended: {why}; it takes no further {self.what}")

    def check_quota(
        self, run: str, limits: SubmissionLimits, new: Amount, waiting: Amount, num_total: int, to_store: int
    ) -> None:
        """Check what a call adds. `to_store` is the room of the ledger that it needs, bytes. Raises `quota`, with a
        time to retry if others make room when they are admitted."""
        unit, wait, section = f"{self.unit}s", self.waiting, f"coordinator.run.{self.section}"
        most = f"{limits.waiting_max} {self.what} with {limits.waiting_bytes_max} bytes"
        settings = f"`{section}.{wait}_max`, `{wait}_bytes_max`"
        num, then = num_total + new.num, Amount(waiting.num + new.num, waiting.num_bytes + new.num_bytes)
        metadata: dict[str, Any]
        if to_store > limits.ledger_bytes_left:
            message = (
                f"the ledger of run {run} has room for {max(0, limits.ledger_bytes_left)} bytes of {self.what}, and "
                f"with this call they need {to_store}; create another run for further ones, or raise "
                "`coordinator.streams.ledger_bytes_max` and resume the run"
            )
            metadata = {"ledger_bytes_left": limits.ledger_bytes_left}
        elif num > limits.total_max:
            message = (
                f"the run may get at most {limits.total_max} {self.what} (`{section}.{unit}_max`), and with this call "
                f"it would have {num}; create another run for further ones, or raise the limit"
            )
            metadata = {f"{unit}_max": limits.total_max}
        elif not new.may_wait(limits):
            message = (
                f"{new.num} {self.what} with {new.num_bytes} bytes can never wait for admission together, because at "
                f"most {most} may ({settings}); submit at most that many per call, or raise the limits"
            )
            metadata = {f"{unit}_per_call": limits.waiting_max, "bytes_per_call": limits.waiting_bytes_max}
        elif not then.may_wait(limits):
            message = (
                f"at most {most} may wait for admission ({settings}), and with this call {then.num} with "
                f"{then.num_bytes} bytes would wait; submit them after others were admitted, or raise the limits"
            )
            metadata = {f"{wait}_max": limits.waiting_max, f"{wait}_bytes_max": limits.waiting_bytes_max}
            metadata["retry_after_s"] = RETRY_AFTER_S
        else:
            return
        raise self.quota(message, **metadata)


TASKS = Submitted("task", "tasks", "task_id", "submitted", "open", TaskConflict, TaskQuota)
SAMPLES = Submitted(
    "group", "groups of submitted samples", "key.group", "samples", "waiting", SampleConflict, SampleQuota
)
