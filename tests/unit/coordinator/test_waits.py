"""The wait chain: the root cause is the component that is missing, without heartbeat or failing, and no other."""

from __future__ import annotations

from typing import Any

import pytest

from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core import messages as m
from rollmesh.services.coordinator.core.decision_context import DecisionContext
from rollmesh.services.coordinator.core.fleet import Fleet, NodeKind, WeightGoal
from rollmesh.services.coordinator.core.waits import Wait, chain, to_text
from rollmesh.shared.domain.versions import PolicyVersion

from .core_run import CoreRun

KINDS = {
    "inference-0": NodeKind.INFERENCE,
    "rollout-0": NodeKind.ROLLOUT,
    "sandbox-0": NodeKind.SANDBOX,
    "reward": NodeKind.REWARD,
    "data": NodeKind.DATA,
    "depot": NodeKind.DEPOT,
    "learner": NodeKind.LEARNER,
}
INITIAL = PolicyVersion(policy="main", step=0, weights_digest="w0.0")


class Scene:
    """A run and a healthy fleet, from which a test removes components."""

    def __init__(self, *, without: str = "", **spec: Any) -> None:
        self.run = CoreRun(**spec)
        self.fleet = Fleet()
        for node_id, kind in KINDS.items():
            if node_id != without:
                active = INITIAL if kind is NodeKind.INFERENCE else None
                self.fleet.joined(node_id=node_id, kind=kind, address="a", capacity=8, runs=(), active=active, now=0.0)
        self.hear()

    def hear(self, **said: dict[str, Any]) -> None:
        """Every node reports except those mapped to None; `rollout_0={"waiting_for": ...}` sets a report."""
        for node_id in self.fleet.nodes:
            words = said.get(node_id.replace("-", "_"), {})
            if words is not None:
                self.fleet.reported(
                    node_id, num_running=0, num_waiting=0, now=self.run.now, **({"waiting_for": ""} | words)
                )
        self.fleet.plan({"r": WeightGoal(versions=[INITIAL])}, self.run.now)

    def pass_time(self, seconds: float, *, silent: str = "", **said: Any) -> None:
        self.run.now += seconds
        self.hear(**(said | ({silent.replace("-", "_"): None} if silent else {})))

    def acquire(self, num: int = 4, node_id: str = "rollout-0") -> i.Acquired:
        acquired: i.Acquired = self.run.ask(i.AcquireRollouts, node_id=node_id, num_max=num, wait_s=1.0)
        return acquired

    def fail(self, leases: tuple[i.EpisodeLease, ...], cause: str) -> None:
        failed = m.EpisodeOutcome.INFRA_FAILURE
        reports = tuple(
            i.EpisodeReport(
                lease_id=x.lease_id, group=x.group, episode=x.episode, attempt=x.attempt, outcome=failed, cause=cause
            )
            for x in leases
        )
        self.run.ask(i.ReportEpisodes, node_id="rollout-0", reports=reports)

    def links(self, reward_error: str = "") -> list[Wait]:
        turn = DecisionContext(self.run.core.state, self.run.core.ephemeral, self.run.now)
        return chain(turn, self.fleet, reward_error)


def test_a_run_without_a_trainer_waits_for_one() -> None:
    scene = Scene(without="learner")
    assert to_text(scene.links()) == "run waits for a trainer to attach; learner is missing: no learner node has joined"


def test_the_chain_goes_through_the_worker_to_a_silent_inference_node() -> None:
    scene = Scene()
    scene.run.begin()
    scene.acquire()
    waits = {
        "waiting_for": "a node that serves main at step 0 or later (4 requests): no node does",
        "waiting_on": NodeKind.INFERENCE,
    }
    scene.pass_time(10.0, silent="inference-0", rollout_0=waits)
    assert to_text(scene.links()) == (
        "learner/main waits for READY groups: 0 of 2, 2 on their way; "
        "rollout-0 waits for a node that serves main at step 0 or later (4 requests): no node does; inference-0 without heartbeat for 10 s"
    )


