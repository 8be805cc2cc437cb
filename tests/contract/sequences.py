"""Many sequences against one mesh, and a table of their results."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

from .ends import Ends
from .player import Plan, Player, Result


async def play_all(
    ends: Ends, plans: Sequence[Plan], *, parallel: int, on_result: Callable[[Result], None] = lambda _: None
) -> list[Result]:
    """Play every plan, each in a run with the name of its seed; at most `parallel` at a time."""
    room = asyncio.Semaphore(parallel)

    async def one(plan: Plan) -> Result:
        async with room:
            result = await play(ends, plan)
        on_result(result)
        return result

    return await asyncio.gather(*map(one, plans))


async def play(ends: Ends, plan: Plan) -> Result:
    """Play one plan."""
    run = f"contract-{plan.seed}"
    async with ends.worker(run) as node_id:
        return await Player(ends, plan, run=run, node_id=node_id).play()


def to_text(results: Sequence[Result]) -> str:
    """Return totals, responses by code, and every violation with its newest calls."""
    calls: Counter[str] = Counter()
    for result in results:
        calls.update(_codes(result))
    totals = {
        "calls": sum(r.calls for r in results),
        "calls in the shortest": min(r.calls for r in results),
        "standing updates": sum(r.updates for r in results),
        "updates undone": sum(r.undone for r in results),
        "samples used": sum(r.samples_used for r in results),
        "batches short": sum(r.batches_short for r in results),
        "invalid requests": sum(r.rejected for r in results),
        "contradicted samples withheld": sum(r.withheld for r in results),
        "dropped members of leased groups": sum(r.dropped for r in results),
        "submitted groups": sum(r.submitted for r in results),
        "submitted groups in batches": sum(r.given for r in results),
    }
    lines = [
        f"{len(results)} sequences: " + ", ".join(f"{num} {what}" for what, num in totals.items()),
        "answers: " + ", ".join(f"{code} {count}" for code, count in calls.most_common()),
    ]
    for result in results:
        if result.violation:
            lines += [f"seed {result.seed}: VIOLATION: {result.violation}", *(f"    {line}" for line in result.log)]
    lines.append(f"{sum(bool(r.violation) for r in results)} violations")
    return "\n".join(lines)


def _codes(result: Result) -> Counter[str]:
    codes: Counter[str] = Counter()
    for key, count in result.counts.items():
        codes[key.rpartition(" ")[2]] += count
    return codes
