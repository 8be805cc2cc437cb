"""The audit folds a run's ledger from its start, and proves conservation, once, bound and the digest chain, or reports
violations.

    report = await audit_run(bus, "my-run", checkpoint=Path("runs/my-run/checkpoints"), heads=heads)
    report.holds, report.to_text(), msgspec.json.encode(report)

First it compares the chain of records with the heads that others stored (`audit_chain`), and archive segments with
their digests (`audit_archive`). Then it compares four results
with each other: the core's fold (`apply`), independent counters (`audit_conservation`), updates recomputed from the
facts (`audit_updates`, with leases and versions), and the trainer's list of the samples in its weights. On request it
compares payloads (`audit_payloads`).

A damaged or contradictory ledger gives findings, never an exception, and every wait has a limit.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

from rollmesh.services.coordinator.audit_archive import SealedSegments
from rollmesh.services.coordinator.audit_chain import Chain, StoredHead
from rollmesh.services.coordinator.audit_changes import Changes
from rollmesh.services.coordinator.audit_checkpoint import OpenCheckpoint, check_checkpoint, open_checkpoint
from rollmesh.services.coordinator.audit_conservation import (
    EVALUATION,
    REPLAY,
    TRAINING,
    Conservation,
    submitted_account,
)
from rollmesh.services.coordinator.audit_history import HistoryLine, ledger_history
from rollmesh.services.coordinator.audit_payloads import Payloads
from rollmesh.services.coordinator.audit_report import (
    REMEDIES,
    AuditReport,
    Finding,
    HeadLine,
    PayloadCounts,
    ReplayLine,
    SampleTotals,
)
from rollmesh.services.coordinator.audit_updates import Updates
from rollmesh.services.coordinator.core.apply import apply
from rollmesh.services.coordinator.core.facts import (
    EpisodeEnded,
    EpisodeLeased,
    EpisodeReturned,
    EpisodesAdded,
    EpisodeScored,
    Fact,
    GroupFinalized,
    GroupReserved,
    RunCreated,
    SampleEnd,
    SamplesEnded,
)
from rollmesh.services.coordinator.core.state import SampleCounters, State
from rollmesh.services.coordinator.ledger import StoredRecord, read_ledger
from rollmesh.shared.bus.archive_bus import ArchivedLedger, LostRecords, open_ledger
from rollmesh.shared.bus.bus import Bus, BusUnavailable, StreamLog, UnknownStream
from rollmesh.shared.bus.run_streams import run_streams
from rollmesh.shared.domain.formats import NewerFormat
from rollmesh.shared.domain.ledger_head import EMPTY, LedgerHead
from rollmesh.shared.errors import DataLoss, InvalidInput, UnknownRun

FINDINGS_MAX = 1000
"""Number of findings that are kept. Further ones are only counted."""
EPISODES_MAX = 100_000
"""Maximum number of episodes that a group reserves at once. A fact with more is false and is not folded, because it
would take all memory."""
_OF_A_GROUP = (
    GroupReserved,
    EpisodesAdded,
    EpisodeLeased,
    EpisodeReturned,
    EpisodeEnded,
    EpisodeScored,
    GroupFinalized,
    SamplesEnded,
)
"""Facts that concern one group. Any other may concern all of them."""
_CONTRADICTIONS = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)
"""Errors of a fold by a fact that contradicts earlier ones."""


class Audit:
    """Folds records one after the other, and collects findings."""

    def __init__(self, run: str = "", *, payloads: bool = False) -> None:
        """`run`: name of the run whose ledger it should be; empty if it is not known. `payloads`: whether payloads will
        be compared."""
        self._run = run
        self.state = State()
        self.updates = Updates(self.complain)
        self.payloads = Payloads(self.complain, keep=payloads)
        self.segments = SealedSegments(self.complain)
        self._changes = Changes(self.complain)
        self._conservation = Conservation(
            lambda what: self.complain("conservation", what), lambda _, samples: self.updates.forget(samples)
        )
        self._findings: list[Finding] = []
        self._warnings: list[Finding] = []
        self._num_findings = 0
        self._num_records = 0
        self._position = 0
        self._live: dict[str, Counter[str]] = {}
        """Purpose and number of live samples of each group."""
        self._sums: Counter[str] = Counter()
        """Number of live samples in the groups, by purpose."""
        self._folds = True
        """False once the core's fold met a contradiction: its state then proves nothing."""

    def complain(self, check: str, message: str, position: int | None = None) -> None:
        """Add a finding, at the current record by default."""
        self._num_findings += 1
        if len(self._findings) < FINDINGS_MAX:
            self._findings.append(self._finding(check, message, position))

    def warn(self, check: str, message: str, position: int | None = None) -> None:
        """Add a warning: unusual, but no violation."""
        if len(self._warnings) < FINDINGS_MAX:
            self._warnings.append(self._finding(check, message, position))

    def _finding(self, check: str, message: str, position: int | None) -> Finding:
        place = self._position if position is None else position
        return Finding(check=check, position=place, message=message, remedy=REMEDIES[check])

    def enter(self, record: StoredRecord) -> None:
        """Fold one record and check what must hold after it."""
        self._position = record.position
        self._num_records += 1
        for fact in record.facts:
            self._take("once", self.updates.enter, fact)
            self._take("conservation", self._conservation.enter, fact)
            self._take("payloads", lambda fact: self.payloads.enter(fact, record.position, record.protocol), fact)
            self._take("chain", lambda fact: self.segments.enter(fact, record.position), fact)
            self._take("ledger", lambda fact: self._changes.enter(fact, record), fact)
            if isinstance(fact, RunCreated) and self._run and fact.spec.run != self._run:
                self.complain(
                    "ledger", f"this is the ledger of run {fact.spec.run!r}, expected that of run {self._run!r}"
                )
            self._fold(fact)
        self._compare(record)

    def _take(self, check: str, account: Callable[[Fact], None], fact: Fact) -> None:
        try:
            account(fact)
        except _CONTRADICTIONS as error:
            self.complain(check, f"{type(fact).__name__} contradicts what was before ({_words(error)})")

    def _fold(self, fact: Fact) -> None:
        if not self._folds:
            return
        try:
            _check_size(fact)
            apply(self.state, fact)
        except _CONTRADICTIONS as error:
            self._folds = False
            what = f"contradicts what was before ({_words(error)}); the fold ends here"
            self.complain("ledger", f"{type(fact).__name__} {what}")

    def _walk(self, record: StoredRecord) -> None:
        """Count the live samples again of every group that the record concerns."""
        groups: Iterable[str] = {fact.group for fact in record.facts if isinstance(fact, _OF_A_GROUP)}
        if not all(isinstance(fact, _OF_A_GROUP) for fact in record.facts):
            groups = [*self._live, *self.state.groups]
        accounts = {id(counters): kind for kind, counters in self._counters().items()}
        for name in groups:
            self._sums.subtract(self._live.pop(name, Counter()))
            if (group := self.state.groups.get(name)) is not None:
                found = self._live[name] = Counter({accounts[id(self.state.counters_of(group))]: group.num_unfinished})
                found.update(accounts[id(self.state.counters_of(group, one))] for one in group.live_samples())
                self._sums.update(found)

    def _compare(self, record: StoredRecord) -> None:
        """Compare the counters with the groups."""
        if not self._folds:
            return
        self._walk(record)
        for kind, counters in self._counters().items():
            walked = self._sums[kind]
            sums = {
                "live in the groups": walked,
                "reserved less ended": counters.reserved - sum(counters.ends.values()),
            }
            for what, value in sums.items():
                if value != counters.live:
                    self.complain("conservation", f"{kind}: the counters say {counters.live} live, {what}: {value}")

    def _counters(self) -> dict[str, SampleCounters]:
        """Return the counters of the fold by account."""
        state = self.state
        submitted = {submitted_account(source): account.counters for source, account in state.foreign.items()}
        return {TRAINING: state.counters, EVALUATION: state.eval_counters, REPLAY: state.replay.counters, **submitted}

    def _compare_conservation(self) -> None:
        for kind, counters in self._counters().items():
            ours = {"RESERVED": self._conservation.reserved(kind), "LIVE": self._conservation.live(kind)}
            theirs = {"RESERVED": counters.reserved, "LIVE": counters.live}
            for end in SampleEnd:
                if end is not SampleEnd.LIVE:
                    ours[end.name] = self._conservation.ends(end, kind)
                    theirs[end.name] = counters.ends.get(end, 0)
            for name, value in ours.items():
                if value != theirs[name]:
                    self.complain(
                        "conservation",
                        f"{kind}: {value} {name} by the independent count, {theirs[name]} in the counters",
                    )

    def report(
        self,
        checkpoint: OpenCheckpoint | None = None,
        *,
        head: LedgerHead = EMPTY,
        heads: tuple[HeadLine, ...] = (),
        payloads: PayloadCounts | None = None,
        history: tuple[HistoryLine, ...] = (),
    ) -> AuditReport:
        """Return the report over all records. `checkpoint` is compared with them."""
        self.payloads.finish()
        if self._folds:
            self._compare_conservation()
        summary = None
        state, updates = self.state, self.updates
        if checkpoint is not None:
            policy = state.spec.policy if state.spec is not None else ""
            summary = check_checkpoint(checkpoint, updates, policy, lambda what: self.complain("checkpoint", what, 0))
        return AuditReport(
            run=self._run or (state.spec.run if state.spec is not None else ""),
            holds=self._num_findings == 0,
            num_records=self._num_records,
            head=str(head),
            num_findings=self._num_findings,
            findings=tuple(self._findings),
            warnings=tuple(self._warnings),
            ended=state.ended,
            eta=state.spec.max_staleness if state.spec is not None else 0,
            lag_max=max(updates.lags, default=-1),
            lags=dict(updates.lags),
            samples=_totals(state.counters),
            eval_samples=_totals(state.eval_counters),
            replay=_replay_line(state, updates),
            submitted={source: _totals(account.counters) for source, account in state.foreign.items()},
            ages={source: dict(ages) for source, ages in updates.ages.items()},
            reasons=dict(state.counters.reasons),
            updates=len(updates.standing),
            updates_undone=updates.num_undone,
            updates_skipped=sum(not update.applied for update in updates.standing.values()),
            digest=updates.digest,
            heads=heads,
            checkpoint=summary,
            payloads=payloads,
            changes=tuple(self._changes.lines),
            history=history,
        )


