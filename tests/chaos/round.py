"""One round: a run under `rollmesh train`, the faults of its plan, and the checks at its end.

The run is not informed of the faults. It must finish by itself with the last update, its audit must hold with the
newest checkpoint, the stamps of the payloads must be within the bound, every sample must have its end, and no process
and no cgroup may remain. Collaborators: `plan` (the faults), `train_command` (the processes of the run), `verdict` (the
checks of the witness).
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from rollmesh.app.config import TrainConfig
from rollmesh.app.nats_files import ALL
from rollmesh.services.coordinator.audit_checkpoint import find_list
from rollmesh.services.coordinator.audit_report import AuditReport
from rollmesh.shared.config.loader import to_yaml
from rollmesh.shared.process.process_launch import bound_to_parent
from rollmesh.trainer.trained_log import read_trained
from rollmesh.v1 import run_pb2

from ..nats_cluster import NatsCluster
from .plan import NATS_SERVERS, PROGRAM, SUPERVISOR, Fault
from .processes import same_as
from .programs import (
    JournalLine,
    ProgramCounts,
    ProgramWitness,
    at_once_min,
    runs_programs,
    signal_programs,
    with_journal,
)
from .scoring import DROPPED, DROPPER
from .train_command import RoundFailed, TrainCommand, environment
from .verdict import check_witness

_MOMENT_S_MAX = 240.0
_THERE_S_MAX = 240.0
"""Longest absence of a victim because of an earlier fault, and longest time of the run to reach the update of a
fault."""
_AUDIT_S_MAX = 180.0
_CURRENT_S_MAX = 180.0
"""Longest time until a server of the cluster has all records again."""
_LINES_LOGGED = 15
Tell = Callable[[str], None]


class Injection(msgspec.Struct, frozen=True, kw_only=True):
    """A fault that hit, or found no process."""

    fault: Fault
    at_s: float
    """Seconds since the start of the round."""
    hit: bool


class Outcome(msgspec.Struct, kw_only=True):
    """The result of a round."""

    seed: int
    folder: str
    injections: list[Injection] = []
    cause: str = ""
    """Why it failed; empty if all checks held."""
    seconds: float = 0.0
    num_starts: int = 0
    """Number of starts of the supervisor."""
    gone_s: list[float] = []
    """Seconds until all processes had exited, for each SIGKILL of the supervisor."""
    updates: int = 0
    updates_undone: int = 0
    samples: dict[str, int] = {}
    lag_max: int = -1
    lags: dict[int, int] = {}
    """Number of samples in the final weights by staleness, from the stamps of their payloads."""
    programs: ProgramCounts | None = None
    """What the witness of the programs saw; None if the agents are not programs."""


async def play(
    seed: int,
    faults: list[Fault],
    config: TrainConfig,
    folder: Path,
    *,
    limit_s: float,
    tell: Tell,
    cluster: NatsCluster | None = None,
) -> Outcome:
    """Run a round in `folder`. A failure of the run is not raised: the outcome has the cause. `cluster` has started;
    the run uses it."""
    folder.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240 (nothing else runs here)
    if cluster is not None:
        config = on_cluster(config, cluster)
    if runs_programs(config):
        config = with_journal(config, folder)
    (folder / "config.yaml").write_text(to_yaml(config))
    outcome = Outcome(seed=seed, folder=str(folder))
    one = _Round(config, TrainCommand(folder), outcome, tell, cluster)
    begin_s = time.monotonic()
    try:
        async with asyncio.timeout(limit_s):
            await one.play(faults)
    except Exception as err:  # noqa: BLE001 (the recording point: the other rounds still run)
        outcome.cause = f"{type(err).__name__}: {err}"
        (folder / "failure.txt").write_text(f"{outcome.cause}\n\n{await one.evidence()}")
    finally:
        await one.command.end()
    outcome.seconds = round(time.monotonic() - begin_s, 1)
    outcome.num_starts, outcome.gone_s = one.command.num_starts, one.command.gone_s
    return outcome


def on_cluster(config: TrainConfig, cluster: NatsCluster) -> TrainConfig:
    """Return the configuration with the streams on a cluster, with a copy on each server."""
    bus = msgspec.structs.replace(config.bus, url=cluster.url, login_file=str(cluster.logins / ALL))
    streams = msgspec.structs.replace(config.coordinator.streams, num_replicas=len(cluster.servers))
    coordinator = msgspec.structs.replace(config.coordinator, streams=streams)
    return msgspec.structs.replace(config, bus=bus, coordinator=coordinator)


class _Round:
    """Injects the faults of one round and checks the result."""

    def __init__(
        self, config: TrainConfig, command: TrainCommand, outcome: Outcome, tell: Tell, cluster: NatsCluster | None
    ) -> None:
        self.command = command
        self._cluster = cluster
        self._outage: asyncio.Task[None] | None = None
        self._config = config
        self._outcome = outcome
        self._tell = tell
        self._begin_s = time.monotonic()
        self._pauses: list[asyncio.Task[None]] = []
        self._programs: ProgramWitness | None = None
        if runs_programs(config):
            self._programs = ProgramWitness(Path(outcome.folder))
            outcome.programs = self._programs.counts

    async def play(self, faults: list[Fault]) -> None:
        await self.command.start()
        watching = asyncio.create_task(self._programs.watch()) if self._programs is not None else None
        try:
            for fault in faults:
                hit = await self._inject(fault)
                at_s = round(time.monotonic() - self._begin_s, 1)
                self._outcome.injections.append(Injection(fault=fault, at_s=at_s, hit=hit))
                self._tell(f"{at_s:6.1f} s  {fault}{'' if hit else ': the run was over before'}")
            await self.command.unless_over("the end of the run", _nothing, limit_s=float("inf"))
        finally:
            for pause in self._pauses:
                pause.cancel()
            await asyncio.gather(*self._pauses, return_exceptions=True)
            if watching is not None:
                watching.cancel()
                await asyncio.wait({watching})
        if watching is not None and not watching.cancelled():
            watching.result()
        if self.command.exit_code:
            raise RoundFailed(f"`rollmesh train` ended with exit code {self.command.exit_code}")
        await self._judge()

    # Faults -----------------------------------------------------------------------------------------------------------

    async def _inject(self, fault: Fault) -> bool:
        """Return whether it hit a process. Raises RoundFailed if the run does not reach its update."""
        reached = await self.command.unless_over(
            f"update {fault.update} for: {fault}", lambda: self._at(fault.update), limit_s=_THERE_S_MAX
        )
        if reached is None:
            return False
        if fault.at_fault_point:
            return await self._strike_at_fault_point(fault)
        await asyncio.sleep(fault.delay_s)
        if fault.victim == PROGRAM:
            return await self._strike_programs(fault)
        if fault.victim in NATS_SERVERS:
            return await self._strike_server(fault)

        async def there() -> int | None:
            return self.command.pid_of(fault.victim)

        pid = await self.command.unless_over(f"{fault.victim} runs", there, limit_s=_THERE_S_MAX)
        if pid is None:
            return False
        if fault.victim == SUPERVISOR and fault.kind == "kill":
            await self.command.kill_supervisor()
            await self.command.start()
            return True
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
        await self._hit(pid, fault)
        return True

    async def _strike_server(self, fault: Fault) -> bool:
        """Hit a server of the cluster after the one before runs again, so that a majority remains."""
        assert self._cluster is not None
        cluster, name = self._cluster, fault.victim.removeprefix("nats-")

        async def there() -> bool | None:
            return True if self._outage is None or self._outage.done() else None

        if await self.command.unless_over("the last server runs again", there, limit_s=_THERE_S_MAX) is None:
            return False
        if self._outage is not None:
            self._outage.result()
        server = cluster.servers[name]
        match fault.kind:
            case "kill":
                server.kill()
            case "pause":
                server.signal(signal.SIGSTOP)
            case "cut":
                await cluster.cut(name)

        async def end() -> None:
            try:
                await asyncio.sleep(fault.pause_s)
            finally:
                server.signal(signal.SIGCONT)
                await cluster.join(name)
                if server.pid is None:
                    server.start()
            await cluster.until_current(name, limit_s=_CURRENT_S_MAX)

        self._outage = asyncio.create_task(end(), name=f"outage of {name}")
        self._pauses.append(self._outage)
        return True

    async def _strike_programs(self, fault: Fault) -> bool:
        """Hit a third of the programs that run."""
        assert self._programs is not None
        programs = self._programs

        async def there() -> list[JournalLine] | None:
            return programs.running()[::3] or None

        hit = await self.command.unless_over("programs run", there, limit_s=_THERE_S_MAX)
        if hit is None:
            return False
        if fault.kind == "kill":
            signal_programs(hit, signal.SIGKILL)
            programs.counts.killed += len(hit)
            return True
        signal_programs(hit, signal.SIGSTOP)

        async def go_on() -> None:
            await asyncio.sleep(fault.pause_s)
            signal_programs(hit, signal.SIGCONT)

        self._pauses.append(asyncio.create_task(go_on()))
        return True

    async def _strike_at_fault_point(self, fault: Fault) -> bool:
        traps, moment = self.command.traps, fault.victim
        traps.clear(moment)
        number = signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP
        traps.arm(moment, signal_number=number, after=fault.after)

        async def passed() -> int | None:
            return traps.victim(moment)

        try:
            pid = await self.command.unless_over(f"a process passes {moment}", passed, limit_s=_MOMENT_S_MAX)
        finally:
            traps.disarm(moment)
        if pid is not None:
            await self._hit(pid, fault)
        return pid is not None

    async def _hit(self, pid: int, fault: Fault) -> None:
        """Follow a process that received the signal."""
        if fault.kind == "pause":
            self._go_on_later(pid, fault)
        elif self._programs is not None and fault.service == "rollout":
            await self._programs.worker_killed(pid)

    def _go_on_later(self, pid: int, fault: Fault) -> None:
        """End the pause."""
        paused = same_as(pid)

        async def go_on() -> None:
            await asyncio.sleep(fault.pause_s)
            if paused is not None and paused.alive:
                os.kill(paused.pid, signal.SIGCONT)

        self._pauses.append(asyncio.create_task(go_on()))

    async def _at(self, update: int) -> bool | None:
        state = await self.command.state()
        applied = state.policies[0].applied_step if state is not None and state.policies else -1
        return True if applied >= update else None

    # Checks ----------------------------------------------------------------------------------------------------------

    async def _judge(self) -> None:
        if left := self.command.left_over():
            raise RoundFailed(f"left over: {', '.join(left)}")
        audit = await self._audit()
        out, samples = self._outcome, audit.samples
        out.updates, out.updates_undone, out.lag_max = audit.updates, audit.updates_undone, audit.lag_max
        out.samples = {name: num for name, num in msgspec.structs.asdict(samples).items() if name != "live"}
        trained = list(read_trained(find_list(self.command.run_dir / "checkpoints")))
        _check(audit, trained_updates=len(trained), updates=self._config.run.updates_max)
        ids = [sample for update in trained for sample in update.sample_ids]
        ledger = samples.trained + (audit.replay.samples.trained if audit.replay is not None else 0)
        if not len(ids) == len(set(ids)) == ledger:
            raise RoundFailed(f"the final list has {len(ids)} samples, {len(set(ids))} different; the ledger {ledger}")
        drops = any(finalizer.name == DROPPER for finalizer in self._config.reward.finalizers)
        if drops and not audit.reasons.get(f"filtered/{DROPPED}"):
            raise RoundFailed(f"the finalizer has dropped no member: {audit.reasons}")
        if self._programs is not None:
            self._programs.check(ids, at_once=at_once_min(self._config))
        run = self._config.run
        bound = run.replay.bound.max_staleness if run.replay is not None else None
        out.lags = check_witness(self.command.run_dir, trained, eta=run.max_staleness, replay_bound=bound)

    async def _audit(self) -> AuditReport:
        """Run `rollmesh audit`."""
        checkpoint = max((self.command.run_dir / "checkpoints").glob("update-*"))
        process = await asyncio.create_subprocess_exec(
            *bound_to_parent([
                sys.executable, "-m", "rollmesh.cli", "audit", str(self.command.run_dir), "--json",
                "--checkpoint", str(checkpoint),
            ]),
            env=environment(self.command.traps), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        async with asyncio.timeout(_AUDIT_S_MAX):
            out, err = await process.communicate()
        if not out:
            raise RoundFailed(f"`rollmesh audit` says nothing but: {err.decode(errors='replace')[-1000:]}")
        (self.command.run_dir.parent / "audit.json").write_bytes(out)
        return msgspec.json.decode(out, type=AuditReport)

    async def evidence(self) -> str:
        """Return the state of the run and the end of every log."""
        state = await self.command.state()
        logs = [self.command.run_dir.parent / "command.log", *sorted((self.command.run_dir / "logs").glob("*.log"))]
        ends = [
            f"--- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-_LINES_LOGGED:])
            for path in logs
            if path.exists()
        ]
        return "\n\n".join([str(state or run_pb2.RunState()), *ends])


async def _nothing() -> None:
    """Return None: wait only for the exit of the process."""


def _check(audit: AuditReport, *, trained_updates: int, updates: int) -> None:
    if not audit.holds:
        raise RoundFailed(f"the audit does not hold: {audit.to_text()}")
    if not audit.updates == trained_updates == updates:
        raise RoundFailed(f"{updates} updates were to be; {audit.updates} stand, {trained_updates} are in the weights")
    replayed = (audit.replay.samples,) if audit.replay is not None else ()
    for counts in (audit.samples, audit.eval_samples, *replayed):
        numbers = msgspec.structs.asdict(counts)
        if counts.live or counts.reserved != sum(num for name, num in numbers.items() if name != "reserved"):
            raise RoundFailed(f"samples are not conserved: {counts}")
