"""One random sequence of calls to one run, and the checks at its end."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rollmesh.services.coordinator.audit import audit_run
from rollmesh.v1 import events_pb2
from rollmesh.v1 import run_pb2 as pb

from . import invalid
from .calls import Calls
from .dropping import REASONS
from .ends import Ends
from .model import Checkpoint, RunModel, Violation, require
from .submitting import Submitter, draw_source
from .trainer import Trainer
from .worker import Worker

PROGRESS_S = 60.0
SHORT_LEASE_S = 0.3


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of a sequence, drawn from its seed."""

    seed: int
    num_calls: int
    kills: bool = False


@dataclass(slots=True)
class Result:
    """Result of a sequence."""

    seed: int
    calls: int = 0
    updates: int = 0
    undone: int = 0
    samples_used: int = 0
    batches_short: int = 0
    rejected: int = 0
    withheld: int = 0
    dropped: int = 0
    submitted: int = 0
    given: int = 0
    violation: str = ""
    log: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)


class Player:
    """Worker and trainer of one run."""

    def __init__(self, ends: Ends, plan: Plan, *, run: str, node_id: str) -> None:
        rng = random.Random(plan.seed)
        self._plan = plan
        self._ends = ends
        self._rng = rng
        self._spec = draw_spec(rng, run, kills=plan.kills)
        short = self._spec.batch_lease_s <= SHORT_LEASE_S
        self._model = RunModel(
            eta=self._spec.max_staleness,
            mask=self._spec.beyond == events_pb2.BOUND_POLICY_MASK,
            keeps_no_checkpoints=rng.random() < 0.12,
            group_size=self._spec.group_size,
            external_sources=tuple(self._spec.external_sources),
        )
        for source in self._spec.foreign:
            self._model.max_age = int(source.max_age) if source.max_age != "unlimited" else None
            self._model.share = source.share
        self.calls = Calls(patience_s=90.0 if plan.kills else 0.0)
        lenient = plan.kills or self._spec.episode_lease_s <= 1.0
        self._worker = Worker(ends, self.calls, self._model, rng, run, node_id, lenient)
        self._trainer = Trainer(ends, self.calls, self._model, rng, run, self._spec.batch_groups, short)
        self._submitter = Submitter(ends, self.calls, self._model, rng, run, self._spec.group_size)
        self._num_rejected = 0
        self._num_changes = 0

    async def play(self) -> Result:
        """Play the whole sequence. A violation is in the result, with the newest calls."""
        result = Result(self._plan.seed)
        try:
            await self._begin()
            while sum(self.calls.counts.values()) < self._plan.num_calls:
                await self._step()
            await self._progress()
            await self._end()
            result.samples_used = await self._audit()
        except Violation as violation:
            result.violation, result.log = str(violation), list(self.calls.log)
            with suppress(Violation):  # the run must not block the next sequence
                await self.calls.call(self._ends.run.StopRun, pb.StopRunRequest(run=self._spec.run))
        result.calls = sum(self.calls.counts.values())
        result.counts = dict(self.calls.counts)
        result.updates, result.undone = self._model.applied, self._model.num_undone
        result.withheld = len(self._trainer.withheld)
        result.dropped = len(self._model.dropped)
        result.submitted, result.given = len(self._model.submitted), self._trainer.num_given
        result.batches_short, result.rejected = self._trainer.num_short, self._num_rejected
        return result

    # Phases -----------------------------------------------------------------------------------------------------------

    async def _begin(self) -> None:
        run = self._ends.run
        created = await self.calls.call(run.CreateRun, pb.CreateRunRequest(spec=self._spec))
        require(created.ok and (created.repeated or created.response.created), f"CreateRun was answered {created}")
        again = await self.calls.call(run.CreateRun, pb.CreateRunRequest(spec=self._spec))
        require(again.ok and not again.response.created, f"the same CreateRun again was answered {again}")
        await self._trainer.attach(Checkpoint(()))
        if self._rng.random() < 0.2:
            require(not await self._trainer.lease(), "a batch was leased before any weights were published")
        await self._trainer.publish()

    async def _step(self) -> None:
        trainer, worker, batch = self._trainer, self._worker, self._model.batch
        lost = batch is not None and batch.in_doubt
        choices: list[tuple[float, Callable[[], Awaitable[Any]]]] = [
            (1.0, self._work),
            (2.0, self._invalid),
            (0.4, worker.malformed),
            (0.3, worker.repeat),
            (0.3, worker.foreign),
            (0.2, worker.renew),
            (0.6, trainer.repeat),
            (0.6, trainer.checkpoint),
            (3.0 if lost else 0.35, trainer.crash),
            (0.3, self._read),
            (0.1, self._change),
            (0.6, trainer.publish),
            (0.4, trainer.prefetch),
        ]
        if self._spec.foreign:
            choices += [(1.0, self._submitter.submit), (0.3, self._submitter.conflict)]
        if batch is None or lost:
            choices.append((4.0, self._lease))
        else:
            choices += [
                (3.5, trainer.commit),
                (1.0, trainer.fetch),
                (0.4, trainer.fetch_some),
                (0.4, trainer.renew),
                (0.3, trainer.release),
                (0.4, trainer.checkpoint_ahead),
                (0.3, trainer.lease),
            ]
            if trainer.short_leases:
                choices.append((0.7, self._let_expire))
        weights, steps = zip(*choices, strict=True)
        await self._rng.choices(steps, weights)[0]()

    async def _lease(self) -> None:
        """Work until there is a batch, and lease it."""
        geometry = self._rng.random() < 0.3
        if await self._trainer.lease(0.0, geometry=geometry) or not self._model.is_published:
            return
        if self._model.batch is None:
            await self._work()
            await self._trainer.lease(1.0, geometry=geometry)

    async def _work(self) -> None:
        num = self._spec.batch_groups * self._spec.group_size
        if self._model.is_published:
            await self._worker.acquire(num + self._rng.randint(0, num), 0.1)
            await self._worker.report_all()

    async def _invalid(self) -> None:
        one = invalid.draw(self._trainer, self._rng)
        answer = await self.calls.call(one.method, one.request)
        self._num_rejected += 1
        named = {answer.code, answer.reason} & one.expected
        require(bool(named), f"{one.name}: was answered {answer}, expected one of {sorted(one.expected)}")

    async def _let_expire(self) -> None:
        batch = self._model.batch
        assert batch is not None
        await asyncio.sleep(2 * SHORT_LEASE_S)
        await self._trainer.renew()
        require(batch.in_doubt, "a lease outlived its term")

    async def _change(self) -> None:
        """Change the bound during the run."""
        eta = self._rng.randint(max(0, self._spec.publish_every - 1), 4)
        self._num_changes += 1
        request = pb.ChangeRunRequest(spec=self._spec, change_id=f"{self._spec.run}-{self._num_changes}")
        request.spec.max_staleness = eta
        request.changes.add(key="run.max_staleness", old=str(self._model.eta), new=str(eta))
        answer = await self.calls.call(self._ends.run.ChangeRun, request)
        require(answer.ok, f"ChangeRun was answered {answer}")
        self._spec.max_staleness = self._model.eta = eta

    async def _read(self) -> None:
        """Check that the state agrees with the model and is conserved."""
        answer = await self.calls.call(self._ends.run.GetRun, pb.GetRunRequest(run=self._spec.run))
        require(answer.ok, f"GetRun was answered {answer}")
        self._check_state(answer.response.state)

    def _check_state(self, state: pb.RunState) -> None:
        model, counts, policy = self._model, state.samples, state.policies[0]
        ends = (counts.trained, counts.stale, counts.filtered, counts.failed, counts.cancelled, counts.exported)
        require(counts.reserved == counts.live + sum(ends), f"samples are not conserved: {counts}")
        require(min(counts.live, *ends) >= 0, f"a negative count: {counts}")
        require(policy.applied_step == model.applied, f"applied {policy.applied_step}, model {model.applied}")
        require(policy.incarnation == model.incarnation, f"incarnation {policy.incarnation}, model {model.incarnation}")
        require(policy.digest == model.digest, f"digest {policy.digest}, model {model.digest}")
        trained = Counter(model.was_given(name) for name in model.used_standing() & model.trained)
        require(counts.trained == trained[False], f"trained {counts.trained}, model {trained[False]}")
        for account in state.submitted_samples:
            counts, num = account.samples, len(model.submitted)
            ends = (counts.trained, counts.stale, counts.filtered, counts.failed, counts.cancelled, counts.exported)
            require(counts.reserved == counts.live + sum(ends), f"submitted samples are not conserved: {counts}")
            require(counts.trained == trained[True], f"trained {counts.trained} submitted, model {trained[True]}")
            require(account.groups == num, f"{account.groups} groups were submitted, model {num}")
            left = num - account.waiting - account.dropped
            require(left >= len(model.given), f"{left} groups were admitted, workers were given {model.given}")

    async def _progress(self) -> None:
        """Check that there is no deadlock: an update follows from any state."""
        trainer, target = self._trainer, self._model.applied + 1
        until = time.monotonic() + (3 if self._plan.kills else 1) * PROGRESS_S
        while self._model.applied < target:
            require(time.monotonic() < until, f"no update follows within {PROGRESS_S:g} s; {await self._state_text()}")
            batch = self._model.batch
            if batch is not None and batch.in_doubt:
                await trainer.crash()
                target = min(target, self._model.applied + 1)
            elif batch is not None:
                await trainer.commit()
            else:
                await trainer.publish()
                await self._lease()

    async def _state_text(self) -> str:
        answer = await self.calls.call(self._ends.run.GetRun, pb.GetRunRequest(run=self._spec.run))
        return str(answer.response or answer)

    async def _end(self) -> None:
        """Stop the run with or without a held batch. Afterwards no sample may be live."""
        trainer, model = self._trainer, self._model
        if self._rng.random() < 0.5 and model.batch is None:
            await self._lease()
        stop = pb.StopRunRequest(run=self._spec.run, reason="the player is done")
        for _ in range(2):
            answer = await self.calls.call(self._ends.run.StopRun, stop)
            require(answer.ok, f"StopRun was answered {answer}")
        model.stopped = True
        if model.batch is None:
            await trainer.lease()
        elif not model.batch.in_doubt:
            await self._rng.choice([trainer.commit, trainer.release, trainer.commit])()
        if model.batch is not None:
            await trainer.attach(Checkpoint(tuple(model.commits)))
        if not model.keeps_no_checkpoints:
            request = pb.ReportCheckpointRequest(**trainer.common(), update=model.applied, digest=model.digest)
            answer = await self.calls.call(self._ends.run.ReportCheckpoint, request)
            require(answer.ok, f"the last ReportCheckpoint was answered {answer}")
            model.checkpointed(model.applied)
        answer = await self.calls.call(self._ends.run.GetRun, pb.GetRunRequest(run=self._spec.run))
        require(answer.ok, f"GetRun was answered {answer}")
        self._check_state(answer.response.state)
        state = answer.response.state
        for counts in (state.samples, *(account.samples for account in state.submitted_samples)):
            require(counts.live == 0, f"live in a run that has ended: {counts}")

    async def _audit(self) -> int:
        """Check that the audit agrees with the model. Return the number of samples that the remaining updates used."""
        model = self._model
        report = await self.calls.persist(lambda: audit_run(self._ends.bus, self._spec.run))
        require(report.holds, report.to_text())
        require(
            report.updates == model.applied, f"the audit counts {report.updates} updates, the model {model.applied}"
        )
        require(report.updates_undone == model.num_undone, f"undone: {report.updates_undone}, model {model.num_undone}")
        require(report.digest == model.digest, f"the audit's digest {report.digest}, the model's {model.digest}")
        used = model.used_standing()
        own = sum(not model.was_given(name) for name in used)
        require(report.samples.trained == own, f"trained {report.samples.trained}, model {own}")
        require(not model.commits or max(model.lags(), default=0) <= 4, f"lags {model.lags()}")
        made = Counter(sample.drop for sample in model.samples.values())
        seen = Counter(model.dropped.values())
        for reason in REASONS:
            counted = report.reasons.get(f"filtered/{reason}", 0)
            what = f"{counted} samples are filtered/{reason}, {seen[reason]} were seen, {made[reason]} were reported"
            require(seen[reason] <= counted <= made[reason] or self._plan.kills, what)
        return len(used)


def draw_spec(rng: random.Random, run: str, *, kills: bool) -> events_pb2.RunSpec:
    """Return a small run with any bound."""
    eta, batch_groups = rng.randint(0, 3), rng.randint(1, 3)
    external = rng.choice([(), ("dataset",), ("dataset", "replay", "peer", "human"), ("peer",)])
    return events_pb2.RunSpec(
        run=run,
        max_staleness=eta,
        beyond=rng.choice([events_pb2.BOUND_POLICY_DROP, events_pb2.BOUND_POLICY_MASK]),
        batch_groups=batch_groups,
        group_size=rng.randint(1, 3),
        publish_every=rng.randint(1, eta + 1),
        tries_max=50,
        episode_lease_s=1.0 if rng.random() < 0.1 else 60.0,
        batch_lease_s=SHORT_LEASE_S if rng.random() < 0.15 and not kills else 60.0,
        group_s_max=120.0,
        eval_s_max=5.0,
        success_reward="correct",
        external_sources=external,
        foreign=[draw_source(rng, batch_groups)] if "peer" in external else [],
    )
