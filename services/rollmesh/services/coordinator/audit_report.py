"""The report of an audit: findings with position and remedy, counts, and the report as text."""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

from rollmesh.services.coordinator.audit_history import HistoryLine
from rollmesh.shared.domain.text import count_of

REMEDIES = {
    "chain": "restore RM_<run>_LEDGER from a replica or a backup that contains every stored head, and do not resume "
    "the run before",
    "ledger": "compare the record with a replica or a backup; if it is the same there, report it with a copy of the "
    "ledger",
    "conservation": "compare the record with a replica or a backup; if it is the same there, report it with a copy of "
    "the ledger",
    "once": "do not use weights of this update or a later one: return to a checkpoint before it",
    "bound": "do not use weights of this update or a later one: return to a checkpoint before it",
    "digest": "do not use weights of this update or a later one: return to a checkpoint before it",
    "checkpoint": "use a checkpoint of this run whose list agrees with the ledger, or restore the ledger that it was "
    "trained with",
    "payloads": "find the worker that wrote the payload or the report in the logs, and remove it from the mesh",
}
"""Remedy for a finding, by the violated claim."""
CHECKS = tuple(REMEDIES)


class Complain(Protocol):
    """Receives a finding: the violated claim, the violation, and its record if it is not the current one."""

    def __call__(self, check: str, message: str, position: int | None = None) -> None: ...


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One violation."""

    check: str
    """The violated claim: one of `CHECKS`."""
    position: int
    """Ledger record that shows it; 0 if it is about the whole ledger."""
    message: str
    remedy: str = ""


class HeadLine(msgspec.Struct, frozen=True, kw_only=True):
    """A head of the ledger that was stored elsewhere."""

    where: str
    """Checkpoint, gateway or option that it comes from."""
    position: int
    hash: str
    holds: bool
    """Whether the ledger contains it."""


class CheckpointSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of a checkpoint's list."""

    path: str
    updates: int
    samples: int
    digest: str


class PayloadCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Payloads of scored episodes."""

    compared: int
    purged: int
    """Number that is no longer in the sample stream, so that it cannot be checked."""
    external_unreported: int = 0
    """Number of samples that train tokens of other sources, and that a coordinator before protocol 1.1 recorded without
    them."""


class SampleTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Number of samples by end; reserved = live + all ends."""

    reserved: int
    live: int
    trained: int
    stale: int
    filtered: int
    failed: int
    cancelled: int
    exported: int


class ReplayLine(msgspec.Struct, frozen=True, kw_only=True):
    """The account of replayed samples."""

    samples: SampleTotals
    bound: int | Literal["unlimited"]
    """The staleness bound of replayed samples."""
    lags: dict[int, int]
    """Used replayed samples by lag; -1 counts those that train no POLICY token."""


class ChangeLine(msgspec.Struct, frozen=True, kw_only=True):
    """A setting that changed during the run."""

    position: int
    time_unix_s: float
    key: str
    old: str
    new: str


