"""The worker against a local mesh: leases, cancellation at every stage, and a coordinator that goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from rollmesh.services.rollout.config import LimitsConfig, RolloutConfig, StagesConfig, WorkerConfig
from rollmesh.services.rollout.worker import RolloutWorker
from rollmesh.shared.clock import ManualClock
from rollmesh.shared.errors import Draining, FailedPrecondition, Unavailable
from rollmesh.testing.rollout import Gate, LocalMesh, lease
from rollmesh.v1 import coordinator_pb2

COMPLETED = coordinator_pb2.EPISODE_OUTCOME_COMPLETED
INFRA_FAILURE = coordinator_pb2.EPISODE_OUTCOME_INFRA_FAILURE
CANCELLED = coordinator_pb2.EPISODE_OUTCOME_CANCELLED

AWAY = Unavailable("coordinator restarts")


def one_call(text: str) -> str:
    return "<answer>2</answer><|end|>" if "<|tool|>" in text else "<tool_call>1+1</tool_call><|end|>"


def local_mesh(num: int, config: RolloutConfig | None = None, **kwargs: float) -> LocalMesh:
    leases = [lease(lease_id=f"l{i}", tools=["calculator"], **kwargs) for i in range(num)]  # type: ignore[arg-type]
    return LocalMesh(
        script=one_call,
        functions={"call": lambda text: "2"},
        leases=leases,
        config=config or RolloutConfig(),
        clock=ManualClock(),
    )


@asynccontextmanager
async def running(mesh: LocalMesh) -> AsyncIterator[RolloutWorker]:
    """A worker at work; cancelled and gone at the end."""
    worker = mesh.worker()
    task = asyncio.ensure_future(worker.run())
    try:
        yield worker
    finally:
        task.cancel()
        await asyncio.wait([task])
        check_accounts(mesh, worker)


async def until(mesh: LocalMesh, condition: Callable[[], object], *, limit_s: float = 600.0) -> None:
    """Lets tasks run, and time pass while none can, until `condition` holds."""
    clock = mesh.clock
    assert isinstance(clock, ManualClock)
    end_s = clock.monotonic_s() + limit_s
    while not condition():
        for _ in range(25):
            await asyncio.sleep(0)
            if condition():
                return
        step_s = clock.next_deadline_s() - clock.monotonic_s()
        assert clock.monotonic_s() + step_s < end_s, "the condition never held"
        clock.advance(step_s)


def check_accounts(mesh: LocalMesh, worker: RolloutWorker) -> None:
    counts = mesh.progress
    ended = counts.num_completed + counts.num_failed + counts.num_cancelled + counts.num_lost
    assert counts.num_leased == ended + worker.num_running


async def test_worker_runs_every_lease_and_reports_payload_first() -> None:
    mesh = local_mesh(20)
    async with running(mesh):
        await until(mesh, lambda: len(mesh.coordinator.reports) == 20)
    assert {report.outcome for report in mesh.coordinator.reports} == {COMPLETED}
    assert sorted(report.payload.sequence for report in mesh.coordinator.reports) == list(range(1, 21))
    assert not mesh.coordinator.live
    for report in mesh.coordinator.reports:
        episode = mesh.samples.episodes[report.payload.sequence - 1]
        assert episode.key.episode == report.key.episode
        assert [m.sample_id for m in report.samples] == [s.sample_id for s in episode.samples]
        assert report.payload.size_bytes == len(mesh.samples.payloads[report.payload.sequence - 1])
        assert {"init", "run", "generate", "tool"} <= set(episode.stage_s)


async def test_episodes_that_end_together_are_reported_together() -> None:
    mesh = local_mesh(50)
    async with running(mesh):
        await until(mesh, lambda: len(mesh.coordinator.reports) == 50)
    assert len(mesh.coordinator.report_sizes) <= 3


async def test_worker_asks_only_for_free_places() -> None:
    config = RolloutConfig(worker=WorkerConfig(episodes_max=4))
    mesh = local_mesh(10, config)
    mesh.generator.gate.held = True
    async with running(mesh) as worker:
        await until(mesh, lambda: mesh.generator.gate.num_inside == 4)
        assert (mesh.coordinator.asked_for, worker.num_running) == ([4], 4)
        worker.cancel(["l0"])
        await until(mesh, lambda: mesh.coordinator.asked_for == [4, 1])
        assert worker.num_running == 4


async def test_each_stage_has_its_own_places() -> None:
    config = RolloutConfig(stages=StagesConfig(init_max=2, run_max=5, score_max=3))
    mesh = local_mesh(30, config)
    for stage, gate, most in (
        ("init", mesh.sandbox.opening, 2),
        ("run", mesh.generator.gate, 5),
        ("score", mesh.scorer.gate, 3),
    ):
        gate.held = True
        async with running(mesh):
            await until(mesh, lambda gate=gate, most=most: gate.num_inside == most)  # type: ignore[misc]
            await mesh.clock.run_for(1.0)  # type: ignore[attr-defined]
            assert gate.num_inside == most, stage
        gate.held = False
        mesh.coordinator.waiting = [lease(lease_id=f"{stage}{i}", tools=["calculator"]) for i in range(30)]


GATES: dict[str, Callable[[LocalMesh], Gate]] = {
    "opening a session": lambda mesh: mesh.sandbox.opening,
    "generating": lambda mesh: mesh.generator.gate,
    "calling a tool": lambda mesh: mesh.sandbox.calling,
    "scoring": lambda mesh: mesh.scorer.gate,
    "appending": lambda mesh: mesh.samples.gate,
}


@pytest.mark.parametrize("where", GATES)
async def test_stopping_leaves_nothing_behind_and_gives_leases_back(where: str) -> None:
    mesh = local_mesh(8)
    gate = GATES[where](mesh)
    gate.held = True
    async with running(mesh):
        await until(mesh, lambda: gate.num_inside == 8)
    assert mesh.num_open == 0
    assert not mesh.coordinator.live
    assert [report.outcome for report in mesh.coordinator.reports] == [CANCELLED] * 8
    assert mesh.progress.num_cancelled == 8


@pytest.mark.parametrize("where", GATES)
async def test_a_gone_lease_ends_its_episode_wherever_it_is(where: str) -> None:
    mesh = local_mesh(3)
    gate = GATES[where](mesh)
    gate.held = True
    async with running(mesh) as worker:
        await until(mesh, lambda: gate.num_inside == 3)
        mesh.coordinator.gone = {"l1"}
        await until(mesh, lambda: worker.num_running == 2)
        assert gate.num_inside == 2
        assert mesh.coordinator.live.keys() == {"l0", "l2"}
        assert not mesh.coordinator.reports
    assert mesh.progress.num_lost == 1


async def test_a_finished_episode_is_delivered_when_the_worker_stops_before_the_acknowledgement() -> None:
    mesh = local_mesh(1)
    async with running(mesh):
        await until(mesh, lambda: mesh.coordinator.live)
        mesh.coordinator.away = AWAY
        await until(mesh, lambda: mesh.samples.payloads)
        await mesh.clock.run_for(1.0)  # type: ignore[attr-defined]
        mesh.coordinator.away = None
    assert [report.outcome for report in mesh.coordinator.reports] == [COMPLETED]


async def test_leases_are_renewed_together_within_a_third_of_their_term() -> None:
    mesh = local_mesh(5, lease_s=9.0)
    mesh.generator.gate.held = True
    async with running(mesh):
        await until(mesh, lambda: mesh.generator.gate.num_inside == 5)
        await mesh.clock.run_for(9.5)  # type: ignore[attr-defined]
    assert [len(ids) for ids in mesh.coordinator.renewals] == [5, 5, 5]


async def test_a_shorter_lease_brings_renewal_forward() -> None:
    mesh = local_mesh(1, lease_s=30.0)
    mesh.generator.gate.held = True
    async with running(mesh):
        await until(mesh, lambda: mesh.generator.gate.num_inside == 1)
        mesh.coordinator.waiting = [lease(lease_id="short", tools=["calculator"], lease_s=3.0)]
        await until(mesh, lambda: mesh.generator.gate.num_inside == 2, limit_s=30)
        start_s = mesh.clock.monotonic_s()
        await until(mesh, lambda: mesh.coordinator.renewals and "short" in mesh.coordinator.renewals[-1])
        assert mesh.clock.monotonic_s() - start_s <= 1.1


async def test_worker_survives_a_coordinator_that_is_away() -> None:
    mesh = local_mesh(6, RolloutConfig(worker=WorkerConfig(episodes_max=3, acquire_wait_s=1.0)), lease_s=60.0)
    mesh.scorer.gate.held = True
    async with running(mesh) as worker:
        await until(mesh, lambda: mesh.scorer.gate.num_inside == 3)
        mesh.coordinator.away = AWAY
        mesh.scorer.gate.held = False
        worker.cancel(["l0"])
        await mesh.clock.run_for(45.0)  # type: ignore[attr-defined]
        assert "coordinator restarts" in worker.waiting_for
        mesh.coordinator.away = None
        await until(mesh, lambda: mesh.progress.num_completed == 5, limit_s=20)
    assert mesh.progress.num_lost == 1


async def test_a_rejected_report_and_a_dropped_one_count_as_lost() -> None:
    mesh = local_mesh(1)
    mesh.scorer.gate.held = True
    async with running(mesh):
        await until(mesh, lambda: mesh.scorer.gate.num_inside == 1)
        mesh.coordinator.live.clear()
        mesh.scorer.gate.held = False
        await until(mesh, lambda: mesh.coordinator.reports)
        await until(mesh, lambda: mesh.progress.num_lost == 1)
    mesh = local_mesh(1, RolloutConfig(worker=WorkerConfig(give_up_s=5.0)))
    async with running(mesh) as worker:
        await until(mesh, lambda: mesh.coordinator.live)
        mesh.coordinator.away = AWAY
        await until(mesh, lambda: worker.num_running == 0, limit_s=20)
    assert mesh.progress.num_lost == 1


@pytest.mark.parametrize("asked_by", ["command", "refusal"])
async def test_draining_takes_nothing_more_and_ends_with_what_is_held(asked_by: str) -> None:
    mesh = local_mesh(2)
    mesh.scorer.gate.held = True
    worker = mesh.worker()
    task = asyncio.ensure_future(worker.run())
    await until(mesh, lambda: mesh.scorer.gate.num_inside == 2)
    if asked_by == "command":
        worker.drain()
    else:
        mesh.coordinator.draining = Draining("draining")
    await mesh.clock.run_for(11.0)  # type: ignore[attr-defined]
    mesh.coordinator.waiting = [lease(lease_id="late")]
    assert not task.done()
    mesh.scorer.gate.held = False
    await until(mesh, task.done)
    assert [report.outcome for report in mesh.coordinator.reports] == [COMPLETED, COMPLETED]
    assert len(mesh.coordinator.waiting) == 1
    check_accounts(mesh, worker)


async def test_a_refusal_that_cannot_pass_ends_the_worker() -> None:
    mesh = local_mesh(0)
    mesh.coordinator.away = FailedPrecondition("wrong mesh")
    with pytest.raises(FailedPrecondition, match="wrong mesh"):
        await mesh.worker().run()


async def test_a_lease_that_cannot_be_read_is_reported_as_infra_failure() -> None:
    mesh = local_mesh(1)
    mesh.coordinator.waiting[0].ClearField("purpose")
    async with running(mesh):
        await until(mesh, lambda: mesh.coordinator.reports)
    (report,) = mesh.coordinator.reports
    assert (report.outcome, report.lease_id) == (INFRA_FAILURE, "l0")
    assert "does not support purpose 0" in report.failure.message


async def test_time_limits_of_init_and_score_are_infra_and_of_run_the_models() -> None:
    config = RolloutConfig(limits=LimitsConfig(run_s_max=20.0), stages=StagesConfig(init_s_max=10.0, score_s_max=10.0))
    expected: dict[str, tuple[coordinator_pb2.EpisodeOutcome.ValueType, str]] = {
        "opening a session": (INFRA_FAILURE, "init: stage exceeded 10.0 s"),
        "scoring": (INFRA_FAILURE, "score: stage exceeded 10.0 s"),
        "generating": (
            INFRA_FAILURE,
            "inference: no token was sampled before the limit",
        ),  # not one token: nothing is known of the model
        "calling a tool": (COMPLETED, ""),
    }
    for where, (outcome, message) in expected.items():
        mesh = local_mesh(1, config)
        GATES[where](mesh).held = True
        async with running(mesh):
            await until(mesh, lambda mesh=mesh: mesh.coordinator.reports)  # type: ignore[misc]
        (report,) = mesh.coordinator.reports
        assert (report.outcome, report.failure.message.startswith(message)) == (outcome, True), where
        assert mesh.num_open == 0
