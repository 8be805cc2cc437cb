"""A run without a learner: a mesh rolls out tasks and exports each sample when it is finished.

    configuration -> model -> mesh -> StreamSamples -> transcripts, samples.jsonl, means

The run has a folder that `rollmesh show` and `rollmesh audit` read. Collaborators: `samples` (the lines), `transcript`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from rollmesh.app.checks.config_checks import check
from rollmesh.app.config import TrainConfig, load_train_config
from rollmesh.app.interrupts import Interrupts, Stopped
from rollmesh.app.run_folder import RunFolder, logging_to, new_folder, origin_now, run_config
from rollmesh.app.samples.samples import RewardLine, SampleLine, encode_sample_line, mean_rewards, sample_lines
from rollmesh.app.session import make_model
from rollmesh.app.views.causes import failed_attempts_text, failure_text, refuse_if_all_failed
from rollmesh.mesh.mesh import Mesh
from rollmesh.mesh.mesh_services import blocking_endpoints
from rollmesh.services.data.config import build_pools
from rollmesh.services.data.task import Split
from rollmesh.shared.clock import Clock, SystemClock
from rollmesh.shared.domain.ledger_head import EMPTY, LedgerHead
from rollmesh.shared.errors import ConfigError, MeshError
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.rpc.status import typed_errors
from rollmesh.shared.weights.manifest import ADAPTER_CONFIG
from rollmesh.v1 import run_pb2, run_pb2_grpc

RESUME_S = 0.5
"""Pause before a broken stream is resumed."""
STATE_EVERY_S = 1.0
"""Pause between reads of the state of the run."""
STATE_S_MAX = 10.0
_log = logging.getLogger(__name__)
_SUFFIX = "-rollout"
_NAME_CHARS_MAX = 64 - len(_SUFFIX)


class RolloutOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of the command."""

    num: int = 8
    """Number of tasks."""
    per_task: int = 1
    """Number of episodes per task."""
    split: str = "test"
    model: Path | None = None
    """A model folder in place of the configuration's."""
    folder: Path | None = None
    """Folder of the run. Default: runs/NAME-TIME."""

    def __post_init__(self) -> None:
        for name in ("num", "per_task"):
            if getattr(self, name) < 1:
                raise ConfigError(f"`{name}` must be >= 1, got {getattr(self, name)}")


class RolloutSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the run."""

    run: str
    folder: str
    ended: str
    """Why the run ended; empty if it was interrupted."""
    interrupted: bool
    samples: dict[str, int]
    """Number of samples by end: reserved, exported, failed, ..."""
    mean_rewards: dict[str, float]
    num_tokens: int
    ledger_head: LedgerHead
    """Ledger head after the last exported sample; `rollmesh audit` checks that the ledger contains it."""
    out: str = ""
    """File with the samples."""
    failure: str = ""
    """The newest failure of an episode, with the traceback of the user's code; empty if none failed."""


