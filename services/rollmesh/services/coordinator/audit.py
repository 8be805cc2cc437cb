"""The audit: folds a run's ledger from its start and proves conservation, once, bound and the digest chain, or says where they break.

    report = await audit_run(bus, "my-run", checkpoint=Path("runs/my-run/checkpoints"))
    report.holds, report.to_text(), msgspec.json.encode(report)

Four accounts are held against each other: the core's fold (`apply`), a second bookkeeping (`audit_books`), updates recomputed from the facts
(`audit_updates`), and the trainer's own list of what its weights were trained on.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from rollmesh.services.coordinator.audit_books import Books
from rollmesh.services.coordinator.audit_checkpoint import CheckpointSummary, check_checkpoint
from rollmesh.services.coordinator.audit_story import StoryLine, tell
from rollmesh.services.coordinator.audit_updates import Updates
from rollmesh.services.coordinator.core.apply import apply
from rollmesh.services.coordinator.core.facts import Fact, RunChanged
from rollmesh.services.coordinator.core.records import Purpose, SampleEnd
from rollmesh.services.coordinator.core.state import Accounts, State
from rollmesh.services.coordinator.ledger import StoredRecord, read_ledger
from rollmesh.shared.bus.bus import Bus, UnknownStream
from rollmesh.shared.bus.run_streams import run_streams
from rollmesh.shared.errors import DataLoss, InvalidInput, UnknownRun

FINDINGS_MAX = 1000
"""Findings kept; further ones are only counted."""
CHECKS = ("ledger", "conservation", "once", "bound", "digest", "checkpoint")
_KINDS = {"training": (Purpose.TRAIN, Purpose.EXPORT), "evaluation": (Purpose.EVAL,)}


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that must not be."""

    check: str
    """Which claim it breaks: one of `CHECKS`."""
    position: int
    """Ledger record at which it shows; 0 if it is about the whole."""
    message: str


class SampleAccounts(msgspec.Struct, frozen=True, kw_only=True):
    """Samples by fate; reserved = live + all ends."""

    reserved: int
    live: int
    trained: int
    stale: int
    filtered: int
    failed: int
    cancelled: int
    exported: int


class ChangeLine(msgspec.Struct, frozen=True, kw_only=True):
    """A setting that changed when the run went on."""

    position: int
    time_unix_s: float
    key: str
    old: str
    new: str


class AuditReport(msgspec.Struct, frozen=True, kw_only=True):
    """What an audit found."""

    run: str
    holds: bool
    """Whether every claim was proven."""
    num_records: int
    num_findings: int
    findings: tuple[Finding, ...]
    ended: str
    eta: int
    lag_max: int
    """Largest lag of a used sample; -1 if none trained on POLICY tokens."""
    lags: dict[int, int]
    samples: SampleAccounts
    eval_samples: SampleAccounts
    reasons: dict[str, int]
    updates: int
    """Updates that stand."""
    updates_undone: int
    updates_skipped: int
    digest: str
    checkpoint: CheckpointSummary | None = None
    changes: tuple[ChangeLine, ...] = ()
    """Settings that changed when the run went on, in order."""
    story: tuple[StoryLine, ...] = ()

    def to_text(self) -> str:
        """The report for people."""
        broken = {finding.check for finding in self.findings}
        verdicts = [f"  {check:<13} {_verdict(check in broken, check, self.checkpoint)}" for check in CHECKS]
        lags = ", ".join(f"{lag}: {num}" for lag, num in sorted(self.lags.items())) or "none"
        lines = [
            f"run {self.run}: {'every claim holds' if self.holds else 'CLAIMS ARE BROKEN'} over {self.num_records} ledger records",
            *verdicts,
            f"  samples       {_describe(self.samples)}",
            f"  evaluation    {_describe(self.eval_samples)}",
            f"  updates       {self.updates} stand, {self.updates_skipped} of them skipped, {self.updates_undone} were undone",
            f"  staleness     eta {self.eta}, samples used by lag: {lags}",
            f"  digest        {self.digest or '(none)'}",
        ]
        lines += [
            f"  changed       at record {c.position}: {c.key} {c.old or '(none)'} -> {c.new or '(none)'}"
            for c in self.changes
        ]
        lines += [f"  {finding.check} at record {finding.position}: {finding.message}" for finding in self.findings]
        if self.num_findings > len(self.findings):
            lines.append(f"  and {self.num_findings - len(self.findings)} more")
        lines += [f"  #{line.position} {line.what}" for line in self.story]
        return "\n".join(lines)


def _verdict(broken: bool, check: str, checkpoint: CheckpointSummary | None) -> str:
    if check == "checkpoint" and checkpoint is None and not broken:
        return "not looked at (give one)"
    return "BROKEN" if broken else "holds"


def _describe(samples: SampleAccounts) -> str:
    return ", ".join(f"{name} {value}" for name, value in msgspec.structs.asdict(samples).items() if value) or "none"


