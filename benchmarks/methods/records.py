"""Records of `python -m benchmarks methods`: one JSON line for each arm, with its curves and its measures.

Measures, all over evaluations on held-out tasks by sampling at temperature 1, except for `ess`:

    success     mean of the reward that the task names
    pass_at_k   share of the tasks with a success among its k samples, k = `EVAL_SAMPLES`
    length      sampled tokens per episode
    turns       turns of the model per episode
    repeated    share of the turns that equal an earlier turn of their episode, token by token
    entropy     nats per token, estimated by the mean of -log pi
    kl          nats per token from the initial policy, KL(pi || pi_0), by the k3 estimate of `rollmesh.trainer.metrics.kl_k3`
    ess         effective sample size of the updates, `ess` of `rollmesh.trainer.metrics`

The measure of an arm is the mean of its last three evaluations, and for `ess` that of the updates since the first of
these.
"""  # noqa: E501, W505

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import get_args

import msgspec

from benchmarks.methods.expectations import Measure

EVAL_SAMPLES = 4
"""Episodes per task of an evaluation."""
LRS = (5.0e-4, 1.5e-4)
"""Learning rates at which methods are compared. A correction that helps with small steps may do harm with large ones,
so one rate shows one half."""
LAST = 3
"""Number of evaluations whose mean is the measure of an arm."""
MEASURES: tuple[Measure, ...] = get_args(Measure)
OF_UPDATES: tuple[Measure, ...] = ("ess",)
"""Measures that are means over updates, not over evaluations."""


class MethodArm(msgspec.Struct, frozen=True, kw_only=True):
    """One training run: a method on a task at a lag with a seed and a learning rate. Arms that differ only in the
    method are paired: same initial model, same order of prompts, same evaluations."""

    method: str
    """Name of the recipe, or its file."""
    task: str
    lag: int
    """Number of updates by which the weights that generate are older than those that are trained."""
    seed: int
    lr: float = LRS[0]
    """Learning rate."""
    like: str = ""
    """The method whose `baseline_settings` this arm has, if it is the baseline of a method that names some."""

    @property
    def label(self) -> str:
        """The method, with the one whose settings it has."""
        return f"{self.method} as {self.like}" if self.like else self.method

    def __str__(self) -> str:
        return f"{self.label} on {self.task} at lag {self.lag}, seed {self.seed}, lr {self.lr:g}"


class EvalPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluation after `update` updates."""

    update: int
    success: float
    pass_at_k: float
    length: float
    entropy: float
    kl: float
    turns: float = 0.0
    """0 in records of earlier versions, as the next one."""
    repeated: float = 0.0


class UpdatePoint(msgspec.Struct, frozen=True, kw_only=True):
    """One update with some of the metrics of the trainer, by name."""

    update: int
    metrics: dict[str, float]


class ArmRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one arm."""

    commit: str
    """Commit of the code, with `-changed` if files differ from it."""
    settings: str
    """Digest of the settings of recipe and task."""
    arm: MethodArm
    updates_max: int
    samples: int = 0
    """Samples that were generated for training."""
    tokens: int = 0
    """Tokens that were trained on."""
    cpu_s: float
    """CPU seconds of the process, without imports and warm start."""
    wall_s: float
    evals: tuple[EvalPoint, ...] = ()
    updates: tuple[UpdatePoint, ...] = ()
    error: str = ""
    """Cause if the arm failed. It has no measures then."""

    def measures(self) -> dict[Measure, float]:
        """Return the measures; none for an arm that failed."""
        if self.error:
            return {}
        last = self.evals[-LAST:]
        found: dict[Measure, float] = {
            name: fmean(getattr(point, name) for point in last) for name in MEASURES if name not in OF_UPDATES
        }
        since = [point for point in self.updates if point.update >= last[0].update] or list(self.updates[-1:])
        for name in OF_UPDATES:
            values = [point.metrics[name] for point in since if name in point.metrics]
            found[name] = fmean(values) if values else 0.0
        return found


def read_records(file: Path) -> list[ArmRecord]:
    """Return the records in a file, none if it does not exist. A last line that was not written completely is
    ignored."""
    if not file.exists():
        return []
    lines = file.read_bytes().split(b"\n")
    return [msgspec.json.decode(line, type=ArmRecord) for line in lines[:-1] if line]


def append_record(file: Path, record: ArmRecord) -> None:
    """Append a record. A line that an earlier process did not complete is removed first."""
    with file.open("a+b") as stream:
        stream.seek(0)
        text = stream.read()
        stream.truncate(text.rfind(b"\n") + 1)
        stream.write(msgspec.json.encode(record) + b"\n")


def chosen_records(
    records: Sequence[ArmRecord], settings: Mapping[MethodArm, str], commit: str | None
) -> dict[MethodArm, ArmRecord]:
    """Return the last record of each arm of `settings` with these settings, of `commit` or, if it is None, of any
    commit.

    Failures of other commits do not count.
    """
    found: dict[MethodArm, ArmRecord] = {}
    for record in records:
        fits = settings.get(record.arm) == record.settings
        if fits and (record.commit == commit or (commit is None and not record.error)):
            found[record.arm] = record
    return found