@pytest.mark.parametrize(
    ("gone", "kind"),
    [("inference-0", NodeKind.INFERENCE), ("sandbox-0", NodeKind.SANDBOX), ("reward", NodeKind.REWARD)],
)
def test_a_service_that_never_came_is_the_root(gone: str, kind: NodeKind) -> None:
    scene = Scene(without=gone)
    scene.run.begin()
    scene.acquire()
    scene.pass_time(1.0, rollout_0={"waiting_for": "a node", "waiting_on": kind})
    name = kind.name.lower()
    assert scene.links()[-1] == Wait(name, f"is missing: no {name} node has joined")


def test_a_dead_node_that_was_forgotten_is_still_named() -> None:
    scene = Scene()
    scene.run.begin()
    scene.acquire()
    for _ in range(20):
        scene.pass_time(10.0, silent="sandbox-0")
    assert "sandbox-0" not in scene.fleet.nodes
    scene.pass_time(0.0, rollout_0={"waiting_for": "a sandbox", "waiting_on": NodeKind.SANDBOX})
    assert scene.links()[-1] == Wait("sandbox-0", "was the last sandbox node and fell silent 200 s ago")


def test_a_silent_worker_is_the_root_whatever_it_said_last() -> None:
    scene = Scene()
    scene.run.begin()
    scene.acquire()
    scene.pass_time(1.0, rollout_0={"waiting_for": "x", "waiting_on": NodeKind.INFERENCE})
    scene.pass_time(6.0, silent="rollout-0")
    assert scene.links()[-1] == Wait("rollout-0", "without heartbeat for 6 s")


def test_failing_attempts_with_all_nodes_available_name_the_component_and_the_last_failure() -> None:
    scene = Scene(tries_max=50)
    scene.run.begin()
    for _ in range(3):
        scene.fail(scene.acquire().leases, "scorer: exact@1: ScorerFailed: division by zero")
    root = scene.links()[-1]
    assert root.who == "scorer"
    assert root.what.startswith("failed 12 attempts")
    assert "division by zero" in root.what


def test_failures_at_a_missing_service_name_the_service_and_not_the_failures() -> None:
    scene = Scene(tries_max=50, without="sandbox-0")
    scene.run.begin()
    scene.fail(scene.acquire().leases, "sandbox: no sandbox node is known")
    assert scene.links()[-1].who == "sandbox"


def test_progress_forgets_the_failures_before_it() -> None:
    scene = Scene(tries_max=50)
    scene.run.begin()
    scene.fail(scene.acquire().leases, "scorer: broken")
    scene.run.generate(2, step=0)
    scene.acquire(2)
    assert scene.links()[-1].who == "rollout-0"


def test_a_learner_that_holds_a_batch_in_silence_is_the_root() -> None:
    scene = Scene()
    scene.run.begin()
    scene.run.generate(4, step=0)
    lease_id = scene.run.lease(1).lease_id
    scene.pass_time(12.0, silent="learner")
    assert (
        to_text(scene.links())
        == f"run waits for update 1: the trainer holds batch {lease_id}; learner without heartbeat for 12 s"
    )


def test_a_learner_that_lives_says_what_it_does() -> None:
    scene = Scene()
    scene.run.begin()
    scene.run.generate(4, step=0)
    scene.run.lease(1)
    scene.pass_time(12.0, learner={"doing": "train of update 1 for 12 s"})
    assert scene.links()[-1] == Wait("learner", "is at work: train of update 1 for 12 s")


def test_ready_groups_without_a_lease_wait_for_the_learner() -> None:
    scene = Scene()
    scene.run.begin()
    scene.run.generate(4, step=0)
    assert str(scene.links()[0]) == "run waits for update 1: 2 READY groups not leased"


def test_an_inference_node_behind_the_needed_step_is_named_with_its_command() -> None:
    scene = Scene(max_staleness=0)
    scene.run.begin()
    scene.run.train(1)
    scene.run.publish(1)
    scene.acquire()
    newer = PolicyVersion(policy="main", step=1, weights_digest="w1.0")
    scene.fleet.plan({"r": WeightGoal(versions=[INITIAL, newer], step_min=1)}, scene.run.now)
    scene.fleet.reported(
        "rollout-0",
        num_running=4,
        num_waiting=0,
        waiting_for="a node",
        waiting_on=NodeKind.INFERENCE,
        now=scene.run.now,
    )
    assert scene.links()[-1] == Wait(
        "inference-0", "is STALE at main@0.0: it has not answered the command to PREPARE main@1.0"
    )