def _replay_line(state: State, updates: Updates) -> ReplayLine | None:
    if state.spec is None or state.spec.replay is None:
        return None
    return ReplayLine(
        samples=_totals(state.replay.counters),
        bound=state.spec.replay.max_staleness,
        lags=dict(updates.replays.lags),
    )


def _totals(counters: SampleCounters) -> SampleTotals:
    ends = {end.name.lower(): counters.ends.get(end, 0) for end in SampleEnd if end is not SampleEnd.LIVE}
    return SampleTotals(reserved=counters.reserved, live=counters.live, **ends)


def _check_size(fact: Fact) -> None:
    if isinstance(fact, GroupReserved | EpisodesAdded) and not 0 <= fact.num_episodes <= EPISODES_MAX:
        raise ValueError(f"{fact.num_episodes} episodes of group {fact.group}")


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]


async def audit_run(
    bus: Bus,
    run: str,
    *,
    checkpoint: Path | None = None,
    heads: Sequence[StoredHead] = (),
    payloads: bool = False,
    sample: str = "",
) -> AuditReport:
    """Audit a run that is live or has ended. `sample`: id of a sample or episode whose history to report.

    `checkpoint`: a checkpoint folder, or the folder of checkpoints (then the newest of now). `heads`: heads of this
    ledger that others stored. `payloads`: compare metadata with the payloads that the sample stream still stores.
    Raises UnknownRun, and WrongHost on a host without the archive segments.
    """
    try:
        streams = run_streams(run)
        log = await open_ledger(bus, run)
    except (UnknownStream, InvalidInput) as error:
        raise UnknownRun(
            f"there is no ledger of run {run!r} on this bus; name a run that was created here (`rollmesh audit FOLDER "
            "--run-name NAME`)",
            run=run,
        ) from error
    audit = Audit(run, payloads=payloads)
    chain = Chain(log.name, heads, audit.complain, audit.warn)
    # Opened before the ledger is read: the trainer of a live run removes checkpoints, and writes others that are newer
    # than the records.
    with nullcontext() if checkpoint is None else open_checkpoint(checkpoint) as opened:
        await _read(log, chain, audit)
        if isinstance(log, ArchivedLedger) and log.files is not None:
            await asyncio.to_thread(audit.segments.compare, log.files)
        return audit.report(
            opened,
            head=chain.head,
            heads=chain.heads,
            payloads=await audit.payloads.compare(bus, streams.samples.name) if payloads else None,
            history=tuple(await ledger_history(lambda: _readable(log), sample)) if sample else (),
        )