class Audit:
    """Folds records, one after the other, and gathers findings."""

    def __init__(self) -> None:
        self.state = State()
        self.updates = Updates(self.complain)
        self._books = Books(lambda what: self.complain("conservation", what))
        self._findings: list[Finding] = []
        self._num_findings = 0
        self._changes: list[ChangeLine] = []
        self._num_records = 0
        self._position = 0
        self._folds = True
        """False once the core's fold met what it can't be in: then its state says nothing any more."""

    def complain(self, check: str, message: str, position: int | None = None) -> None:
        self._num_findings += 1
        if len(self._findings) < FINDINGS_MAX:
            place = self._position if position is None else position
            self._findings.append(Finding(check=check, position=place, message=message))

    def enter(self, record: StoredRecord) -> None:
        """Fold one record and check what must hold after it."""
        self._position = record.position
        self._num_records += 1
        for fact in record.facts:
            self.updates.enter(fact)
            self._keep_books(fact)
            self._fold(fact)
            self._note_changes(fact, record)
        self._compare()

    def _note_changes(self, fact: Fact, record: StoredRecord) -> None:
        for change in fact.changes if isinstance(fact, RunChanged) else ():
            self._changes.append(
                ChangeLine(
                    position=record.position,
                    time_unix_s=record.time_unix_s,
                    key=change.key,
                    old=change.old,
                    new=change.new,
                )
            )

    def _keep_books(self, fact: Fact) -> None:
        try:
            self._books.enter(fact)
        except KeyError as error:
            self.complain("conservation", f"{type(fact).__name__} is about {error}, which is not there")

    def _fold(self, fact: Fact) -> None:
        if not self._folds:
            return
        try:
            apply(self.state, fact)
        except (AssertionError, KeyError, ValueError) as error:
            self._folds = False
            what = f"{type(error).__name__}: {error}"
            self.complain("ledger", f"{type(fact).__name__} contradicts what was before ({what}); the fold ends here")

    def _compare(self) -> None:
        """Accounts against a walk over the groups, and against the second bookkeeping."""
        if not self._folds:
            return
        for kind, purposes in _KINDS.items():
            accounts = self.state.accounts_of(purposes[0])
            walked = sum(group.num_live for group in self.state.groups.values() if group.purpose in purposes)
            sums = {
                "live in the groups": walked,
                "reserved less ended": accounts.reserved - sum(accounts.ends.values()),
            }
            for what, value in sums.items():
                if value != accounts.live:
                    self.complain("conservation", f"{kind}: the accounts say {accounts.live} live, {what}: {value}")

    def _compare_books(self) -> None:
        for kind, purposes in _KINDS.items():
            accounts = self.state.accounts_of(purposes[0])
            ours = {"RESERVED": self._books.reserved(*purposes), "LIVE": self._books.live(*purposes)}
            theirs = {"RESERVED": accounts.reserved, "LIVE": accounts.live}
            for end in SampleEnd:
                if end is not SampleEnd.LIVE:
                    ours[end.name] = self._books.ends(end, *purposes)
                    theirs[end.name] = accounts.ends.get(end, 0)
            for name, value in ours.items():
                if value != theirs[name]:
                    self.complain(
                        "conservation", f"{kind}: {value} {name} by counting again, {theirs[name]} in the accounts"
                    )

    def report(self, checkpoint: Path | None = None, story: tuple[StoryLine, ...] = ()) -> AuditReport:
        """The verdict over all records entered."""
        if self._folds:
            self._compare_books()
        summary = None
        if checkpoint is not None:
            summary = check_checkpoint(checkpoint, self.updates, lambda what: self.complain("checkpoint", what, 0))
        state, updates = self.state, self.updates
        return AuditReport(
            run=state.spec.run if state.spec is not None else "",
            holds=self._num_findings == 0,
            num_records=self._num_records,
            num_findings=self._num_findings,
            findings=tuple(self._findings),
            ended=state.ended,
            eta=state.spec.max_staleness if state.spec is not None else 0,
            lag_max=max(updates.lags, default=-1),
            lags=dict(updates.lags),
            samples=_accounts(state.accounts),
            eval_samples=_accounts(state.eval_accounts),
            reasons=dict(state.accounts.reasons),
            updates=len(updates.standing),
            updates_undone=updates.num_undone,
            updates_skipped=sum(not update.applied for update in updates.standing.values()),
            digest=updates.digest,
            checkpoint=summary,
            changes=tuple(self._changes),
            story=story,
        )


def _accounts(accounts: Accounts) -> SampleAccounts:
    ends = {end.name.lower(): accounts.ends.get(end, 0) for end in SampleEnd if end is not SampleEnd.LIVE}
    return SampleAccounts(reserved=accounts.reserved, live=accounts.live, **ends)


async def audit_run(bus: Bus, run: str, *, checkpoint: Path | None = None, sample: str = "") -> AuditReport:
    """Audit a run, whether it goes on or has ended. `sample`: a sample's or episode's id whose story to tell.

    `checkpoint`: a checkpoint folder, or the folder of checkpoints (then the newest). Raises UnknownRun.
    """
    try:
        log = await bus.open(run_streams(run).ledger.name)
    except (UnknownStream, InvalidInput) as error:
        raise UnknownRun(
            f"there is no ledger of run {run!r} on this bus; name a run that was made here (`rollmesh audit FOLDER --run-name NAME`)",
            run=run,
        ) from error
    audit = Audit()
    records: list[StoredRecord] = []
    try:
        async for record in read_ledger(log):
            audit.enter(record)
            if sample:
                records.append(record)
    except DataLoss as error:
        audit.complain("ledger", str(error))
    return audit.report(checkpoint, tuple(tell(records, sample)) if sample else ())
