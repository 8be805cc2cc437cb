"""summary.json: a run in one object, for scripts and tables; and the text at the end of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from rollmesh.app.config import TrainConfig
from rollmesh.app.run_folder import RunFolder, shown
from rollmesh.app.views.divergence import Divergence, divergence_text, divergences
from rollmesh.app.views.series import Eval, Point, Series, heldout_name
from rollmesh.app.views.source_shares import SourceShares, source_shares
from rollmesh.services.learner.metrics_log import MetricsLine, read_metrics
from rollmesh.services.learner.progress import PHASES
from rollmesh.shared.domain.ledger_head import LedgerHead
from rollmesh.trainer.checkpoint_files import age

Outcome = Literal["finished", "interrupted", "failed"]
MILESTONES = (0.6, 0.7, 0.8, 0.85, 0.9, 0.95)


class Milestone(msgspec.Struct, frozen=True, kw_only=True):
    """The first evaluation at which held-out success reached a level."""

    success: float
    update: int
    time_s: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run. Times are seconds of running time without interruptions."""

    run: str
    outcome: Outcome
    ended: str = ""
    """Why the run ended, as in RunState.ended; empty if it can be resumed."""
    recipe: str
    seed: int
    eta: int
    """The staleness bound."""
    lag_max: int | None
    """Largest staleness of a trained sample; null if none trained tokens of the policy."""
    updates: int
    wall_s: float
    """Total: creating the model, starting, training, evaluating."""
    warm_start_s: float
    train_s: float
    heldout_success_before: float | None
    heldout_success_after: float | None
    heldout_graded: bool = False
    """Whether values of the success reward were neither 0 nor 1, so that the two above are mean rewards."""
    heldout_by_label_before: dict[str, float]
    heldout_by_label_after: dict[str, float]
    milestones: list[Milestone]
    tokens_generated: int
    tokens_trained: int
    samples: dict[str, int]
    """Number of samples: reserved = live + all ends."""
    reasons: dict[str, int]
    trained_by_staleness: dict[int, int]
    """Trained samples by staleness at their update; -1 counts those without tokens of the policy."""
    replay: dict[str, int] = {}
    """Number of replayed samples: reserved = live + all ends; empty in a run without replay."""
    replayed_by_staleness: dict[int, int] = {}
    """Trained replayed samples by staleness at their update."""
    learner_seconds: dict[str, float]
    """Seconds of the learner by phase."""
    reward_divergences: list[Divergence] = []
    """Rewards without a weight that do not follow the trained reward."""
    source_shares: list[SourceShares] = []
    """Requested and trained share of each source of a mixture."""
    ledger_head: LedgerHead
    """Newest ledger head that was received; `rollmesh audit` checks that the ledger contains it."""
    folder: str
    checkpoint: str | None
    report: str


def summarize(
    folder: RunFolder, config: TrainConfig, series: Series, *, outcome: Outcome, warm_start_s: float
) -> Summary:
    """Return the summary of the folder."""
    last, evals = series.last, series.evals_by_step
    metrics = learner_metrics(folder.metrics)
    num_draws = last.samples.get("reserved", 0) // config.run.group_size
    before = evals[0] if evals else None
    after = evals[-1] if evals and evals[-1].step > 0 else None
    checkpoint = folder.newest_checkpoint()
    return Summary(
        run=config.run.name,
        outcome=outcome,
        ended=last.ended,
        recipe=config.recipe,
        seed=config.run.seed,
        eta=config.run.max_staleness,
        lag_max=max((lag for lag, n in last.trained_by_staleness.items() if n and lag >= 0), default=None),
        updates=_num_updates(last, checkpoint),
        wall_s=round(warm_start_s + last.time_s, 3),
        warm_start_s=round(warm_start_s, 3),
        train_s=round(last.time_s, 3),
        heldout_success_before=before.success if before else None,
        heldout_success_after=after.success if after else None,
        heldout_graded=any(e.graded for e in evals),
        heldout_by_label_before=before.success_by_label if before else {},
        heldout_by_label_after=after.success_by_label if after else {},
        milestones=milestones(evals),
        tokens_generated=last.tokens_generated,
        tokens_trained=last.tokens_trained,
        samples=last.samples,
        reasons=last.reasons,
        trained_by_staleness=dict(sorted(last.trained_by_staleness.items())),
        replay=last.replay,
        replayed_by_staleness=dict(sorted(last.replayed_by_staleness.items())),
        learner_seconds=learner_seconds(folder.metrics),
        reward_divergences=divergences(metrics, config.reward.weights),
        source_shares=source_shares(config.data.selector, metrics, num_draws=num_draws),
        ledger_head=last.ledger_head,
        folder=str(folder.root),
        checkpoint=str(checkpoint) if checkpoint else None,
        report=str(folder.report),
    )


def _num_updates(last: Point, checkpoint: Path | None) -> int:
    """Return the newest update of series and checkpoint: the series may lack the last states before a stop."""
    watched = (last.incarnation, last.update)
    return max(watched, age(checkpoint))[1] if checkpoint is not None else last.update


def milestones(evals: list[Eval]) -> list[Milestone]:
    found = []
    for success in MILESTONES:
        first = next((e for e in evals if e.success >= success), None)
        if first is not None:
            found.append(Milestone(success=success, update=first.step, time_s=round(first.time_s, 3)))
    return found


def learner_metrics(metrics: Path) -> dict[int, MetricsLine]:
    """Return the lines of metrics.jsonl by update; empty if it cannot be read."""
    try:
        return read_metrics(metrics)
    except (OSError, ValueError):
        return {}


def learner_seconds(metrics: Path) -> dict[str, float]:
    """Return seconds per phase over all updates in metrics.jsonl; empty if it cannot be read."""
    if not (lines := learner_metrics(metrics).values()):
        return {}
    return {phase: round(sum(line.seconds.get(phase, 0.0) for line in lines), 3) for phase in PHASES}


def write_summary(folder: RunFolder, summary: Summary) -> None:
    folder.summary.write_bytes(encode_summary(summary))


def encode_summary(summary: Summary) -> bytes:
    """Return indented JSON."""
    return msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n"


def summary_text(summary: Summary) -> str:
    """Return the result in a few lines, with the commands to use next."""
    folder = shown(Path(summary.folder))
    result = (
        f"{summary.run}, seed {summary.seed}: {summary.outcome} after {summary.updates} updates, {summary.wall_s:.0f} s"
    )
    before, after = summary.heldout_success_before, summary.heldout_success_after
    name = heldout_name(summary.heldout_graded)
    if before is not None and after is not None:
        result += f"; {name} {before:.3f} -> {after:.3f}"
    elif before is not None:
        result += f"; {name} {before:.3f} at update 0 (not evaluated since)"
    lines = [result]
    if summary.ended:
        lines.append(f"  ended by    {summary.ended}")
    lines += [f"  rewards     {divergence_text(one)}" for one in summary.reward_divergences]
    if summary.checkpoint is not None:
        lines.append(f"  checkpoint  {shown(Path(summary.checkpoint))}")
    lines.append(f"  report      {shown(Path(summary.report))}")
    if summary.outcome != "finished":
        lines.append(f"  resume      rollmesh train {folder}")
    lines.append(f"  audit       rollmesh audit {folder}")
    return "\n".join(lines) + "\n"
