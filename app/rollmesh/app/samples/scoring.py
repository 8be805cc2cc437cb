"""Score samples or answers in a JSONL file with the configured scorers, without a mesh.

A line is a sample as `rollmesh rollout --out` writes it, or `{"task": ID, "response": TEXT}`, where `answer` is an
alias of `response`. The task is looked up by its id in the configured source. A sample of another source needs an
oracle reference.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollmesh.app.checks.scorers_alone import check_scorers
from rollmesh.app.config import load_train_config
from rollmesh.app.run_folder import RunFolder
from rollmesh.app.samples.samples import (
    ACTION,
    MessageLine,
    RewardLine,
    SampleLine,
    SegmentLine,
    mean_rewards,
    reward_lines,
)
from rollmesh.mesh.mesh_services import blocking_endpoints, reward_config
from rollmesh.services.data.config import build_pools
from rollmesh.services.data.task import PoolTask, Split, TaskPool
from rollmesh.services.reward.config import build_engine
from rollmesh.services.reward.engine import RewardEngine
from rollmesh.services.reward.item import (
    JudgedSegment,
    ScoreItem,
    TaskView,
    check_task_scorers,
    num_action_tokens,
)
from rollmesh.shared.domain.trajectory import EndpointUse, EpisodeKey, FinishReason, Message, Outcome, Role, Source
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.endpoints.client import Endpoints
from rollmesh.shared.errors import ConfigError, InvalidInput, UnknownOracle
from rollmesh.shared.store.jsonl import read_jsonl
from rollmesh.shared.store.records import FileRecord

NUM_LINES_MAX = 1_000_000
CHUNK_LINES = 256
"""Number of lines that are scored together."""
AGENT = "agent"
"""Caller of endpoints whose use scorers read."""
_FINISHES = ", ".join(name.lower() for name in FinishReason.__members__)


class ScoredLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line's rewards."""

    line: int
    task: str
    sample_id: str
    rewards: list[RewardLine]


class ScoreReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a file."""

    file: str
    num_lines: int
    num_failed: int
    """Lines for which a scorer failed. They are excluded from the mean of that scorer."""
    mean_rewards: dict[str, float]
    lines: list[ScoredLine]


class LineScorer:
    """The scorers and the tasks of a configuration. `close` it in the loop in which it scored."""

    def __init__(self, config: Path | None, overrides: Sequence[str]) -> None:
        """Raises ConfigError, also without a `config`."""
        path, base_dir = _configuration(config)
        settings = load_train_config(path, overrides)
        self._tasks = _Tasks(build_pools(settings.data, base_dir, blocking_endpoints(settings, base_dir)))
        self._endpoints = Endpoints(settings.endpoints, base_dir=base_dir)
        self._engine = build_engine(reward_config(settings), base_dir, endpoints=self._endpoints)
        check_scorers(self._engine)
        self.digest = hashlib.sha256(msgspec.json.encode(settings.reward.scorers, order="sorted")).hexdigest()
        """Digest of the scorers with their options."""

    async def score(self, records: Sequence[FileRecord]) -> list[ScoredLine]:
        """Check all lines, then score them. Raises RecordError."""
        items = [_item(record, self._tasks, self._engine) for record in records]
        found: list[ScoredLine] = []
        for start in range(0, len(items), CHUNK_LINES):
            chunk = items[start : start + CHUNK_LINES]
            for record, item, rewards in zip(records[start:], chunk, await self._engine.score(chunk), strict=False):
                found.append(
                    ScoredLine(
                        line=record.line,
                        task=item.task.task_id,
                        sample_id=item.sample_id,
                        rewards=reward_lines(rewards),
                    )
                )
        return found

    async def close(self) -> None:
        await self._engine.close()
        await self._endpoints.close()


def score_file(file: Path, config: Path | None, overrides: Sequence[str]) -> ScoreReport:
    """Score the lines of a file. Raises ConfigError, also without a `config`, or RecordError with the first line and
    field that cannot be scored."""
    scorer = LineScorer(config, overrides)
    lines = asyncio.run(_score(scorer, read_jsonl(file, num_lines_max=NUM_LINES_MAX).records))
    return ScoreReport(
        file=str(file),
        num_lines=len(lines),
        num_failed=sum(has_failed(line.rewards) for line in lines),
        mean_rewards=mean_rewards([line.rewards for line in lines]),
        lines=lines,
    )


def has_failed(rewards: Sequence[RewardLine]) -> bool:
    """Return whether a scorer failed."""
    return any(reward.outcome == Outcome.INFRA_FAILURE.name.lower() for reward in rewards)


def _configuration(named: Path | None) -> tuple[Path, Path]:
    """Return (file, folder of the user's files) of a run folder or of a configuration file."""
    if named is None:
        raise ConfigError(
            "--config is missing; name the configuration file or the run folder with the tasks and scorers"
        )
    if named.is_dir():
        folder = RunFolder(named.resolve())
        return folder.config, Path(folder.read_origin().base_dir)
    return named, named.parent.resolve()


async def _score(scorer: LineScorer, records: Sequence[FileRecord]) -> list[ScoredLine]:
    try:
        return await scorer.score(records)
    finally:
        await scorer.close()


@dataclass(frozen=True, slots=True)
class _Tasks:
    """The tasks of the configured source, by id."""

    pools: Mapping[Split, TaskPool]

    def find(self, task_id: str) -> PoolTask | None:
        for pool in self.pools.values():
            position = pool.position(task_id)
            if position is not None:
                return pool.task(position)
        return None


def _item(record: FileRecord, tasks: _Tasks, engine: RewardEngine) -> ScoreItem:
    """Return the input of the scorers for a line. Raises RecordError."""
    sample = _sample(record) if "messages" in record.fields else _answer(record, tasks)
    known = tasks.find(sample.task)
    reference = sample.oracle_ref or (known.oracle_ref if known is not None else "")
    if known is None and not reference:
        raise record.error(
            f"{sample.task!r} is not a task of the configured source, and the line has no oracle_ref; name the run's "
            "configuration with --config",
            "task",
        )
    try:
        key = engine.oracles.resolve(reference)
    except UnknownOracle as err:
        raise record.error(str(err), "oracle_ref" if sample.oracle_ref else "task") from err
    view = _view(sample, known)
    try:
        check_task_scorers(view.scorers, [scorer.name for scorer in engine.scorers])
    except InvalidInput as err:
        raise record.error(err.message, "scorers" if known is None else "task") from err
    actions = [segment for segment in sample.segments if segment.role == ACTION]
    path = tuple(_judged(segment, number) for number, segment in enumerate(sample.segments))
    return ScoreItem(
        key=EpisodeKey(run=sample.run, task=sample.task, group=sample.group, episode=sample.episode),
        task=view,
        answer_key=key,
        messages=tuple(Message(role=m.role, content=m.content) for m in sample.messages),
        sample_id=sample.sample_id,
        role=sample.role,
        num_action_tokens=num_action_tokens(path),
        leaf=path[-1].index if path else 0,
        finish=_finish(sample, actions),
        path=path,
        endpoints=tuple(EndpointUse(**msgspec.structs.asdict(use)) for use in sample.endpoints if use.caller == AGENT),
    )


def _judged(segment: SegmentLine, number: int) -> JudgedSegment:
    """Return the segment `number` of a line. Without an index, it is numbered by its place in the line."""
    columns = {**segment.arrays, **({"logprobs": segment.logprobs} if segment.logprobs is not None else {})}
    return JudgedSegment(
        index=segment.index if segment.index >= 0 else number,
        role=Role[segment.role.upper()],
        source=Source[segment.source.upper()],
        token_ids=np.asarray(segment.token_ids, dtype=np.int32),
        text=segment.text,
        finish=FinishReason[segment.finish.upper()] if segment.finish else FinishReason.UNFINISHED,
        version=PolicyVersion(**msgspec.structs.asdict(segment.version)) if segment.version is not None else None,
        arrays={name: _column(values) for name, values in columns.items()},
    )


def _column(values: Sequence[object]) -> NDArray[Any]:
    """Return an array of a line. Ids are int32, all other values float32."""
    column = np.asarray(values)
    return column.astype(np.int32 if column.dtype.kind in "iu" else np.float32)


def _finish(sample: SampleLine, actions: Sequence[SegmentLine]) -> FinishReason:
    named = sample.finish or (actions[-1].finish if actions else FinishReason.STOP.name)
    return FinishReason[named.upper()]


def _view(sample: SampleLine, known: PoolTask | None) -> TaskView:
    if known is None:
        return TaskView(task_id=sample.task, split=sample.split, labels=sample.labels, scorers=tuple(sample.scorers))
    return TaskView(
        task_id=known.task_id,
        messages=known.messages,
        tools=known.tools,
        split=known.split,
        labels=known.labels,
        scorers=tuple(known.scorers),
        extras=known.extras,
    )


def _sample(record: FileRecord) -> SampleLine:
    try:
        sample = msgspec.convert(dict(record.fields), SampleLine)
    except msgspec.ValidationError as err:
        cause, _, layout = str(err).partition(" - at `$.")
        missing = re.search(r"missing required field `(\w+)`", cause)
        field = layout.rstrip("`") or (missing[1] if missing else "")
        raise record.error(cause[:1].lower() + cause[1:], field) from err
    if sample.finish and sample.finish.upper() not in FinishReason.__members__:
        raise record.error(f"must be one of {_FINISHES}; got {sample.finish!r}", "finish")
    for number, segment in enumerate(sample.segments):
        for name, kind in (("role", Role), ("source", Source)):
            if getattr(segment, name).upper() not in kind.__members__:
                known = ", ".join(kind.__members__).lower()
                raise record.error(
                    f"must be one of {known}; got {getattr(segment, name)!r}", f"segments[{number}].{name}"
                )
        if segment.role == ACTION and segment.finish.upper() not in FinishReason.__members__:
            raise record.error(f"must be one of {_FINISHES}; got {segment.finish!r}", f"segments[{number}].finish")
    return sample


def _answer(record: FileRecord, tasks: _Tasks) -> SampleLine:
    """Return a plain answer as a sample whose last message it is."""
    task_id = record.text("task")
    task = tasks.find(task_id)
    field = "answer" if "answer" in record.fields else "response"
    said = record.value(field)
    if not isinstance(said, str):
        raise record.error("must be a string", field)
    prompt = [MessageLine(role=m.role, content=m.content) for m in task.messages] if task is not None else []
    name = f"line-{record.line}"
    return SampleLine(
        sample_id=name,
        run="",
        task=task_id,
        group=name,
        episode=name,
        messages=[*prompt, MessageLine(role="assistant", content=said)],
    )
