"""A run of the pure core for tests: inputs in, ledger records out. Draws and group decisions are answered at once."""

from __future__ import annotations

import itertools
from typing import Any

from msgspec.structs import replace

from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core import messages as m
from rollmesh.services.coordinator.core.core import Core, Decision
from rollmesh.services.coordinator.core.decision_context import DrawTasks, FinalizeGroup, Reply
from rollmesh.services.coordinator.core.facts import (
    Fact,
    GroupDecision,
    PayloadRef,
    Reward,
    SampleMeta,
    SampleSummary,
    StepSpan,
    Task,
)
from rollmesh.services.coordinator.ledger import StoredRecord
from rollmesh.shared.domain.plans import Plan
from rollmesh.shared.domain.versions import PolicyVersion
from tests.sim.world import endless_spec

NO_SUMMARY = SampleSummary()
NAMES: dict[str, Any] = {"policy": "main", "learner": "main"}


class CoreRun:
    """One run with a trainer and a worker that the test controls."""

    def __init__(self, **spec: Any) -> None:
        self.core = Core()
        self.records: list[StoredRecord] = []
        self.now = 0.0
        self.epoch = 0
        self._tickets = itertools.count(1)
        self._payloads = itertools.count(1)
        values: dict[str, Any] = {"max_staleness": 1, "batch_groups": 2, "group_size": 2} | spec
        self.ask(m.CreateRun, spec=endless_spec(**values))

    @property
    def facts(self) -> list[Fact]:
        return [fact for record in self.records for fact in record.facts]

    def ask(self, kind: type, **fields: Any) -> Any:
        """Return the reply to an input if it is immediate."""
        ticket = next(self._tickets)
        replies = self.take(self.core.handle(kind(ticket=ticket, **fields), self.now))
        return replies.get(ticket)

    def take(self, decision: Decision) -> dict[int, Any]:
        """Store a decision and answer its requests. Return the replies by ticket."""
        if decision.facts:
            position = len(self.records) + 1
            record = StoredRecord(
                position=position, record_id=f"d{position}", time_unix_s=self.now, facts=decision.facts
            )
            self.records.append(record)
        replies = {e.ticket: e.value for e in decision.effects if isinstance(e, Reply)}
        for effect in decision.effects:
            if isinstance(effect, DrawTasks):
                draws = range(effect.first_draw, effect.first_draw + effect.num)
                tasks = tuple((draw, Task(task_id=f"t{draw}", split=effect.split)) for draw in draws)
                answer = i.TasksDrawn(
                    purpose=effect.purpose,
                    tasks=tasks,
                    step=effect.step,
                    incarnation=effect.incarnation,
                    plans={draw: plan for draw in draws if (plan := self.plan(draw)) is not None},
                )
                replies |= self.take(self.core.handle(answer, self.now))
            elif isinstance(effect, FinalizeGroup):
                replies |= self.take(self.core.handle(self.decide(effect.group), self.now))
        return replies

    def plan(self, draw: int) -> Plan | None:
        """Return the plan of the selector for a draw."""
        return None

    def decide(self, group: str) -> i.GroupDecided:
        """Return the decision on a group."""
        return i.GroupDecided(group=group, decision=GroupDecision.KEEP)

    def reward(self, episode: str) -> float:
        """Return the reward of the sample of an episode."""
        return 1.0

    def attach(self, last_update: int = 0, digest: str = "") -> i.Attached:
        attached: i.Attached = self.ask(i.AttachTrainer, **NAMES, last_update=last_update, digest=digest)
        self.epoch = attached.trainer_epoch
        return attached

    def publish(self, step: int, incarnation: int = 0) -> None:
        version = PolicyVersion(
            policy="main", step=step, incarnation=incarnation, weights_digest=f"w{step}.{incarnation}"
        )
        self.ask(i.PublishVersion, **NAMES, trainer_epoch=self.epoch, version=version)

    def begin(self) -> None:
        self.attach()
        self.publish(0)

    def generate(
        self, num: int, *, step: int, incarnation: int = 0, summary: SampleSummary = NO_SUMMARY, wait_s: float = 1.0
    ) -> list[str]:
        """Lease and finish `num` episodes of one sample each. Return the sample ids."""
        acquired: i.Acquired = self.ask(i.AcquireRollouts, node_id="w", num_max=num, wait_s=wait_s)
        reports = []
        for lease in acquired.leases:
            meta = SampleMeta(
                sample_id=f"{lease.episode}.0",
                policy="main",
                steps=(StepSpan(step=step, incarnation=incarnation, num_tokens=4),),
                num_tokens=8,
                num_sampled_tokens=4,
                rewards=(Reward(name="correct", value=self.reward(lease.episode), segment=-1, scorer="exact@1"),),
                summary=replace(summary, variant=lease.variant.name if lease.variant is not None else ""),
            )
            reports.append(
                i.EpisodeReport(
                    lease_id=lease.lease_id,
                    group=lease.group,
                    episode=lease.episode,
                    attempt=lease.attempt,
                    outcome=m.EpisodeOutcome.COMPLETED,
                    payload=PayloadRef(sequence=next(self._payloads), size_bytes=10),
                    samples=(meta,),
                )
            )
        self.ask(i.ReportEpisodes, node_id="w", reports=tuple(reports))
        return [report.samples[0].sample_id for report in reports]

    def lease(self, update: int) -> m.LeaseBatchResponse:
        batch: m.LeaseBatchResponse = self.ask(i.LeaseBatch, **NAMES, trainer_epoch=self.epoch, update=update)
        return batch

    def commit(self, update: int, lease_id: str) -> str:
        committed: i.Committed = self.ask(
            i.CommitUpdate, **NAMES, trainer_epoch=self.epoch, update=update, lease_ids=(lease_id,)
        )
        return committed.digest

    def train(self, update: int, *, incarnation: int = 0) -> str:
        """Run a whole update. Return its digest."""
        self.generate(4, step=update - 1, incarnation=incarnation)
        return self.commit(update, self.lease(update).lease_id)

    def checkpoint(self, update: int, digest: str) -> None:
        self.ask(m.ReportCheckpoint, **NAMES, trainer_epoch=self.epoch, update=update, digest=digest)
