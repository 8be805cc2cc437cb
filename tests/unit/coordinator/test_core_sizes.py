"""What a run records and replies has bounds: leases of batches and of episodes, rewards of groups, reasons of ends."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core import messages as m
from rollmesh.services.coordinator.core import rollouts
from rollmesh.services.coordinator.core.batches import group_members
from rollmesh.services.coordinator.core.core import Core, Decision
from rollmesh.services.coordinator.core.decision_context import DrawTasks, Reply
from rollmesh.services.coordinator.core.facts import (
    BatchLeased,
    EpisodeScored,
    GroupDecision,
    GroupFinalized,
    Message,
    PayloadRef,
    Reward,
    SampleEnd,
    SampleMeta,
    SampleRewards,
    Task,
)
from rollmesh.services.coordinator.core.state import REASONS_MAX, SampleCounters
from rollmesh.services.coordinator.fact_codec import encode_record
from rollmesh.services.coordinator.run_state import run_state
from rollmesh.shared.domain.ledger_head import EMPTY
from rollmesh.shared.errors import MeshError

from .core_run import NAMES, CoreRun


def lease(run: CoreRun, *, bytes_max: int, wait_s: float = 0.0, **fields: Any) -> tuple[int, Decision]:
    """Request the batch of update 1, of which each sample has 10 bytes."""
    request = i.LeaseBatch(
        ticket=99,
        **NAMES,
        trainer_epoch=run.epoch,
        update=1,
        wait_s=wait_s,
        size_of=lambda grant: 10 * len(grant.samples),
        bytes_max=bytes_max,
        **fields,
    )
    return request.ticket, run.core.handle(request, run.now)


def test_a_batch_above_the_limit_is_refused_before_it_is_recorded() -> None:
    run = CoreRun()
    run.begin()
    run.generate(4, step=0)
    ticket, decision = lease(run, bytes_max=39)
    (reply,) = [effect for effect in decision.effects if isinstance(effect, Reply)]
    assert reply.ticket == ticket
    assert isinstance(reply.value, MeshError)
    assert reply.value.reason == "PAYLOAD_TOO_LARGE"
    for text in ("40 bytes", "at most 39", "`run.batch_groups` (now 2)", "`run.group_size` (now 2)"):
        assert text in reply.value.message
    assert reply.value.metadata == {"bytes": "40", "bytes_max": "39"}, "there is no lease that it could name"
    assert not run.core.state.batches
    assert not decision.facts
    _, decision = lease(run, bytes_max=39, amount=1)
    assert [type(fact) for fact in decision.facts] == [BatchLeased], "a smaller geometry is granted"


def test_a_trainer_that_waits_is_refused_when_its_batch_has_become_too_large() -> None:
    run = CoreRun()
    run.begin()
    ticket, decision = lease(run, bytes_max=39, wait_s=60.0)
    assert not decision.effects
    taken: list[dict[int, Any]] = []
    take = run.take
    run.take = lambda decision: taken.append(take(decision)) or taken[-1]  # type: ignore[method-assign, func-returns-value]
    run.generate(4, step=0)
    refused = [replies[ticket] for replies in taken if ticket in replies]
    assert [refusal.reason for refusal in refused] == ["PAYLOAD_TOO_LARGE"] * len(refused)
    assert refused
    assert not run.core.ephemeral.trainers


def test_a_held_batch_above_a_lowered_limit_is_refused_with_its_lease() -> None:
    run = CoreRun()
    run.begin()
    run.generate(4, step=0)
    lease(run, bytes_max=40)
    with pytest.raises(MeshError) as caught:
        lease(run, bytes_max=39)
    lease_id = caught.value.metadata["lease_id"]
    assert lease_id in run.core.state.batches
    assert f"batch lease {lease_id} remains held; release it, then lower `run.batch_groups`" in caught.value.message


def _ask_for(run: CoreRun, num: int, text: str) -> list[i.EpisodeLease]:
    """Request `num` episodes of tasks with this text."""
    decision = run.core.handle(i.AcquireRollouts(ticket=7, node_id="w", num_max=num, wait_s=60.0), run.now)
    (draw,) = [effect for effect in decision.effects if isinstance(effect, DrawTasks)]
    task = Task(task_id="t", messages=(Message(role="user", content=text),))
    drawn = tuple((number, task) for number in range(draw.first_draw, draw.first_draw + draw.num))
    decision = run.core.handle(i.TasksDrawn(purpose=draw.purpose, tasks=drawn), run.now)
    return _leases(decision)


def _leases(decision: Decision) -> list[i.EpisodeLease]:
    replies: list[Any] = [effect.value for effect in decision.effects if isinstance(effect, Reply)]
    return [lease for reply in replies for lease in reply.leases]


def test_a_worker_gets_at_most_as_many_episodes_as_fit_into_a_message() -> None:
    run = CoreRun()
    run.begin()
    size = rollouts.LEASES_BYTES_MAX // 3
    leases = _ask_for(run, 8, "x" * size)
    assert len(leases) == 2, "two tasks and their frame are below the limit, three are above"
    again = run.core.handle(i.AcquireRollouts(ticket=8, node_id="w", num_max=8, wait_s=1.0), run.now)
    assert len(_leases(again)) == 2, "the next call gets the others"


def test_a_task_above_the_limit_is_leased_alone() -> None:
    run = CoreRun()
    run.begin()
    assert len(_ask_for(run, 8, "x" * (rollouts.LEASES_BYTES_MAX + 1))) == 1


class _Generous(CoreRun):
    """Gives the first sample of each group many rewards."""

    def take(self, decision: Decision) -> dict[int, Any]:
        core: Any = self.core
        handle = self.core.handle

        def adjusted(given: Any, now: float) -> Decision:
            if isinstance(given, i.GroupDecided):
                reward = Reward(name="n" * 64, value=1.0, segment=-1, answer="a" * 256)
                many = SampleRewards(sample_id=f"{given.group}.0.0", rewards=(reward,) * 9000)
                given = i.GroupDecided(group=given.group, decision=GroupDecision.KEEP, adjusted=(many,))
            return handle(given, now)

        core.handle = adjusted
        try:
            return super().take(decision)
        finally:
            core.handle = handle


def test_a_group_whose_rewards_fit_into_no_record_ends_with_the_cause() -> None:
    run = _Generous()
    run.begin()
    run.generate(4, step=0)
    assert run.core.state.counters.reasons == {"failed/NOT_FINALIZED": 4}
    assert "expected at most" in run.core.ephemeral.failed.cause
    assert max(len(encode_record("d", 0.0, record.facts, "")) for record in run.records) < 8 * 1024 * 1024


def test_the_evidence_is_in_the_fact_of_the_episode_only() -> None:
    run = CoreRun()
    run.begin()
    reward = Reward(name="correct", value=1.0, segment=-1, evidence="e" * 4096)
    acquired: i.Acquired = run.ask(i.AcquireRollouts, node_id="w", num_max=4, wait_s=1.0)
    assert len(acquired.leases) == 4
    reports = tuple(
        i.EpisodeReport(
            lease_id=lease.lease_id,
            group=lease.group,
            episode=lease.episode,
            attempt=lease.attempt,
            outcome=m.EpisodeOutcome.COMPLETED,
            payload=PayloadRef(sequence=1, size_bytes=1),
            samples=(SampleMeta(sample_id=f"{lease.episode}.0", policy="main", rewards=(reward,)),),
        )
        for lease in acquired.leases
    )
    run.ask(i.ReportEpisodes, node_id="w", reports=reports)
    recorded = b"".join(msgspec.msgpack.encode(fact) for fact in run.facts)
    assert recorded.count(b"e" * 4096) == 4
    assert b"e" * 4096 not in msgspec.msgpack.encode(run.core.state)
    assert not any(b"e" * 4096 in msgspec.msgpack.encode(f) for f in run.facts if isinstance(f, GroupFinalized))


# Reasons --------------------------------------------------------------------------------------------------------------


def test_the_reasons_of_a_run_are_bounded_and_the_rest_is_counted_as_other() -> None:
    counters = SampleCounters()
    counters.reserve(3000)
    for number in range(1000):
        counters.end(SampleEnd.FILTERED, f"MEAN_{number}")
        counters.end(SampleEnd.FILTERED, "x" * 3000)
        counters.end(SampleEnd.TRAINED, "")
    assert counters.conserved
    assert sum(counters.reasons.values()) == 3000
    assert len(counters.reasons) <= REASONS_MAX + 2
    assert max(map(len, counters.reasons)) < 100
    assert counters.reasons["filtered/OTHER"] == 2000 - (len(counters.reasons) - 2)
    counters.void_trained(1000)
    assert counters.reasons["trained"] == 0


def test_a_ledger_of_an_older_release_with_many_reasons_gives_a_state_that_fits_into_a_message() -> None:
    run = CoreRun(group_size=1, max_staleness=255)
    run.begin()
    run.generate(500, step=0)
    replayed = Core()
    for fact in run.facts:
        if isinstance(fact, GroupFinalized):
            reason = f"MEAN_{fact.group}" + "x" * 40_000
            fact = msgspec.structs.replace(fact, decision=GroupDecision.FILTER, reason=reason)
        replayed.replay([fact])
    assert run_state(replayed, EMPTY).ByteSize() < 64 * 1024
    assert replayed.state.counters.conserved


# States ---------------------------------------------------------------------------------------------------------------


def test_evaluations_of_tasks_with_unlike_labels_give_a_state_that_fits_into_a_message() -> None:
    run = CoreRun(eval_every=1, eval_tasks=1000, success_reward="correct")
    run.begin()
    asked = i.AcquireRollouts(ticket=5, node_id="w", num_max=1000, wait_s=1.0)
    (reply,) = [e for e in run.core.handle(asked, 0.0).effects if isinstance(e, Reply)]
    state = run.core.state
    for number, lease in enumerate(reply.value.leases):  # type: ignore[attr-defined]
        group = state.groups[lease.group]
        group.task = msgspec.structs.replace(group.task, labels={"id": f"{number:060}", "text": "x" * 65})
        meta = SampleMeta(
            sample_id=f"{lease.episode}.0", rewards=(Reward(name="correct", value=1.0, segment=-1),), trainable=False
        )
        fact = EpisodeScored(group=lease.group, episode=lease.episode, payload=PayloadRef(sequence=1), samples=(meta,))
        run.core.replay([fact])
    (evaluated,) = state.evals
    assert evaluated.num_samples == 1000
    assert evaluated.reward_sums == {"correct": 1000.0}
    assert len(evaluated.label_sums) == len(evaluated.label_nums) == 256
    assert all(label.startswith("id=") for label in evaluated.label_sums), "a text is not a group of tasks"
    assert group_members(group).labels == {"id": f"{999:060}"}
    state.evals = [msgspec.structs.replace(evaluated, step=step) for step in range(1000)]
    found = run_state(run.core, EMPTY)
    assert found.ByteSize() < 3 * 1024 * 1024
    assert found.evals[-1].step == 999
    assert [e.step for e in found.evals] == list(range(1000 - len(found.evals), 1000))
