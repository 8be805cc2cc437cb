"""The whole mesh in one process, with fake model, trainer and sandbox engine: it ends, outlives its services, and is
asynchronous."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollmesh.mesh import Mesh, MeshConfig
from rollmesh.mesh.mesh import create_run
from rollmesh.mesh.mesh_services import service_names
from rollmesh.services.coordinator.audit import audit_run
from rollmesh.services.coordinator.audit_report import AuditReport
from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.core.facts import Purpose
from rollmesh.services.coordinator.ledger import StoredRecord, read_ledger
from rollmesh.services.learner.config import LearnerConfig
from rollmesh.services.learner.engine import Restored, StepResult
from rollmesh.services.rollout.fault_points import RolloutFaultPoint
from rollmesh.shared.bus.bus import Bus
from rollmesh.shared.bus.jetstream_bus import JetStreamBus
from rollmesh.shared.bus.login import BusLogin
from rollmesh.shared.bus.run_streams import run_streams
from rollmesh.shared.domain.trajectory import GroupContext, Source, TrainingSample
from rollmesh.shared.errors import Fenced, MeshError, Overloaded, Unavailable, UnknownLease
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.rpc.status import typed_errors
from rollmesh.testing import fake_trainer
from rollmesh.v1 import run_pb2, run_pb2_grpc

from ..chaos.world import mesh_config, save_model_folder

LIMIT_S = 60.0
POLL_S = 0.02


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model_folder(tmp_path_factory.mktemp("model"))


def config(model: Path, **run: Any) -> MeshConfig:
    """Four groups of four per update, eta = 2."""
    return mesh_config(model, **({"batch_groups": 4, "group_size": 4, "updates_max": 8} | run))


def policy(state: run_pb2.RunState) -> run_pb2.PolicyState:
    return state.policies[0] if state.policies else run_pb2.PolicyState()


@dataclass
class Operator:
    """Looks at a run through its gateway."""

    mesh: Mesh

    async def call(self, verb: str, request: Any) -> Any:
        async with open_channel(self.mesh.gateway_address, access=self.mesh.access) as channel:
            stub: Any = run_pb2_grpc.RunServiceStub(channel)
            with typed_errors():
                return await getattr(stub, verb)(request, timeout=10.0, wait_for_ready=True)

    async def state(self) -> run_pb2.RunState:
        found: run_pb2.RunState = (await self.call("GetRun", run_pb2.GetRunRequest(run=self.mesh.run))).state
        return found

    async def until(self, condition: Callable[[run_pb2.RunState], bool]) -> run_pb2.RunState:
        """Wait until the state of the run satisfies the condition. Calls during a restart of the coordinator are
        retried."""
        deadline_s, state = time.monotonic() + LIMIT_S, None
        while time.monotonic() < deadline_s:
            with suppress(Unavailable):
                if condition(state := await self.state()):
                    return state
            await asyncio.sleep(POLL_S)
        pytest.fail(f"not within {LIMIT_S} s; the run is in\n{state}")

    async def finished(self) -> None:
        async with asyncio.timeout(LIMIT_S):
            await self.mesh.finished()

    async def audit(self) -> AuditReport:
        bus = await self._bus()
        try:
            return await audit_run(bus, self.mesh.run, checkpoint=self.mesh.layout.run_dir / "checkpoints")
        finally:
            await bus.close()

    async def facts(self) -> list[f.Fact]:
        return [fact for record in await self.records() for fact in record.facts]

    async def records(self) -> list[StoredRecord]:
        bus = await self._bus()
        try:
            log = await bus.open(run_streams(self.mesh.run).ledger.name)
            return [record async for record in read_ledger(log)]
        finally:
            await bus.close()

    async def _bus(self) -> Bus:
        assert self.mesh.nats is not None
        server = await JetStreamBus.connect(self.mesh.nats.url, login=BusLogin.of(self.mesh.access))
        return self.mesh.layout.with_payloads(server)


async def test_a_run_goes_to_its_end_with_evaluations_pinned_and_never_trained_on(tmp_path: Path, model: Path) -> None:
    made = config(model, updates_max=6, eval_every=2, eval_tasks=8)
    async with Mesh(made, run_dir=tmp_path / "run") as mesh:
        operator = Operator(mesh)
        await operator.finished()
        state = await operator.until(lambda s: len(s.evals) == 4 and all(e.complete for e in s.evals))
        report, facts = await operator.audit(), await operator.facts()
    assert state.ended == "UPDATES_MAX"
    assert [result.step for result in state.evals] == [0, 2, 4, 6]
    assert [result.num_samples for result in state.evals] == [8] * 4
    assert report.holds, report.to_text()
    assert report.checkpoint is not None
    assert report.checkpoint.updates == report.updates == 6
    assert report.samples.trained == 6 * 16
    evaluated = {g.group: g.step_min for g in facts if isinstance(g, f.GroupReserved) and g.purpose is Purpose.EVAL}
    scored = [fact for fact in facts if isinstance(fact, f.EpisodeScored) and fact.group in evaluated]
    assert len(scored) == 4 * 8
    assert all({span.step for s in fact.samples for span in s.steps} == {evaluated[fact.group]} for fact in scored)
    leased = {sample for fact in facts if isinstance(fact, f.BatchLeased) for sample in fact.sample_ids}
    assert leased.isdisjoint(s.sample_id for fact in scored for s in fact.samples)


async def test_every_part_may_be_restarted_in_mid_run(tmp_path: Path, model: Path) -> None:
    made = config(model, updates_max=12)
    async with Mesh(made, run_dir=tmp_path / "run") as mesh:
        operator = Operator(mesh)
        for update, name in enumerate(service_names(made), start=1):
            await operator.until(lambda s, k=update: policy(s).applied_step >= min(k, 10))  # type: ignore[misc]
            await mesh.restart(name)
        assert mesh.nats is not None
        await mesh.nats.restart()
        await operator.finished()
        report = await operator.audit()
    assert report.holds, report.to_text()
    assert report.samples.live == 0
    assert report.checkpoint is not None
    assert report.checkpoint.updates == 12


async def test_a_mesh_over_the_same_folder_goes_on_where_the_last_one_was(tmp_path: Path, model: Path) -> None:
    made = config(model)
    async with Mesh(made, run_dir=tmp_path / "run") as mesh:
        address = mesh.gateway_address
        before = await Operator(mesh).until(lambda s: policy(s).checkpoint_update >= 3)
    async with Mesh(made, run_dir=tmp_path / "run") as mesh:
        operator = Operator(mesh)
        assert mesh.gateway_address == address
        assert (await operator.state()).samples.reserved >= before.samples.reserved
        await operator.finished()
        report = await operator.audit()
        state = await operator.state()
    assert report.holds, report.to_text()
    assert report.updates == 8
    assert policy(state).trainer_epoch == 2


async def test_generation_and_training_go_on_without_each_other_as_far_as_the_bound_allows(
    tmp_path: Path, model: Path
) -> None:
    eta, batch = 2, 4
    async with Mesh(config(model, updates_max=0, admit_early=True), run_dir=tmp_path / "run") as mesh:
        operator = Operator(mesh)
        await operator.until(lambda s: policy(s).applied_step >= 2)
        await mesh.service("learner").stop()
        await mesh.stop("learner")
        full = await operator.until(
            lambda s: s.waiting["worker/rollout-0"].startswith("admission:") and not unfinished(s)
        )
        assert sum(policy(full).groups.values()) == (eta + 1) * batch
        await mesh.stop("rollout-0")
        await mesh.start("learner")
        idle = await operator.until(
            lambda s: s.waiting["learner/main"].startswith("READY groups: 0 of 4, 0 on their way")
        )
        assert policy(idle).applied_step == policy(full).applied_step + eta + 1
        assert policy(idle).trained_by_staleness[eta] >= batch * 4, "the last of them is eta behind"
        assert idle.samples.stale == 0
        await mesh.start("rollout-0")
        await operator.until(lambda s: policy(s).applied_step > policy(idle).applied_step)


def unfinished(state: run_pb2.RunState) -> int:
    """Groups that are not generated yet. A batch leased while the learner stopped is generated, and in doubt."""
    return sum(num for phase, num in policy(state).groups.items() if phase not in ("ready", "leased", "in_doubt"))


class Watched(fake_trainer.FakeTrainer):
    """Keeps what it was trained on."""

    seen: dict[int, Sequence[TrainingSample]]

    def update(self, k: int, samples: Sequence[TrainingSample], groups: Sequence[GroupContext]) -> StepResult:
        self.seen[k] = samples
        return super().update(k, samples, groups)


class HoldOne:
    """Holds the first episode that has tokens, until it is let go."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self._held = False

    async def __call__(self, moment: RolloutFaultPoint) -> None:
        if moment is RolloutFaultPoint.GENERATING and not self._held:
            self._held = True
            await self.go.wait()


