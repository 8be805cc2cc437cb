"""Write the results of a run: summary.json, report.html and report.png. The run folder is the only input."""

from __future__ import annotations

from pathlib import Path

import msgspec

from rollmesh.app.config import TrainConfig
from rollmesh.app.run_folder import RunFolder
from rollmesh.app.views.report import write_report
from rollmesh.app.views.series import read_series
from rollmesh.app.views.summary import Outcome, Summary, summarize, write_summary
from rollmesh.demo.model_process import WarmStep
from rollmesh.shared.domain.decoding import UNDECODABLE


class WarmStart(msgspec.Struct, frozen=True, kw_only=True):
    """warm_start.json: how the model was created."""

    seconds: float
    steps: int
    num_tokens: int
    success_validation: float | None


def note_warm_start(folder: RunFolder, last: WarmStep, seconds: float) -> None:
    noted = WarmStart(seconds=seconds, steps=last.step, num_tokens=last.num_tokens, success_validation=last.success)
    _path(folder).write_bytes(msgspec.json.encode(noted) + b"\n")


def write_results(folder: RunFolder, config: TrainConfig, *, outcome: Outcome, points_before: int = 0) -> Summary:
    """Write all three files and return the summary. Raises ConfigError if the series of the folder is damaged.

    `points_before`: number of points of earlier sessions. The summary has the reason of the end only if this session
    recorded it.
    """
    series = read_series(folder.series)
    summary = summarize(folder, config, series, outcome=outcome, warm_start_s=_warm_start_s(folder))
    if len(series.points) <= points_before:
        summary = msgspec.structs.replace(summary, ended="")
    write_report(folder, series, summary)
    write_summary(folder, summary)
    return summary


def _warm_start_s(folder: RunFolder) -> float:
    try:
        return msgspec.json.decode(_path(folder).read_bytes(), type=WarmStart).seconds
    except (OSError, *UNDECODABLE):
        return 0.0


def _path(folder: RunFolder) -> Path:
    return folder.root / "warm_start.json"
