"""Print rounds as a table: their faults and their results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from .plan import MOMENTS
from .round import Outcome

_ENDS = ("reserved", "trained", "stale", "filtered", "failed", "cancelled")


def totals(outcomes: Sequence[Outcome]) -> dict[str, object]:
    """Return totals over all rounds, for the JSON report and the last lines of the text."""
    held = [one for one in outcomes if not one.cause]
    seconds = sorted(one.seconds for one in held)
    return {
        "rounds": len(outcomes),
        "held": len(held),
        "faults": sum(injection.hit for one in outcomes for injection in one.injections),
        "supervisor_starts": sum(one.num_starts for one in outcomes),
        "gone_s_max": round(max((s for one in outcomes for s in one.gone_s), default=0.0), 2),
        "updates": sum(one.updates for one in held),
        "updates_undone": sum(one.updates_undone for one in held),
        "samples": {name: sum(one.samples.get(name, 0) for one in held) for name in _ENDS},
        "lag_max": max((one.lag_max for one in held), default=-1),
        "trained_by_lag": dict(sorted(sum((Counter(one.lags) for one in held), Counter[int]()).items())),
        **_program_totals(held),
        "seconds_median": seconds[len(seconds) // 2] if seconds else 0.0,
        "seconds_max": seconds[-1] if seconds else 0.0,
    }


def _program_totals(held: Sequence[Outcome]) -> dict[str, object]:
    """Return sums over the rounds with programs; the largest of `*_max`, and of the rounds' largest numbers at once the
    smallest."""
    counts = [msgspec.structs.asdict(one.programs) for one in held if one.programs is not None]
    if not counts:
        return {}
    sums = {name: sum(one[name] for one in counts) for name in counts[0] if not name.endswith("_max")}
    at_once = min(one["at_once_max"] for one in counts)
    return {"programs": {**sums, "at_once": at_once, "gone_s_max": max(one["gone_s_max"] for one in counts)}}


def by_victim(outcomes: Sequence[Outcome]) -> dict[str, dict[str, int]]:
    """Return the number of faults that hit, by service and by kind and place."""
    hits: dict[str, Counter[str]] = {}
    for injection in (injection for one in outcomes for injection in one.injections if injection.hit):
        where = "at a fault point" if injection.fault.at_fault_point else "any time"
        hits.setdefault(injection.fault.service, Counter())[f"{injection.fault.kind}, {where}"] += 1
    return {service: dict(counts) for service, counts in sorted(hits.items())}


def to_text(outcomes: Sequence[Outcome]) -> str:
    """Return Markdown: rounds, faults, and totals."""
    sums = totals(outcomes)
    lines = [f"{name.replace('_', ' ')}: {value}" for name, value in sums.items()]
    return "\n\n".join([_rounds(outcomes), _faults(outcomes), _moments(outcomes), "\n".join(lines)])


def _rounds(outcomes: Sequence[Outcome]) -> str:
    head = ["seed", "faults", "starts", "undone", *_ENDS[1:], "lag max", "seconds", "held"]
    rows = []
    for one in outcomes:
        ends = [str(one.samples.get(name, "")) for name in _ENDS[1:]]
        num_hit = sum(injection.hit for injection in one.injections)
        held = "yes" if not one.cause else f"NO: {one.cause.splitlines()[0][:120]} ({one.folder})"
        rows.append([
            str(one.seed), str(num_hit), str(one.num_starts), str(one.updates_undone), *ends, str(one.lag_max), f"{one.seconds:.0f}", held,
        ])  # fmt: skip
    return _markdown(head, rows)


def _faults(outcomes: Sequence[Outcome]) -> str:
    kinds = [f"{kind}, {where}" for where in ("any time", "at a fault point") for kind in ("kill", "pause")] + [
        "cut, any time"
    ]
    rows = [[service, *(str(n.get(kind, "")) for kind in kinds)] for service, n in by_victim(outcomes).items()]
    return _markdown(["service", *kinds], rows)


def _moments(outcomes: Sequence[Outcome]) -> str:
    hit = Counter(s.fault.victim for one in outcomes for s in one.injections if s.hit and s.fault.at_fault_point)
    return "fault points: " + ", ".join(f"{moment} {hit[moment]}" for moment in MOMENTS)


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
