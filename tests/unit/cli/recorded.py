"""A recorded run: twelve updates, three evaluations, some samples stale or filtered."""

from pathlib import Path

import msgspec

from rollmesh.app.config import TrainConfig, load_train_config
from rollmesh.app.run_folder import Origin, RunFolder
from rollmesh.app.views.series import Eval, Point, Series, encode_line
from rollmesh.services.learner.metrics_log import MetricsLine

ORIGIN = Origin(
    command=["rollmesh", "train", "<b>mine</b>.yaml"],
    base_dir="/somewhere",
    started_at="2025-01-01T10:00:00+0000",
    python="3.11.7",
    platform="Linux, 2 cores",
    packages={"rollmesh": "0.1"},
)


def recorded_point(update: int, *, time_s: float, incarnation: int = 0) -> Point:
    """16 samples per update, of which 12 are trained; everything up to the last multiple of 4 is in a checkpoint."""
    applied, trained = 12 * update, 12 * (update // 4 * 4)
    return Point(
        time_s=time_s,
        update=update,
        incarnation=incarnation,
        published_step=update,
        mean_rewards={"correct": 0.4 + update / 30},
        samples={
            "reserved": 16 * update + 8, "live": applied - trained + 8, "trained": trained, "stale": update,
            "filtered": 3 * update, "failed": 0, "cancelled": 0, "exported": 0,
        },
        reasons={"stale/BEYOND_BOUND": update, "filtered/ZERO_VARIANCE": 3 * update},
        tokens_generated=1000 * update,
        tokens_trained=600 * update,
        trained_by_staleness={0: 4 * update, 1: 8 * update},
        waiting={"learner/main": "READY groups: 1 of 2"},
        ended="UPDATES_MAX" if update == 12 else "",
    )  # fmt: skip


def recorded_eval(step: int, success: float, *, time_s: float) -> Eval:
    by_label = {"level=1": success + 0.1, "level=2": success - 0.1}
    return Eval(time_s=time_s, step=step, split="test", num_samples=64, success=success, success_by_label=by_label)


def recorded_series() -> Series:
    points = [recorded_point(update, time_s=5.0 + 2.0 * update) for update in range(13)]
    evals = [
        recorded_eval(0, 0.45, time_s=4.0),
        recorded_eval(6, 0.72, time_s=18.0),
        recorded_eval(12, 0.9, time_s=30.0),
    ]
    return Series(points=points, evals=evals)


def encoded(points: list[Point], evals: list[Eval]) -> bytes:
    """Return the lines of a series.jsonl."""
    return b"".join([*map(encode_line, points), *map(encode_line, evals)])


def recorded_folder(root: Path, *overrides: str) -> tuple[RunFolder, TrainConfig]:
    """A run folder with a configuration, the series, metrics, and a checkpoint's folder."""
    source = root.parent / f"{root.name}.yaml"
    source.write_text("run: {name: recorded, max_staleness: 2, seed: 3, updates_max: 12}\n")
    config = load_train_config(source, overrides)
    root.mkdir()
    folder = RunFolder(root)
    folder.write(config, ORIGIN)
    series = recorded_series()
    folder.series.write_bytes(encoded(series.points, series.evals))
    lines = [_metrics_line(update) for update in range(1, 13)]
    folder.metrics.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    (root / "checkpoints" / "update-00000012.0").mkdir(parents=True)
    return folder, config


def _metrics_line(update: int) -> MetricsLine:
    return MetricsLine(
        update=update,
        incarnation=0,
        outcome="APPLIED",
        time_unix_s=0.0,
        metrics={"kl": 0.001 * update, "entropy": 1.0, "grad_norm": None, "lr": 1e-4},
        seconds={"train": 1.0, "wait": 0.5},
    )
