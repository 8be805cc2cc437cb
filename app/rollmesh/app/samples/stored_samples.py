"""Read the samples of a run folder from its ledger and, while the payload is stored, its sample stream."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from rollmesh.app.config import load_train_config
from rollmesh.app.run_bus import run_bus
from rollmesh.app.run_folder import RunFolder
from rollmesh.app.samples.samples import RewardLine, SampleLine, sample_lines
from rollmesh.mesh.run_lock import still_starting
from rollmesh.services.coordinator.audit_history import HistoryLine, ledger_history
from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.core.facts import Reward
from rollmesh.services.coordinator.fact_codec import encode
from rollmesh.services.coordinator.ledger import read_ledger
from rollmesh.shared.bus.archive_bus import open_ledger
from rollmesh.shared.bus.bus import Bus, StreamLog, UnknownRecord, UnknownStream
from rollmesh.shared.bus.run_streams import run_streams
from rollmesh.shared.errors import UnknownRun, UnknownSample
from rollmesh.v1 import types_pb2


class ListedSample(msgspec.Struct, frozen=True, kw_only=True):
    """A scored sample, or an episode that ended without one, from the ledger."""

    sample_id: str
    """Id of the sample, or of an episode without samples."""
    task: str
    num_tokens: int = 0
    rewards: list[RewardLine] = []
    lost: str = ""
    """Why an episode ended without samples."""


class ShownSample(msgspec.Struct, frozen=True, kw_only=True):
    """A sample with its history."""

    sample_id: str
    history: list[HistoryLine]
    sample: SampleLine | None
    """None if the payload is no longer in the sample stream; payloads of trained samples are purged."""


def list_samples(root: Path, limit: int) -> list[ListedSample]:
    """Return the samples of the newest `limit` ended episodes, oldest first. Raises ConfigError, UnknownRun,
    BusUnavailable, DataLoss."""
    return asyncio.run(_list_samples(root, limit))


async def _list_samples(root: Path, limit: int) -> list[ListedSample]:
    tasks: dict[str, str] = {}
    newest: deque[ListedSample] = deque(maxlen=limit)
    async with _ledger_of(root) as (_, _, ledger):
        async for fact in _facts(ledger):
            if isinstance(fact, f.GroupReserved):
                tasks[fact.group] = fact.task.task_id
            newest.extend(_listed(fact, tasks))
    return list(newest)


def _listed(fact: f.Fact, tasks: Mapping[str, str]) -> Iterator[ListedSample]:
    if isinstance(fact, f.EpisodeEnded):
        lost = f"{fact.end.name.lower()} {fact.reason}: {fact.cause}".rstrip(": ")
        yield ListedSample(sample_id=fact.episode, task=tasks[fact.group], lost=lost)
    elif isinstance(fact, f.EpisodeScored):
        for meta in fact.samples:
            yield ListedSample(
                sample_id=meta.sample_id,
                task=tasks[fact.group],
                num_tokens=meta.num_tokens,
                rewards=[_reward(reward) for reward in meta.rewards],
            )


def show_sample(root: Path, name: str) -> ShownSample:
    """Return a sample, or the first one of an episode. Raises UnknownSample, and the errors of `list_samples`."""
    return asyncio.run(_show_sample(root, name))


async def _show_sample(root: Path, name: str) -> ShownSample:
    async with _ledger_of(root) as (bus, run, ledger):
        line = await _payload(bus, run, ledger, name)
        found = line.sample_id if line is not None else name
        history = await ledger_history(lambda: read_ledger(ledger), found)
    if not history:
        raise UnknownSample(f"{root}: the ledger has no sample or episode {name!r}; `rollmesh show {root}` lists them")
    return ShownSample(sample_id=found, history=history, sample=line)


@asynccontextmanager
async def _ledger_of(root: Path) -> AsyncIterator[tuple[Bus, str, StreamLog]]:
    """Yield the bus, the name and the ledger of the run of a folder."""
    folder = RunFolder(root)
    folder.read_origin()
    config = load_train_config(folder.config)
    async with run_bus(folder, config) as bus:
        try:
            ledger = await open_ledger(bus, config.run.name)
        except UnknownStream as err:
            if starting := still_starting(root):
                raise starting from err
            raise UnknownRun(
                f"{root}: the ledger of run {config.run.name} does not exist; start the run first", run=config.run.name
            ) from err
        yield bus, config.run.name, ledger


async def _payload(bus: Bus, run: str, ledger: StreamLog, name: str) -> SampleLine | None:
    groups: dict[str, f.Task] = {}
    async for fact in _facts(ledger):
        if isinstance(fact, f.GroupReserved):
            groups[fact.group] = fact.task
        elif isinstance(fact, f.GroupFinalized) and fact.decision is not f.GroupDecision.EXTEND:
            groups.pop(fact.group, None)
        elif isinstance(fact, f.EpisodeScored) and name in (fact.episode, *(meta.sample_id for meta in fact.samples)):
            break
    else:
        return None
    if not fact.payload.sequence:
        return None
    try:
        log = await bus.open(run_streams(run).samples.name)
    except UnknownStream:
        return None
    lines = await stored_lines(log, fact.payload.sequence, groups[fact.group])
    return next((line for line in lines if name in (line.sample_id, line.episode)), None)


async def stored_lines(log: StreamLog, sequence: int, task: f.Task) -> list[SampleLine]:
    """Return the samples of the payload at `sequence`; empty if it was purged. Raises UnreadableRecord, DecodeError and
    InvalidInput if it is damaged."""
    try:
        record = await log.read_direct(sequence)
    except UnknownRecord:
        return []
    return list(sample_lines(types_pb2.Episode.FromString(record.payload), encode(task, types_pb2.Task)))


async def _facts(ledger: StreamLog) -> AsyncIterator[f.Fact]:
    async for record in read_ledger(ledger):
        for fact in record.facts:
            yield fact


def _reward(reward: Reward) -> RewardLine:
    return RewardLine(
        name=reward.name,
        value=reward.value,
        scorer=reward.scorer,
        evidence=reward.evidence,
        outcome=reward.outcome.name.lower(),
        segment=reward.segment,
    )