class AuditReport(msgspec.Struct, frozen=True, kw_only=True):
    """Result of an audit."""

    run: str
    holds: bool
    """Whether every claim was proven."""
    num_records: int
    head: str
    """Head of the ledger as it was read, POSITION:HASH."""
    num_findings: int
    findings: tuple[Finding, ...]
    warnings: tuple[Finding, ...]
    """Unusual records that violate no claim."""
    ended: str
    eta: int
    lag_max: int
    """Largest lag of a used sample; -1 if none trained on POLICY tokens."""
    lags: dict[int, int]
    """Used samples of rollouts by lag; -1 counts those that train no POLICY token."""
    samples: SampleTotals
    eval_samples: SampleTotals
    submitted: dict[str, SampleTotals]
    """Submitted samples by source."""
    ages: dict[str, dict[int, int]]
    """Used submitted samples by source and age."""
    reasons: dict[str, int]
    updates: int
    """Number of updates that are not undone."""
    updates_undone: int
    updates_skipped: int
    digest: str
    replay: ReplayLine | None = None
    """None in a run without replay."""
    heads: tuple[HeadLine, ...] = ()
    """Every head that the chain was compared with."""
    checkpoint: CheckpointSummary | None = None
    payloads: PayloadCounts | None = None
    """None if payloads were not compared."""
    changes: tuple[ChangeLine, ...] = ()
    """Changed settings, in order."""
    history: tuple[HistoryLine, ...] = ()

    def to_text(self) -> str:
        """Return the report as text."""
        broken = {finding.check for finding in self.findings}
        lines = [
            (
                f"run {self.run}: {'every claim holds' if self.holds else 'CLAIMS ARE BROKEN'} over {self.num_records} "
                "ledger records"
            ),
            *(f"  {check:<13} {self._verdict(check, check in broken)}" for check in CHECKS),
            f"  samples       {_describe(self.samples)}",
            f"  evaluation    {_describe(self.eval_samples)}",
            *(f"  {source:<13} {self._submitted(source)}" for source in self.submitted),
            (
                f"  updates       {self.updates} committed, {self.updates_skipped} of them skipped; "
                f"{self.updates_undone} undone"
            ),
            f"  staleness     {self._bounds()}; samples used by staleness: {_by_lag(self.lags)}",
            f"  digest        {self.digest or '(none)'}",
            f"  head          {self.head}",
        ]
        if self.replay is not None:
            lines += [
                f"  replay        {_describe(self.replay.samples)}",
                f"  replayed      bound {self.replay.bound}; samples used by staleness: {_by_lag(self.replay.lags)}",
            ]
        lines += [
            f"  changed       at record {c.position}: {c.key} {c.old or '(none)'} -> {c.new or '(none)'}"
            for c in self.changes
        ]
        lines += [f"  warning at record {warning.position}: {warning.message}" for warning in self.warnings]
        lines += [f"  {finding.check} at record {finding.position}: {finding.message}" for finding in self.findings]
        if self.num_findings > len(self.findings):
            lines.append(f"  and {self.num_findings - len(self.findings)} more")
        lines += [f"  remedy for {check}: {REMEDIES[check]}" for check in CHECKS if check in broken]
        lines += [f"  #{line.position} {line.what}" for line in self.history]
        return "\n".join(lines)

    def _submitted(self, source: str) -> str:
        ages = ", ".join(f"{age}: {num}" for age, num in sorted(self.ages.get(source, {}).items())) or "none"
        return f"submitted: {_describe(self.submitted[source])}; used by age: {ages}"

    def _bounds(self) -> str:
        """Return the staleness bound and the bounds before it."""
        earlier = [
            f"{change.old} before record {change.position}"
            for change in self.changes
            if change.key == "run.max_staleness"
        ]
        return f"bound {self.eta}" + (f" ({', '.join(earlier)})" if earlier else "")

    def _verdict(self, check: str, broken: bool) -> str:
        if broken:
            return "BROKEN"
        if check == "chain":
            newest = max((head for head in self.heads), key=lambda head: head.position, default=None)
            proven = (
                f"compared with {count_of(len(self.heads), 'stored head')}, up to record {newest.position}"
                if newest
                else ""
            )
            return f"holds; {proven or 'no head is stored elsewhere, so missing newest records would not be detected'}"
        if check == "checkpoint" and self.checkpoint is None:
            return "not compared (name one)"
        if check == "payloads":
            found = self.payloads
            if found is None:
                return "not compared (--payloads)"
            unreported = (
                f"; an earlier release recorded {count_of(found.external_unreported, 'sample')} without the trained "
                "tokens of other sources, which could not be checked"
                if found.external_unreported
                else ""
            )
            return f"holds; {found.compared} compared, {found.purged} purged{unreported}"
        return "holds"


def _by_lag(lags: dict[int, int]) -> str:
    text = ", ".join(f"{lag}: {num}" for lag, num in sorted(lags.items()) if lag >= 0) or "none"
    return f"{text}; without tokens of the policy: {without}" if (without := lags.get(-1)) else text


def _describe(samples: SampleTotals) -> str:
    return ", ".join(f"{name} {value}" for name, value in msgspec.structs.asdict(samples).items() if value) or "none"
