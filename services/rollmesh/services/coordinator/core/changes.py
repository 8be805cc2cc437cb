"""Decisions about a run that goes on under other settings.

What a run's history rests on is fixed: its name, its draws, its batches, its rewards, what happens beyond the bound. Limits, terms and
the bound itself may change; a batch that is out keeps the bound it was leased under (`BatchState.bound`).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core.decision_context import DecisionContext, refuse
from rollmesh.services.coordinator.core.facts import ConfigChange
from rollmesh.services.coordinator.core.records import RunSpec

MAY_CHANGE = frozenset(
    {
        "max_staleness",
        "publish_every",
        "tries_max",
        "episode_lease_s",
        "batch_lease_s",
        "group_s_max",
        "eval_s_max",
        "eval_every",
        "updates_max",
        "seconds_max",
        "success_target",
        "tokens_max",
        "stall_s",
    }
)
"""Fields of RunSpec; all others are fixed for the life of a run."""


def change(ctx: DecisionContext, request: i.ChangeRun) -> None:
    """Record a change, and open a run again that had ended at a limit. Idempotent by `change_id`."""
    state = ctx.state
    if request.change_id == state.last_change:
        ctx.reply(request.ticket, i.Changed(recorded=False, reopened=False))
        return
    for name in fixed_fields(ctx.spec, request.spec):
        was, wanted = getattr(ctx.spec, name), getattr(request.spec, name)
        refuse(
            "CHANGE_REFUSED",
            f"run.{name}: {was!r} -> {wanted!r}: it is fixed for the life of a run; change it back, or make a new run",
            key=f"run.{name}",
        )
    reopened = bool(state.ended) and not state.ended.startswith("STOPPED")
    changes = (*request.changes, *unlisted(ctx.spec, request.spec, request.changes))
    ctx.emit(f.RunChanged(change_id=request.change_id, changes=changes, spec=request.spec, reopened=reopened))
    if reopened:
        ctx.ephemeral.counted_at = ctx.ephemeral.progressed_at = ctx.now
    ctx.ephemeral.exhausted = False  # the source may have been given more
    ctx.reply(request.ticket, i.Changed(recorded=True, reopened=reopened))


def fixed_fields(old: RunSpec, new: RunSpec) -> list[str]:
    """Fields that differ and may not."""
    names = (field.name for field in msgspec.structs.fields(RunSpec))
    return [name for name in names if name not in MAY_CHANGE and getattr(old, name) != getattr(new, name)]


def unlisted(old: RunSpec, new: RunSpec, listed: Sequence[ConfigChange]) -> list[ConfigChange]:
    """What the spec changes and the caller does not list: the record is complete whoever asked for the change."""
    known = {change.key for change in listed}
    names = (name for name in sorted(MAY_CHANGE) if getattr(old, name) != getattr(new, name))
    return [
        ConfigChange(key=f"run.{name}", old=_json(getattr(old, name)), new=_json(getattr(new, name)))
        for name in names
        if f"run.{name}" not in known
    ]


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
