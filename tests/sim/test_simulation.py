"""Long seeded histories of the core under faults. A failure prints the command that replays its seed."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest

from rollmesh.services.coordinator.core import messages as m
from rollmesh.services.coordinator.core.facts import GroupDecision
from rollmesh.services.coordinator.core.records import BoundPolicy
from rollmesh.shared.domain.digest import next_digest
from rollmesh.shared.errors import MeshError
from tests.sim.world import World, endless_spec

ACTIONS = 600
SEEDS = [int(s) for s in os.environ.get("ROLLMESH_SEEDS", "0,1,2,3,4,5,6,7").split(",")]
AFTER_DOUBT = {"LEASE_EXPIRED", "UNKNOWN_LEASE", "WRONG_UPDATE", "FENCED"}


def make_world(seed: int) -> World:
    rng = random.Random(seed)
    eta = rng.choice([0, 1, 2, 4])
    spec = endless_spec(
        max_staleness=eta,
        beyond=BoundPolicy.DROP,
        batch_groups=rng.randint(1, 4),
        group_size=rng.randint(1, 4),
        publish_every=1,
        eval_every=rng.choice([0, 2]),
        eval_tasks=2,
        episode_lease_s=10.0,
        batch_lease_s=20.0,
        group_s_max=60.0,
        eval_s_max=30.0,
    )
    world = World(spec=spec, rng=rng)
    world.ask(m.CreateRun(ticket=0, spec=spec))
    world.attach()
    world.checkpoint(report=True)
    return world


def lose_commit_reply(world: World) -> None:
    world.lease_batch()
    if world.trainer.lease is not None:
        world.step_and_commit(lose_reply=True)
        world.attach()


def lose_checkpoints(world: World) -> None:
    del world.checkpoints[-world.rng.randint(1, 3) :]
    world.attach()


def checkpoint_before_commit(world: World) -> None:
    """A trainer saves its step before the commit and crashes in between. The next attach rolls forward."""
    world.lease_batch()
    t = world.trainer
    if t.lease is None:
        return
    used = tuple(s.meta.sample_id for s in t.lease.samples)
    t.update += 1
    t.content.append((t.update, used))
    t.digest = next_digest(t.digest, t.update, used)
    t.lease = None
    world.checkpoint(report=False)
    if world.rng.random() < 0.5:
        world.advance(25.0)
    world.attach()
    assert world.core.state.the_clock.applied == t.update


ACTION_WEIGHTS: list[tuple[int, Callable[[World], None]]] = [
    (30, lambda w: w.train(stragglers=w.rng.randint(0, 8))),
    (20, lambda w: w.acquire(w.rng.randint(1, 8))),
    (20, lambda w: w.finish_episode(outcome=m.EpisodeOutcome.COMPLETED, keep_lease=w.rng.random() < 0.1)),
    (5, lambda w: w.finish_episode(outcome=m.EpisodeOutcome.COMPLETED, num_samples=w.rng.randint(0, 3))),
    (5, lambda w: w.finish_episode(outcome=m.EpisodeOutcome.INFRA_FAILURE)),
    (2, lambda w: w.finish_episode(outcome=m.EpisodeOutcome.CANCELLED)),
    (8, lambda w: w.serve_questions(w.rng.choice(list(GroupDecision)), w.rng.randint(0, 3))),
    (10, lambda w: w.advance(w.rng.choice([0.5, 3.0, 11.0, 22.0, 61.0]))),
    (5, lambda w: w.lease_batch()),
    (5, lambda w: w.step_and_commit(lose_reply=False, applied=w.rng.random() < 0.8)),
    (4, lambda w: w.checkpoint(report=w.rng.random() < 0.8)),
    (3, lose_commit_reply),
    (3, lambda w: w.attach()),
    (2, lose_checkpoints),
    (3, checkpoint_before_commit),
    (4, lambda w: w.crash_coordinator()),
    (2, lambda w: w.restore_from_snapshot()),
]


def act(world: World) -> None:
    weights, actions = zip(*ACTION_WEIGHTS, strict=True)
    action = world.rng.choices(actions, weights)[0]
    try:
        action(world)
    except MeshError as refusal:
        assert refusal.reason in AFTER_DOUBT, refusal
        world.attach()
    world.check()


@pytest.mark.parametrize("seed", SEEDS)
def test_long_history_keeps_the_invariants(seed: int) -> None:
    world = make_world(seed)
    try:
        for _ in range(ACTIONS):
            act(world)
        world.attach()
        goal = world.trainer.update + 5
        for _ in range(20):
            world.train()
            world.advance(1.0)
        assert world.trainer.update >= goal, f"no progress: {world.core.waiting()}"
        world.checkpoint(report=True)
        world.ask(m.StopRun(ticket=world.ticket(), reason="end of test"))
        world.check()
        assert world.core.state.counters.live == 0
    except AssertionError:
        print(f"replay: ROLLMESH_SEEDS={seed} pytest tests/sim/test_simulation.py")
        raise
