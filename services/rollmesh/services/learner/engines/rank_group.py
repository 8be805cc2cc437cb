"""The rank processes of a torch trainer: how they start, how rank 0 makes them call along, and what it reports when one
fails.

    rank 0 (the learner)    start -> send(call) -> the same call here -> ... -> close
    every other rank        join  -> receive -> the same call -> ...         -> exit

The ranks either are started here, on this host, or exist already because torchrun started the learner on each of them
(`WORLD_SIZE` is set). A rank waits for its next call on a key of the store, without a practical timeout, because the
learner may wait long for a batch. The broadcast of a call and the collectives inside it are bounded by
`learner.compute.rank_timeout_s`.

Ranks that were started here die with the thread that started them. A failure ends all of them, and the next session
starts new ones. Ranks of torchrun cannot be replaced, so the learner ends with them, and torchrun restarts all ranks
(`--max-restarts`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from rollmesh.services.learner.config import LearnerConfig
from rollmesh.shared.errors import Code, ConfigError, MeshError, RankFailed, error_for
from rollmesh.shared.process.process_launch import bound_to_parent
from rollmesh.trainer.ranks import Ranks

_HOST = "127.0.0.1"
_IDLE = timedelta(days=365)
"""Timeout of the wait for the next call. A rank ends with rank 0, so nothing else has to end the wait."""
_POLL_S = 0.1
_START_S = 600.0
"""Maximum time for a rank to load its libraries, which takes long where other processes use the cores."""
_END_S = 5.0
"""Time for a rank to exit after its last call, or to write where it is."""
_TAIL_BYTES = 2000


@dataclass(slots=True)
class RankMember:
    """This process as a member of the process group."""

    ranks: Ranks
    store: Store
    calls: int = 0
    """Number of calls so far."""

    def send(self, call: tuple[Any, ...] | None) -> None:
        """Broadcast a call from rank 0; None ends the ranks."""
        self.calls += 1
        self.store.set(_called(self.calls), "")
        dist.broadcast_object_list([call], src=0)

    def receive(self) -> tuple[Any, ...] | None:
        """Return the next call of rank 0."""
        self.calls += 1
        self.store.wait([_called(self.calls)], _IDLE)
        found: list[Any] = [None]
        dist.broadcast_object_list(found, src=0)
        call: tuple[Any, ...] | None = found[0]
        return call

    def report(self, error: MeshError) -> None:
        """Leave the error that ends this rank for rank 0."""
        self.store.set(_failed(self.ranks.rank), f"{error.reason} {error.code.name}\n{error}")


def join(rank: int, size: int, store: Store | None, config_device: str, timeout_s: float) -> RankMember:
    """Join the default process group. Without a store, the environment of torchrun says where."""
    backend = "cpu:gloo,cuda:nccl" if config_device.startswith("cuda") else "gloo"
    timeout = timedelta(seconds=timeout_s)
    if store is None:
        dist.init_process_group(backend, timeout=timeout)
        store = dist.distributed_c10d._get_default_store()
    else:
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    return RankMember(Ranks(rank, size), store)


def rank_of_torchrun() -> int:
    """Return the rank that torchrun gave this process, 0 without torchrun."""
    return int(os.environ.get("RANK", "0")) if size_of_torchrun() > 1 else 0


def size_of_torchrun() -> int:
    """Return the number of ranks that torchrun started, 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "MASTER_ADDR" in os.environ else 1


def device_of(config: LearnerConfig, size: int, local_rank: int) -> str:
    """Return the device of a rank. Raise ConfigError if the configured one is that of one rank."""
    if size == 1 or config.device == "cpu":
        return config.device
    if ":" in config.device:
        raise ConfigError(
            f"`learner.device` must be a kind of device with {size} ranks, such as `cuda`, got {config.device}; rank r "
            "of a host uses its r-th device",
            key="learner.device",
        )
    return f"{config.device}:{local_rank}"


