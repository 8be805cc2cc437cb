"""Real processes, ended by SIGKILL at named moments and at random ones, each started again at once
(docs/reliability.md).

The suite soak runs these; the default suite one lost checkpoint, and in test_round.py a short round of a demo run.
"""

from __future__ import annotations

import shutil
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rollmesh.shared.rpc.channel import open_channel
from rollmesh.v1 import coordinator_pb2, run_pb2, run_pb2_grpc

from ..integration.coordinator_mesh import eventually
from .verdict import Verdict, settle
from .world import HOSTS, LEARNER_APART, World, mesh_config, save_model_folder, world

ENGINE = "tests.chaos.engine:TrappedEngine"
START_S = 90.0
STEP_S = 90.0
FENCING_AND_EXPIRY = ("FENCED", "LEASE_EXPIRED", "UNKNOWN_LEASE")


@dataclass(frozen=True)
class Kill:
    """Kills a process once `update` is committed: at a fault point, or at any point of the host."""

    update: int
    moment: str = ""
    host: str = ""
    after: int = 0
    """Number of passes of the fault point before the kill."""

    @property
    def name(self) -> str:
        return self.moment or self.host


ROUND = (
    Kill(2, "rollout-stored", after=40),
    Kill(5, "inference-generating", after=30),
    Kill(8, "learner-committed"),
    Kill(12, host="coordinator"),
)
EVERY_MOMENT = (
    Kill(3, "rollout-leased", after=10),
    Kill(6, "rollout-generating", after=70),
    Kill(9, "rollout-stored", after=50),
    Kill(12, "inference-generating", after=99),
    Kill(15, "learner-leased"),
    Kill(18, host="coordinator"),
    Kill(22, "learner-mid_fetch"),
    Kill(26, "learner-stepped"),
    Kill(30, host="nats"),
    Kill(34, "learner-committed"),
    Kill(38, "learner-saving"),
    Kill(42, "learner-mid_checkpoint"),
    Kill(46, host="coordinator"),
    Kill(50, "learner-checkpointed"),
    Kill(54, "learner-published"),
    Kill(58, host="services"),
    Kill(62, host="nats"),
    Kill(66, host="gateway"),
    Kill(70, "learner-committed", after=1),
    Kill(74, "rollout-stored", after=7),
    Kill(78, "inference-generating", after=11),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model_folder(tmp_path_factory.mktemp("model"))


def policy(state: run_pb2.RunState) -> run_pb2.PolicyState:
    return state.policies[0] if state.policies else run_pb2.PolicyState()


async def begun(mesh: World) -> run_pb2.RunState:
    return await mesh.until_state("the first update", lambda s: policy(s).applied_step >= 1, limit_s=START_S)


async def carry_out(mesh: World, kill: Kill) -> None:
    """Kill, and wait until the host runs again and the run has progressed."""
    await mesh.until_state(
        f"update {kill.update} for {kill.name}", lambda s: policy(s).applied_step >= kill.update, limit_s=STEP_S
    )
    pid = await _hit(mesh, kill)
    await mesh.until(
        f"{kill.name} is replaced",
        lambda: pid not in mesh.pids.values() and len(mesh.pids) == len(HOSTS),
        limit_s=STEP_S,
    )


async def _hit(mesh: World, kill: Kill) -> int:
    if kill.host == "nats":
        mesh.kill_nats_server()
        return mesh.pids["nats"]
    if kill.host:
        return mesh.kill(kill.host)
    mesh.traps.clear(kill.moment)
    mesh.traps.arm(kill.moment, after=kill.after)
    await mesh.until(
        f"a process passes {kill.moment}", lambda: mesh.traps.victim(kill.moment) is not None, limit_s=STEP_S
    )
    victim = mesh.traps.victim(kill.moment)
    assert victim is not None
    return victim


async def survive(folder: Path, model: Path, kills: Sequence[Kill], **run: Any) -> tuple[Verdict, World]:
    config = mesh_config(model, engine=ENGINE, **run)
    async with world(folder, config) as mesh:
        await begun(mesh)
        for kill in kills:
            await carry_out(mesh, kill)
        verdict = await settle(mesh, updates=run["updates_max"], limit_s=240.0)
    killed = Counter(host for host, code in mesh.exits if code == -signal.SIGKILL)
    for host in HOSTS:
        expected = sum(k.host == host or k.moment.startswith(f"{host.partition('-')[0]}-") for k in kills)
        together = sum(num for name, num in killed.items() if name.partition("-")[0] == host.partition("-")[0])
        assert together == (0 if host == "nats" else expected), mesh.exits  # its host exits by itself
    return verdict, mesh


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_round_with_kills_is_conserved_once_and_within_the_bound(tmp_path: Path, model: Path) -> None:
    verdict, _ = await survive(tmp_path, model, ROUND, updates_max=24)
    assert verdict.audit.samples.trained > 0.9 * 24 * 64
    assert verdict.audit.updates_undone >= 1
    assert verdict.audit.samples.failed == 0


@pytest.mark.slow
@pytest.mark.timeout(1500)
async def test_ten_thousand_samples_with_kills_at_every_moment(tmp_path: Path, model: Path) -> None:
    verdict, mesh = await survive(tmp_path, model, EVERY_MOMENT, updates_max=86, batch_groups=16)
    assert verdict.audit.samples.trained >= 10_000
    print(
        verdict.audit.to_text(),
        verdict.audit.reasons,
        f"lags by payload: {verdict.lags}",
        f"exits: {mesh.exits}",
        sep="\n",
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_learner_paused_beyond_its_lease_trains_nothing_twice(tmp_path: Path, model: Path) -> None:
    """Once without a replacement, once with another trainer attached meanwhile."""
    config = mesh_config(model, updates_max=14, batch_lease_s=2.0)
    async with world(tmp_path, config, LEARNER_APART) as mesh:
        await begun(mesh)
        for attach_another in (False, True):
            pid = await pause(mesh, "learner-stepped")
            held = await mesh.until_state("its batch is in doubt", in_doubt, limit_s=STEP_S)
            if attach_another:
                await attach(mesh, held)
            mesh.resume(pid)
            await attached_since(mesh, epoch(held) + attach_another)
        await settle(mesh, updates=14, limit_s=STEP_S)
    assert mesh.exits == [("learner", 0)], "the same process all the time"
    log = (mesh.layout.run_dir / "logs/learner.log").read_text()
    returns = [line for line in log.splitlines() if "back to the newest checkpoint" in line]
    assert len(returns) == 2
    assert all(any(reason in line for reason in FENCING_AND_EXPIRY) for line in returns), returns
    assert "FENCED" in returns[1]


@pytest.mark.timeout(300)
async def test_a_learner_that_lost_its_newest_checkpoint_rolls_back_and_the_nodes_follow(
    tmp_path: Path, model: Path
) -> None:
    async with world(tmp_path, mesh_config(model, updates_max=14), LEARNER_APART) as mesh:
        await mesh.until_state(
            "a first checkpoint is behind it", lambda s: policy(s).applied_step >= 4, limit_s=START_S
        )
        pid = await pause(mesh, "learner-checkpointed")
        before = await mesh.until_state("it is reported", lambda s: policy(s).checkpoint_update >= 6, limit_s=STEP_S)
        lost = max((mesh.layout.run_dir / "checkpoints").glob("update-*"))
        shutil.rmtree(lost)
        assert mesh.kill("learner") == pid
        after = await mesh.until_state("it rolls back", lambda s: policy(s).incarnation == 1, limit_s=STEP_S)
        assert epoch(after) > epoch(before)
        await mesh.until_state(
            "it gets beyond what was lost",
            lambda s: policy(s).applied_step > policy(before).applied_step,
            limit_s=STEP_S,
        )

        async def follow() -> bool:
            active = [n.active for n in await mesh.fleet() if n.kind == coordinator_pb2.NODE_KIND_INFERENCE]
            return [version.incarnation for version in active] == [1, 1]

        await eventually(follow, STEP_S)
        verdict = await settle(mesh, updates=14, limit_s=STEP_S)
    assert verdict.audit.updates_undone >= 3
    assert verdict.audit.samples.stale >= 3 * 64, "what only the lost checkpoint was trained on is gone with it"
    assert [line.incarnation for line in verdict.trained] == sorted(line.incarnation for line in verdict.trained)
    assert verdict.trained[-1].incarnation == 1


def epoch(state: run_pb2.RunState) -> int:
    return policy(state).trainer_epoch


def in_doubt(state: run_pb2.RunState) -> bool:
    return policy(state).groups.get("in_doubt", 0) > 0


async def attached_since(mesh: World, trainer_epoch: int) -> None:
    await mesh.until_state("the learner attaches", lambda s: epoch(s) > trainer_epoch, limit_s=STEP_S)


async def pause(mesh: World, moment: str) -> int:
    """Stop the process that passes `moment` next, as closing a laptop does."""
    mesh.traps.clear(moment)
    mesh.traps.arm(moment, signal_number=signal.SIGSTOP)
    await mesh.until(f"a process passes {moment}", lambda: mesh.traps.victim(moment) is not None, limit_s=STEP_S)
    victim = mesh.traps.victim(moment)
    assert victim is not None
    return victim


async def attach(mesh: World, state: run_pb2.RunState) -> None:
    """Attach another trainer, with weights that contain all committed updates, which does not train."""
    held = policy(state)
    request = run_pb2.AttachTrainerRequest(
        run=state.run, last_update=held.applied_step, digest=held.digest, holder="another"
    )
    async with open_channel(mesh.layout.gateway, access=mesh.layout.access) as channel:
        stub: Any = run_pb2_grpc.RunServiceStub(channel)
        await stub.AttachTrainer(request, timeout=10.0)