def watching(seen: dict[int, Sequence[TrainingSample]]) -> Callable[[LearnerConfig], Restored]:
    def open_engine(config: LearnerConfig) -> Restored:
        restored = fake_trainer.FakeTrainer.open(config)
        assert isinstance(restored.engine, fake_trainer.FakeTrainer)
        restored.engine.__class__ = Watched
        restored.engine.seen = seen  # type: ignore[attr-defined]
        return replace(restored)

    return open_engine


@pytest.mark.parametrize("beyond", ["mask", "drop"])
async def test_an_episode_that_others_overtook_is_masked_or_dropped(tmp_path: Path, model: Path, beyond: str) -> None:
    seen: dict[int, Sequence[TrainingSample]] = {}
    hold = HoldOne()
    options: Mapping[str, Mapping[str, Any]] = {
        "rollout-0": {"at": hold},
        "learner": {"open_engine": watching(seen)},
    }
    made = config(model, max_staleness=1, beyond=beyond, updates_max=9, batch_lease_s=30.0, episode_lease_s=30.0)
    async with Mesh(made, run_dir=tmp_path / "run", options=options) as mesh:
        operator = Operator(mesh)
        await operator.until(lambda s: policy(s).published_step >= 4)
        hold.go.set()
        await operator.finished()
        state, report = await operator.state(), await operator.audit()
    assert report.holds, report.to_text()
    assert report.lag_max <= 1
    old = [(k, s) for k, samples in seen.items() for s in samples if _sampled_steps(s)[0] < k - 2]
    if beyond == "drop":
        assert not old
        assert state.samples.reasons["stale/BEYOND_BOUND"] == 4, "it and its siblings, which had waited for it"
        return
    ((k, sample),) = old
    assert _sampled_steps(sample)[0] == 0
    assert min(_trained_steps(sample)) >= k - 2
    assert state.samples.reasons["stale/BEYOND_BOUND"] == 3, "its siblings have no token inside the bound"