@dataclass(kw_only=True)
class Rollout:
    """One run without a learner in its folder."""

    folder: RunFolder
    config: TrainConfig
    base_dir: Path
    out: Path | None
    on_sample: Callable[[SampleLine], None]
    on_phase: Callable[[str], None]
    clock: Clock = field(default_factory=SystemClock)
    state: run_pb2.RunState = field(default_factory=run_pb2.RunState)
    rewards: list[list[RewardLine]] = field(default_factory=list)
    num_tokens: int = 0
    head: LedgerHead = EMPTY

    async def run(self) -> RolloutSummary:
        """Run until the run ends, or Ctrl-C. Raises the error that ended it."""
        interrupted = False
        with Interrupts() as interrupts, ExitStack() as stack:
            file = stack.enter_context(_open(self.out)) if self.out is not None else None
            try:
                await interrupts.unless_stopped(self._make_model())
                await interrupts.unless_stopped(self._generate(file))
            except Stopped:
                interrupted = True
        counts = self.state.samples
        names = ("reserved", "live", "exported", "filtered", "failed", "cancelled")
        summary = RolloutSummary(
            run=self.config.run.name,
            folder=str(self.folder.root),
            ended=self.state.ended,
            interrupted=interrupted,
            samples={name: getattr(counts, name) for name in names if getattr(counts, name)},
            mean_rewards=mean_rewards(self.rewards),
            num_tokens=self.num_tokens,
            ledger_head=self.head,
            out=str(self.out) if self.out is not None else "",
            failure=failure_text(self.state.failed_attempts),
        )
        self.folder.summary.write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
        return summary

    async def _make_model(self) -> None:
        if self.config.made_model is None:
            return
        words = "making the model: supervised warm start"
        self.on_phase(words)
        await make_model(
            self.folder, self.config, self.base_dir, lambda step: self.on_phase(f"{words}, step {step.step}")
        )
        self.config = run_config(self.folder, self.config)

    async def _generate(self, file: BinaryIO | None) -> None:
        self.on_phase("starting the services")
        async with Mesh(self.config, run_dir=self.folder.root, base_dir=self.base_dir) as mesh:
            self.on_phase("generating")
            reading = asyncio.create_task(self._read(mesh, file), name="samples")
            serving = asyncio.create_task(mesh.finished(), name="mesh")
            showing = asyncio.create_task(self._show_progress(mesh), name="progress")
            try:
                await asyncio.wait([reading, serving, showing], return_when=asyncio.FIRST_COMPLETED)
                for task in (serving, showing):
                    if task.done():
                        task.result()  # raises the error that ended a process, or AllFailed
                await reading
            finally:
                for task in (reading, serving, showing):
                    task.cancel()
                await asyncio.wait([reading, serving, showing])
            self.on_phase("stopping the services")

    async def _show_progress(self, mesh: Mesh) -> None:
        """Show every STATE_EVERY_S how far the run is and what it waits for. Raises AllFailed."""
        async with open_channel(mesh.gateway_address, access=mesh.access) as channel:
            stub: Any = run_pb2_grpc.RunServiceStub(channel)
            while True:
                await self.clock.sleep(STATE_EVERY_S)
                with contextlib.suppress(MeshError), typed_errors():
                    request = run_pb2.GetRunRequest(run=mesh.run)
                    self.state = (await stub.GetRun(request, timeout=STATE_S_MAX)).state
                    self.on_phase(progress_text(self.state))
                refuse_if_all_failed(self.state, self.config.run.first_failures_max)

    async def _read(self, mesh: Mesh, file: BinaryIO | None) -> None:
        async with open_channel(mesh.gateway_address, access=mesh.access) as channel:
            stub: Any = run_pb2_grpc.RunServiceStub(channel)
            async for response in stream_samples(stub, mesh.run, self.clock):
                self.head = LedgerHead(position=response.ledger_position, hash=response.ledger_hash)
                if response.HasField("failure"):
                    _log.warning("episode skipped: %s", response.failure.message)
                    continue
                for line in sample_lines(response.episode, response.task):
                    self._take(line, file)
            with typed_errors():
                request = run_pb2.GetRunRequest(run=mesh.run)
                self.state = (await stub.GetRun(request, timeout=STATE_S_MAX)).state
            self.head = LedgerHead(position=self.state.ledger_position, hash=self.state.ledger_hash)

    def _take(self, line: SampleLine, file: BinaryIO | None) -> None:
        self.rewards.append(line.rewards)
        self.num_tokens += line.num_tokens
        if file is not None:
            file.write(encode_sample_line(line))
            file.flush()
        self.on_sample(line)


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("wb")
    except OSError as err:
        raise ConfigError(f"--out {path}: cannot be written: {err.strerror}; name another file", path=path) from err


