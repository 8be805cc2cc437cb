"""Long seeded histories of the core under faults. A failure prints the command that replays its seed."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest

from rollmesh.services.coordinator.audit import Audit
from rollmesh.services.coordinator.core import messages as m
from rollmesh.services.coordinator.core.facts import GroupDecision, SampleEnd
from rollmesh.services.coordinator.core.records import UNLIMITED, BoundPolicy, ForeignSource, ReplaySpec
from rollmesh.services.coordinator.ledger import StoredRecord
from rollmesh.shared.domain.digest import next_digest
from rollmesh.shared.errors import MeshError
from tests.sim.world import World, endless_spec

ACTIONS = 600
SEEDS = [int(s) for s in os.environ.get("ROLLMESH_SEEDS", "0,1,2,3,4,5,6,7").split(",")]
AFTER_DOUBT = {"LEASE_EXPIRED", "UNKNOWN_LEASE", "WRONG_UPDATE", "FENCED"}


REPLAYS = (
    ReplaySpec(max_staleness=4, share=0.5, capacity_groups=6),
    ReplaySpec(max_staleness=UNLIMITED, share=0.5, capacity_groups=8, priority="return", options={"temperature": 0.5}),
    ReplaySpec(max_staleness=3, share=0.75, capacity_groups=8, priority="advantage"),
    ReplaySpec(max_staleness=8, share=0.5, capacity_groups=8, priority="success_per_task"),
    ReplaySpec(max_staleness=6, share=1.0, capacity_groups=8, priority="compensation"),
)


PEER = ForeignSource(source="peer", max_age=3, share=0.5)


def make_world(seed: int, replay: ReplaySpec | None = None, foreign: tuple[ForeignSource, ...] = ()) -> World:
    rng = random.Random(seed)
    eta = rng.choice([0, 1, 2, 4])
    spec = endless_spec(
        max_staleness=eta,
        beyond=BoundPolicy.DROP,
        batch_groups=rng.randint(1 if replay is None and not foreign else 2, 4),
        group_size=rng.randint(1 if replay is None else 2, 4),
        publish_every=1,
        eval_every=rng.choice([0, 2]),
        eval_tasks=2,
        episode_lease_s=10.0,
        batch_lease_s=20.0,
        group_s_max=60.0,
        eval_s_max=30.0,
        replay=replay,
        foreign=foreign,
        external_sources=tuple(source.source for source in foreign),
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
SUBMIT: tuple[int, Callable[[World], None]] = (25, lambda w: w.submit_samples())


def act(world: World) -> None:
    weights, actions = zip(*ACTION_WEIGHTS, *([SUBMIT] if world.spec.foreign else ()), strict=True)
    action = world.rng.choices(actions, weights)[0]
    try:
        action(world)
    except MeshError as refusal:
        assert refusal.reason in AFTER_DOUBT, refusal
        world.attach()
    world.check()


@pytest.mark.parametrize("seed", SEEDS)
def test_long_history_keeps_the_invariants(seed: int) -> None:
    play(make_world(seed), ACTIONS, seed)


@pytest.mark.parametrize("replay", REPLAYS, ids=lambda replay: replay.priority)
@pytest.mark.parametrize("seed", SEEDS[:1])
def test_long_history_with_replay_keeps_the_invariants(seed: int, replay: ReplaySpec) -> None:
    world = make_world(seed, replay)
    play(world, ACTIONS // 3, seed)
    counters = world.core.state.replay.counters
    assert counters.ends[SampleEnd.TRAINED] > 0
    assert counters.live == 0
    audit = Audit("r")
    for position, facts in enumerate(world.ledger, 1):
        audit.enter(StoredRecord(position=position, record_id=str(position), time_unix_s=0.0, facts=facts))
    report = audit.report()
    assert report.holds, report.to_text()
    assert report.replay is not None
    assert sum(report.replay.lags.values()) == sum(world.core.state.replay.trained_by_staleness.values()) > 0


@pytest.mark.parametrize("replay", [None, *REPLAYS], ids=lambda replay: replay.priority if replay else "none")
def test_long_history_with_submitted_samples_keeps_the_invariants(replay: ReplaySpec | None) -> None:
    """Samples of a source have their own account, beside the one of the replay log, which has none of them."""
    world = make_world(SEEDS[0], replay, (PEER,))
    play(world, ACTIONS // 3, SEEDS[0])
    state = world.core.state
    peer = state.foreign["peer"].counters
    assert sum(state.foreign["peer"].trained_by_age.values()) > 0
    assert peer.live == 0
    assert not world.submitted.keys() & set(world.originals.values()), "a submitted sample is not replayed"
    audit = Audit("r")
    for position, facts in enumerate(world.ledger, 1):
        audit.enter(StoredRecord(position=position, record_id=str(position), time_unix_s=0.0, facts=facts))
    report = audit.report()
    assert report.holds, report.to_text()
    assert report.submitted["peer"].trained == peer.ends[SampleEnd.TRAINED]
    assert sum(report.ages["peer"].values()) == sum(state.foreign["peer"].trained_by_age.values())


def play(world: World, num: int, seed: int) -> None:
    try:
        for _ in range(num):
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