def test_groups_that_cannot_be_finalised_wait_for_the_reward_service() -> None:
    scene = Scene(without="reward")
    scene.run.begin()
    scene.acquire(2)
    scene.run.core.state.groups["g0"].phase = scene.run.core.state.groups["g0"].phase.FINALIZING
    assert scene.links("no reward node is known")[-1] == Wait("reward", "is missing: no reward node has joined")


def test_a_run_that_has_ended_has_no_wait_chain() -> None:
    scene = Scene()
    scene.run.ask(m.StopRun, reason="x")
    assert scene.links() == []


# Progress and the event -----------------------------------------------------------------------------------------------


def stalls(run: CoreRun) -> list[f.RunStalled]:
    return [fact for fact in run.facts if isinstance(fact, f.RunStalled)]


def test_a_stall_is_recorded_once_and_again_only_for_another_root() -> None:
    run = CoreRun(stall_s=10.0)
    run.begin()
    for root, seconds in (("a", 5.0), ("a", 6.0), ("a", 6.0), ("b", 3.0), ("b", 3.0)):
        run.now += seconds
        run.take(run.core.handle(i.Stalled(root=root, cause=f"{root} is away"), run.now))
    assert [(s.root, s.stalled_s) for s in stalls(run)] == [("a", 11.0), ("b", 23.0)]
    assert run.core.state.stall == "b is away"


def test_progress_ends_a_stall_and_retries_do_not() -> None:
    scene = Scene(stall_s=10.0, tries_max=9)
    run = scene.run
    run.begin()
    leases = scene.acquire().leases
    run.now += 11.0
    run.take(run.core.handle(i.Stalled(root="a", cause="a is away"), run.now))
    scene.fail(leases, "x")
    assert run.core.is_stalled(run.now)
    run.generate(4, step=0)
    assert not run.core.is_stalled(run.now)
    assert run.core.state.stall == ""


def test_without_a_limit_and_after_the_end_nothing_stalls() -> None:
    run = CoreRun()
    run.now = 1e9
    assert not run.core.is_stalled(run.now)
    ended = CoreRun(stall_s=1.0)
    ended.ask(m.StopRun, reason="x")
    ended.now = 1e9
    assert not ended.core.is_stalled(ended.now)


def test_recovery_gives_a_stall_its_full_term_again() -> None:
    run = CoreRun(stall_s=10.0)
    run.begin()
    run.now = 1000.0
    run.core.resume(run.now)
    assert not run.core.is_stalled(run.now + 9.9)
    assert run.core.is_stalled(run.now + 10.0)


# Dead letters ---------------------------------------------------------------------------------------------------------


def test_a_replayed_task_is_a_new_group_before_any_fresh_draw_and_only_once() -> None:
    scene = Scene(tries_max=1, group_size=1)
    run = scene.run
    run.begin()
    leases = scene.acquire(1).leases
    scene.fail(leases, "sandbox: no jail")
    dead = i.DeadTask(dead_id=7, task=leases[0].task, draw=0)
    assert run.ask(i.ReplayDead, tasks=(dead,)) == m.ReplayDeadResponse(dead_ids=(7,))
    assert run.ask(i.ReplayDead, tasks=(dead,)) == m.ReplayDeadResponse(dead_ids=())
    (again,) = scene.acquire(1).leases
    assert (again.task.task_id, again.attempt) == (leases[0].task.task_id, 1)
    assert again.group != leases[0].group
    assert run.ask(i.ReplayDead, tasks=(dead,)) == m.ReplayDeadResponse(dead_ids=())
    (fresh,) = scene.acquire(1).leases
    assert fresh.task.task_id == "t1"
    assert not run.core.state.replays
    assert run.core.state.counters.conserved
