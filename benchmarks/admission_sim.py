"""A run in virtual time: the real coordinator core with modeled workers and a modeled learner.

    worker slots --AcquireRollouts--> core <--LeaseBatch, CommitUpdate, PublishVersion-- learner
                 --ReportEpisodes-->

Every duration is drawn for one episode of one group, or for one update, from the seed of the run. So two runs that
differ only in a setting of the coordinator draw the same durations, and their virtual times may be compared directly.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core import messages as m
from rollmesh.services.coordinator.core.core import Core
from rollmesh.services.coordinator.core.decision_context import DrawTasks, Effect, FinalizeGroup, Reply
from rollmesh.services.coordinator.core.facts import GroupDecision, PayloadRef, SampleMeta, StepSpan, Task
from rollmesh.services.coordinator.core.records import RunSpec
from rollmesh.shared.domain.versions import PolicyVersion

NAMES: dict[str, Any] = {"policy": "main", "learner": "main"}
NEVER_S = 1e9
Duration = Callable[[random.Random], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One modeled mesh. Times are virtual seconds."""

    name: str
    eta: int
    episode_s: Duration
    """Duration of an episode from its lease to its report."""
    train_s: Duration = lambda _: 1.0
    """Duration of an update from its lease to its commit."""
    publish_s: float = 0.02
    """Time from a commit until nodes sample with its weights."""
    waits_for_publication: bool = True
    """Whether the learner requests the next batch after the publication, or at its commit."""
    slots: int = 256
    """Episodes that the workers run at once."""
    filtered: float = 0.0
    """Share of groups that the finalizer filters."""
    stall_every_s: float = 0.0
    """Time between two stalls of all workers; 0: none."""
    stall_s: float = 0.0
    """Duration of a stall. An episode that would finish in it finishes after it."""
    batch_groups: int = 8
    group_size: int = 4
    publish_every: int = 1
    updates: int = 120


@dataclass(slots=True)
class Result:
    """What a run took and trained."""

    seconds: float
    lags: Counter[int] = field(default_factory=Counter)
    """Trained samples by staleness."""
    waited_s: float = 0.0
    """Time for which the learner waited for a batch."""

    @property
    def lag_mean(self) -> float:
        return sum(lag * num for lag, num in self.lags.items()) / max(1, self.lags.total())

    def share_at(self, lag: int) -> float:
        """Return the share of trained samples with staleness `lag`."""
        return self.lags[lag] / max(1, self.lags.total())


def simulate(scenario: Scenario, *, seed: int, admit_early: bool) -> Result:
    """Run the scenario until its last commit."""
    return _Simulation(scenario, seed, admit_early).run()


