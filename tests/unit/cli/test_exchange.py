"""What ends an exchange, and what it survives: rejected groups, and a queue that stays full."""

from __future__ import annotations

from typing import Any

import pytest

from rollmesh.app.exchange import REJECTIONS_MAX, Exchange
from rollmesh.app.mesh_client import MeshAddress
from rollmesh.app.shared_rollouts import FinishedGroup, Selection
from rollmesh.services.coordinator.core.facts import Task
from rollmesh.shared.clock import ManualClock
from rollmesh.shared.errors import InvalidInput, MeshError, PayloadTooLarge, SampleQuota
from rollmesh.shared.net.retry import RetryConfig
from rollmesh.shared.rpc.access import Access
from rollmesh.v1 import types_pb2


class Target:
    """A run that gives these answers, one per call."""

    def __init__(self, *answers: MeshError | None) -> None:
        self._answers = list(answers)

    async def submit_samples(self, *_: Any, **__: Any) -> None:
        if (error := self._answers.pop(0)) is not None:
            raise error


def exchange() -> Exchange:
    layout: Any = None
    made = Exchange(
        source=layout,
        run="north",
        target=MeshAddress(address="localhost:1", access=Access(token="t")),
        to_run="south",
        selection=Selection(),
        mesh="north",
        per_minute=float("inf"),
        retry=RetryConfig(retry_s=10.0, call_s=1.0),
        clock=ManualClock(),
    )
    rewards = {"a": {"correct": 0.0}, "b": {"correct": 1.0}}
    made._pending = [FinishedGroup("g0", Task(task_id="t"), None, rewards=rewards)]
    made._groups.success_reward = "correct"
    return made


async def give(made: Exchange, *answers: MeshError | None) -> None:
    async def read(key: str) -> list[types_pb2.Episode]:
        return [types_pb2.Episode()]

    target: Any = Target(*answers)
    for _ in answers:
        await made._give(target, read)


@pytest.mark.parametrize(
    "error", [InvalidInput("x"), PayloadTooLarge("x"), SampleQuota("x", groups_per_call=1, bytes_per_call=1)]
)
async def test_rejected_groups_end_an_exchange_only_if_none_between_them_is_accepted(error: MeshError) -> None:
    made, few = exchange(), [error] * (REJECTIONS_MAX - 1)
    await give(made, *few, None, *few)
    assert (made.summary.rejected, made.summary.shared) == (2 * len(few), 1)
    with pytest.raises(type(error)):
        await give(made, error)


async def test_a_final_quota_ends_an_exchange() -> None:
    with pytest.raises(SampleQuota):
        await give(exchange(), SampleQuota("x", groups_max=1))


async def test_a_full_queue_does_not_end_an_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    made = exchange()
    clock: Any = made.clock
    num = 0

    async def session(_: Any) -> None:
        nonlocal num
        num += 1
        clock.advance(made.retry.retry_s * 2)
        if num < 5:
            raise SampleQuota("full", retry_after_s=1.0)
        made.summary.ended = "done"

    async def no_pause(_: float) -> None:
        pass

    monkeypatch.setattr(made, "_session", session)
    monkeypatch.setattr(clock, "sleep", no_pause)
    await made._forever()
    assert (made.summary.retries, made.summary.ended) == (4, "done")
