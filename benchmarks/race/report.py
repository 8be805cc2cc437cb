"""The tables of the race: rates, learning, checks, shares and targets of the arms that have run. Pure.

`race` runs the arms and explains how to read the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

import msgspec

from benchmarks.race.work import RaceMark, RaceRun, UpdateSeen
from benchmarks.report import BenchTarget, Report, spread

TRL, BARE, OLD = "TRL", "bare loop", "old "
ONE, MANY = ("one process, eta 0", "one process, eta 2"), ("processes, eta 0", "processes, eta 2")
APART = "learner apart, eta 2"
PAIRS = (ONE, (ONE[0], APART), MANY)
"""Arms at eta 0 and at eta 2. With `processes.enabled` false a run has one process at eta 0, and a learner apart at eta
2."""
OF_TRL = {ONE[0]: 1.0, ONE[1]: 1.0, APART: 1.0, MANY[0]: 1.4, MANY[1]: 1.4}
"""Most CPU per episode, relative to TRL's."""
OF_ALLOWED = 0.85
"""Least speed-up of eta = 2, relative to the allowed one."""
SUCCESS = 0.80
WARM = 3
"""Updates before the counted ones: caches, and at eta = 2 the filling of the pipeline."""
SHOWN = 0.01
"""Parts below this share in every arm are omitted."""


class RaceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An arm that has run and was evaluated."""

    settings: str
    """Digest of all that the result depends on."""
    arm: str
    seed: int
    run: RaceRun
    success: dict[int, float]
    """Held-out success by update. Snapshots between the first at `SUCCESS` and the last are not evaluated."""


Records = Mapping[str, Sequence[RaceRecord]]


def race_report(records: Records, setting: str) -> Report:
    """Return the report of the race without the notes of its run."""
    report = Report("race", setting)
    report.rows = [*_rates(records), *_learning(records), *_checks(records), *_shares(records)]
    report.targets = _targets(records)
    report.notes = _missed(records, report.targets)
    return report


def _rates(records: Records) -> list[dict[str, Any]]:
    return [
        _spreads("CPU ms per episode", records, cpu_ms, 1),
        _spreads("CPU s per update", records, _cpu_s, 2),
        _spreads("wall s per update", records, wall_s, 2),
        _of("CPU per episode over TRL", records, TRL, lambda ours, trl: cpu_ms(ours) / cpu_ms(trl)),
        _of("CPU per episode over the bare loop", records, BARE, lambda ours, bare: cpu_ms(ours) / cpu_ms(bare)),
        _spreads("start-up, CPU s", records, lambda r: r.run.marks[0].cpu_s - _cpu_s(r) * r.run.marks[0].update, 1),
        _spreads("start-up, wall s", records, lambda r: r.run.marks[0].wall_s - wall_s(r) * r.run.marks[0].update, 1),
        _row(
            "allowed speed-up",
            {slow: spread([_allowed(r) for r in records[slow]], 2) for slow, _ in _pairs(records)},
            records,
        ),
        _row("speed-up", {name: spread(found, 2) for name, found in _speed_ups(records).items()}, records),
    ]


def _learning(records: Records) -> list[dict[str, Any]]:
    return [
        _each(f"update at {SUCCESS:.2f}", records, lambda r, at: f"{at}"),
        _each(f"CPU s to {SUCCESS:.2f}", records, lambda r, at: f"{_until(r, at, lambda m: m.cpu_s, _cpu_s(r)):.0f}"),
        _each(f"wall s to {SUCCESS:.2f}", records, lambda r, at: f"{_until(r, at, lambda m: m.wall_s, wall_s(r)):.0f}"),
        _spreads("success at the end", records, lambda r: r.success.get(max(r.success, default=0), 0.0), 2),
    ]


def _checks(records: Records) -> list[dict[str, Any]]:
    return [
        _spreads("updates", records, lambda r: r.run.marks[-1].update),
        _spreads("episodes per update", records, lambda r: _episodes(r) / _num(r)),
        _spreads("tokens per sample", records, lambda r: fmean(u.tokens / u.samples for u in _counted(r)), 1),
        _spreads("training success", records, lambda r: fmean(u.success for u in _counted(r)), 2),
        _row("tokens by lag 0 / 1 / 2, %", {name: _lags(found) for name, found in records.items()}, records),
    ]


def _shares(records: Records) -> list[dict[str, Any]]:
    prices = {name: _part_ms(found) for name, found in records.items()}
    names = {part for arm in prices.values() for part, ms in arm.items() if ms >= SHOWN * sum(arm.values())}
    ordered = sorted(names, key=lambda part: -max(arm.get(part, 0.0) for arm in prices.values()))
    rows = [
        _row(f"CPU ms: {part}", {name: f"{arm.get(part, 0.0):.1f}" for name, arm in prices.items() if arm}, records)
        for part in ordered
    ]
    known = {
        name: [r.run.model_share for r in found if r.run.model_share is not None] for name, found in records.items()
    }
    shares = {name: f"{100 * fmean(values):.0f} %" for name, values in known.items() if values}
    return [*rows, _row("share of model compute", shares, records)]


def _targets(records: Records) -> list[BenchTarget]:
    targets = []
    for name, bound in OF_TRL.items():
        ratios = [cpu_ms(ours) / cpu_ms(trl) for ours, trl in zip(records[name], records[TRL], strict=True)]
        targets.append(BenchTarget(f"CPU per episode over TRL, {name}", median(ratios), bound))
    speed_ups = _speed_ups(records)
    for slow, fast in PAIRS:
        shares = [ours / _allowed(r) for ours, r in zip(speed_ups[fast], records[slow], strict=True)]
        targets.append(BenchTarget(f"speed-up over the allowed one, {fast}", median(shares), OF_ALLOWED, at_most=False))
    return targets


def _missed(records: Records, targets: Sequence[BenchTarget]) -> list[str]:
    """Name the parts that cost most in the arms that miss a target."""
    notes = []
    bare = _part_ms(records[BARE])
    for target in targets:
        arm = next((name for name in records if target.what.endswith(f", {name}")), None)
        if not target.met and arm is not None:
            extra = {part: ms - bare.get(part, 0.0) for part, ms in _part_ms(records[arm]).items()}
            largest = sorted(extra.items(), key=lambda one: -one[1])[:4]
            parts = ", ".join(f"{part} {ms:+.1f}" for part, ms in largest)
            notes.append(f"missed, {target.what}: CPU ms per episode against the bare loop: {parts}")
    return notes


def _pairs(records: Records) -> list[tuple[str, str]]:
    """Return the arms at eta 0 and eta 2 that are compared, also those of the other tree."""
    both = [*PAIRS, *((OLD + slow, OLD + fast) for slow, fast in PAIRS)]
    return [(slow, fast) for slow, fast in both if slow in records]


def _speed_ups(records: Records) -> dict[str, list[float]]:
    """Return the wall time of eta = 0 over that of eta = 2, by arm at eta = 2."""
    return {
        fast: [wall_s(one) / wall_s(other) for one, other in zip(records[slow], records[fast], strict=True)]
        for slow, fast in _pairs(records)
    }


def _allowed(record: RaceRecord) -> float:
    generation_s = fmean(update.generation_s for update in _counted(record))
    training_s = fmean(update.training_s for update in _counted(record))
    return (generation_s + training_s) / max(generation_s, training_s, _cpu_s(record) / 2)


def _ends(record: RaceRecord) -> tuple[RaceMark, RaceMark]:
    """Return the marks between which updates are counted: the last warm one, and the last."""
    marks = record.run.marks
    first = next((mark for mark in marks if mark.update >= WARM), marks[0])
    return (first, marks[-1]) if first is not marks[-1] else (marks[0], marks[-1])


def _num(record: RaceRecord) -> int:
    first, last = _ends(record)
    return max(1, last.update - first.update)


def _counted(record: RaceRecord) -> list[UpdateSeen]:
    first, last = _ends(record)
    return [update for update in record.run.updates if first.update < update.update <= last.update] or list(
        record.run.updates[-1:]
    )


def _episodes(record: RaceRecord) -> float:
    first, last = _ends(record)
    return sum(update.samples for update in _counted(record)) + last.dropped - first.dropped


def _cpu_s(record: RaceRecord) -> float:
    first, last = _ends(record)
    return (last.cpu_s - first.cpu_s) / _num(record)


def wall_s(record: RaceRecord) -> float:
    """Return the wall time per update in seconds."""
    first, last = _ends(record)
    return (last.wall_s - first.wall_s) / _num(record)


def cpu_ms(record: RaceRecord) -> float:
    """Return the CPU time per episode in milliseconds."""
    return 1e3 * _cpu_s(record) * _num(record) / _episodes(record)


def _reached(record: RaceRecord) -> int | None:
    return min((update for update, success in record.success.items() if success >= SUCCESS), default=None)


def _until(record: RaceRecord, update: int, value: Callable[[RaceMark], float], mean_s: float) -> float:
    """Return the cost up to an update, without start-up: the first update is counted as a mean one."""
    first = record.run.marks[0]
    at = next(mark for mark in record.run.marks if mark.update >= update)
    return value(at) - value(first) + mean_s * first.update


def _part_ms(records: Sequence[RaceRecord]) -> dict[str, float]:
    known = [record for record in records if record.run.parts]
    parts = {part for record in known for part in record.run.parts}
    return {part: fmean(record.run.parts.get(part, 0.0) * cpu_ms(record) for record in known) for part in parts}


def _lags(records: Sequence[RaceRecord]) -> str:
    tokens: dict[str, float] = {}
    for record in records:
        for update in _counted(record):
            for lag, num in update.staleness.items():
                tokens[lag] = tokens.get(lag, 0.0) + num
    total = sum(tokens.values())
    return " / ".join(f"{100 * tokens.get(lag, 0.0) / total:.0f}" for lag in ("0", "1", "2")) if total else ""


def _spreads(what: str, records: Records, value: Callable[[RaceRecord], float], digits: int = 0) -> dict[str, Any]:
    return _row(
        what, {name: spread([value(record) for record in found], digits) for name, found in records.items()}, records
    )


def _of(what: str, records: Records, base: str, ratio: Callable[[RaceRecord, RaceRecord], float]) -> dict[str, Any]:
    pairs = {name: zip(found, records[base], strict=True) for name, found in records.items() if name != base}
    return _row(what, {name: spread([ratio(*pair) for pair in found], 2) for name, found in pairs.items()}, records)


def _each(what: str, records: Records, value: Callable[[RaceRecord, int], str]) -> dict[str, Any]:
    """One value per seed, `-` where the target was not reached."""
    cells = {
        name: ", ".join("-" if (at := _reached(record)) is None else value(record, at) for record in found)
        for name, found in records.items()
    }
    return _row(what, cells, records)


def _row(what: str, cells: Mapping[str, Any], records: Records) -> dict[str, Any]:
    return {"": what} | {name: cells.get(name, "") for name in records}
