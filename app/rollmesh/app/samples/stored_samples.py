"""Read the samples of a run folder from its ledger and, while the payload is stored, its sample stream."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from rollmesh.app.config import load_train_config
from rollmesh.app.run_bus import run_bus
from rollmesh.app.run_folder import RunFolder
from rollmesh.app.samples.samples import RewardLine, SampleLine, sample_lines
from rollmesh.mesh.run_lock import still_starting
from rollmesh.services.coordinator.audit_history import HistoryLine, sample_history
from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.core.facts import Reward
from rollmesh.services.coordinator.fact_codec import encode
from rollmesh.services.coordinator.ledger import StoredRecord, read_ledger
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
    BusUnavailable."""
    records, _ = asyncio.run(_read(root, ""))
    tasks = {fact.group: fact.task.task_id for fact in _facts(records) if isinstance(fact, f.GroupReserved)}
    return [listed for fact in _facts(records) for listed in _listed(fact, tasks)][-limit:]


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
    records, line = asyncio.run(_read(root, name))
    history = sample_history(records, line.sample_id if line is not None else name)
    if not history:
        raise UnknownSample(f"{root}: the ledger has no sample or episode {name!r}; `rollmesh show {root}` lists them")
    return ShownSample(sample_id=line.sample_id if line is not None else name, history=history, sample=line)


async def _read(root: Path, name: str) -> tuple[list[StoredRecord], SampleLine | None]:
    folder = RunFolder(root)
    folder.read_origin()
    config = load_train_config(folder.config)
    async with run_bus(folder, config) as bus:
        try:
            ledger = await bus.open(run_streams(config.run.name).ledger.name)
        except UnknownStream as err:
            if starting := still_starting(root):
                raise starting from err
            raise UnknownRun(
                f"{root}: the ledger of run {config.run.name} does not exist; start the run first", run=config.run.name
            ) from err
        records = [record async for record in read_ledger(ledger)]
        return records, await _payload(bus, config.run.name, records, name) if name else None


async def _payload(bus: Bus, run: str, records: Sequence[StoredRecord], name: str) -> SampleLine | None:
    scored = next(
        (
            fact
            for fact in _facts(records)
            if isinstance(fact, f.EpisodeScored) and name in (fact.episode, *(meta.sample_id for meta in fact.samples))
        ),
        None,
    )
    if scored is None or not scored.payload.sequence:
        return None
    task = next(g.task for g in _facts(records) if isinstance(g, f.GroupReserved) and g.group == scored.group)
    try:
        log = await bus.open(run_streams(run).samples.name)
    except UnknownStream:
        return None
    lines = await stored_lines(log, scored.payload.sequence, task)
    return next((line for line in lines if name in (line.sample_id, line.episode)), None)


async def stored_lines(log: StreamLog, sequence: int, task: f.Task) -> list[SampleLine]:
    """Return the samples of the payload at `sequence`; empty if it was purged. Raises UnreadableRecord, DecodeError and
    InvalidInput if it is damaged."""
    try:
        record = await log.read_direct(sequence)
    except UnknownRecord:
        return []
    return list(sample_lines(types_pb2.Episode.FromString(record.payload), encode(task, types_pb2.Task)))


def _facts(records: Sequence[StoredRecord]) -> Iterator[f.Fact]:
    return (fact for record in records for fact in record.facts)


def _reward(reward: Reward) -> RewardLine:
    return RewardLine(
        name=reward.name,
        value=reward.value,
        scorer=reward.scorer,
        evidence=reward.evidence,
        outcome=reward.outcome.name.lower(),
        segment=reward.segment,
    )