class RankGroup:
    """The ranks as rank 0 sees them."""

    def __init__(
        self, member: RankMember, started: dict[int, subprocess.Popen[bytes]], logs: Path, timeout_s: float
    ) -> None:
        self._member = member
        self._started = started
        self._logs = logs
        self._timeout_s = timeout_s
        self.failed = False

    @property
    def ranks(self) -> Ranks:
        return self._member.ranks

    @property
    def lasting(self) -> bool:
        """Whether the ranks outlast a session, because they were not started here."""
        return not self._started

    @classmethod
    def start(cls, config: LearnerConfig) -> RankGroup:
        """Start the other ranks, or join those of torchrun. Raise RankFailed if one does not start, and ConfigError."""
        compute, logs = config.compute, Path(config.directory) / "ranks"
        if dist.is_initialized():
            raise ConfigError(
                "`learner.compute.ranks` > 1 needs a separate process, and this process has another trainer with ranks "
                "or in bfloat16; run each learner in its own process",
                key="learner.compute.ranks",
            )
        if (size := size_of_torchrun()) > 1:
            if compute.ranks not in (1, size):
                raise ConfigError(
                    f"`learner.compute.ranks` must be {size}, the number of processes of torchrun, or 1, got "
                    f"{compute.ranks}",
                    key="learner.compute.ranks",
                )
            return cls(join(0, size, None, config.device, compute.rank_timeout_s), {}, logs, compute.rank_timeout_s)
        size = compute.ranks
        timeout = timedelta(seconds=compute.rank_timeout_s)
        store = TCPStore(_HOST, 0, size, is_master=True, timeout=timeout, wait_for_workers=False)
        logs.mkdir(parents=True, exist_ok=True)
        started: dict[int, subprocess.Popen[bytes]] = {}
        try:
            for rank in range(1, size):
                started[rank] = _start(rank, size, store.port, config, logs)
            _wait_until_up(started, store, logs)
            return cls(
                join(0, size, store, config.device, compute.rank_timeout_s), started, logs, compute.rank_timeout_s
            )
        except BaseException:
            _kill(started)
            raise

    @contextlib.contextmanager
    def call(self, *call: Any) -> Iterator[None]:
        """Make all other ranks call along with the block. An error in the block ends them.

        Raise RankFailed if one of them exits or does not respond, or the error of rollmesh that ended it."""
        if self.failed:
            raise RankFailed("the ranks of the trainer have ended after an error; the next session starts them again")
        self.failed = True
        try:
            self._member.send(call)
            yield
            self.failed = False
        except RuntimeError as err:  # the error of torch.distributed
            if (cause := self._cause(err)) is err:
                raise
            raise cause from err
        finally:
            if self.failed:
                self.close()

    def close(self) -> None:
        """End the other ranks, and leave the process group."""
        if not self.failed:
            self.failed = True
            with contextlib.suppress(RuntimeError):
                self._member.send(None)
            for process in self._started.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_END_S)
        _kill(self._started)
        if dist.is_initialized():
            dist.destroy_process_group()

    def _cause(self, err: RuntimeError) -> Exception:
        """Return the error of the first rank that exited or reported one; else that of the ranks that did not respond;
        else `err`."""
        for rank in range(1, self.ranks.size):
            process = self._started.get(rank)
            if process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_END_S if "onnection" in str(err) else _POLL_S)
            if self._member.store.check([_failed(rank)]):
                condition, _, message = self._member.store.get(_failed(rank)).decode().partition("\n")
                reason, _, code = condition.partition(" ")
                return error_for(reason, Code[code])(f"rank {rank}: {message}")
            if process is not None and process.returncode is not None:
                return _exited(rank, process.returncode, self._logs)
        if not _of_distributed(err):
            return err
        return RankFailed(
            f"a rank of the trainer did not respond within {self._timeout_s:g} s (`learner.compute.rank_timeout_s`): "
            f"{'; '.join(_where(rank, process, self._logs) for rank, process in self._started.items()) or err}"
        )


def _start(rank: int, size: int, port: int, config: LearnerConfig, logs: Path) -> subprocess.Popen[bytes]:
    compute = config.compute
    command = [sys.executable, "-m", "rollmesh.services.learner.engines.rank_process"]
    arguments = [str(rank), str(size), _HOST, str(port), config.device, str(compute.rank_timeout_s)]
    with _log_of(rank, logs).open("wb") as log:
        return subprocess.Popen(
            bound_to_parent([*command, *arguments]),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # rank 0 handles a Ctrl-C at the terminal
        )


def _wait_until_up(started: dict[int, subprocess.Popen[bytes]], store: Store, logs: Path) -> None:
    """Wait until every rank has connected. Raise RankFailed for one that exits first, or needs too long."""
    for rank, process in started.items():
        for _ in range(int(_START_S / _POLL_S)):
            if store.check([up(rank)]):
                break
            with contextlib.suppress(subprocess.TimeoutExpired):
                raise _exited(rank, process.wait(_POLL_S), logs)
        else:
            raise RankFailed(f"rank {rank} of the trainer did not start within {_START_S:g} s: {_tail(rank, logs)}")


def _kill(started: dict[int, subprocess.Popen[bytes]]) -> None:
    for process in started.values():
        process.kill()
        process.wait()


def _exited(rank: int, code: int, logs: Path) -> RankFailed:
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    return RankFailed(f"rank {rank} of the trainer {how}; its last output: {_tail(rank, logs)}")


def _where(rank: int, process: subprocess.Popen[bytes], logs: Path) -> str:
    """Return the state of a running rank, and where its code is."""
    state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
    if state in "Tt":
        return f"rank {rank} (pid {process.pid}) is stopped"
    process.send_signal(signal.SIGUSR1)  # it writes the stack of its threads
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_S / 5)
    return f"rank {rank} (pid {process.pid}) is running: {_tail(rank, logs)}"


def _tail(rank: int, logs: Path) -> str:
    path = _log_of(rank, logs)
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        return f"{file.read().decode(errors='replace').strip() or 'none'} ({path})"


def _log_of(rank: int, logs: Path) -> Path:
    return logs / f"rank-{rank}.log"


def _of_distributed(err: RuntimeError) -> bool:
    """Return whether torch.distributed raised the error. The errors of gloo have no class."""
    return isinstance(err, dist.DistError) or any(
        word in str(err) for word in ("gloo", "onnection", "imed out", "NCCL")
    )


def up(rank: int) -> str:
    """Return the key of the store that a rank sets when it has started."""
    return f"up/{rank}"


def _called(number: int) -> str:
    return f"call/{number}"


def _failed(rank: int) -> str:
    return f"failed/{rank}"
