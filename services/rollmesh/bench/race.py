"""The race: TRL, the bare loop and the mesh train the same model on the same tasks, and every arm is judged by the same evaluator.

All arms start from one warm-started model per seed, take the tasks in the order of the mesh, 128 samples per update in two optimizer steps,
the same learning rates and clipping, float32, one compute thread, and keep every group. One more arm filters groups without variance, as the
demo does. Arms take turns seed by seed, each in new processes, and each seed begins with another arm.

CPU is that of all processes of an arm. An update is counted from the end of the one before, so start-up is not part of it: it is the time
until the first update minus one mean update. Evaluations run after an arm has ended. TRL and the bare loop stop their clocks while they
write snapshots for them; the mesh writes its snapshots as checkpoints, on the clock.

How to read it:
- `CPU ms per episode` is the price: rollouts, training, and all that is between. The share of each part of it is below.
- `to 0.80` is the first evaluation at or above 0.80, at most once in `SNAPSHOT_EVERY` updates. `-`: not within the updates.
- `allowed speed-up` of eta = 0 is (generation + training) / max(generation, training, CPU / 2) by its own stage times: the most that
  overlapping both on two cores can win. `speed-up` of eta = 2 is the wall time of eta = 0 over its own.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import IO, Any

import msgspec

from rollmesh.bench.methods import commit
from rollmesh.bench.race_env import trl_python
from rollmesh.bench.race_eval import EvalWork
from rollmesh.bench.race_play import RaceTask
from rollmesh.bench.race_work import RaceMark, RaceMode, RaceRun, RaceWork, UpdateSeen, race_config, race_limits
from rollmesh.bench.report import BenchTarget, Report, spread
from rollmesh.demo.config import MadeModelConfig
from rollmesh.demo.families.calc import CalcOracle
from rollmesh.demo.make_model import make_model
from rollmesh.services.data.config import build_pools, build_selector
from rollmesh.services.data.task import PoolTask, Split
from rollmesh.shared.config import config_from_dict, read_tree

CONFIG = Path(__file__).parents[1] / "cli" / "demo.yaml"
"""The demo: its model, tasks and schedule."""


@dataclass(frozen=True, slots=True)
class ArmPlan:
    """One arm of the race."""

    mode: RaceMode
    eta: int = 0
    filtered: bool = False
    old: bool = False
    """Whether the services come from the other tree."""


TRL, BARE, OLD = "TRL", "bare loop", "old "
ONE, MANY = ("one process, eta 0", "one process, eta 2"), ("processes, eta 0", "processes, eta 2")
APART = "learner apart, eta 2"
ARMS: dict[str, ArmPlan] = {
    TRL: ArmPlan("trl"),
    BARE: ArmPlan("bare"),
    ONE[0]: ArmPlan("mesh", 0),
    ONE[1]: ArmPlan("mesh", 2),
    APART: ArmPlan("learner apart", 2),
    MANY[0]: ArmPlan("processes", 0),
    MANY[1]: ArmPlan("processes", 2),
    f"{APART}, filtered": ArmPlan("learner apart", 2, filtered=True),
}
PAIRS = (ONE, (ONE[0], APART), MANY)
"""Arms at eta 0 and at eta 2. With `processes.enabled` false a run has one process at eta 0, and a learner apart at eta 2."""
OF_TRL = {ONE[0]: 1.0, ONE[1]: 1.0, APART: 1.0, MANY[0]: 1.4, MANY[1]: 1.4}
"""Most CPU per episode, relative to TRL's."""
OF_ALLOWED = 0.85
"""Least speed-up of eta = 2, relative to the allowed one."""
SUCCESS = 0.80
SEEDS = (0, 1, 2)
UPDATES = 50
WARM = 3
"""Updates before the counted ones: caches, and at eta = 2 the filling of the pipeline."""
SNAPSHOT_EVERY = 5
NUM_PROFILED = 4
EVAL_SAMPLES = 2
EVALUATORS = 2
RACE_S_MAX = 2640.0
"""Longest time of the race in seconds. Arms share what is left of it and stop at the update that they have reached."""
EVAL_S = 25.0
"""Time of the evaluations of an arm, reserved when the arms get their shares."""
ARM_S_MIN = 60.0
END_S = 180.0
"""Time of an arm beyond its limit: an update, the profile, the shut-down."""
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


