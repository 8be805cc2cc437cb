"""The race: TRL, the bare loop and the mesh train the same model on the same tasks, and every arm is judged by the same
evaluator.

All arms start from one warm-started model per seed, take the tasks in the order of the mesh, 128 samples per update in
two optimizer steps, the same learning rates and clipping, float32, one compute thread, and keep every group. One more
arm filters groups without variance, as the demo does. Arms take turns seed by seed, each in new processes, and each
seed begins with another arm.

CPU is that of all processes of an arm. An update is counted from the end of the one before, so start-up is not part of
it: it is the time until the first update minus one mean update. Evaluations run after an arm has ended. TRL and the
bare loop stop their clocks while they write snapshots for them; the mesh writes its snapshots as checkpoints, on the
clock.

How to read it:
- `CPU ms per episode` is the price: rollouts, training, and all that is between. The share of each part of it is below.
- `to 0.80` is the first evaluation at or above 0.80, at most once in `SNAPSHOT_EVERY` updates. `-`: not within the
  updates.
- `allowed speed-up` of eta = 0 is (generation + training) / max(generation, training, CPU / 2) by its own stage times:
  the most that overlapping both on two cores can win. `speed-up` of eta = 2 is the wall time of eta = 0 over its own.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

import msgspec

from benchmarks.methods.bench import commit
from benchmarks.race.evaluation import EvalWork
from benchmarks.race.play import RaceTask
from benchmarks.race.report import (
    APART,
    BARE,
    MANY,
    OLD,
    ONE,
    SUCCESS,
    TRL,
    WARM,
    RaceRecord,
    cpu_ms,
    race_report,
    wall_s,
)
from benchmarks.race.trl_environment import trl_python
from benchmarks.race.work import RaceMode, RaceRun, RaceWork, race_config, race_limits
from benchmarks.report import Report
from rollmesh.demo.config import MadeModelConfig
from rollmesh.demo.families.calc import CalcOracle
from rollmesh.demo.make_model import make_model
from rollmesh.services.data.config import build_pools, build_selector
from rollmesh.services.data.task import PoolTask, Split
from rollmesh.shared.config.loader import config_from_dict, read_tree

CONFIG = Path(__file__).parents[2] / "configs" / "demo.yaml"
"""The demo: its model, tasks and schedule."""


@dataclass(frozen=True, slots=True)
class ArmPlan:
    """One arm of the race."""

    mode: RaceMode
    eta: int = 0
    filtered: bool = False
    old: bool = False
    """Whether the services come from the other tree."""


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
SEEDS = (0, 1, 2)
UPDATES = 50
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


def run(
    quick: bool,
    *,
    seeds: Sequence[int] = SEEDS,
    updates: int = UPDATES,
    old: Path | None = None,
    out: Path | None = None,
) -> Report:
    """`old` is another checkout with an environment, whose mesh runs as further arms. `out` keeps records, and arms
    that have one there are not run again."""
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
    report = race_report(records, setting)
    report.notes.append(f"the race took {race.seconds:.0f} s")
    return report


# Running --------------------------------------------------------------------------------------------------------------


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
            f"seed {seed}, {name}: {result.marks[-1].update} updates, {cpu_ms(record):.1f} CPU ms per episode, "
            f"{wall_s(record):.2f} s per update, success {success.get(last, 0.0):.2f} at {last}"
        )
        return record

    def _process(self, work: RaceWork, plan: ArmPlan) -> bytes:
        python, module = sys.executable, "benchmarks.race.arm"
        if plan.mode == "trl":
            python, module = str(self._trl), "benchmarks.race.trl"
        command = [python, "-m", module]
        if plan.old:
            assert self._old is not None
            here = f"import runpy, sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})"
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
        [sys.executable, "-m", "benchmarks.race.evaluation"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
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
