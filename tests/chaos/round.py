"""One round: a run under `rollmesh train`, the blows of its plan, and what must hold of it in the end.

The run is told nothing. It must end by itself with the last update, its audit must hold against the newest checkpoint, the payloads'
stamps must be within the bound, every sample must have its end, and nothing may be left: no process, no cgroup.
Collaborators: `plan` (what is done), `lives` (the run's processes), `verdict` (the witness's account).
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

from rollmesh.cli.config import TrainConfig
from rollmesh.services.coordinator.audit_checkpoint import find_list
from rollmesh.services.coordinator.audit_report import AuditReport
from rollmesh.shared.config import to_yaml
from rollmesh.shared.process_launch import bound_to_parent
from rollmesh.trainer.trained_log import read_trained
from rollmesh.v1 import run_pb2

from .lives import Lives, RoundFailed, environment
from .plan import SUPERVISOR, Blow
from .processes import same_as
from .verdict import check_witness

_MOMENT_S_MAX = 120.0
_THERE_S_MAX = 120.0
"""How long a victim may be away because of an earlier blow, and how long the run may take to reach a blow's update."""
_AUDIT_S_MAX = 60.0
_LINES_TOLD = 15
Tell = Callable[[str], None]


class Struck(msgspec.Struct, frozen=True, kw_only=True):
    """A blow that hit, or had nobody left to hit."""

    blow: Blow
    at_s: float
    """Seconds since the round's begin."""
    hit: bool


class Outcome(msgspec.Struct, kw_only=True):
    """What a round came to."""

    seed: int
    folder: str
    struck: list[Struck] = []
    cause: str = ""
    """Why it failed; empty if everything held."""
    seconds: float = 0.0
    lives: int = 0
    """Of the supervisor."""
    gone_s: list[float] = []
    """Until everything was gone, for each SIGKILL of the supervisor."""
    updates: int = 0
    updates_undone: int = 0
    samples: dict[str, int] = {}
    lag_max: int = -1
    lags: dict[int, int] = {}
    """Samples of the final weights by staleness, by the stamps in their payloads."""


async def play(
    seed: int, blows: list[Blow], config: TrainConfig, folder: Path, *, limit_s: float, tell: Tell
) -> Outcome:
    """Plays a round in `folder`. Never raises for what the run did: the outcome has the cause."""
    folder.mkdir(parents=True)  # noqa: ASYNC240 (nothing else runs here)
    (folder / "config.yaml").write_text(to_yaml(config))
    outcome = Outcome(seed=seed, folder=str(folder))
    one = _Round(config, Lives(folder), outcome, tell)
    begin_s = time.monotonic()
    try:
        async with asyncio.timeout(limit_s):
            await one.play(blows)
    except Exception as err:  # noqa: BLE001 (the recording point: the other rounds are played all the same)
        outcome.cause = f"{type(err).__name__}: {err}"
        (folder / "failure.txt").write_text(f"{outcome.cause}\n\n{await one.evidence()}")
    finally:
        await one.lives.end()
    outcome.seconds = round(time.monotonic() - begin_s, 1)
    outcome.lives, outcome.gone_s = one.lives.num_lives, one.lives.gone_s
    return outcome


