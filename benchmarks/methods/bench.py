"""Every method against its baseline, on small tasks and with exact lag: what the papers lead one to expect, and what
happens here.

An arm trains a tiny model with one recipe on one task (`tasks`) in the bare loop (`race.bare_loop`): generation, reward
and update in one process without services. At lag n the weights of n updates ago generate. Arms of one task, lag and
seed have the same initial model, the same order of prompts and the same evaluations; they differ in the method.
`expectations` says with which method it is compared, and which differences are expected.

    arms to run -> processes of `arm`, one arm at a time each -> records.jsonl -> comparisons (`verdict`) -> report

All methods are screened with a few seeds. Up to `CONFIRM_MAX` named ones are then run with other seeds, and only they
get verdicts. A comparison with a verdict gets no further seeds, so the plan depends on the records, and a call plans
again when the arms of a plan have records. A record is written when its arm ends, and arms with a record are not run
again. The budget is in CPU seconds, which exclude the waiting for a busy core. Groups without variance of their rewards
stay in the batch, because the bare loop has no finalizer.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import get_args

import msgspec
from msgspec.structs import replace

from benchmarks.methods.arm import ArmWork, Made, Size, settings_digest
from benchmarks.methods.expectations import Expected, MethodTask, expected_of
from benchmarks.methods.records import LRS, ArmRecord, MethodArm, append_record, chosen_records, read_records
from benchmarks.methods.verdict import (
    CONFIRM_SEED,
    LOOKS,
    Case,
    MethodComparison,
    cases,
    confirmed,
    open_cases,
    screened,
)
from rollmesh.shared.config.registry import unknown_name
from rollmesh.shared.errors import InvalidInput
from rollmesh.shared.process.process_launch import bound_to_parent
from rollmesh.trainer.recipe import recipe_names

LAGS = (0, 4, 16)
"""Lags of tasks on which a method expects something of stale data."""
ARM_S_MAX = 3600.0
"""Most wall seconds of one arm, with the making of its model."""
LINE_BYTES_MAX = 1 << 24
CONFIRM_MAX = 20
"""Most methods that get verdicts. More comparisons need larger differences."""
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
    """Seeds that screen."""
    confirm: tuple[str, ...] = ()
    """Recipes by name or by file that get verdicts."""
    confirm_seeds: int = LOOKS[0]
    """Number of seeds for verdicts, besides those that screen. One of `verdict.LOOKS`."""
    lrs: tuple[float, ...] = LRS
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
        if max(self.seeds) >= CONFIRM_SEED:
            raise InvalidInput(
                f"--seeds must be < {CONFIRM_SEED}, got {self.seeds}; the seeds from there on are those of --confirm"
            )
        if len(set(self.confirm)) > CONFIRM_MAX:
            raise InvalidInput(f"--confirm must name at most {CONFIRM_MAX} methods, got {len(set(self.confirm))}")
        if self.confirm_seeds not in LOOKS:
            raise InvalidInput(f"--confirm-seeds must be one of {LOOKS}, got {self.confirm_seeds}")
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


def planned(options: MethodsOptions, records: Mapping[MethodArm, ArmRecord]) -> list[MethodArm]:
    """Return the arms that the records call for: those that screen, then those of each look for the comparisons that
    are open at it, until a look has arms without a record.

    They are seed by seed, each baseline before its method, so that an early end leaves whole pairs. Raises ConfigError.
    """
    arms = dict.fromkeys(_screening_arms(options))
    family, done = _family(options), 0
    for look in LOOKS[: LOOKS.index(options.confirm_seeds) + 1]:
        still_open = open_cases(family, records, done) if done else family
        wanted = _arms(still_open, range(CONFIRM_SEED + done, CONFIRM_SEED + look))
        arms |= dict.fromkeys(wanted)
        if any(arm not in records for arm in wanted):
            break
        done = look
    return list(arms)


def _screening_arms(options: MethodsOptions) -> list[MethodArm]:
    arms: dict[MethodArm, None] = {}
    for seed in options.seeds:
        for method in options.methods or recipe_names():
            wanted = expected_of(method)
            for task, lag in places_of(wanted, options):
                alone = [MethodArm(method=method, task=task, lag=lag, seed=seed, lr=lr) for lr in options.lrs]
                pairs = _arms(cases(method, wanted, [(task, lag)], options.lrs), [seed])
                arms |= dict.fromkeys(pairs or alone)
    return list(arms)


def _arms(found: Sequence[Case], seeds: Sequence[int]) -> list[MethodArm]:
    return list(dict.fromkeys(arm for seed in seeds for case in found for arm in case.arms(seed)))


def _family(options: MethodsOptions) -> list[Case]:
    """Return the comparisons that get verdicts. Raises InvalidInput for a method that has none."""
    family: list[Case] = []
    for method in dict.fromkeys(options.confirm):
        wanted = expected_of(method)
        found = [case for case in cases(method, wanted, places_of(wanted, options), options.lrs) if case.expected]
        if not found:
            raise InvalidInput(
                f"--confirm: `{method}` has no expectation on these tasks, lags and learning rates, and a verdict "
                "needs one; name it in NAME.expected.yaml"
            )
        family += found
    return family


def places_of(wanted: Expected, options: MethodsOptions) -> list[tuple[str, int]]:
    """Return the tasks and lags on which a method is run."""
    places = []
    for task in options.tasks or tuple(dict.fromkeys(one.task for one in wanted.expected)) or ("calc",):
        stale = any(one.lag_min for one in wanted.expected if one.task == task)
        places += [(task, lag) for lag in options.lags or (LAGS if stale else LAGS[:1])]
    return places


def read_outcome(options: MethodsOptions) -> MethodsOutcome:
    """Return what the records in the folder show, without running anything."""
    family = _family(options)
    seeds = range(CONFIRM_SEED, CONFIRM_SEED + options.confirm_seeds)
    screening = _screening_arms(options)
    found = chosen_records(
        read_records(options.out / "records.jsonl"),
        _settings([*screening, *_arms(family, seeds)], options),
        None if options.any_commit else commit(),
    )
    arms = planned(options, found)
    records = {arm: found[arm] for arm in arms if arm in found}
    compared = [
        case
        for method in options.methods or recipe_names()
        for case in cases(method, expected_of(method), places_of(expected_of(method), options), options.lrs)
    ]
    rows = [*confirmed(family, records, options.confirm_seeds), *screened(compared, records)]
    return MethodsOutcome(records, [arm for arm in arms if arm not in found], rows)


def _settings(arms: Sequence[MethodArm], options: MethodsOptions) -> dict[MethodArm, str]:
    """Return the digest of the settings of each arm, which does not depend on seed and lag."""
    digests: dict[MethodArm, str] = {}
    for arm in arms:
        alike = replace(arm, seed=0, lag=0)
        if alike not in digests:
            digests[alike] = settings_digest(alike, options.size)
    return {arm: digests[replace(arm, seed=0, lag=0)] for arm in arms}


async def run_methods(options: MethodsOptions, report: Progress) -> MethodsOutcome:
    """Run the arms without a record until the budget is spent, and return the state of the records. `report` gets lines
    of progress."""
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "models").mkdir(exist_ok=True)
    outcome = read_outcome(options)
    report(f"{len(outcome.records)} arms have a record, {len(outcome.missing)} to run, budget {options.cpu_s:g} CPU s")
    run = _Run(options, report)
    while run.take(outcome.missing):
        async with asyncio.TaskGroup() as group:
            for number in range(min(options.processes, len(outcome.missing))):
                group.create_task(run.work(number))
        outcome = read_outcome(options)
    outcome.crashed = run.crashed
    return outcome


class _Run:
    """The arms of one call, which its processes take one after the other."""

    def __init__(self, options: MethodsOptions, report: Progress) -> None:
        self.crashed: list[str] = []
        self._options = options
        self._waiting: list[MethodArm] = []
        self._taken: set[MethodArm] = set()
        self._report = report
        self._commit = commit()
        self._cpu_s: list[float] = []
        self._num_running = 0

    def take(self, arms: Sequence[MethodArm]) -> bool:
        """Plan the arms that this call has not taken yet, and return whether it can run any."""
        self._waiting = [arm for arm in reversed(arms) if arm not in self._taken]
        self._taken |= set(arms)
        return bool(self._waiting) and self._affordable()

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
            self.crashed.append(f"{arm}: {cause}; see the logs in {options.out}")
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
        return f"{record.arm}: {record.error.splitlines()[0]}"
    first, last = record.evals[0].success, record.measures()["success"]
    return f"{record.arm}: success {first:.2f} -> {last:.2f}, {record.cpu_s:.0f} CPU s"


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