def run(
    quick: bool,
    *,
    seeds: Sequence[int] = SEEDS,
    updates: int = UPDATES,
    old: Path | None = None,
    out: Path | None = None,
) -> Report:
    """`old` is another checkout with an environment, whose mesh runs as further arms. `out` keeps records, and arms that have one there are
    not run again."""
    seeds, updates = (tuple(seeds)[:1], SNAPSHOT_EVERY) if quick else (tuple(seeds), updates)
    arms = dict(ARMS)
    if old is not None:
        arms |= {f"{OLD}{name}": replace(p, old=True) for name, p in ARMS.items() if p.mode in ("mesh", "processes")}
    with TemporaryDirectory(prefix="rollmesh-race-") as folder, ExitStack() as stack:
        race = _Race(
            arms=arms, seeds=seeds, updates=updates, old=old, out=out or Path(folder), folder=Path(folder), stack=stack
        )
        records = race.run()
    batch = race.batch
    setting = f"{CONFIG.name}, batches of {batch}; updates {WARM + 1} to {updates}, {len(seeds)} seeds in turns"
    report = Report("race", setting)
    report.rows = [*_rates(records), *_learning(records), *_checks(records), *_shares(records)]
    report.targets = _targets(records)
    report.notes = [*_missed(records, report.targets), f"the race took {race.seconds:.0f} s"]
    return report


# Running ---------------------------------------------------------------------------------------------------------------


