"""One run from the command line: make the model, start the mesh, watch until the end, write summary and report.

The caller holds the lock of the run folder (`mesh.run_lock`), since a session writes there from its first step to its last.

    folder -> model -> mesh -> watch -> learner is done -> last evaluation -> checkpoint, summary.json, report.html

Whatever ends it, the folder is left so that `rollmesh train FOLDER` goes on from the newest checkpoint.
Collaborators: `mesh` (the run itself: a process for each part, or all in this one), `watch` and `display` (RunService clients), `results`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rollmesh.cli.config import TrainConfig
from rollmesh.cli.disk_need import disk_need, in_words
from rollmesh.cli.display import View
from rollmesh.cli.interrupts import Interrupts, Stopped
from rollmesh.cli.results import note_warm_start, write_results
from rollmesh.cli.run_folder import RunFolder, run_config
from rollmesh.cli.series import Eval
from rollmesh.cli.summary import Outcome, Summary
from rollmesh.cli.watch import Recorder, Watcher
from rollmesh.demo.model_process import WarmStep, make_in_process
from rollmesh.mesh.mesh import Mesh
from rollmesh.mesh.running import RunningMesh
from rollmesh.mesh.supervisor import Supervisor
from rollmesh.services.learner.metrics_log import EventFile
from rollmesh.shared.clock import Clock, SystemClock
from rollmesh.shared.errors import DeadlineExceeded, MeshError
from rollmesh.shared.model_folder import find_model

MAKE_MODEL_S_MAX = 1800.0
END_S_MARGIN = 30.0
"""Beyond the limit of an evaluation: how long the run's end may follow the learner's."""


class RunStalled(DeadlineExceeded):
    """The run made no progress for `run.stall_s`, and its config says that this ends it."""

    reason = "RUN_STALLED"


@dataclass(kw_only=True)
class Session:
    """A run in its folder."""

    folder: RunFolder
    config: TrainConfig
    base_dir: Path
    """Where files that the configuration names are looked up."""
    view: View
    in_process: bool = False
    """All parts in this process, whatever `processes.enabled` says."""
    clock: Clock = field(default_factory=SystemClock)
    outcome: Outcome = "failed"

    async def run(self) -> Summary:
        """Returns the summary, of a stopped run too. Raises what broke the run, after writing what there is."""
        with Interrupts(leave=self.view.close, notice=self._notice_stop) as interrupts:
            try:
                await interrupts.unless_stopped(self._make_model())
                await self._train(interrupts)
            except Stopped:
                self.outcome = "interrupted"
            finally:
                summary = write_results(self.folder, self.config, outcome=self.outcome)
                self.view.close()
        return summary

    def _notice_stop(self) -> None:
        self.view.phase("stopping: finishing the update, writing a checkpoint (Ctrl-C again leaves at once)")

    async def _make_model(self) -> None:
        if self.config.made_model is None or (self.folder.model / "config.json").is_file():
            return
        self.view.phase("making the model: supervised warm start on generated demonstrations")
        begin_s = self.clock.monotonic_s()
        last = await make_model(self.folder, self.config, self.base_dir, self.view.warm_start)
        note_warm_start(self.folder, last, self.clock.monotonic_s() - begin_s)

    def _mesh(self) -> RunningMesh:
        config, root = run_config(self.folder, self.config), self.folder.root
        if config.processes.enabled and not self.in_process:
            return Supervisor(config, run_dir=root, base_dir=self.base_dir, on_event=self.view.event, holds_lock=True)
        return Mesh(config, run_dir=root, base_dir=self.base_dir)

    def _tell_disk(self) -> None:
        config = run_config(self.folder, self.config)
        model = find_model(config.model, self.base_dir) if config.model else self.folder.model
        self.view.note(in_words(disk_need(config, model), self.folder.root))

    def _event_file(self, stack: AsyncExitStack) -> Callable[[Eval], None]:
        """Where evaluations go besides the series: into an event file for TensorBoard, beside that of the learner."""
        if not self.config.learner.tensorboard:
            return lambda _: None
        events = EventFile(self.folder.root)
        stack.callback(events.close)

        def add(result: Eval) -> None:
            by_label = {f"heldout_success/{label}": value for label, value in result.success_by_label.items()}
            events.add(result.step, self.clock.wall_s(), {"heldout_success": result.success, **by_label})

        return add

    async def _train(self, interrupts: Interrupts) -> None:
        run = self.config.run
        self._tell_disk()
        async with AsyncExitStack() as stack:
            recorder = Recorder(
                self.folder.series,
                success_reward=run.success_reward,
                clock=self.clock,
                on_state=lambda _: self.view.moved(),
                on_eval=self._event_file(stack),
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
            try:
                await interrupts.unless_stopped(unless_hopeless(mesh.finished(), recorder, run.on_stall))
            except Stopped:
                await mesh.stop_learner()
                with suppress(MeshError):  # what is shown may be a moment old
                    await watcher.refresh()
                raise
            await interrupts.unless_stopped(_ended(watcher, run.eval_s_max + END_S_MARGIN))
            self.outcome = "finished"
            self.view.phase("stopping the services")


async def make_model(
    folder: RunFolder, config: TrainConfig, base_dir: Path, on_step: Callable[[WarmStep], None] = lambda _: None
) -> WarmStep:
    """Make the model of `made_model` in the run folder, and return the last step of its warm start. Raises ModelNotMade."""
    plan = config.model_plan(base_dir)
    assert plan is not None, "the configuration names a model"
    seed = plan.seed or config.run.seed
    return await make_in_process(plan, folder.model, seed=seed, limit_s=MAKE_MODEL_S_MAX, on_step=on_step)


async def _ended(watcher: Watcher, limit_s: float) -> None:
    """Waits until the watcher has seen the end of the run: the last evaluation comes after the last update."""
    try:
        async with asyncio.timeout(limit_s):
            await watcher.wait()
    except TimeoutError as err:
        raise DeadlineExceeded(
            f"the learner is done, but the run has not ended in {limit_s:.0f} s; `rollmesh train` on its folder goes on"
        ) from err


async def unless_hopeless(
    work: Coroutine[Any, Any, None], recorder: Recorder, on_stall: Literal["warn", "exit"]
) -> None:
    """Awaits `work`. Cancels it and raises the cause once the recorder sees that all samples fail, or under `exit` a stall."""
    working = asyncio.ensure_future(work)
    hopeless = asyncio.ensure_future(recorder.hopeless.wait())
    stalled = asyncio.ensure_future(recorder.stalled.wait())
    ends = [working, hopeless, *([stalled] if on_stall == "exit" else [])]
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if recorder.failure is not None and not working.done():
            raise recorder.failure
        if not working.done():
            raise RunStalled(
                f"the run is stalled, and run.on_stall is exit: {recorder.now.stalled}; remove the cause, then continue with "
                "its folder"
            )
        working.result()
    finally:
        for task in (working, hopeless, stalled):
            task.cancel()
        await asyncio.gather(working, hopeless, stalled, return_exceptions=True)
