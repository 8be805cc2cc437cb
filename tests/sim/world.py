"""A simulation around the coordinator core: workers, a trainer with checkpoints, a data and a reward service, and
crashes.

It has one virtual clock and one seed. The trainer is modeled by what its weights *contain*: the list of sample ids per
update. The checks here share no arithmetic with the core. They recompute staleness from the spans that the workers
reported.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core import messages as m
from rollmesh.services.coordinator.core.core import Core, Decision
from rollmesh.services.coordinator.core.decision_context import (
    CancelEpisodes,
    DrawTasks,
    Effect,
    FinalizeGroup,
    Reply,
)
from rollmesh.services.coordinator.core.facts import (
    DroppedSample,
    ExternalSpan,
    Fact,
    GroupDecision,
    PayloadRef,
    Purpose,
    Reward,
    SampleMeta,
    SamplesEnded,
    SegmentSource,
    StepSpan,
    SubmittedGroup,
    Task,
)
from rollmesh.services.coordinator.core.records import RunSpec
from rollmesh.services.coordinator.core.replay_log import DEFERRED
from rollmesh.services.coordinator.core.state import GroupPhase, State
from rollmesh.shared.domain.digest import next_digest
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.errors import MeshError

SOURCE = SegmentSource.PEER
"""Source of the samples that clients submit."""
SAMPLE_LIMITS = i.SubmissionLimits(total_max=10**6, waiting_max=4, waiting_bytes_max=10**6)
NAMES: dict[str, Any] = {"policy": "main", "learner": "main"}


def endless_spec(**values: Any) -> RunSpec:
    """Return a spec without evaluations, limits and stall reports. It is synchronous unless `values` change that."""
    off: dict[str, Any] = {"max_staleness": 0, "updates_max": 0, "eval_every": 0, "eval_tasks": 0, "stall_s": 0.0}
    rest: dict[str, Any] = {"run": "r", "batch_groups": 1, "group_size": 1, "tries_max": 3, "eval_s_max": 60.0}
    return RunSpec(**(rest | off | values))


@dataclass
class Checkpoint:
    update: int
    digest: str
    incarnation: int
    content: list[tuple[int, tuple[str, ...]]]
    dropped: tuple[str, ...] = ()
    """With `applied`: the dispositions of its last update if that was saved before its commit."""
    applied: bool = True


@dataclass
class Trainer:
    """State of a trainer process. `content` is what its weights contain: (update, sample ids)."""

    epoch: int = 0
    update: int = 0
    incarnation: int = 0
    digest: str = ""
    content: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)
    lease: m.LeaseBatchResponse | None = None
    stepped: bool = False
    """The weights contain the leased batch, but the commit has no reply."""


@dataclass
class World:
    """Drives the core through a run, with faults on demand."""

    spec: RunSpec
    rng: random.Random
    core: Core = field(default_factory=Core)
    now: float = 0.0
    ledger: list[tuple[Fact, ...]] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)
    tickets: int = 0
    leases: list[i.EpisodeLease] = field(default_factory=list)
    spans: dict[str, tuple[StepSpan, ...]] = field(default_factory=dict)
    scored: set[str] = field(default_factory=set)
    """Leases whose samples are recorded. The core ignores the samples of a repeated report."""
    checkpoints: list[Checkpoint] = field(default_factory=list)
    trainer: Trainer = field(default_factory=Trainer)
    node_step: tuple[int, int] = (0, 0)
    """(incarnation, step) that the inference nodes serve."""
    published: list[tuple[int, int]] = field(default_factory=list)
    """Every announced (incarnation, step), oldest first: what a node may have served."""
    rollbacks: list[tuple[int, int]] = field(default_factory=list)
    ahead: set[str] = field(default_factory=set)
    """Groups that were read ahead of their lease."""
    dropped: set[str] = field(default_factory=set)
    """Members that a decision dropped."""
    originals: dict[str, str] = field(default_factory=dict)
    """Ids of the originals of leased samples that are replayed."""
    submissions: list[tuple[SubmittedGroup, int]] = field(default_factory=list)
    """Groups of samples that clients submitted, with the update of the coordinator at that time."""
    submitted: dict[str, int] = field(default_factory=dict)
    """That update, by the id of a sample of such a group."""
    deferred: set[str] = field(default_factory=set)
    """Samples that a lease left to an extra update."""

    # --- the coordinator -------------------------------------------------------------------------------------

    def ask(self, request: i.Input, *, lose_reply: bool = False) -> object:
        """Submit one input to the core, store its facts, release its effects. Return the reply to `request` if it is
        immediate."""
        decision = self.core.handle(request, self.now)
        return self._release(decision, getattr(request, "ticket", 0), lose_reply=lose_reply)

    def _release(self, decision: Decision, ticket: int, *, lose_reply: bool) -> object:
        if decision.facts:
            self.ledger.append(decision.facts)
        for fact in decision.facts:
            if isinstance(fact, SamplesEnded) and fact.reason == DEFERRED:
                self.deferred.update(fact.sample_ids)
        answer = None
        for effect in decision.effects:
            if isinstance(effect, Reply) and effect.ticket == ticket:
                answer = None if lose_reply else effect.value
            else:
                self.effects.append(effect)
        return answer

    def ticket(self) -> int:
        self.tickets += 1
        return self.tickets

    def crash_coordinator(self) -> None:
        """Kill the coordinator: unreleased effects, waiting callers and deadlines are lost. Recovery folds the
        ledger."""
        before = msgspec.msgpack.encode(self.core.state)
        self.core = Core()
        self.effects = []
        for facts in self.ledger:
            self.core.replay(facts)
        assert msgspec.msgpack.encode(self.core.state) == before, "recovery reaches the same state"
        self._release(self.core.resume(self.now), 0, lose_reply=True)

    def restore_from_snapshot(self) -> None:
        """Recovery from a snapshot gives the same state as recovery from facts alone."""
        stored = msgspec.msgpack.encode(self.core.state)
        state = msgspec.msgpack.decode(stored, type=State)
        assert msgspec.msgpack.encode(state) == stored
        self.core = Core(state)
        self.effects = []
        self._release(self.core.resume(self.now), 0, lose_reply=True)

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.ask(i.Tick())

    # --- clients ---------------------------------------------------------------------------------------------

    def submit_samples(self) -> None:
        """Submit a group of samples, or one that was submitted before."""
        if self.submissions and self.rng.random() < 0.3:
            group, _ = self.rng.choice(self.submissions)
        else:
            key = f"s{len(self.submissions)}"
            episodes = tuple(b"text" for _ in range(self.rng.randint(1, 3)))
            group = SubmittedGroup(key=key, task=Task(task_id=key), episodes=episodes)
        known = any(one.key == group.key for one, _ in self.submissions)
        try:
            answer = self.ask(
                i.SubmitSamples(
                    ticket=self.ticket(),
                    submission=f"{len(self.ledger)}-ab",
                    source=SOURCE,
                    groups=(group,),
                    limits=SAMPLE_LIMITS,
                )
            )
        except MeshError as refusal:
            assert refusal.reason == "SAMPLE_QUOTA"
            assert not known
            return
        assert isinstance(answer, m.SubmitSamplesResponse)
        assert answer.num_added == (not known)
        if not known:
            self.submissions.append((group, self.core.state.the_clock.applied))

    # --- data, reward ----------------------------------------------------------------------------------------

    def serve_questions(self, decide: GroupDecision = GroupDecision.KEEP, drop_every: int = 0) -> None:
        """Answer the core's requests to the data and reward services. Each `drop_every`-th member of a group is
        dropped."""
        questions, self.effects = self.effects, []
        for effect in questions:
            if isinstance(effect, DrawTasks):
                self._draw(effect)
            elif isinstance(effect, FinalizeGroup):
                self._decide(effect.group, decide, drop_every)
            elif isinstance(effect, Reply) and isinstance(effect.value, i.Acquired):
                self.leases.extend(effect.value.leases)
            elif isinstance(effect, CancelEpisodes):
                self.leases = [lease for lease in self.leases if lease.lease_id not in effect.lease_ids]

    def _decide(self, name: str, decide: GroupDecision, drop_every: int) -> None:
        group = self.core.state.groups.get(name)
        members = list(group.samples) if group is not None and drop_every else []
        dropped = {sample: f"DROP_{number % 2}" for number, sample in enumerate(members) if number % drop_every == 0}
        if decide is not GroupDecision.EXTEND:
            self.dropped.update(dropped)
        self.ask(i.GroupDecided(group=name, decision=decide, reason="ZERO_VARIANCE", num_extend=1, dropped=dropped))

    def _draw(self, question: DrawTasks) -> None:
        draws = range(question.first_draw, question.first_draw + question.num)
        num_tasks = 4 if self.spec.replay is not None else 10**9  # a task comes again
        tasks = tuple((d, Task(task_id=f"t{d % num_tasks}", labels={"level": str(d % 3)})) for d in draws)
        self.ask(
            i.TasksDrawn(purpose=question.purpose, tasks=tasks, step=question.step, incarnation=question.incarnation)
        )

    # --- workers ---------------------------------------------------------------------------------------------

    def acquire(self, num: int) -> None:
        answer = self.ask(i.AcquireRollouts(ticket=self.ticket(), node_id="worker", num_max=num, wait_s=5.0))
        if isinstance(answer, i.Acquired):
            self.leases.extend(answer.leases)
        self.serve_questions()

    def finish_episode(self, *, outcome: m.EpisodeOutcome, keep_lease: bool = False, num_samples: int = 1) -> None:
        """Report one of the held episodes. Its tokens are of steps between its minimum and what nodes serve now."""
        if not self.leases:
            return
        lease = self.leases[self.rng.randrange(len(self.leases))]
        if not keep_lease:
            self.leases.remove(lease)
        samples = tuple(self._sample(lease, n) for n in range(num_samples))
        report = i.EpisodeReport(
            lease_id=lease.lease_id,
            group=lease.group,
            episode=lease.episode,
            attempt=lease.attempt,
            outcome=outcome,
            payload=PayloadRef(sequence=self.ticket(), size_bytes=10),
            samples=samples if outcome is m.EpisodeOutcome.COMPLETED else (),
            cause="the jail broke",
        )
        answer = self.ask(i.ReportEpisodes(ticket=self.ticket(), node_id="worker", reports=(report,)))
        assert isinstance(answer, m.ReportEpisodesResponse)
        assert not answer.results[0].startswith("INVALID"), answer
        if answer.results == ("",) and report.samples and lease.lease_id not in self.scored:
            self.scored.add(lease.lease_id)
            if lease.given:
                steps = {group.key: step for group, step in self.submissions}
                self.submitted.update({s.sample_id: steps[lease.task.task_id] for s in report.samples})
            self.spans.update({s.sample_id: s.steps for s in report.samples if s.sample_id not in self.spans})

    def _sample(self, lease: i.EpisodeLease, number: int) -> SampleMeta:
        if lease.given:
            external = (ExternalSpan(source=SOURCE, num_tokens=7),)
            name = f"{lease.episode}/{number}"
            return SampleMeta(sample_id=name, policy="main", num_tokens=9, external=external, rewards=(self._reward(),))
        incarnation, step = self.node_step
        if lease.purpose is Purpose.EVAL:
            incarnation, step = lease.incarnation_min, lease.step_min
        usable = [v for v in self.published if v <= (incarnation, step) and v[1] >= lease.step_min]
        first = self.rng.choice(usable or [(incarnation, step)])
        spans: tuple[StepSpan, ...] = (StepSpan(step=first[1], incarnation=first[0], num_tokens=3),)
        if first != (incarnation, step):
            spans += (StepSpan(step=step, incarnation=incarnation, num_tokens=2),)
        return SampleMeta(
            sample_id=f"{lease.episode}/{number}",
            policy="main",
            steps=spans,
            num_tokens=9,
            num_sampled_tokens=5,
            rewards=(self._reward(),),
        )

    def _reward(self) -> Reward:
        return Reward(name="correct", value=float(self.rng.random() < 0.5), segment=-1, scorer="exact@1")

    # --- the trainer -----------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Start a trainer process from the newest checkpoint."""
        newest = self.checkpoints[-1] if self.checkpoints else Checkpoint(0, "", 0, [])
        answer = self.ask(
            i.AttachTrainer(
                ticket=self.ticket(),
                last_update=newest.update,
                digest=newest.digest,
                dropped=tuple(DroppedSample(sample_id=name, reason="TEST") for name in newest.dropped),
                named=tuple(newest.dropped),
                applied=newest.applied,
                **NAMES,
            )
        )
        assert isinstance(answer, i.Attached)
        if answer.resolution is m.AttachResolution.ROLLED_BACK:
            self.rollbacks.append((answer.incarnation, newest.update))
        assert answer.next_update == newest.update + 1
        self.trainer = Trainer(
            epoch=answer.trainer_epoch,
            update=newest.update,
            incarnation=answer.incarnation,
            digest=newest.digest,
            content=list(newest.content),
        )
        self.publish()

    def publish(self) -> None:
        t = self.trainer
        version = PolicyVersion(policy="main", step=t.update, incarnation=t.incarnation, weights_digest=f"w{t.update}")
        self.ask(i.PublishVersion(ticket=self.ticket(), trainer_epoch=t.epoch, version=version, **NAMES))
        self.node_step = (t.incarnation, t.update)
        if self.node_step not in self.published:
            self.published.append(self.node_step)

    def lease_batch(self) -> None:
        t = self.trainer
        answer = self.ask(
            i.LeaseBatch(ticket=self.ticket(), trainer_epoch=t.epoch, update=t.update + 1, wait_s=0.0, **NAMES)
        )
        self.serve_questions()
        if isinstance(answer, m.LeaseBatchResponse) and answer.lease_id:
            t.lease, t.stepped = answer, False
            self._note_replayed(answer)

    def _note_replayed(self, lease: m.LeaseBatchResponse) -> None:
        """Check what a batch says of replayed samples: the versions of the original, whose key and payload it has."""
        for sample in (sample for sample in lease.samples if sample.replay_of):
            assert sample.meta.steps == self.spans[sample.replay_of]
            assert sample.key.group != sample.group
            assert sample.payload.sequence
            assert sample.mask_below_step == 0
            self.originals[sample.meta.sample_id] = sample.replay_of

    def read_ahead(self) -> None:
        """Read the samples of the next batch ahead of its lease: READY ones, each once while it stays READY."""
        t, core = self.trainer, self.core
        request = i.WatchReady(ticket=0, trainer_epoch=t.epoch, **NAMES)
        try:
            found = core.ready_ahead(request, self.ahead)
        except MeshError as refusal:
            assert refusal.reason in ("FENCED", "RUN_ENDED"), refusal
            return
        assert not core.ready_ahead(request, self.ahead)
        for sample in found:
            group = core.state.groups[sample.group]
            assert group.phase is GroupPhase.READY
            assert sample.meta.sample_id in {live.sample_id for live in group.live_samples()}
            assert sample.payload.sequence > 0

    def release_and_repeat(self) -> None:
        """Release the batch, and repeat the release late, when the next batch may be held. It must not release that
        one."""
        t = self.trainer
        if t.lease is None:
            return
        release = {"trainer_epoch": t.epoch, "lease_id": t.lease.lease_id, **NAMES}
        t.lease = None
        self.ask(m.ReleaseBatch(ticket=self.ticket(), **release))
        self.lease_batch()
        self.ask(m.ReleaseBatch(ticket=self.ticket(), **release))
        if t.lease is not None:
            again = self.ask(
                i.LeaseBatch(ticket=self.ticket(), trainer_epoch=t.epoch, update=t.update + 1, wait_s=0.0, **NAMES)
            )
            assert isinstance(again, m.LeaseBatchResponse)
            assert again.lease_id == t.lease.lease_id != release["lease_id"]

    def step_and_commit(self, *, lose_reply: bool, dropped: Sequence[str] = (), applied: bool = True) -> None:
        """Change the weights, then commit. With `lose_reply` the trainer crashes or gets no reply."""
        t = self.trainer
        if t.lease is None:
            return
        used = tuple(s.meta.sample_id for s in t.lease.samples if s.meta.sample_id not in dropped) if applied else ()
        t.stepped = True
        answer = self.ask(
            i.CommitUpdate(
                ticket=self.ticket(),
                trainer_epoch=t.epoch,
                update=t.update + 1,
                lease_ids=(t.lease.lease_id,),
                dropped=tuple(DroppedSample(sample_id=name, reason="TEST") for name in dropped),
                named=tuple(dropped),
                applied=applied,
                **NAMES,
            ),
            lose_reply=lose_reply,
        )
        if not isinstance(answer, i.Committed):
            return
        t.update += 1
        t.content.append((t.update, used))
        t.digest = answer.digest
        t.lease, t.stepped = None, False

    def save_before_commit(self, *, dropped: Sequence[str], applied: bool) -> None:
        """Change the weights, save them, and crash before the commit. The next attach must roll forward."""
        t = self.trainer
        if t.lease is None:
            return
        used = tuple(s.meta.sample_id for s in t.lease.samples if s.meta.sample_id not in dropped) if applied else ()
        content = [*t.content, (t.update + 1, used)]
        digest = next_digest(t.digest, t.update + 1, used)
        self.checkpoints.append(Checkpoint(t.update + 1, digest, t.incarnation, content, tuple(dropped), applied))
        self.attach()

    def checkpoint(self, *, report: bool) -> None:
        """Save the weights and report it, or crash in between."""
        t = self.trainer
        if t.stepped:
            return
        self.checkpoints.append(Checkpoint(t.update, t.digest, t.incarnation, list(t.content)))
        if report:
            self.ask(
                m.ReportCheckpoint(
                    ticket=self.ticket(), trainer_epoch=t.epoch, update=t.update, digest=t.digest, **NAMES
                )
            )

    def lose_newest_checkpoint(self) -> None:
        if self.checkpoints:
            self.checkpoints.pop()

    def train(self, *, stragglers: int = 0) -> None:
        """Run one update while up to `stragglers` episodes remain open."""
        for _ in range(20):
            self.acquire(8)
            while len(self.leases) > stragglers:
                self.finish_episode(outcome=m.EpisodeOutcome.COMPLETED)
            self.serve_questions()
            if self.trainer.lease is None:
                self.lease_batch()
            if self.trainer.lease is not None:
                self.step_and_commit(lose_reply=False)
                self.publish()
                return
            self.advance(0.1)

    # --- what must always hold -------------------------------------------------------------------------------

    def check(self) -> None:
        state = self.core.state
        accounts = {"training": state.counters, "evaluation": state.eval_counters, "replay": state.replay.counters}
        for name, counters in (accounts | {source: one.counters for source, one in state.foreign.items()}).items():
            walked = sum(
                (group.num_unfinished if state.counters_of(group) is counters else 0)
                + sum(state.counters_of(group, sample) is counters for sample in group.live_samples())
                for group in state.groups.values()
            )
            assert counters.live == walked, f"live {name} samples are where the counters say"
            assert counters.conserved, counters
        leased = {sample for batch in state.batches.values() for sample in batch.sample_ids}
        assert not leased & self.dropped, f"leased, though dropped: {leased & self.dropped}"
        for content in [self.trainer.content, *(c.content for c in self.checkpoints[-2:])]:
            self._check_content(content)

    def _check_content(self, content: list[tuple[int, tuple[str, ...]]]) -> None:
        seen: set[str] = set()
        for update, used in content:
            for sample_id in used:
                assert sample_id not in self.dropped, f"{sample_id} trained, though dropped"
                assert sample_id not in seen, f"{sample_id} trained twice in one history of weights"
                seen.add(sample_id)
                if sample_id in self.submitted:
                    age = max(0, update - 1 - self.submitted[sample_id])
                    assert age <= int(self.spec.foreign[0].max_age), f"{sample_id} trained {age} updates after it came"
                    continue
                original = self.originals.get(sample_id, "")
                oldest = min(span.step for span in self.spans[original or sample_id])
                lag = update - 1 - oldest
                most = self.spec.max_staleness
                if original:
                    assert self.spec.replay is not None
                    most = self.spec.replay.bound.max_staleness
                assert 0 <= lag <= most, f"{sample_id} trained {lag} updates late"
            again = [self.originals.get(s, s) for s in used if self.originals.get(s, s) in self.deferred]
            assert len(again) == len(set(again)), "a deferred sample is trained once"


def refused(world: World, request: i.Input) -> str:
    """Return the reason for which the core rejects `request`. Fail if it does not."""
    try:
        world.core.handle(request, world.now)
    except MeshError as refusal:
        return refusal.reason
    raise AssertionError(f"{request} was not refused")