class _Race:
    """Runs the arms seed by seed."""

    def __init__(
        self,
        *,
        arms: Mapping[str, ArmPlan],
        seeds: Sequence[int],
        updates: int,
        old: Path | None,
        out: Path,
        folder: Path,
        stack: ExitStack,
    ) -> None:
        self._begin_s = time.monotonic()
        self._arms = arms
        self._seeds = seeds
        self._updates = updates
        self._old = old
        self._folder = folder
        self._models = out / "models"
        self._records = out / "records.jsonl"
        self._models.mkdir(parents=True, exist_ok=True)
        self._say("preparing TRL's environment")
        self._trl = trl_python()
        self._config = race_config(self._work("bare", seed=0))
        self.batch = f"{self._config.run.batch_groups} x {self._config.run.group_size} episodes"
        self._evaluators = [stack.enter_context(_evaluator(self._eval_work())) for _ in range(EVALUATORS)]

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begin_s

    def run(self) -> dict[str, list[RaceRecord]]:
        known = {(r.arm, r.seed): r for r in self._read()}
        found: dict[str, list[RaceRecord]] = {name: [] for name in self._arms}
        turns = [(seed, name) for seed in self._seeds for name in _rotated(list(self._arms), seed)]
        left = sum((name, seed) not in known for seed, name in turns)
        for seed, name in turns:
            record = known.get((name, seed))
            if record is None:
                limit_s = max(ARM_S_MIN, (RACE_S_MAX - self.seconds) / left - EVAL_S)
                record = self._race(name, seed, limit_s)
                left -= 1
                with self._records.open("ab") as file:
                    file.write(msgspec.json.encode(record) + b"\n")
            found[name].append(record)
        return found

    def _race(self, name: str, seed: int, limit_s: float) -> RaceRecord:
        plan = self._arms[name]
        model = self._model(seed)
        with TemporaryDirectory(dir=self._folder) as folder:
            work = self._work(
                plan.mode, seed=seed, model=model, folder=folder, limit_s=limit_s, eta=plan.eta, filtered=plan.filtered
            )
            result = msgspec.json.decode(self._process(work, plan), type=RaceRun)
            success = self._evaluate(Path(folder) / "snapshots", result.marks[-1].update)
        record = RaceRecord(settings=self._settings(), arm=name, seed=seed, run=result, success=success)
        last = max(success, default=0)
        self._say(
            f"seed {seed}, {name}: {result.marks[-1].update} updates, {_cpu_ms(record):.1f} CPU ms per episode, "
            f"{_wall_s(record):.2f} s per update, success {success.get(last, 0.0):.2f} at {last}"
        )
        return record

    def _process(self, work: RaceWork, plan: ArmPlan) -> bytes:
        python, module = sys.executable, "rollmesh.bench.race_arm"
        if plan.mode == "trl":
            python, module = str(self._trl), "rollmesh.bench.race_trl"
        command = [python, "-m", module]
        if plan.old:
            assert self._old is not None
            here = f"import rollmesh.bench, runpy; rollmesh.bench.__path__.insert(0, {str(Path(__file__).parent)!r})"
            command = [
                str(self._old / ".venv/bin/python"), "-c", f"{here}; runpy.run_module({module!r}, run_name='__main__')",
            ]  # fmt: skip
        done = subprocess.run(
            command,
            input=msgspec.json.encode(work),
            stdout=subprocess.PIPE,
            env={**os.environ, "TQDM_DISABLE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"},
            check=True,
            timeout=work.limit_s + END_S,
        )
        return done.stdout

    def _work(self, mode: RaceMode, *, seed: int, model: Path = Path(), folder: str = "", **settings: Any) -> RaceWork:
        work = RaceWork(
            mode=mode,
            config=str(CONFIG),
            eta=settings.get("eta", 0),
            filtered=settings.get("filtered", False),
            seed=seed,
            model=str(model),
            folder=folder,
            updates=self._updates,
            snapshot_every=SNAPSHOT_EVERY,
            num_profiled=NUM_PROFILED,
            limit_s=settings.get("limit_s", 0.0),
        )
        return msgspec.structs.replace(work, tasks=race_tasks(work)) if mode == "trl" else work

    def _model(self, seed: int) -> Path:
        """Return the warm-started model of a seed. It is made if it does not exist."""
        tree, _ = read_tree(CONFIG)
        plan = config_from_dict(MadeModelConfig, tree["made_model"])
        digest = hashlib.sha256(msgspec.json.encode(plan)).hexdigest()[:12]
        folder = self._models / f"{digest}-{seed}"
        if not folder.exists():
            self._say(f"seed {seed}: warm start")
            make_model(plan, folder, seed=seed, on_step=lambda _: None)
        return folder

    def _eval_work(self) -> EvalWork:
        pool = build_pools(self._config.data)[Split.TEST]
        tasks = tuple(_race_task(pool.task(at)) for at in range(self._config.run.eval_tasks or len(pool)))
        return EvalWork(tasks=tasks, num_samples=EVAL_SAMPLES, limits=race_limits(self._config))

    def _evaluate(self, snapshots: Path, last: int) -> dict[int, float]:
        """Return the success of the snapshots up to the first that reaches the target, and of the last one."""
        due = (
            sorted(number for path in snapshots.iterdir() if (number := int(path.name)) <= last)
            if snapshots.is_dir()
            else []
        )
        found: dict[int, float] = {}
        for at in range(0, len(due), EVALUATORS):
            if any(success >= SUCCESS for success in found.values()):
                break
            found |= self._judged(snapshots, due[at : at + EVALUATORS])
        return found | self._judged(snapshots, [number for number in due[-1:] if number not in found])

    def _judged(self, snapshots: Path, numbers: Sequence[int]) -> dict[int, float]:
        """Let one evaluator judge each snapshot, at the same time."""
        pairs = list(zip(numbers, self._evaluators, strict=False))
        for number, (ask, _) in pairs:
            ask.write(f"{snapshots / str(number)}\n".encode())
            ask.flush()
        return {number: msgspec.json.decode(answer.readline(), type=float) for number, (_, answer) in pairs}

    def _settings(self) -> str:
        parts = [CONFIG.read_text(), str(self._updates), str(self._old), commit()]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

    def _read(self) -> list[RaceRecord]:
        if not self._records.exists():
            return []
        lines = self._records.read_bytes().split(b"\n")[:-1]
        records = [msgspec.json.decode(line, type=RaceRecord) for line in lines]
        return [record for record in records if record.settings == self._settings()]

    def _say(self, line: str) -> None:
        print(f"{self.seconds:6.0f} s  {line}", file=sys.stderr, flush=True)


