"""Decide on changes of a run's settings.

Settings on which the history of a run depends are fixed: name, draws, batches, rewards, bound policy. The fields of
`RunSpec` that are marked LIVE may change. A held batch keeps the bound under which it was leased (`BatchState.bound`).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.core import messages as m
from rollmesh.services.coordinator.core.decision_context import DecisionContext
from rollmesh.services.coordinator.core.facts import ConfigChange
from rollmesh.services.coordinator.core.records import RunSpec
from rollmesh.shared.config.settings import may_change
from rollmesh.shared.errors import ChangeRefused


def change(ctx: DecisionContext, request: m.ChangeRun) -> None:
    """Record a change, and reopen a run that had ended at a limit. Idempotent by `change_id`."""
    state = ctx.state
    if request.change_id == state.last_change:
        ctx.reply(request, m.ChangeRunResponse(recorded=False, reopened=False))
        return
    for name in fixed_fields(ctx.spec, request.spec):
        was, wanted = getattr(ctx.spec, name), getattr(request.spec, name)
        raise ChangeRefused(
            f"run.{name}: {was!r} -> {wanted!r}: it cannot change after the run began; change it back, or create a new "
            "run",
            key=f"run.{name}",
        )
    reopened = state.reopens
    changes = (*request.changes, *unlisted(ctx.spec, request.spec, request.changes))
    ctx.emit(f.RunChanged(change_id=request.change_id, changes=changes, spec=request.spec, reopened=reopened))
    if reopened:
        ctx.ephemeral.counted_at = ctx.ephemeral.progressed_at = ctx.now
    ctx.ephemeral.exhausted = False  # the source may have more tasks now
    ctx.reply(request, m.ChangeRunResponse(recorded=True, reopened=reopened))


def fixed_fields(old: RunSpec, new: RunSpec) -> list[str]:
    """Return the fields that differ although they are fixed."""
    return [name for name in changed_fields(old, new) if not may_change(RunSpec, name)]


def changed_fields(old: RunSpec, new: RunSpec) -> list[str]:
    return [name for name in sorted(RunSpec.__struct_fields__) if getattr(old, name) != getattr(new, name)]


def unlisted(old: RunSpec, new: RunSpec, listed: Sequence[ConfigChange]) -> list[ConfigChange]:
    """Return the changes of the spec that the caller does not list. With them the record is complete."""
    known = {change.key for change in listed}
    return [
        ConfigChange(key=f"run.{name}", old=_json(getattr(old, name)), new=_json(getattr(new, name)))
        for name in changed_fields(old, new)
        if f"run.{name}" not in known
    ]


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