async def _read(log: StreamLog, chain: Chain, audit: Audit) -> None:
    """Enter every record that can be read."""
    try:
        last_seq, begin = (await log.info()).last_seq, 1
        while begin:
            begin = await _read_from(log, begin, chain, audit)
        chain.finish(last_seq)
    except (BusUnavailable, UnknownStream) as error:
        audit.complain("chain", f"{error.message}; later records could not be read", chain.head.position + 1)


async def _read_from(log: StreamLog, begin: int, chain: Chain, audit: Audit) -> int:
    """Enter the records from `begin` on. Return where to continue after an archive segment that cannot be read; 0 at
    the end of the ledger."""
    try:
        async for record in log.read_range(begin):
            stored = chain.enter(record)
            if stored is not None:
                audit.enter(stored)
    except LostRecords as error:
        audit.complain("chain", error.message, chain.head.position + 1)
        return error.last + 1
    except NewerFormat as error:  # of an archive segment
        audit.complain("chain", f"{error.message}; later records could not be read", chain.head.position + 1)
    return 0


async def _readable(log: StreamLog) -> AsyncIterator[StoredRecord]:
    """Yield the records up to the first one that cannot be read, which is a finding of the audit."""
    with suppress(DataLoss, NewerFormat, BusUnavailable, UnknownStream):
        async for record in read_ledger(log):
            yield record