@contextmanager
def _evaluator(work: EvalWork) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Pipes to and from an evaluator, which waits for folders."""
    process = subprocess.Popen(
        [sys.executable, "-m", "rollmesh.bench.race_eval"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(msgspec.json.encode(work) + b"\n")
        process.stdin.flush()
        yield process.stdin, process.stdout
    finally:
        process.kill()
        process.wait()


def race_tasks(work: RaceWork) -> tuple[RaceTask, ...]:
    """Return the training tasks in the order in which a mesh draws them, those of an update behind each other."""
    config = race_config(work)
    pool = build_pools(config.data)[Split.TRAIN]
    selector = build_selector(msgspec.structs.replace(config.data, seed=config.data.seed or work.seed), pool)
    return tuple(
        _race_task(pool.task(selector.draw(draw, frozenset())))
        for draw in range(work.updates * config.run.batch_groups)
    )


def _race_task(task: PoolTask) -> RaceTask:
    (answer,) = CalcOracle().resolve(task.oracle_ref.partition(":")[2]).answers
    return RaceTask(question=task.messages[-1].content, answer=answer, tools=tuple(task.tools))


def _rotated(names: list[str], by: int) -> list[str]:
    by = by * 3 % len(names)
    return names[by:] + names[:by]


# The table -------------------------------------------------------------------------------------------------------------


def _rates(records: Records) -> list[dict[str, Any]]:
    return [
        _spreads("CPU ms per episode", records, _cpu_ms, 1),
        _spreads("CPU s per update", records, _cpu_s, 2),
        _spreads("wall s per update", records, _wall_s, 2),
        _of("CPU per episode over TRL", records, TRL, lambda ours, trl: _cpu_ms(ours) / _cpu_ms(trl)),
        _of("CPU per episode over the bare loop", records, BARE, lambda ours, bare: _cpu_ms(ours) / _cpu_ms(bare)),
        _spreads("start-up, CPU s", records, lambda r: r.run.marks[0].cpu_s - _cpu_s(r) * r.run.marks[0].update, 1),
        _spreads("start-up, wall s", records, lambda r: r.run.marks[0].wall_s - _wall_s(r) * r.run.marks[0].update, 1),
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
        _each(
            f"wall s to {SUCCESS:.2f}", records, lambda r, at: f"{_until(r, at, lambda m: m.wall_s, _wall_s(r)):.0f}"
        ),
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
        ratios = [_cpu_ms(ours) / _cpu_ms(trl) for ours, trl in zip(records[name], records[TRL], strict=True)]
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
        arm = next((name for name in ARMS if target.what.endswith(f", {name}")), None)
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
        fast: [_wall_s(one) / _wall_s(other) for one, other in zip(records[slow], records[fast], strict=True)]
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


def _wall_s(record: RaceRecord) -> float:
    first, last = _ends(record)
    return (last.wall_s - first.wall_s) / _num(record)


def _cpu_ms(record: RaceRecord) -> float:
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
    return {part: fmean(record.run.parts.get(part, 0.0) * _cpu_ms(record) for record in known) for part in parts}


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
