"""The display of a running run: a live panel on a terminal, plain lines elsewhere.

Both read the newest state of the recorder and neither slows the run down nor makes it fail. Collaborators:
`watch.RunRecorder`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from rich.box import ROUNDED
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rollmesh.app.config import TrainConfig
from rollmesh.app.views.causes import failed_attempts_text, no_update_text
from rollmesh.app.views.series import Eval, Point, Series, heldout_name, staleness_shares
from rollmesh.app.views.watch import RunRecorder
from rollmesh.demo.model_process import WarmStep
from rollmesh.mesh.process_events import ProcessEvent
from rollmesh.services.learner.metrics_log import SHOWN, newest_metrics

PLAIN_EVERY_S = 10.0
"""Without a terminal: print a line for an update at most this often. Evaluations have their own lines."""
_WIDTH_MAX = 104
_BARS = "▁▂▃▄▅▆▇█"
_SPARK_MAX = 32
_STALENESS_BAR = 10
SHOWN_EVENTS = ("restarting", "gave_up")
"""Process events that are shown; processes.jsonl has all of them."""
_EVENTS_SHOWN = 3


class View(Protocol):
    """Receives the progress of a session."""

    def phase(self, text: str) -> None:
        """Show a new phase; an empty text once the run has started."""
        ...

    def warm_start(self, step: WarmStep) -> None: ...

    def follow(self, recorder: RunRecorder) -> None:
        """Show the run from now on; called once."""
        ...

    def moved(self) -> None:
        """The recorder has received a state."""
        ...

    def event(self, event: ProcessEvent) -> None:
        """Show an event of a process of the run."""
        ...

    def note(self, text: str) -> None:
        """Show a remark about the run."""
        ...

    def announce(self, text: str) -> None:
        """Print a line that stays in the terminal."""
        ...

    def close(self) -> None: ...


def open_view(config: TrainConfig, console: Console, folder: str) -> View:
    """Return a live panel if the console is a terminal, else plain lines."""
    return LiveView(config, console, folder) if console.is_terminal else PlainView(config, console, folder)


class QuietView:
    """Shows nothing."""

    def phase(self, text: str) -> None: ...

    def warm_start(self, step: WarmStep) -> None: ...

    def follow(self, recorder: RunRecorder) -> None: ...

    def moved(self) -> None: ...

    def event(self, event: ProcessEvent) -> None: ...

    def note(self, text: str) -> None: ...

    def announce(self, text: str) -> None: ...

    def close(self) -> None: ...


# Plain ----------------------------------------------------------------------------------------------------------------


class PlainView:
    """A line per evaluation, and at most every `PLAIN_EVERY_S` one per update, for logs and pipes."""

    def __init__(self, config: TrainConfig, console: Console, folder: str) -> None:
        self._config = config
        self._console = console
        self._recorder: RunRecorder | None = None
        self._shown_update = 0
        self._shown_evals = 0
        self._shown_s = -PLAIN_EVERY_S
        self._shown_stall = ""
        self._silence_s = 0.0
        self._shown_problem = ""
        self._problem_s = -PLAIN_EVERY_S
        self._say(f"{config.run.name}: seed {config.run.seed}, {folder}")

    def phase(self, text: str) -> None:
        if text:
            self._say(text)

    def warm_start(self, step: WarmStep) -> None:
        if step.success is not None or step.step % 50 == 0:
            self._say(f"warm start {warm_text(step)}")

    def follow(self, recorder: RunRecorder) -> None:
        self._recorder = recorder
        self._shown_evals = len(recorder.series.evals)

    def moved(self) -> None:
        recorder = self._recorder
        if recorder is None:
            return
        for result in recorder.series.evals[self._shown_evals :]:
            self._say(f"{_clock(result.time_s)}  evaluated update {result.step}: {eval_text(result)}")
        self._shown_evals = len(recorder.series.evals)
        self._show_silence(recorder.silent_s)
        now = recorder.now
        if now.stalled != self._shown_stall:
            self._shown_stall = now.stalled
            self._say(f"{_clock(now.time_s)}  " + (f"stalled: {now.stalled}" if now.stalled else "no longer stalled"))
        if now.update != self._shown_update and now.time_s - self._shown_s >= PLAIN_EVERY_S:
            self._shown_update, self._shown_s = now.update, now.time_s
            self._say(self._line(now, recorder.series))
        self._show_problem(now, recorder)

    def _show_silence(self, silent_s: float) -> None:
        """Report it at its start, every `PLAIN_EVERY_S`, and at its end."""
        if silent_s and (not self._silence_s or silent_s - self._silence_s >= PLAIN_EVERY_S):
            self._silence_s = silent_s
            self._say(silence_text(silent_s))
        elif not silent_s and self._silence_s:
            self._silence_s = 0.0
            self._say("coordinator responds again")

    def _show_problem(self, now: Point, recorder: RunRecorder) -> None:
        """Report the newest failure and why there is no update, if they changed, at most every `PLAIN_EVERY_S`."""
        problem = "; ".join(filter(None, problems(self._config, recorder)))
        if problem and problem != self._shown_problem and now.time_s - self._problem_s >= PLAIN_EVERY_S:
            self._shown_problem, self._problem_s = problem, now.time_s
            self._say(f"{_clock(now.time_s)}  {problem}")

    def event(self, event: ProcessEvent) -> None:
        if event.what in SHOWN_EVENTS:
            self._say(_first_line(event))

    def note(self, text: str) -> None:
        self._say(text)

    def announce(self, text: str) -> None:
        self._say(text)

    def close(self) -> None:
        """Do nothing: no resource is held."""

    def _line(self, now: Point, series: Series) -> str:
        generated, _ = series.rates()
        lags = " ".join(f"{lag}:{share:.0%}" for lag, share in staleness_shares(now, self._config.run.max_staleness))
        rewards = " ".join(f"{name} {value:.2f}" for name, value in now.mean_rewards.items())
        total = f"/{self._config.run.updates_max}" if self._config.run.updates_max else ""
        return (
            f"{_clock(now.time_s)}  update {now.update}{total}  reward {rewards}  lag {lags}  {_si(generated)} tokens/s"
            + (f"  {learner}" if (learner := learner_text(self._metrics())) else "")
        )

    def _metrics(self) -> Path:
        assert self._recorder is not None, "lines about updates come from a recorder"
        return self._recorder.metrics

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


# Live -----------------------------------------------------------------------------------------------------------------


class LiveView:
    """A panel that is redrawn four times per second."""

    def __init__(self, config: TrainConfig, console: Console, folder: str) -> None:
        self._config = config
        self._folder = folder
        self._console = console
        self._phase = "starting"
        self._note = ""
        self._warm: WarmStep | None = None
        self._warm_evals: list[float] = []
        self._recorder: RunRecorder | None = None
        self._events: deque[ProcessEvent] = deque(maxlen=_EVENTS_SHOWN)
        self._begin_s = time.monotonic()
        self._live = Live(console=console, get_renderable=self.render, refresh_per_second=4, redirect_stdout=False)
        self._live.start()

    def phase(self, text: str) -> None:
        self._phase = text

    def warm_start(self, step: WarmStep) -> None:
        self._warm = step
        if step.success is not None:
            self._warm_evals.append(step.success)

    def follow(self, recorder: RunRecorder) -> None:
        self._recorder = recorder

    def moved(self) -> None:
        """Do nothing: the panel is redrawn periodically."""

    def event(self, event: ProcessEvent) -> None:
        if event.what in SHOWN_EVENTS:
            self._events.append(event)

    def note(self, text: str) -> None:
        self._note = text

    def announce(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._live.stop()

    def render(self) -> RenderableType:
        config, recorder = self._config, self._recorder
        body: list[RenderableType] = [Text(self._phase, style="dim")]
        if recorder is None and self._warm is not None:
            rows: list[tuple[str, RenderableType]] = [("warm start", Text(warm_text(self._warm)))]
            if self._warm_evals:
                course = f"{self._warm_evals[-1]:.3f}   {spark(self._warm_evals, low=0.0, high=1.0)}"
                rows.append(("validation", Text(course, style="green")))
            body += [Text(), _rows(rows)]
        if recorder is not None:
            body = [progress_line(config, recorder), Text(), run_table(config, recorder)]
            if self._events:
                body += [Text(), *(Text(_first_line(event), style="yellow") for event in self._events)]
            if self._phase:
                body += [Text(), Text(self._phase, style="bold yellow")]
        warns = self._note.startswith("warning")
        if warns or (self._note and recorder is None):
            body += [Text(), Text(self._note, style="yellow" if warns else "dim")]
        title = Text.assemble(
            ("rollmesh ", "bold"), (config.run.name, "bold cyan"), (f"  seed {config.run.seed} ", "dim")
        )
        return Panel(
            Group(*body),
            title=title,
            title_align="left",
            subtitle=Text(f" {self._folder} · Ctrl-C stops, resumable ", style="dim"),
            subtitle_align="left",
            box=ROUNDED,
            border_style="cyan",
            padding=(1, 2),
            width=min(_WIDTH_MAX, self._console.width),
        )


def progress_line(config: TrainConfig, recorder: RunRecorder) -> RenderableType:
    """`update 57 / 100 ━━━━━ 1:03, about 0:45 left`."""
    now, total, elapsed_s = recorder.now, config.run.updates_max, recorder.elapsed_s()
    grid = Table.grid(padding=(0, 2))
    label = Text.assemble(("update ", "dim"), (f"{now.update}", "bold"), (f" / {total}" if total else "", "dim"))
    left_s = elapsed_s * (total - now.update) / now.update if total and now.update else 0.0
    timing = _clock(elapsed_s) + (f", about {_clock(left_s)} left" if left_s else "")
    cells: list[RenderableType] = [label]
    if total:
        cells.append(
            ProgressBar(total=total, completed=now.update, width=36, complete_style="cyan", finished_style="green")
        )
    grid.add_row(*cells, Text(timing, style="dim"))
    return grid


def run_table(config: TrainConfig, recorder: RunRecorder) -> Table:
    """Return held-out success, rewards, staleness, samples, rates and problems, a line each."""
    now, series = recorder.now, recorder.series
    name = heldout_name(any(result.graded for result in series.evals))
    rows: list[tuple[str, RenderableType]] = [(name, _held_out(config, series.evals_by_step))]
    if series.evals and (labels := _labels(series.evals_by_step[-1])):
        rows.append(("", Text("  ".join(labels), style="dim")))
    rows.append(("reward", _rewards(series)))
    rows.append(("staleness", _staleness(now, config.run.max_staleness)))
    if now.replay:
        rows.append(("replayed", _replayed(now)))
    rows.append(("samples", _samples(now)))
    if learner := learner_text(recorder.metrics):
        rows.append(("learner", Text(learner)))
    generated, trained = series.rates()
    rows.append(("tokens/s", Text(f"{_si(generated)} generated   {_si(trained)} trained")))
    failure, no_update = problems(config, recorder)
    if failure:
        rows.append(("failures", Text(failure, style="red")))
    if no_update:
        rows.append(("", Text(no_update, style="yellow")))
    if recorder.silent_s:
        rows.append(("", Text(silence_text(recorder.silent_s), style="bold red")))
    if now.stalled:
        rows.append(("stalled", Text(now.stalled, style="bold red")))
    rows += [(f"{who.rpartition('/')[2]} waits", Text(what, style="dim")) for who, what in sorted(now.waiting.items())]
    return _rows(rows)


def silence_text(silent_s: float) -> str:
    return f"no response from the coordinator for {silent_s:.0f} s"


def problems(config: TrainConfig, recorder: RunRecorder) -> tuple[str, str]:
    """Return the newest failure, and why no update was made from two batches of samples; each may be empty."""
    now, unused = recorder.now, recorder.unused()
    no_update = no_update_text(now.update, unused, recorder.recent, folder=recorder.folder)
    wasted = sum(num for reason, num in unused.items() if not reason.startswith("trained"))
    if now.update and wasted < 2 * config.run.batch_groups * config.run.group_size:
        no_update = ""
    return failed_attempts_text(now.failed_attempts, now.failure), no_update


def _rows(rows: Sequence[tuple[str, RenderableType]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", justify="right", min_width=15, no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in rows:
        table.add_row(label, value)
    return table


def _held_out(config: TrainConfig, evals: Sequence[Eval]) -> Text:
    if not evals:
        evaluates = config.run.eval_every and config.run.eval_tasks
        words = "first evaluation is running" if evaluates else "no evaluations (run.eval_every=0)"
        return Text(words, style="dim")
    first, last = evals[0], evals[-1]
    text = Text.assemble((f"{first.success:.3f}", "dim"), (" → ", "dim"), (f"{last.success:.3f}", "bold green"))
    text.append(f"   {spark([e.success for e in evals], low=0.0, high=1.0)}", style="green")
    return text.append(f"   at update {last.step}", style="dim")


def _labels(result: Eval) -> list[str]:
    return [f"{label.replace('=', ' ')}: {value:.2f}" for label, value in result.success_by_label.items()]


def _rewards(series: Series) -> Text:
    updates = series.updates
    text = Text()
    for name, value in (updates[-1].mean_rewards if updates else {}).items():
        course = [point.mean_rewards.get(name, 0.0) for point in updates]
        low = min(0.0, *course) if len(course) > 1 else 0.0
        text.append(f"{name} {value:.3f}   ").append(
            spark(course, low=low, high=max(1.0, *course, 0.0)), style="magenta"
        )
        text.append("   ")
    return text if text.plain else Text("no update yet", style="dim")


def _staleness(now: Point, bound: int) -> Text:
    text = Text()
    for lag, share in staleness_shares(now, bound):
        bar = "█" * round(share * _STALENESS_BAR) or "▏"
        text.append(f"{lag} ", style="bold").append(bar, style="blue" if lag <= bound else "red").append(
            f" {share:.0%}   "
        )
    return text.append(f"(bound {bound})", style="dim")


def _replayed(now: Point) -> Text:
    counts = {name: num for name, num in now.replay.items() if num or name == "trained"}
    lags = [lag for lag, num in now.replayed_by_staleness.items() if num]
    text = Text(", ".join(f"{num:,} {name}" for name, num in counts.items()))
    return text.append(f"   staleness up to {max(lags)}" if lags else "", style="dim")


def _samples(now: Point) -> Text:
    text = Text.assemble((f"{now.samples.get('reserved', 0):,}", "bold"), (" reserved = ", "dim"))
    for number, (name, count) in enumerate(sample_parts(now)):
        style = "bold red" if name in ("failed", "stale") else ""
        text.append(" + " if number else "", style="dim").append(f"{count:,} ", style=style).append(name, style="dim")
    return text


def sample_parts(now: Point) -> list[tuple[str, int]]:
    """Return the states of the reserved samples. A live sample in the weights is `applied` until a checkpoint contains
    it."""
    counts = dict(now.samples)
    counts.pop("reserved", None)
    live, trained = counts.pop("live", 0), counts.pop("trained", 0)
    applied = min(live, max(0, sum(now.trained_by_staleness.values()) - trained))
    parts = [("trained", trained), ("applied", applied), *counts.items(), ("in flight", live - applied)]
    return [(name, count) for name, count in parts if count or name in ("trained", "in flight")]


# Text -----------------------------------------------------------------------------------------------------------------


def warm_text(step: WarmStep) -> str:
    """Return a step of the warm start in a line."""
    success = f"  success {step.success:.3f}" if step.success is not None else ""
    return f"step {step.step}  levels 1-{step.level}  loss {step.loss_smoothed:.3f}{success}"


def eval_text(result: Eval) -> str:
    """Return an evaluation in a line."""
    incomplete = "" if result.complete else f" (only {result.num_samples} samples in time)"
    labels = f"  ({', '.join(found)})" if (found := _labels(result)) else ""
    return f"{heldout_name(result.graded)} {result.success:.3f}{incomplete}{labels}"


def learner_text(path: Path) -> str:
    """Return KL, entropy, gradient norm, effective sample size, length and learning rate of the newest update, as far
    as measured."""
    metrics = newest_metrics(path)
    shown = ((label, metrics.get(name)) for label, name in SHOWN)
    return "  ".join(f"{label} {value:.3g}" for label, value in shown if value is not None)


def spark(values: Sequence[float], *, low: float, high: float) -> str:
    """Return a line of block characters. Of many values it shows evenly spaced ones, including the last."""
    if len(values) > _SPARK_MAX:
        values = [values[round(i * (len(values) - 1) / (_SPARK_MAX - 1))] for i in range(_SPARK_MAX)]
    span = (high - low) or 1.0
    return "".join(_BARS[min(len(_BARS) - 1, max(0, int((v - low) / span * len(_BARS))))] for v in values)


def _first_line(event: ProcessEvent) -> str:
    when = time.strftime("%H:%M:%S", time.localtime(event.time_s))
    return f"{when}  {event.text().splitlines()[0]}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _si(value: float) -> str:
    for factor, suffix in ((1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.1f}{suffix}"
    return f"{value:.0f}"
