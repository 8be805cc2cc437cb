"""One run from the command line: create the model, start the mesh, watch it until the end, write summary and report.

The caller holds the lock of the run folder (`mesh.run_lock`), because a session writes there from start to end.

    folder -> model -> mesh -> watch -> learner finishes -> last evaluation -> checkpoint, summary.json, report.html

However it ends, `rollmesh train FOLDER` can resume it from the newest checkpoint. Collaborators: `mesh` (the run
itself: a process for each part, or all in this one), `watch` and `display` (RunService clients), `results`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec

from rollmesh.app.checks.disk_need import disk_need, disk_text
from rollmesh.app.config import TrainConfig
from rollmesh.app.interrupts import Interrupts, Stopped
from rollmesh.app.loggers.run_loggers import LoggedRun, RunLoggers, heldout_values, without_logins
from rollmesh.app.page_link import has_page, page_link
from rollmesh.app.run_folder import RunFolder, run_config, shown
from rollmesh.app.views.display import View
from rollmesh.app.views.results import note_warm_start, write_results
from rollmesh.app.views.series import Eval, Series, read_series
from rollmesh.app.views.summary import Outcome, Summary
from rollmesh.app.views.watch import RunRecorder, Watcher
from rollmesh.demo.model_process import WarmStep, make_in_process
from rollmesh.mesh.mesh import Mesh
from rollmesh.mesh.running_mesh import RunningMesh
from rollmesh.mesh.supervisor import Supervisor, hosts_in_one_process
from rollmesh.services.learner.metrics_log import EventFile
from rollmesh.shared.clock import Clock, SystemClock
from rollmesh.shared.errors import DeadlineExceeded, MeshError
from rollmesh.shared.weights.model_folder import find_model

MAKE_MODEL_S_MAX = 1800.0
END_S_MARGIN = 30.0
"""Added to the limit of an evaluation: longest time from the end of the learner to the end of the run."""


class RunStalled(DeadlineExceeded):
    """The run made no progress for `run.stall_s`, and `run.on_stall` is exit."""

    reason = "RUN_STALLED"


@dataclass(kw_only=True)
class TrainSession:
    """A run in its folder."""

    folder: RunFolder
    config: TrainConfig
    base_dir: Path
    """Folder of the files that the configuration names."""
    view: View
    in_process: bool = False
    """Run all services in this process, whatever `processes.enabled` says."""
    clock: Clock = field(default_factory=SystemClock)
    outcome: Outcome = "failed"

    async def run(self) -> Summary:
        """Run, and return the summary, also after an interrupt. On an error, write summary and report first, then raise
        it."""
        points_before = len(read_series(self.folder.series).points)
        with Interrupts(leave=self.view.close, notice=self._notice_stop) as interrupts:
            try:
                await interrupts.unless_stopped(self._make_model())
                await self._train(interrupts)
            except Stopped:
                self.outcome = "interrupted"
            finally:
                summary = write_results(self.folder, self.config, outcome=self.outcome, points_before=points_before)
                self.view.close()
        return summary

    def _notice_stop(self) -> None:
        self.view.phase("stopping: finishing the update, writing a checkpoint (press Ctrl-C again to exit at once)")

    async def _make_model(self) -> None:
        if self.config.made_model is None or (self.folder.model / "config.json").is_file():
            return
        self.view.phase("making the model: supervised warm start on generated demonstrations")
        begin_s = self.clock.monotonic_s()
        last = await make_model(self.folder, self.config, self.base_dir, self.view.warm_start)
        note_warm_start(self.folder, last, self.clock.monotonic_s() - begin_s)

    def _mesh(self) -> RunningMesh:
        config, root = run_config(self.folder, self.config), self.folder.root
        enabled = config.processes.enabled
        hosts = None if enabled or self.in_process else hosts_in_one_process(config, self.base_dir)
        if self.in_process or not (enabled or hosts):
            return Mesh(config, run_dir=root, base_dir=self.base_dir)
        return Supervisor(
            config,
            run_dir=root,
            base_dir=self.base_dir,
            hosts=hosts,
            on_event=self.view.event,
            holds_lock=True,
        )

    def _show_disk_need(self) -> None:
        config = run_config(self.folder, self.config)
        model = find_model(config.model, self.base_dir) if config.model else self.folder.model
        self.view.note(disk_text(disk_need(config, model), self.folder.root))

    def _event_file(self, stack: AsyncExitStack) -> Callable[[Eval], None]:
        """Return a callback that writes evaluations to an event file for TensorBoard, beside that of the learner."""
        if not self.config.learner.tensorboard:
            return lambda _: None
        events = EventFile(self.folder.root)
        stack.callback(events.close)
        return lambda result: events.add(result.step, self.clock.wall_s(), heldout_values(result))

    async def _loggers(self, stack: AsyncExitStack) -> RunLoggers | None:
        """Return the loggers, which are closed with the stack; None without any."""
        config, folder = self.config, self.folder
        if not config.run.loggers:
            return None
        self.view.phase("connecting to the loggers")
        run = LoggedRun(name=config.run.name, folder=folder.root, config=without_logins(msgspec.to_builtins(config)))
        make = partial(
            RunLoggers, config.run.loggers, run, metrics=folder.metrics, state=folder.loggers, base_dir=self.base_dir
        )
        loggers = await asyncio.to_thread(make)
        stack.push_async_callback(lambda: asyncio.to_thread(lambda: loggers.close(finished=self.outcome == "finished")))
        return loggers

    async def _train(self, interrupts: Interrupts) -> None:
        run = self.config.run
        self._show_disk_need()
        async with AsyncExitStack() as stack:
            loggers = await interrupts.unless_stopped(self._loggers(stack))
            write_event = self._event_file(stack)

            def on_state(_: Series) -> None:
                self.view.moved()
                if loggers is not None:
                    loggers.read()

            def on_eval(result: Eval) -> None:
                write_event(result)
                if loggers is not None:
                    loggers.add_eval(result, self.clock.wall_s())

            recorder = RunRecorder(
                self.folder.series,
                success_reward=run.success_reward,
                clock=self.clock,
                on_state=on_state,
                on_eval=on_eval,
                first_failures_max=run.first_failures_max,
            )
            stack.callback(recorder.close)
            self.view.phase("starting the services")
            mesh = self._mesh()
            await interrupts.unless_stopped(stack.enter_async_context(mesh))
            watcher = Watcher(
                mesh.layout.gateway, mesh.layout.access, mesh.layout.run, recorder, self.clock, stall_s=run.stall_s
            )
            await stack.enter_async_context(watcher)
            self.view.follow(recorder)
            self.view.phase("")
            if has_page(mesh.layout):
                announcing = asyncio.create_task(self._announce_page(mesh, recorder), name="live page")
                stack.callback(announcing.cancel)
            try:
                await interrupts.unless_stopped(unless_fatal(mesh.finished(), recorder, run.on_stall))
            except Stopped:
                await mesh.stop_learner()
                with suppress(MeshError):  # the streamed state may be old
                    await watcher.refresh()
                raise
            await interrupts.unless_stopped(_ended(watcher, run.eval_s_max + END_S_MARGIN, self.folder.root))
            self.outcome = "finished"
            self.view.phase("stopping the services")

    async def _announce_page(self, mesh: RunningMesh, recorder: RunRecorder) -> None:
        """Print the link to the live page when the gateway responds."""
        await recorder.seen.wait()
        self.view.announce(f"live page: {page_link(mesh.layout)}")


async def make_model(
    folder: RunFolder, config: TrainConfig, base_dir: Path, on_step: Callable[[WarmStep], None] = lambda _: None
) -> WarmStep:
    """Make the model of `made_model` in the run folder, and return the last step of its warm start. Raises
    ModelNotMade."""
    plan = config.model_plan(base_dir)
    assert plan is not None, "the configuration names a model"
    seed = plan.seed or config.run.seed
    return await make_in_process(plan, folder.model, seed=seed, limit_s=MAKE_MODEL_S_MAX, on_step=on_step)


async def _ended(watcher: Watcher, limit_s: float, folder: Path) -> None:
    """Wait until the watcher has seen the end of the run: the last evaluation follows the last update."""
    try:
        async with asyncio.timeout(limit_s):
            await watcher.wait()
    except TimeoutError as err:
        raise DeadlineExceeded(
            f"the learner has finished, but the run has not ended within {limit_s:.0f} s; resume it with `rollmesh "
            f"train {shown(folder)}`"
        ) from err


async def unless_fatal(
    work: Coroutine[Any, Any, None], recorder: RunRecorder, on_stall: Literal["warn", "exit"]
) -> None:
    """Await `work`. Cancel it and raise the cause if all samples fail, or with `exit` if the run stalls."""
    working = asyncio.ensure_future(work)
    fatal = asyncio.ensure_future(recorder.fatal.wait())
    stalled = asyncio.ensure_future(recorder.stalled.wait())
    ends = [working, fatal, *([stalled] if on_stall == "exit" else [])]
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if recorder.failure is not None and not working.done():
            raise recorder.failure
        if not working.done():
            raise RunStalled(
                f"the run is stalled, and run.on_stall is exit: {recorder.now.stalled}; remove the cause, then resume "
                f"with `rollmesh train {shown(recorder.folder)}`"
            )
        working.result()
    finally:
        for task in (working, fatal, stalled):
            task.cancel()
        await asyncio.gather(working, fatal, stalled, return_exceptions=True)
