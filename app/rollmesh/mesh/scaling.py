"""Change the number of nodes of a running mesh: the rules, and the two files by which a command and the supervisor of a
run folder talk.

    RUN/scale.json    the newest request, written by `rollmesh scale`
    RUN/scaled.json   the answer to it, written by the supervisor

A request names the new counts of this host and has an id, which the answer repeats. The supervisor ignores a request
from before its start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from rollmesh.mesh.config import CountsConfig
from rollmesh.shared.clock import Clock
from rollmesh.shared.domain.decoding import UNDECODABLE
from rollmesh.shared.domain.ids import RandomIds
from rollmesh.shared.errors import ConfigError, FailedPrecondition, MeshError
from rollmesh.shared.store.whole_files import write_whole

T = TypeVar("T")

REQUEST, ANSWER = "scale.json", "scaled.json"
SCALABLE = CountsConfig.__struct_fields__
"""Kinds of nodes that a host starts in any number."""
COUNT_MAX = 1024
POLL_S = 0.2
_WHY_NOT = {
    "coordinator": "a mesh has one coordinator",
    "depot": "a mesh has one depot, from which the nodes fetch weights",
    "learner": "a run has one learner; `learner.compute.ranks` spreads it over devices",
    "gateway": "a host starts one; `rollmesh serve gateway --join HOST:PORT` adds another",
    "data": "a host starts one; `rollmesh serve data --join HOST:PORT` adds another",
    "nats": "nats-server is not a node; `bus.url` names a cluster",
    "endpoint": "`endpoints.NAME.nodes` sets the number of nodes of an endpoint",
}


class NotScalable(FailedPrecondition):
    """The running mesh cannot change its number of nodes; the message names the cause."""

    reason = "NOT_SCALABLE"


class ScaleRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Content of scale.json."""

    id: str
    counts: CountsConfig


class ScaleAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Content of scaled.json."""

    id: str
    error: str = ""
    """Why nothing was changed; empty if it was."""
    started: tuple[str, ...] = ()
    draining: tuple[str, ...] = ()
    """Nodes that leave when their work is finished."""


def check_counts(wanted: Mapping[str, int], counts: CountsConfig, others: Mapping[str, int]) -> CountsConfig:
    """Return `counts` with the wanted numbers. `others` are the nodes by kind that other hosts have added.

    Raises ConfigError for a kind that cannot be scaled, a count out of range, and a kind without which the run would
    wait.
    """
    for kind, num in wanted.items():
        if kind not in SCALABLE:
            why = _WHY_NOT.get(kind.partition("-")[0], "there is no such service")
            raise ConfigError(f"`{kind}` must be one of {', '.join(SCALABLE)}: {why}", key=kind)
        if not 0 <= num <= COUNT_MAX:
            raise ConfigError(f"`{kind}` must be in [0, {COUNT_MAX}], got {num}", key=kind)
        if not num and getattr(counts, kind) and not others.get(kind):
            raise ConfigError(
                f"`{kind}` must be >= 1, got 0: no other host has added one, so the run would wait; add one first "
                f"(rollmesh serve {kind} --join HOST:PORT), or stop the run",
                key=kind,
            )
    return msgspec.structs.replace(counts, **wanted)


# The command ----------------------------------------------------------------------------------------------------------


async def request_counts(run_dir: Path, counts: CountsConfig, *, limit_s: float, clock: Clock) -> ScaleAnswer:
    """Ask the supervisor of a run folder for new counts, and return its answer. Raises NotScalable."""
    request = ScaleRequest(id=RandomIds().new(), counts=counts)
    _write(run_dir / REQUEST, request)
    until_s = clock.monotonic_s() + limit_s
    while clock.monotonic_s() < until_s:
        answer = _read(run_dir / ANSWER, ScaleAnswer)
        if answer is not None and answer.id == request.id:
            if answer.error:
                raise NotScalable(answer.error)
            return answer
        await clock.sleep(POLL_S)
    (run_dir / REQUEST).unlink(missing_ok=True)
    raise NotScalable(
        f"{run_dir}: the process that executes this run has not answered within {limit_s:g} s; it cannot start nodes "
        "if all services "
        "share its process (--in-process, or processes.enabled=false); stop the run, and resume it with counts.KIND=N"
    )


# The supervisor -------------------------------------------------------------------------------------------------------


async def answer_requests(run_dir: Path, scale: Callable[[CountsConfig], Awaitable[ScaleAnswer]], clock: Clock) -> None:
    """Pass every request to `scale` and store its answer, until cancelled. An error of `scale` is the answer."""
    (run_dir / REQUEST).unlink(missing_ok=True)
    while True:
        await clock.sleep(POLL_S)
        request = _read(run_dir / REQUEST, ScaleRequest)
        if request is None:
            continue
        try:
            answer = await scale(request.counts)
        except (MeshError, OSError) as error:
            answer = ScaleAnswer(id="", error=str(error))
        (run_dir / REQUEST).unlink(missing_ok=True)  # before the answer, after which another request may come
        await asyncio.to_thread(_write, run_dir / ANSWER, msgspec.structs.replace(answer, id=request.id))


def _read(path: Path, type_: type[T]) -> T | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=type_)
    except (FileNotFoundError, *UNDECODABLE):  # absent, or of another release
        return None


def _write(path: Path, value: msgspec.Struct) -> None:
    write_whole(path, msgspec.json.encode(value), private=False)
