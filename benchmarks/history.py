"""The facts of an ordinary run, from the coordinator core alone: any number of samples within seconds.

Workers lease and report in lists of 64, complete groups are finalized, a trainer leases, commits, publishes, and
reports a checkpoint every 10 updates. Nothing fails. Sizes of records are those of a run with two rewards and three
turns per sample and messages of 200 characters. Numbers and hashes of observations are random, with a fixed seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core import messages as m
from rollmesh.services.coordinator.core.core import Core
from rollmesh.services.coordinator.core.decision_context import DrawTasks, Effect, FinalizeGroup, Reply
from rollmesh.services.coordinator.core.facts import (
    ArchiveSealed,
    Fact,
    FinishReason,
    GroupDecision,
    Message,
    PayloadRef,
    Reward,
    SampleMeta,
    SampleSummary,
    StepSpan,
    Task,
    TurnSummary,
)
from rollmesh.services.coordinator.core.records import RunSpec
from rollmesh.shared.domain.versions import PolicyVersion

NAMES: dict[str, Any] = {"policy": "main", "learner": "main"}
LIST = 64
CHECKPOINT_EVERY = 10
SPEC = RunSpec(run="bench", max_staleness=2, batch_groups=16, group_size=16, updates_max=0, eval_every=0, stall_s=0.0)
SAMPLES_PER_UPDATE = SPEC.batch_groups * SPEC.group_size
QUESTION = Message(role="user", content="What is (17 + 4) * 3? " * 9)


class History:
    """One run; `core.state` is the state after the facts so far."""

    def __init__(self) -> None:
        self.core = Core()
        self._ticket = 0
        self._now_s = 0.0
        self._facts: list[tuple[Fact, ...]] = []
        self._questions: list[Effect] = []
        self._sequence = 0
        self._epoch = 0
        self._draws = random.Random(0)

    def updates(self, num_updates: int) -> Iterator[list[tuple[Fact, ...]]]:
        """Yield the decisions update by update, one ledger record each. `core` then holds the state after the last
        one."""
        self._ask(m.CreateRun(ticket=self._next(), spec=SPEC))
        attached: i.Attached = self._ask(i.AttachTrainer(ticket=self._next(), last_update=0, digest="", **NAMES))
        self._epoch = attached.trainer_epoch
        self._publish(0)
        for update in range(1, num_updates + 1):
            self._generate(update)
            self._train(update)
            decisions, self._facts = self._facts, []
            yield decisions

    def seal(self, segment: ArchiveSealed) -> tuple[Fact, ...]:
        """Return the facts of the decision that an archive segment is sealed."""
        return self.core.handle(i.SealArchive(ticket=self._next(), segment=segment), self._now_s).facts

    def _next(self) -> int:
        self._ticket += 1
        return self._ticket

    def _ask(self, request: Any) -> Any:
        self._now_s += 1e-3
        decision = self.core.handle(request, self._now_s)
        if decision.facts:
            self._facts.append(decision.facts)
        answer, ticket = None, getattr(request, "ticket", -1)
        for effect in decision.effects:
            if isinstance(effect, Reply) and effect.ticket == ticket:
                answer = effect.value
            else:
                self._questions.append(effect)
        return answer

    def _generate(self, update: int) -> None:
        """Generate groups as admission allows, until the batch of `update` is complete."""
        leases: list[i.EpisodeLease] = []
        reported = 0
        while reported < SAMPLES_PER_UPDATE:
            acquired = self._ask(i.AcquireRollouts(ticket=self._next(), node_id="w", num_max=LIST, wait_s=1.0))
            leases += acquired.leases if acquired is not None else ()
            leases += self._answer()
            if leases:
                self._ask(i.ReportEpisodes(ticket=self._next(), node_id="w", reports=tuple(map(self._report, leases))))
                self._answer()
            reported += len(leases)
            leases.clear()

    def _report(self, lease: i.EpisodeLease) -> i.EpisodeReport:
        self._sequence += 1
        rewards = tuple(
            Reward(name=name, value=self._draws.random(), segment=-1, scorer="exact@1", answer=answer)
            for name, answer in (("correct", "63"), ("format", ""))
        )
        turns = tuple(
            TurnSummary(
                segment=at,
                num_tokens=self._draws.randint(50, 150),
                mean_logprob=-self._draws.random(),
                observation=self._draws.randbytes(8).hex(),
            )
            for at in (2, 4, 6)
        )
        sampled = sum(turn.num_tokens for turn in turns)
        span = StepSpan(step=lease.step_min, incarnation=lease.incarnation_min, num_tokens=sampled)
        sample = SampleMeta(
            sample_id=f"{lease.episode}-0",
            policy="main",
            leaf=6,
            steps=(span,),
            num_tokens=sampled + 150,
            rewards=rewards,
            num_sampled_tokens=sampled,
            summary=SampleSummary(finish=FinishReason.STOP, turns=turns),
        )
        return i.EpisodeReport(
            lease_id=lease.lease_id,
            group=lease.group,
            episode=lease.episode,
            attempt=lease.attempt,
            outcome=m.EpisodeOutcome.COMPLETED,
            payload=PayloadRef(sequence=self._sequence, size_bytes=self._draws.randint(4000, 5000)),
            samples=(sample,),
        )

    def _answer(self) -> list[i.EpisodeLease]:
        """Respond as data and reward service, and return the resulting leases."""
        leases: list[i.EpisodeLease] = []
        while self._questions:
            questions, self._questions = self._questions, []
            for question in questions:
                if isinstance(question, DrawTasks):
                    self._draw(question)
                elif isinstance(question, FinalizeGroup):
                    self._ask(i.GroupDecided(group=question.group, decision=GroupDecision.KEEP))
                elif isinstance(question, Reply) and isinstance(question.value, i.Acquired):
                    leases += question.value.leases
        return leases

    def _draw(self, question: DrawTasks) -> None:
        draws = range(question.first_draw, question.first_draw + question.num)
        self._ask(i.TasksDrawn(purpose=question.purpose, tasks=tuple((draw, self._task(draw)) for draw in draws)))

    def _task(self, draw: int) -> Task:
        return Task(task_id=f"train/{draw}", messages=(QUESTION,), labels={"level": "3"})

    def _train(self, update: int) -> None:
        batch = self._ask(self._request(i.LeaseBatch, update=update))
        assert batch.lease_id, f"no batch of update {update}: it waits for {batch.waiting_for}"
        committed = self._ask(self._request(i.CommitUpdate, update=update, lease_ids=(batch.lease_id,)))
        if update % CHECKPOINT_EVERY == 0:
            self._ask(self._request(m.ReportCheckpoint, update=update, digest=committed.digest))
        self._publish(update)
        self._answer()

    def _publish(self, step: int) -> None:
        version = PolicyVersion(policy="main", step=step, weights_digest=f"{step:064x}")
        self._ask(self._request(i.PublishVersion, version=version))

    def _request(self, kind: Any, **fields: Any) -> Any:
        return kind(ticket=self._next(), trainer_epoch=self._epoch, **NAMES, **fields)