def _sampled_steps(sample: TrainingSample) -> list[int]:
    """Steps of its sampled segments, in order."""
    return [s.version.step for s in sample.segments if s.source is Source.POLICY and s.version is not None]


def _trained_steps(sample: TrainingSample) -> list[int]:
    masked = [s for s in sample.segments if s.loss_mask is not None and np.any(s.loss_mask)]
    return [s.version.step for s in masked if s.version is not None]


async def test_an_external_trainer_gets_clear_errors_and_loses_nothing(tmp_path: Path, model: Path) -> None:
    """Run an external trainer over the gateway of a mesh without a learner."""
    services = [name for name in service_names(config(model)) if name != "learner"]
    async with Mesh(config(model), run_dir=tmp_path / "run", services=services) as mesh:
        operator = Operator(mesh)
        await create_run(mesh.layout)
        first = await operator.call("AttachTrainer", run_pb2.AttachTrainerRequest(run=mesh.run))
        second = await operator.call("AttachTrainer", run_pb2.AttachTrainerRequest(run=mesh.run))
        commit = run_pb2.CommitUpdateRequest(run=mesh.run, trainer_epoch=first.trainer_epoch, update=1, lease_ids=["b"])
        commit.outcome = run_pb2.UPDATE_OUTCOME_APPLIED
        assert await refusal(operator, "CommitUpdate", commit) == ("ABORTED", Fenced.reason)
        commit.trainer_epoch = second.trainer_epoch
        assert await refusal(operator, "CommitUpdate", commit) == ("NOT_FOUND", UnknownLease.reason)
        commit.samples.add(sample_id="s", reason="x" * (9 << 20))
        code, _ = await refusal(operator, "CommitUpdate", commit)
        assert code == Overloaded.code.name == "RESOURCE_EXHAUSTED"
        assert policy(await operator.state()).trainer_epoch == second.trainer_epoch


async def refusal(operator: Operator, verb: str, request: Any) -> tuple[str, str]:
    with pytest.raises(MeshError) as caught:
        await operator.call(verb, request)
    return caught.value.code.name, caught.value.reason