class _Simulation:
    def __init__(self, scenario: Scenario, seed: int, admit_early: bool) -> None:
        self._scenario = scenario
        self._seed = seed
        self._core = Core()
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._tickets = count(1)
        self._on_reply: dict[int, Callable[[Any], None]] = {}
        self._free = scenario.slots
        self._asking = False
        self._active = 0
        self._update = 0
        self._epoch = 0
        self._asked_at = 0.0
        self._result = Result(0.0)
        self._spec = RunSpec(
            run="sim",
            max_staleness=scenario.eta,
            batch_groups=scenario.batch_groups,
            group_size=scenario.group_size,
            publish_every=scenario.publish_every,
            admit_early=admit_early,
            updates_max=0,
            eval_every=0,
            stall_s=0.0,
            episode_lease_s=86_400.0,
            batch_lease_s=86_400.0,
            group_s_max=604_800.0,
        )

    def run(self) -> Result:
        self._ask(m.CreateRun(ticket=next(self._tickets), spec=self._spec), lambda _: None)
        attach = i.AttachTrainer(
            ticket=next(self._tickets), last_update=0, digest="", keeps_no_checkpoints=True, **NAMES
        )
        self._ask(attach, self._attached)
        self._acquire()
        while self._update < self._scenario.updates:
            self._now, _, happen = heapq.heappop(self._events)
            happen()
        self._result.seconds = self._now
        return self._result

    def _after(self, seconds: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now + seconds, next(self._order), happen))

    def _ask(self, request: Any, on_reply: Callable[[Any], None] | None = None) -> None:
        if on_reply is not None:
            self._on_reply[request.ticket] = on_reply
        for effect in self._core.handle(request, self._now).effects:
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, Reply):
            self._on_reply.pop(effect.ticket)(effect.value)
        elif isinstance(effect, DrawTasks):
            draws = range(effect.first_draw, effect.first_draw + effect.num)
            drawn = i.TasksDrawn(purpose=effect.purpose, tasks=tuple((d, Task(task_id=f"t{d}")) for d in draws))
            self._after(0.0, lambda: self._ask(drawn))
        elif isinstance(effect, FinalizeGroup):
            filtered = self._rng("filter", effect.group).random() < self._scenario.filtered
            decision = GroupDecision.FILTER if filtered else GroupDecision.KEEP
            self._after(0.0, lambda: self._ask(i.GroupDecided(group=effect.group, decision=decision)))

    def _rng(self, *names: object) -> random.Random:
        return random.Random(f"{self._seed}/{'/'.join(map(str, names))}")

    # Workers ----------------------------------------------------------------------------------------------------------

    def _acquire(self) -> None:
        """Request episodes for the free slots, one request at a time, as a worker does."""
        if self._free and not self._asking:
            self._asking = True
            ticket = next(self._tickets)
            request = i.AcquireRollouts(ticket=ticket, node_id="worker", num_max=self._free, wait_s=NEVER_S)
            self._ask(request, self._acquired)

    def _acquired(self, answer: i.Acquired) -> None:
        self._asking = False
        self._free -= len(answer.leases)
        for lease in answer.leases:
            self._begin(lease)
        self._after(0.0, self._acquire)

    def _begin(self, lease: i.EpisodeLease) -> None:
        seconds = self._scenario.episode_s(self._rng("episode", lease.group, lease.index))
        every, length = self._scenario.stall_every_s, self._scenario.stall_s
        if every and (into := (self._now + seconds) % every) < length and self._now + seconds > every:
            seconds += length - into
        step = self._active
        self._after(seconds, lambda: self._finish(lease, step))

    def _finish(self, lease: i.EpisodeLease, step: int) -> None:
        self._free += 1
        sample = SampleMeta(
            sample_id=f"{lease.episode}/0",
            policy="main",
            steps=(StepSpan(step=step, incarnation=0, num_tokens=3),),
            num_tokens=5,
            num_sampled_tokens=3,
            rewards=(),
        )
        ticket = next(self._tickets)
        report = i.EpisodeReport(
            lease_id=lease.lease_id,
            group=lease.group,
            episode=lease.episode,
            attempt=lease.attempt,
            outcome=m.EpisodeOutcome.COMPLETED,
            payload=PayloadRef(sequence=ticket, size_bytes=1),
            samples=(sample,),
        )
        self._ask(i.ReportEpisodes(ticket=ticket, node_id="worker", reports=(report,)), lambda _: self._acquire())

    # The learner ------------------------------------------------------------------------------------------------------

    def _attached(self, answer: i.Attached) -> None:
        self._epoch = answer.trainer_epoch
        self._publish(0)
        self._lease()

    def _publish(self, step: int) -> None:
        version = PolicyVersion(policy="main", step=step, incarnation=0, weights_digest=f"w{step}")
        request = i.PublishVersion(ticket=next(self._tickets), trainer_epoch=self._epoch, version=version, **NAMES)
        self._active = step
        self._ask(request, lambda _: None)

    def _lease(self) -> None:
        self._asked_at = self._now
        ticket, update = next(self._tickets), self._update + 1
        request = i.LeaseBatch(ticket=ticket, trainer_epoch=self._epoch, update=update, wait_s=NEVER_S, **NAMES)
        self._ask(request, self._leased)

    def _leased(self, grant: m.LeaseBatchResponse) -> None:
        if self._update:
            self._result.waited_s += self._now - self._asked_at
        self._result.lags.update(sample.staleness for sample in grant.samples)
        self._after(self._scenario.train_s(self._rng("update", self._update + 1)), lambda: self._commit(grant.lease_id))

    def _commit(self, lease_id: str) -> None:
        update = self._update + 1
        ticket, epoch = next(self._tickets), self._epoch
        request = i.CommitUpdate(ticket=ticket, trainer_epoch=epoch, update=update, lease_ids=(lease_id,), **NAMES)
        self._ask(request, lambda _: None)
        self._update = update
        due = update % self._scenario.publish_every == 0
        if due:
            self._after(self._scenario.publish_s, lambda: self._publish(update))
        delayed = due and self._scenario.waits_for_publication
        self._after(self._scenario.publish_s if delayed else 0.0, self._lease)
