"""One sample as the page shows it: its tokens with text, source, version and log-prob, its rewards, advantage and
history.

The record of the sample is found in the ledger, its tokens in the payload. Texts of tasks and models are data: the page
inserts them as text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from google.protobuf.message import Message

from rollmesh.services.gateway.page.history import RunHistory
from rollmesh.services.gateway.page.parts import LifeLine, PageParts, TokenDecoder
from rollmesh.services.gateway.page.plain import word
from rollmesh.services.gateway.payloads import Read, episode_ref, read_episode
from rollmesh.shared.bus.archive_bus import open_ledger, scan_ledger
from rollmesh.shared.bus.bus import Bus, StreamLog, StreamRecord, UnknownStream
from rollmesh.shared.bus.run_streams import run_streams
from rollmesh.shared.codec.trajectory import decode_episode, decode_group_context
from rollmesh.shared.config.extras import install_hint
from rollmesh.shared.domain.ledger_facts import facts_of, read_record
from rollmesh.shared.domain.trajectory import IntArray, Sample, Segment
from rollmesh.shared.errors import ConfigError, DeadlineExceeded, MeshError, PayloadLost, UnknownSample
from rollmesh.trainer.estimators.base import UNDECIDED
from rollmesh.v1 import events_pb2, run_pb2, types_pb2

TOKENS_MAX = 20_000
"""Number of tokens of a transcript. The rest is counted."""
RECORDS_MAX = 5_000
"""Number of ledger records, from the reservation of the group on, that are read for a sample."""
READ_S_MAX = 30.0
"""Time limit of a transcript, in seconds. A sample that is no longer recent is searched for in the whole ledger."""
CHARACTER_TOKENS_MAX = 8
"""Number of tokens that may share a character."""
_BROKEN = "\ufffd"


class TokenRun(msgspec.Struct, kw_only=True, frozen=True):
    """Consecutive tokens of one segment."""

    role: str
    source: str
    tokens: list[str]
    """Text of each token; empty for a token whose bytes belong to a character that an earlier token began."""
    ids: list[int]
    logprobs: list[float] | None = None
    trained: list[int] | None = None
    """1 for each token that may be trained on; None means that no token may."""
    step: int | None = None
    incarnation: int | None = None
    finish: str = ""
    reward: float | None = None
    """Weighted rewards of exactly this segment, if there are any."""


class ShownReward(msgspec.Struct, kw_only=True, frozen=True):
    """One reward of the sample or of one of its segments."""

    name: str
    value: float
    outcome: str
    scorer: str
    evidence: str
    answer: str
    segment: int


class Transcript(msgspec.Struct, kw_only=True):
    """A sample. `missing` has a sentence for each part that cannot be shown."""

    sample_id: str
    group: str
    episode: str
    task: str
    labels: dict[str, str] = {}
    variant: str = ""
    """Name of the variant of its episode in a group with a plan."""
    attempt: int = 0
    update: int = 0
    """The update that leased it last; 0 if none has. The staleness of its tokens is update - 1 - step."""
    siblings: list[str] = []
    """All scored samples of its group."""
    runs: list[TokenRun] = []
    num_tokens: int = 0
    messages: list[dict[str, str]] = []
    rewards: list[ShownReward] = []
    advantage: float | None = None
    advantage_of: str = ""
    """How the advantage was computed."""
    history: list[LifeLine] = []
    missing: list[str] = []


@dataclass(slots=True)
class _Found:
    """What the ledger says about a sample."""

    scored: events_pb2.EpisodeScored | None = None
    task: types_pb2.Task = field(default_factory=types_pb2.Task)
    purpose: types_pb2.Purpose.ValueType = types_pb2.PURPOSE_UNSPECIFIED
    members: list[events_pb2.EpisodeScored] = field(default_factory=list)
    finalized: events_pb2.GroupFinalized | None = None
    update: int = 0
    records: list[StreamRecord] = field(default_factory=list)
    cut: bool = False


class Transcripts:
    """Reads the transcripts of the runs on one bus."""

    def __init__(self, bus: Bus, parts: PageParts) -> None:
        self._bus = bus
        self._parts = parts
        self._decoder: TokenDecoder | None = None
        self._decoder_error = ""
        self._reading = asyncio.Semaphore(2)

    async def read(self, run: str, name: str, history: RunHistory) -> Transcript:
        """Return the sample `name`, or the first one of an episode. Raise UnknownSample, BusUnavailable, DataLoss,
        NewerFormat, DeadlineExceeded."""
        try:
            async with asyncio.timeout(READ_S_MAX):
                return await self._read(run, name, history)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"sample {name} was not found within {READ_S_MAX:.0f} s, because it is not recent and the ledger is "
                f"long; `rollmesh show RUN {name}` has no limit"
            ) from error

    async def _read(self, run: str, name: str, history: RunHistory) -> Transcript:
        async with self._reading:
            found = await self._find(run, name, history)
            assert found.scored is not None
            meta = next((m for m in found.scored.samples if m.sample_id == name), found.scored.samples[0])
            shown = Transcript(
                sample_id=meta.sample_id,
                group=found.scored.group,
                episode=found.scored.episode,
                task=found.task.task_id,
                labels=dict(found.task.labels),
                variant=meta.summary.variant,
                update=found.update,
                siblings=[m.sample_id for scored in found.members for m in scored.samples],
                rewards=[_reward(reward) for reward in meta.rewards],
                num_tokens=meta.num_tokens,
            )
            if found.cut:
                shown.missing.append(f"The history covers {RECORDS_MAX} records of the ledger; later ones are omitted.")
            await self._add_payload(run, shown, found.scored, meta)
            await asyncio.to_thread(self._add_computed, run, shown, found)
            return shown

    # Ledger -----------------------------------------------------------------------------------------------------------

    async def _find(self, run: str, name: str, history: RunHistory) -> _Found:
        """Return what the ledger says about a sample and its group."""
        log = await open_ledger(self._bus, run)
        known = history.find(name)
        if known is not None and known.sample_id == known.episode:
            raise UnknownSample(f"episode {name} ended without a sample: {known.end} {known.reason}", sample=name)
        group = known.group if known is not None else await self._group_of(run, log, name)
        begin = history.group_begin(group) or await self._reservation_of(run, log, group)
        found = _Found()
        async for record in log.read_range(begin):
            if len(found.records) == RECORDS_MAX:
                found.cut = True
                break
            found.records.append(record)
            for fact in _facts_about(record, group, run):
                _note(found, fact, group, name)
            await _pause(len(found.records))
        if found.scored is None:
            raise UnknownSample(f"the ledger of {run} has no sample {name!r} in group {group!r}", sample=name)
        return found

    async def _group_of(self, run: str, log: StreamLog, name: str) -> str:
        """Return the group of a sample that is no longer recent. Raise UnknownSample."""
        async for record in scan_ledger(log):
            for fact in _facts_about(record, name, run):
                if isinstance(fact, events_pb2.EpisodeScored) and fact.samples and name in _names(fact):
                    return fact.group
            await _pause(record.seq)
        what = f"{log.name} has no sample {name!r}; the list of samples has those that exist"
        raise UnknownSample(what, sample=name)

    async def _reservation_of(self, run: str, log: StreamLog, group: str) -> int:
        """Return the record that reserved a group."""
        async for record in scan_ledger(log):
            for fact in _facts_about(record, group, run):
                if isinstance(fact, events_pb2.GroupReserved) and fact.group == group:
                    return record.seq
            await _pause(record.seq)
        return 1

    # Payload ----------------------------------------------------------------------------------------------------------

    async def _add_payload(
        self, run: str, shown: Transcript, scored: events_pb2.EpisodeScored, meta: types_pb2.SampleMeta
    ) -> None:
        if not scored.payload.sequence:
            shown.missing.append("The sample was reported without a payload, so it has no tokens.")
            return
        key = types_pb2.EpisodeKey(run=run, group=scored.group, episode=scored.episode)
        sample = run_pb2.LeasedSample(meta=meta, key=key, rewards_as_reported=True)
        try:
            log = await self._bus.open(run_streams(run).samples.name)
            read: Read = await read_episode(log, episode_ref(scored.payload.sequence, [sample]))
        except (PayloadLost, UnknownStream):
            shown.missing.append(
                "The payload is no longer stored, so the tokens cannot be shown. Payloads are removed when a "
                "checkpoint contains their samples, or when the samples have ended without an update."
            )
            return
        if read.episode is None:
            shown.missing.append(f"The payload cannot be read: {read.error}")
            return
        await asyncio.to_thread(self._add_tokens, run, shown, read.episode)

    def _add_tokens(self, run: str, shown: Transcript, message: types_pb2.Episode) -> None:
        try:
            episode = decode_episode(message)
        except MeshError as error:
            shown.missing.append(f"The payload is not a valid episode: {error}")
            return
        sample = next((one for one in episode.samples if one.sample_id == shown.sample_id), None)
        if sample is None:
            shown.missing.append("The payload does not contain this sample.")
            return
        decoder = self._decoder_of(run, shown)
        path = [(index, episode.segments[index]) for index in episode.path(sample.leaf)]
        shown.attempt = episode.key.attempt
        shown.num_tokens = sum(len(segment.token_ids) for _, segment in path)
        shown.messages = [{"role": m.role, "content": m.content} for _, one in path for m in one.messages]
        shown.runs = list(_token_runs(path, sample, decoder))
        shown_tokens = sum(len(run.ids) for run in shown.runs)
        if shown_tokens < shown.num_tokens:
            shown.missing.append(f"{shown.num_tokens - shown_tokens} further tokens are omitted.")

    def _decoder_of(self, run: str, shown: Transcript) -> TokenDecoder | None:
        """Return the tokenizer, which is loaded once."""
        if run != self._parts.run:
            shown.missing.append("The tokenizer of this run is unknown to the gateway, so tokens are shown as numbers.")
            return None
        if self._decoder is None and not self._decoder_error:
            try:
                self._decoder = self._parts.decoder()
                self._decoder_error = "" if self._decoder is not None else "the configuration names no model"
            except ModuleNotFoundError as error:
                hint = install_hint(error.name)
                self._decoder_error = f"the library {error.name} is not installed{f' ({hint})' if hint else ''}"
            except (ConfigError, OSError) as error:
                self._decoder_error = str(error)
        if self._decoder is None:
            shown.missing.append(f"Tokens are shown as numbers, because their text is unknown: {self._decoder_error}.")
        return self._decoder

    # Advantage and history --------------------------------------------------------------------------------------------

    def _add_computed(self, run: str, shown: Transcript, found: _Found) -> None:
        self._add_advantage(run, shown, found)
        if self._parts.history is None:
            shown.missing.append("The history is not available at this gateway; `rollmesh show RUN SAMPLE` prints it.")
            return
        try:
            shown.history = list(self._parts.history(found.records, shown.sample_id))
        except MeshError as error:
            shown.missing.append(f"The history cannot be read: {error}")

    def _add_advantage(self, run: str, shown: Transcript, found: _Found) -> None:
        if found.purpose != types_pb2.PURPOSE_TRAIN:
            return
        if found.finalized is None:
            shown.missing.append("The group has no decision yet, so there is no advantage.")
            return
        final = {member.sample_id: member.rewards for member in found.finalized.members}
        context = types_pb2.GroupContext(group=shown.group, task=shown.task, labels=shown.labels)
        for scored in found.members:
            for meta in scored.samples:
                context.members.add(
                    sample_id=meta.sample_id,
                    rewards=final.get(meta.sample_id, meta.rewards),
                    end="ready",
                    episode=scored.episode,
                    summary=meta.summary,
                )
        try:
            group = decode_group_context(context)
            if self._parts.advantages is None or run != self._parts.run:
                raise ConfigError("the estimator of this run is unknown to the gateway")
            values = self._parts.advantages(group)
            if values and all(value == UNDECIDED for value in values.values()):
                raise ConfigError(f"the estimator {self._parts.estimator} needs the whole batch")
            shown.advantage = values.get(shown.sample_id)
            shown.advantage_of = f"estimator {self._parts.estimator}, from the rewards of the group"
        except (MeshError, ModuleNotFoundError) as error:
            shown.advantage = _over_mean(context, shown.sample_id)
            shown.advantage_of = f"sum of rewards minus the mean of the group, because {str(error)[:200]}"
        if shown.advantage is None:
            shown.missing.append("The sample has no usable reward, so it has no advantage.")


def _token_runs(
    path: Sequence[tuple[int, Segment]], sample: Sample, decoder: TokenDecoder | None
) -> Iterator[TokenRun]:
    left = TOKENS_MAX
    rewards: dict[int, float] = {}
    for reward in sample.rewards:
        if reward.segment >= 0:
            rewards[reward.segment] = rewards.get(reward.segment, 0.0) + reward.value
    for index, segment in path:
        if left <= 0:
            return
        ids = segment.token_ids[:left]
        left -= len(ids)
        version = segment.version
        yield TokenRun(
            role=segment.role.name.lower(),
            source=segment.source.name.lower(),
            tokens=token_texts(ids, decoder),
            ids=ids.tolist(),
            logprobs=None if segment.logprobs is None else [round(float(x), 4) for x in segment.logprobs[: len(ids)]],
            trained=None if segment.loss_mask is None else segment.loss_mask[: len(ids)].tolist(),
            step=None if version is None else version.step,
            incarnation=None if version is None else version.incarnation,
            finish="" if version is None else segment.finish.name.lower(),
            reward=rewards.get(index),
        )


def token_texts(ids: IntArray, decoder: TokenDecoder | None) -> list[str]:
    """Return the text of each token after the token before it. The text of a character of several tokens is that of the
    first one."""
    if decoder is None:
        return [f"{number} " for number in ids.tolist()]
    texts: list[str] = []
    before, context = ids[:0], ""
    while len(texts) < len(ids):
        begin = len(texts)
        size, text = 1, ""
        for num in range(1, min(CHARACTER_TOKENS_MAX, len(ids) - begin) + 1):
            whole = decoder.decode(np.concatenate([before, ids[begin : begin + num]]))
            if num == 1:
                text = whole[len(context) :]
            if _BROKEN not in whole[len(context) :]:
                size, text = num, whole[len(context) :]
                break
        texts += [text, *[""] * (size - 1)]
        before = ids[begin : begin + size]
        context = decoder.decode(before)
    return texts


def _facts_about(record: StreamRecord, name: str, run: str) -> Iterator[Message]:
    """Yield the facts of a record if its bytes contain `name`. Most records do not, and are not decoded."""
    if name.encode() in record.payload:
        yield from facts_of(read_record(record.payload, run, record.seq))


def _names(scored: events_pb2.EpisodeScored) -> list[str]:
    return [scored.episode, *(meta.sample_id for meta in scored.samples)]


def _note(found: _Found, fact: Message, group: str, name: str) -> None:
    match fact:
        case events_pb2.GroupReserved() if fact.group == group:
            found.task, found.purpose = fact.task, fact.purpose
        case events_pb2.EpisodeScored() if fact.group == group:
            found.members.append(fact)
            if name in _names(fact):
                found.scored = fact
        case events_pb2.GroupFinalized() if fact.group == group:
            found.finalized = fact
        case events_pb2.BatchLeased() if group in fact.groups:
            found.update = fact.update


async def _pause(number: int) -> None:
    """Let other tasks run after every 100 records, because buffered records do not wait."""
    if number % 100 == 0:
        await asyncio.sleep(0)


def _reward(reward: types_pb2.Reward) -> ShownReward:
    return ShownReward(
        name=reward.name,
        value=reward.value,
        outcome=word(types_pb2.RewardOutcome.DESCRIPTOR, reward.outcome, "REWARD_OUTCOME_"),
        scorer=reward.scorer,
        evidence=reward.evidence[:2000],
        answer=reward.answer,
        segment=reward.segment,
    )


def _over_mean(context: types_pb2.GroupContext, sample: str) -> float | None:
    """Return the sum of the whole-sample rewards minus the mean of the group; None without a usable reward."""
    sums: dict[str, float] = {}
    for member in context.members:
        usable = [r.value for r in member.rewards if r.segment < 0 and r.outcome == types_pb2.REWARD_OUTCOME_OK]
        if usable:
            sums[member.sample_id] = sum(usable)
    return sums[sample] - float(np.mean(list(sums.values()))) if sample in sums else None
