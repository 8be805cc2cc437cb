"""Every method against its baseline, on small tasks and with exact lag: what the papers lead one to expect, and what
happens here.

An arm trains a tiny model with one recipe on one task (`tasks`) in the bare loop (`race.bare_loop`): generation, reward
and update in one process without services. At lag n the weights of n updates ago generate. Arms of one task, lag and
seed have the same initial model, the same order of prompts and the same evaluations; they differ in the method.
`expectations` says with which method it is compared, and which differences are expected.

    arms to run -> processes of `arm`, one arm at a time each -> records.jsonl -> comparisons (`verdict`) -> report

A record is written when its arm ends, and arms with a record are not run again. The budget is in CPU seconds, which
exclude the waiting for a busy core. Rewards of groups without variance stay in the batch, because the bare loop has no
finalizer.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import get_args

import msgspec

from benchmarks.methods.arm import ArmWork, Made, Size, settings_digest
from benchmarks.methods.expectations import Expected, MethodTask, expected_of
from benchmarks.methods.records import LR, ArmRecord, MethodArm, append_record, chosen_records, read_records
from benchmarks.methods.verdict import MethodComparison, compare
from rollmesh.shared.config.registry import unknown_name
from rollmesh.shared.errors import InvalidInput
from rollmesh.shared.process.process_launch import bound_to_parent
from rollmesh.trainer.recipe import recipe_names

LAGS = (0, 4, 16)
"""Lags of tasks on which a method expects something of stale data."""
ARM_S_MAX = 3600.0
"""Most wall seconds of one arm, with the making of its model."""
LINE_BYTES_MAX = 1 << 24
QUICK = Size(updates=2, evals=1, eval_tasks=4)
Progress = Callable[[str], None]


class MethodsOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to run. An empty choice means the default."""

    methods: tuple[str, ...] = ()
    """Recipes by name or by file. Default: all built-in ones. Their baselines are added."""
    tasks: tuple[str, ...] = ()
    """Default: the tasks on which a recipe expects something, or calc."""
    lags: tuple[int, ...] = ()
    """Default: 0, and also 4 and 16 on tasks on which the recipe expects something of a larger lag."""
    seeds: tuple[int, ...] = (0, 1, 2)
    lrs: tuple[float, ...] = (LR,)
    """Learning rates."""
    cpu_s: float = 3600.0
    """Budget of this call, in CPU seconds."""
    processes: int = 1
    out: Path
    any_commit: bool = False
    """Accept records of other commits with the same settings."""
    quick: bool = False

    def __post_init__(self) -> None:
        """Raise InvalidInput for a choice that cannot be run."""
        for task in self.tasks:
            if task not in get_args(MethodTask):
                raise InvalidInput(f"--tasks: {unknown_name('task', task, get_args(MethodTask), own='none')}")
        if not self.seeds or min((*self.seeds, *self.lags)) < 0:
            raise InvalidInput(f"--seeds and --lags must be >= 0, got {self.seeds} and {self.lags}")
        if not self.lrs or min(self.lrs) <= 0:
            raise InvalidInput(f"--lr must be > 0, got {self.lrs}")
        if self.processes < 1 or self.cpu_s < 0:
            raise InvalidInput(f"--processes must be >= 1 and --cpu-s >= 0, got {self.processes} and {self.cpu_s:g}")

    @property
    def size(self) -> Size:
        return QUICK if self.quick else Size()


@dataclass(slots=True)
class MethodsOutcome:
    """The state of the records after a call."""

    records: dict[MethodArm, ArmRecord] = field(default_factory=dict)
    missing: list[MethodArm] = field(default_factory=list)
    rows: list[MethodComparison] = field(default_factory=list)
    crashed: list[str] = field(default_factory=list)
    """Causes of arms without a record, whose process ended or exceeded `ARM_S_MAX`. They are run again by the next
    call."""


def planned(options: MethodsOptions) -> list[MethodArm]:
    """Return the arms, seed by seed, each baseline before its methods, so that an early end leaves whole pairs. Raises
    ConfigError."""
    arms: dict[MethodArm, None] = {}
    for seed in options.seeds:
        for method in options.methods or recipe_names():
            wanted = expected_of(method)
            for task, lag in cases_of(wanted, options):
                for lr, name in product(options.lrs, (wanted.baseline, method)):
                    arms[MethodArm(method=name, task=task, lag=lag, seed=seed, lr=lr)] = None
    return list(arms)


def cases_of(wanted: Expected, options: MethodsOptions) -> list[tuple[str, int]]:
    """Return the tasks and lags on which a method is run."""
    cases = []
    for task in options.tasks or tuple(dict.fromkeys(one.task for one in wanted.expected)) or ("calc",):
        stale = any(one.lag_min for one in wanted.expected if one.task == task)
        cases += [(task, lag) for lag in options.lags or (LAGS if stale else LAGS[:1])]
    return cases