class _Round:
    """The hands of one round."""

    def __init__(self, config: TrainConfig, lives: Lives, outcome: Outcome, tell: Tell) -> None:
        self.lives = lives
        self._config = config
        self._outcome = outcome
        self._tell = tell
        self._begin_s = time.monotonic()
        self._pauses: list[asyncio.Task[None]] = []

    async def play(self, blows: list[Blow]) -> None:
        await self.lives.start()
        try:
            for blow in blows:
                hit = await self._strike(blow)
                at_s = round(time.monotonic() - self._begin_s, 1)
                self._outcome.struck.append(Struck(blow=blow, at_s=at_s, hit=hit))
                self._tell(f"{at_s:6.1f} s  {blow}{'' if hit else ': the run was over before'}")
            await self.lives.unless_over("the end of the run", _nothing, limit_s=float("inf"))
        finally:
            for pause in self._pauses:
                pause.cancel()
            await asyncio.gather(*self._pauses, return_exceptions=True)
        if self.lives.exit_code:
            raise RoundFailed(f"`rollmesh train` ended with exit code {self.lives.exit_code}")
        await self._judge()

    # Blows ------------------------------------------------------------------------------------------------------------

    async def _strike(self, blow: Blow) -> bool:
        """Whether it hit somebody. Raises RoundFailed if the run does not get there."""
        reached = await self.lives.unless_over(
            f"update {blow.update} for: {blow}", lambda: self._at(blow.update), limit_s=_THERE_S_MAX
        )
        if reached is None:
            return False
        if blow.at_moment:
            return await self._strike_at_moment(blow)
        await asyncio.sleep(blow.delay_s)

        async def there() -> int | None:
            return self.lives.pid_of(blow.victim)

        pid = await self.lives.unless_over(f"{blow.victim} is there", there, limit_s=_THERE_S_MAX)
        if pid is None:
            return False
        if blow.victim == SUPERVISOR and blow.kind == "kill":
            await self.lives.kill_supervisor()
            await self.lives.start()
            return True
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL if blow.kind == "kill" else signal.SIGSTOP)
        self._go_on_later(pid, blow)
        return True

    async def _strike_at_moment(self, blow: Blow) -> bool:
        traps, moment = self.lives.traps, blow.victim
        traps.clear(moment)
        number = signal.SIGKILL if blow.kind == "kill" else signal.SIGSTOP
        traps.arm(moment, signal_number=number, after=blow.after)

        async def passed() -> int | None:
            return traps.victim(moment)

        try:
            pid = await self.lives.unless_over(f"somebody passes {moment}", passed, limit_s=_MOMENT_S_MAX)
        finally:
            traps.disarm(moment)
        if pid is not None:
            self._go_on_later(pid, blow)
        return pid is not None

    def _go_on_later(self, pid: int, blow: Blow) -> None:
        """The end of a pause, if this is one."""
        if blow.kind != "pause":
            return
        paused = same_as(pid)

        async def go_on() -> None:
            await asyncio.sleep(blow.pause_s)
            if paused is not None and paused.alive:
                os.kill(paused.pid, signal.SIGCONT)

        self._pauses.append(asyncio.create_task(go_on()))

    async def _at(self, update: int) -> bool | None:
        state = await self.lives.state()
        applied = state.policies[0].applied_step if state is not None and state.policies else -1
        return True if applied >= update else None

    # Judgement --------------------------------------------------------------------------------------------------------

    async def _judge(self) -> None:
        if left := self.lives.left_over():
            raise RoundFailed(f"left over: {', '.join(left)}")
        audit = await self._audit()
        out, samples = self._outcome, audit.samples
        out.updates, out.updates_undone, out.lag_max = audit.updates, audit.updates_undone, audit.lag_max
        out.samples = {name: num for name, num in msgspec.structs.asdict(samples).items() if name != "live"}
        trained = list(read_trained(find_list(self.lives.run_dir / "checkpoints")))
        _check(audit, trained_updates=len(trained), updates=self._config.run.updates_max)
        ids = [sample for update in trained for sample in update.sample_ids]
        if not len(ids) == len(set(ids)) == samples.trained:
            raise RoundFailed(
                f"the final list has {len(ids)} samples, {len(set(ids))} different; the ledger {samples.trained}"
            )
        out.lags = check_witness(self.lives.run_dir, trained, eta=self._config.run.max_staleness)

    async def _audit(self) -> AuditReport:
        """As a person asks for it."""
        checkpoint = max((self.lives.run_dir / "checkpoints").glob("update-*"))
        process = await asyncio.create_subprocess_exec(
            *bound_to_parent([
                sys.executable, "-m", "rollmesh.cli", "audit", str(self.lives.run_dir), "--json",
                "--checkpoint", str(checkpoint),
            ]),
            env=environment(self.lives.traps), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        async with asyncio.timeout(_AUDIT_S_MAX):
            out, err = await process.communicate()
        if not out:
            raise RoundFailed(f"`rollmesh audit` says nothing but: {err.decode(errors='replace')[-1000:]}")
        (self.lives.run_dir.parent / "audit.json").write_bytes(out)
        return msgspec.json.decode(out, type=AuditReport)

    async def evidence(self) -> str:
        """What a person wants to see of a failure first: the run's state, and the end of every log."""
        state = await self.lives.state()
        logs = [self.lives.run_dir.parent / "command.log", *sorted((self.lives.run_dir / "logs").glob("*.log"))]
        ends = [
            f"--- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-_LINES_TOLD:])
            for path in logs
            if path.exists()
        ]
        return "\n\n".join([str(state or run_pb2.RunState()), *ends])


async def _nothing() -> None:
    """Waiting for the end of a life alone."""


def _check(audit: AuditReport, *, trained_updates: int, updates: int) -> None:
    if not audit.holds:
        raise RoundFailed(f"the audit does not hold: {audit.to_text()}")
    if not audit.updates == trained_updates == updates:
        raise RoundFailed(f"{updates} updates were to be; {audit.updates} stand, {trained_updates} are in the weights")
    for counts in (audit.samples, audit.eval_samples):
        numbers = msgspec.structs.asdict(counts)
        if counts.live or counts.reserved != sum(num for name, num in numbers.items() if name != "reserved"):
            raise RoundFailed(f"samples are not conserved: {counts}")
