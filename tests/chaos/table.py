"""Rounds as a table for people: what was done to whom, and what became of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from .plan import MOMENTS
from .round import Outcome

_ENDS = ("reserved", "trained", "stale", "filtered", "failed", "cancelled")


def totals(outcomes: Sequence[Outcome]) -> dict[str, object]:
    """Over all rounds, for the JSON report and the last lines of the text."""
    held = [one for one in outcomes if not one.cause]
    seconds = sorted(one.seconds for one in held)
    return {
        "rounds": len(outcomes),
        "held": len(held),
        "blows": sum(struck.hit for one in outcomes for struck in one.struck),
        "supervisor_lives": sum(one.lives for one in outcomes),
        "gone_s_max": round(max((s for one in outcomes for s in one.gone_s), default=0.0), 2),
        "updates": sum(one.updates for one in held),
        "updates_undone": sum(one.updates_undone for one in held),
        "samples": {name: sum(one.samples.get(name, 0) for one in held) for name in _ENDS},
        "lag_max": max((one.lag_max for one in held), default=-1),
        "trained_by_lag": dict(sorted(sum((Counter(one.lags) for one in held), Counter[int]()).items())),
        "seconds_median": seconds[len(seconds) // 2] if seconds else 0.0,
        "seconds_max": seconds[-1] if seconds else 0.0,
    }


def by_victim(outcomes: Sequence[Outcome]) -> dict[str, dict[str, int]]:
    """Blows that hit, by service and by kind and place."""
    hits: dict[str, Counter[str]] = {}
    for struck in (struck for one in outcomes for struck in one.struck if struck.hit):
        where = "at a moment" if struck.blow.at_moment else "any time"
        hits.setdefault(struck.blow.service, Counter())[f"{struck.blow.kind}, {where}"] += 1
    return {service: dict(counts) for service, counts in sorted(hits.items())}


def to_text(outcomes: Sequence[Outcome]) -> str:
    """Markdown: rounds, blows, and all together."""
    sums = totals(outcomes)
    lines = [f"{name.replace('_', ' ')}: {value}" for name, value in sums.items()]
    return "\n\n".join([_rounds(outcomes), _blows(outcomes), _moments(outcomes), "\n".join(lines)])


def _rounds(outcomes: Sequence[Outcome]) -> str:
    head = ["seed", "blows", "lives", "undone", *_ENDS[1:], "lag max", "seconds", "held"]
    rows = []
    for one in outcomes:
        ends = [str(one.samples.get(name, "")) for name in _ENDS[1:]]
        num_hit = sum(struck.hit for struck in one.struck)
        held = "yes" if not one.cause else f"NO: {one.cause.splitlines()[0][:120]} ({one.folder})"
        rows.append([
            str(one.seed), str(num_hit), str(one.lives), str(one.updates_undone), *ends, str(one.lag_max), f"{one.seconds:.0f}", held,
        ])  # fmt: skip
    return _markdown(head, rows)


def _blows(outcomes: Sequence[Outcome]) -> str:
    kinds = [f"{kind}, {where}" for where in ("any time", "at a moment") for kind in ("kill", "pause")]
    rows = [[service, *(str(n.get(kind, "")) for kind in kinds)] for service, n in by_victim(outcomes).items()]
    return _markdown(["who", *kinds], rows)


def _moments(outcomes: Sequence[Outcome]) -> str:
    hit = Counter(s.blow.victim for one in outcomes for s in one.struck if s.hit and s.blow.at_moment)
    return "moments: " + ", ".join(f"{moment} {hit[moment]}" for moment in MOMENTS)


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
