"""What the processes of the race exchange: the work of an arm, and its result."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Literal

import msgspec
import yaml

from benchmarks.cpu_profile import tree_cpu_s
from benchmarks.race.play import RaceLimits, RaceTask
from rollmesh.mesh.config import MeshConfig
from rollmesh.shared.config.loader import config_from_dict

RaceMode = Literal["trl", "bare", "mesh", "learner apart", "processes"]
"""`mesh` is one process, `learner apart` two of them, and `processes` one per service."""


class RaceWork(msgspec.Struct, frozen=True, kw_only=True):
    """One arm with one seed."""

    mode: RaceMode
    config: str
    """File of the configuration of `rollmesh train`."""
    eta: int
    """Staleness bound of the mesh; the other arms always train on the newest weights."""
    filtered: bool
    """Whether groups without variance are filtered."""
    seed: int
    model: str
    """Folder of the initial model."""
    folder: str
    """Folder of the arm. `snapshots/UPDATE` gets a model folder."""
    updates: int
    """Number of updates."""
    snapshot_every: int
    """Updates between snapshots for the evaluator."""
    num_profiled: int
    """Number of updates after them whose CPU is assigned to services. 0: none."""
    limit_s: float
    """Seconds after which the arm stops at the update that it has reached."""
    tasks: tuple[RaceTask, ...] = ()
    """Tasks in the order of the mesh, for TRL."""


class RaceMark(msgspec.Struct, frozen=True, kw_only=True):
    """The state after an update."""

    update: int
    wall_s: float
    """Seconds since the process started, without the time to write snapshots for the evaluator where the arm can be
    stopped meanwhile."""
    cpu_s: float
    """CPU seconds of all processes since then, with imports."""
    dropped: int = 0
    """Number of samples so far that were generated and not trained, because their group was filtered or they were too
    old."""


class UpdateSeen(msgspec.Struct, frozen=True, kw_only=True):
    """The metrics of an update."""

    update: int
    samples: float
    tokens: float
    """Number of sampled tokens that were trained."""
    success: float
    """Mean reward of the trained samples."""
    staleness: dict[str, float] = {}
    """Trained tokens by number of updates that their weights were old."""
    generation_s: float = 0.0
    """Time in which the trainer waited for the batch."""
    training_s: float = 0.0


class RaceRun(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an arm."""

    marks: tuple[RaceMark, ...]
    updates: tuple[UpdateSeen, ...]
    parts: dict[str, float]
    """Share of CPU by part in [0, 1]; model compute belongs to its service. Empty if there was no time to profile."""
    model_share: float | None = None
    """Share of the threads that generate and train; None if that is not known."""


class RaceClock:
    """Time and CPU of this process and its descendants since it started. `pause` and `go` exclude what lies between
    them."""

    def __init__(self) -> None:
        self._begin_s = time.perf_counter() - _age_s()
        self._off_s = self._off_cpu_s = 0.0
        self._paused = (0.0, 0.0)

    def mark(self, update: int, dropped: int = 0) -> RaceMark:
        wall_s, cpu_s = self._now()
        return RaceMark(update=update, wall_s=wall_s - self._off_s, cpu_s=cpu_s - self._off_cpu_s, dropped=dropped)

    def pause(self) -> None:
        self._paused = self._now()

    def go(self) -> None:
        wall_s, cpu_s = self._now()
        self._off_s += wall_s - self._paused[0]
        self._off_cpu_s += cpu_s - self._paused[1]

    def _now(self) -> tuple[float, float]:
        return time.perf_counter() - self._begin_s, tree_cpu_s()


def _age_s() -> float:
    """Return the seconds since this process started."""
    with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
        started_ticks = int(file.read().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")


LEARNING_RATE = 3e-4
"""Peak learning rate of all arms. At the demo's 7e-4, which assumes its filter, a policy that trains on every group is
unstable: with some seeds success falls to 0 within 15 updates, in TRL and in the bare loop alike, so that no cost to a
success could be measured."""


def race_config(work: RaceWork) -> MeshConfig:
    """Return the configuration without evaluations and without an end. A mesh writes the snapshots as checkpoints."""
    values = yaml.safe_load(Path(work.config).read_text())
    values.pop("made_model", None)
    values["model"] = work.model
    values["run"] |= {"seed": work.seed, "max_staleness": work.eta, "updates_max": 0, "eval_every": 0}
    values["learner"] |= {"checkpoint_every": work.snapshot_every, "keep_last": 1000, "tensorboard": False}
    values["learner"]["optimizer"]["lr"] = LEARNING_RATE
    if not work.filtered:
        values["reward"] = {**values.get("reward", {}), "finalizers": ["keep_all"]}
    return config_from_dict(MeshConfig, values)


def race_limits(config: MeshConfig) -> RaceLimits:
    """Return the limits of an episode."""
    limits = config.rollout.limits
    return RaceLimits(
        turns=limits.turns_max,
        turn_tokens=config.rollout.sampling.max_tokens,
        episode_tokens=limits.tokens_max,
        context_tokens=limits.context_tokens_max,
    )
