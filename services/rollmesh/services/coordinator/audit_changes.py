"""Compare the changes that RunChanged lists with the changes of its spec."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from rollmesh.services.coordinator.audit_report import ChangeLine, Complain
from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.core.changes import changed_fields
from rollmesh.services.coordinator.core.facts import ConfigChange
from rollmesh.services.coordinator.core.records import RunSpec
from rollmesh.services.coordinator.ledger import StoredRecord
from rollmesh.shared.config.settings import may_change


class Changes:
    """All changes of a run, in order."""

    def __init__(self, complain: Complain) -> None:
        self.lines: list[ChangeLine] = []
        self._complain = complain
        self._spec: RunSpec | None = None

    def enter(self, fact: f.Fact, record: StoredRecord) -> None:
        """Fold one fact."""
        if isinstance(fact, f.RunChanged):
            self.lines += [
                ChangeLine(
                    position=record.position,
                    time_unix_s=record.time_unix_s,
                    key=change.key,
                    old=change.old,
                    new=change.new,
                )
                for change in fact.changes
            ]
            if self._spec is not None:
                self._compare(self._spec, fact)
        if isinstance(fact, f.RunCreated | f.RunChanged):
            self._spec = fact.spec

    def _compare(self, old: RunSpec, fact: f.RunChanged) -> None:
        listed = {change.key: change for change in fact.changes}
        for name in changed_fields(old, fact.spec):
            was, now = getattr(old, name), getattr(fact.spec, name)
            what = f"run.{name} changed from {was!r} to {now!r}"
            if not may_change(RunSpec, name):
                self._complain("ledger", f"{what}, and it cannot change after the run began")
            elif (change := listed.get(f"run.{name}")) is None:
                self._complain("ledger", f"{what}, but the record's list of changes does not contain it")
            elif not _lists_correctly(change, was, now):
                self._complain(
                    "ledger", f"{what}, but the record lists {change.old or '(none)'} -> {change.new or '(none)'}"
                )


def _lists_correctly(change: ConfigChange, was: Any, now: Any) -> bool:
    return _equal(change.old, was) and _equal(change.new, now)


def _equal(text: str, value: Any) -> bool:
    """Return whether a listed value, as JSON, is `value`. An unset setting is listed as empty."""
    if not text:
        return True
    try:
        listed = json.loads(text)
    except ValueError:
        return False
    return bool(listed == json.loads(msgspec.json.encode(value)))