def progress_text(state: run_pb2.RunState) -> str:
    """Return the progress in a line."""
    ended = state.samples.reserved - state.samples.live
    waiting = "; ".join(f"{who}: {what}" for who, what in sorted(state.waiting.items()))
    failure = failed_attempts_text(state.failed_attempts.num, state.failed_attempts.cause)
    notes = "; ".join(filter(None, [failure, waiting]))
    return f"generating: {ended} of {state.samples.reserved} samples have ended" + (f" ({notes})" if notes else "")


async def stream_samples(stub: Any, run: str, clock: Clock) -> AsyncIterator[run_pb2.StreamSamplesResponse]:
    """Yield every scored episode of a run once, and resume broken streams. Raises MeshError if it is not retryable."""
    cursor = ""
    while True:
        call = stub.StreamSamples(run_pb2.StreamSamplesRequest(run=run, cursor=cursor))
        try:
            with typed_errors():
                async for response in call:
                    cursor = response.cursor
                    yield response
                return
        except MeshError as err:
            if not err.retryable:
                raise
        finally:
            call.cancel()
        await clock.sleep(RESUME_S)


def prepare(
    path: Path, overrides: Sequence[str], options: RolloutOptions, command: list[str]
) -> tuple[RunFolder, TrainConfig, Path]:
    """Return a new folder for the run, its configuration, and the folder of the user's files.

    `path` is a configuration file or a run folder. In a run folder its newest checkpoint generates, or else the model
    that was created for it. Adapters of a checkpoint are merged into a model in the new folder. Raises InvalidInput
    with every mistake before anything is created.
    """
    file, base_dir, model = path, path.parent.resolve(), options.model
    if path.is_dir():
        known = RunFolder(path.resolve())
        file, base_dir = known.config, Path(known.read_origin().base_dir)
        model = model or known.newest_checkpoint() or (known.model if known.model.is_dir() else None)
    config = load_train_config(file, overrides)
    adapters = model if model is not None and (model / ADAPTER_CONFIG).is_file() else None
    if adapters is not None:
        from rollmesh.trainer.merge import base_of, merge_checkpoint

        model = base_of(adapters)
    if model is not None:
        config = msgspec.structs.replace(config, made_model=None, model=str(model.resolve()))
    run = msgspec.structs.replace(
        config.run,
        name=f"{config.run.name.removesuffix(_SUFFIX)[:_NAME_CHARS_MAX]}{_SUFFIX}",
        export_groups=options.num,
        export_split=options.split,
        submitted_tasks=False,
        group_size=options.per_task,
        variants=(),
        eval_every=0,
    )
    config = msgspec.structs.replace(config, run=run)
    check(config, base_dir)
    _check_split(config, base_dir, options)
    origin = origin_now(command, base_dir)
    folder = new_folder(config, origin, options.folder)
    if adapters is not None:
        merge_checkpoint(adapters, folder.model)
        config = msgspec.structs.replace(config, model=str(folder.model))
        folder.write(config, origin)
    return folder, config, base_dir


def _check_split(config: TrainConfig, base_dir: Path, options: RolloutOptions) -> None:
    sizes = {
        str(split): len(pool)
        for split, pool in build_pools(config.data, base_dir, blocking_endpoints(config, base_dir)).items()
    }
    if options.split not in set(Split):
        raise ConfigError(f"--split must be one of {', '.join(Split)}; got {options.split!r}")
    if sizes[options.split] < options.num:
        known = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise ConfigError(
            f"-n {options.num}: the {options.split} split has {sizes[options.split]} tasks; lower -n or name another "
            f"--split: {known}"
        )


def run_rollout(
    folder: RunFolder,
    config: TrainConfig,
    base_dir: Path,
    out: Path | None,
    *,
    on_sample: Callable[[SampleLine], None],
    on_phase: Callable[[str], None],
) -> RolloutSummary:
    """Roll out in a folder that `prepare` created. Raises MeshError."""
    work = Rollout(folder=folder, config=config, base_dir=base_dir, out=out, on_sample=on_sample, on_phase=on_phase)
    with logging_to(folder.log):
        return asyncio.run(work.run())