def read_outcome(options: MethodsOptions) -> MethodsOutcome:
    """Return what the records in the folder show, without running anything."""
    arms = planned(options)
    settings = {arm: settings_digest(arm, options.size) for arm in arms}
    records = chosen_records(
        read_records(options.out / "records.jsonl"), settings, None if options.any_commit else commit()
    )
    rows = [
        row
        for method in options.methods or recipe_names()
        if method != expected_of(method).baseline
        for row in compare(method, expected_of(method), records, cases_of(expected_of(method), options))
    ]
    return MethodsOutcome(records, [arm for arm in arms if arm not in records], rows)


async def run_methods(options: MethodsOptions, report: Progress) -> MethodsOutcome:
    """Run the arms without a record until the budget is spent, and return the state of the records. `report` gets lines
    of progress."""
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "models").mkdir(exist_ok=True)
    before = read_outcome(options)
    report(f"{len(before.records)} arms have a record, {len(before.missing)} to run, budget {options.cpu_s:g} CPU s")
    run = _Run(options, before.missing, report)
    async with asyncio.TaskGroup() as group:
        for number in range(min(options.processes, len(before.missing))):
            group.create_task(run.work(number))
    after = read_outcome(options)
    after.crashed = run.crashed
    return after


class _Run:
    """The arms of one call, which its processes take one after the other."""

    def __init__(self, options: MethodsOptions, arms: Sequence[MethodArm], report: Progress) -> None:
        self.crashed: list[str] = []
        self._options = options
        self._waiting = list(reversed(arms))
        self._report = report
        self._commit = commit()
        self._cpu_s: list[float] = []
        self._num_running = 0

    async def work(self, number: int) -> None:
        """Run arms in one process until none is left or the budget does not suffice for another one."""
        while self._waiting and self._affordable():
            with (self._options.out / f"process{number}.log").open("ab") as log:
                process = await asyncio.create_subprocess_exec(
                    *bound_to_parent([sys.executable, "-m", "benchmarks.methods.arm"]),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=log,
                    limit=LINE_BYTES_MAX,
                )
            try:
                while self._waiting and self._affordable() and await self._arm(process, self._waiting.pop()):
                    pass
            finally:
                if process.returncode is None:
                    process.kill()
                await process.wait()

    def _affordable(self) -> bool:
        """Return whether another arm of mean cost fits into the budget. The first arm of a call needs a budget above
        0."""
        spent = sum(self._cpu_s)
        mean = spent / max(1, len(self._cpu_s))
        return spent < self._options.cpu_s and spent + (self._num_running + 1) * mean <= self._options.cpu_s

    async def _arm(self, process: asyncio.subprocess.Process, arm: MethodArm) -> bool:
        """Run one arm and store its record. Return False if the process cannot run another one."""
        assert process.stdin is not None
        assert process.stdout is not None
        options = self._options
        work = ArmWork(
            arm=arm,
            commit=self._commit,
            settings=settings_digest(arm, options.size),
            size=options.size,
            models=str((options.out / "models").absolute()),
        )
        self._num_running += 1
        try:
            async with asyncio.timeout(ARM_S_MAX):
                process.stdin.write(msgspec.json.encode(work) + b"\n")
                line = await process.stdout.readline()
        except (TimeoutError, ConnectionError) as error:
            line, cause = b"", f"{type(error).__name__} after at most {ARM_S_MAX:g} s"
        else:
            cause = "its process ended"
        finally:
            self._num_running -= 1
        if not line:
            self.crashed.append(f"{_name(arm)}: {cause}; see the logs in {options.out}")
            self._report(f"failed: {self.crashed[-1]}")
            return False
        made = msgspec.json.decode(line, type=Made)
        append_record(options.out / "records.jsonl", made.record)
        self._cpu_s.append(made.cpu_s)
        self._report(
            f"{_progress(made.record)}; {sum(self._cpu_s):.0f} of {options.cpu_s:g} s, {len(self._waiting)} left"
        )
        return True


def _progress(record: ArmRecord) -> str:
    if record.error:
        return f"{_name(record.arm)}: {record.error.splitlines()[0]}"
    first, last = record.evals[0].success, record.measures()["success"]
    return f"{_name(record.arm)}: success {first:.2f} -> {last:.2f}, {record.cpu_s:.0f} CPU s"


def _name(arm: MethodArm) -> str:
    return f"{arm.method} on {arm.task} at lag {arm.lag}, seed {arm.seed}, lr {arm.lr:g}"


@cache
def commit() -> str:
    """Return the commit of this code, with `-changed` if tracked files differ from it, or the version of the package
    outside a repository."""
    here = Path(__file__)
    for command in (
        ["ls-files", "--error-unmatch", here.name],
        ["describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=-changed"],
    ):
        try:
            found = subprocess.run(
                ["git", *command], cwd=here.parent, capture_output=True, text=True, check=True, timeout=60
            )
        except (OSError, subprocess.CalledProcessError):
            return f"v{version('rollmesh')}"
    return found.stdout.strip()
