"""One row per sample: the columns of the exported files. docs/samples.md describes them.

Lineage and rewards come from the ledger, and tokens and messages from the payload, if it is still stored. The folder
of a file has its run and its update, which are therefore not columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
import pyarrow as pa

from rollmesh.app.lake.lineage import SampleLineage, group_measures
from rollmesh.app.samples.samples import (
    MessageLine,
    RewardLine,
    SampleLine,
    SamplingLine,
    SegmentLine,
    VersionLine,
)
from rollmesh.services.coordinator.core import facts as f

FORMAT = 1
"""Format of the files; a reader ignores columns that it does not know."""
_TIME = pa.timestamp("us")
_TEXTS = pa.map_(pa.string(), pa.string())
_NUMBERS = pa.map_(pa.string(), pa.float64())


def _rows_of(**fields: pa.DataType) -> pa.DataType:
    return pa.list_(pa.struct(list(fields.items())))


_MESSAGES = _rows_of(role=pa.string(), content=pa.string())
SCHEMA = pa.schema(
    {
        # Names
        "sample_id": pa.string(),
        "episode": pa.string(),
        "group_id": pa.string(),
        "purpose": pa.string(),
        "policy": pa.string(),
        "replay_of": pa.string(),
        "submitted_key": pa.string(),
        "provenance": pa.struct({"mesh": pa.string(), "run": pa.string(), "step": pa.int64()}),
        "role": pa.string(),
        "variant": pa.string(),
        "attempt": pa.int32(),
        "node_id": pa.string(),
        # Task
        "task_id": pa.string(),
        "split": pa.string(),
        "labels": _TEXTS,
        "prompt": _MESSAGES,
        "agent": pa.string(),
        "scorers": pa.list_(pa.string()),
        "oracle_ref": pa.string(),
        # End
        "ended_as": pa.string(),
        "reason": pa.string(),
        "cause": pa.string(),
        "finish": pa.string(),
        # Lineage
        "incarnation": pa.int32(),
        "learner": pa.string(),
        "applied": pa.bool_(),
        "update_intended": pa.int64(),
        "propensity": pa.float64(),
        "staleness": pa.int64(),
        "steps": _rows_of(step=pa.int64(), incarnation=pa.int32(), num_tokens=pa.int64()),
        "external": _rows_of(source=pa.string(), num_tokens=pa.int64()),
        "reserved_time": _TIME,
        "scored_time": _TIME,
        "ended_time": _TIME,
        # Rewards
        "rewards": _rows_of(
            name=pa.string(),
            value=pa.float64(),
            outcome=pa.string(),
            scorer=pa.string(),
            segment=pa.int32(),
            answer=pa.string(),
        ),
        "evidence": pa.list_(pa.string()),
        "measures": _NUMBERS,
        "trainable": pa.bool_(),
        "weight": pa.float64(),
        "num_tokens": pa.int64(),
        "num_sampled_tokens": pa.int64(),
        # Payload
        "stored": pa.bool_(),
        "messages": _MESSAGES,
        "segments": _rows_of(
            index=pa.int32(),
            role=pa.string(),
            source=pa.string(),
            num_tokens=pa.int64(),
            policy=pa.string(),
            step=pa.int64(),
            incarnation=pa.int32(),
            weights_digest=pa.string(),
            sampling=pa.int32(),
            finish=pa.string(),
            text=pa.string(),
        ),
        "sampling": _rows_of(
            temperature=pa.float64(), top_p=pa.float64(), top_k=pa.int64(), max_tokens=pa.int64(), seed=pa.uint64()
        ),
        "token_ids": pa.list_(pa.int32()),
        "logprobs": pa.list_(pa.float32()),
        "logprobs_model": pa.list_(pa.float32()),
        "loss_mask": pa.list_(pa.int8()),
        "stage_s": _NUMBERS,
    }
)
_PAYLOAD = SCHEMA.names[SCHEMA.names.index("stored") + 1 :]
_PER_TOKEN = ("token_ids", "logprobs", "logprobs_model", "loss_mask")
_NOT_STORED: dict[str, Any] = {"stored": False, **dict.fromkeys(_PAYLOAD)}


def row(sample: SampleLineage, line: SampleLine | None) -> dict[str, Any]:
    """Return the row of a sample. `line` is None if its payload is not stored."""
    group, meta = sample.group, sample.meta or f.SampleMeta()
    task, update = group.task, sample.update
    return {
        "sample_id": meta.sample_id or None,
        "episode": sample.episode,
        "group_id": group.group,
        "purpose": "replay" if sample.replay_of else group.purpose.name.lower(),
        "policy": meta.policy or group.policy,
        "replay_of": sample.replay_of or None,
        "submitted_key": group.submitted_key or None,
        "provenance": None if sample.provenance is None else msgspec.structs.asdict(sample.provenance),
        "role": line.role if line is not None else meta.summary.role,
        "variant": line.variant if line is not None else meta.summary.variant,
        "attempt": sample.attempt,
        "node_id": sample.node_id,
        "task_id": task.task_id,
        "split": task.split,
        "labels": list(task.labels.items()),
        "prompt": [{"role": message.role, "content": message.content} for message in task.messages],
        "agent": task.agent,
        "scorers": task.scorers,
        "oracle_ref": task.oracle_ref,
        "ended_as": sample.end.name.lower(),
        "reason": sample.reason,
        "cause": sample.cause,
        "finish": _finish(meta, line),
        "incarnation": update.incarnation if update is not None else None,
        "learner": update.learner if update is not None else None,
        "applied": update.applied if update is not None else None,
        "update_intended": group.update_intended or None,
        "propensity": group.propensity or None,
        "staleness": sample.staleness,
        "steps": [
            {"step": span.step, "incarnation": span.incarnation, "num_tokens": span.num_tokens} for span in meta.steps
        ],
        "external": [{"source": span.source.name.lower(), "num_tokens": span.num_tokens} for span in meta.external],
        "reserved_time": _time(sample.reserved_s),
        "scored_time": _time(sample.scored_s),
        "ended_time": _time(sample.ended_s),
        "rewards": [_reward(reward) for reward in meta.rewards],
        "evidence": [reward.evidence for reward in meta.rewards],
        "measures": list(group_measures(update, group.group).items()) if update is not None else [],
        "trainable": meta.trainable if sample.meta is not None else None,
        "weight": line.weight if line is not None else None,
        "num_tokens": meta.num_tokens,
        "num_sampled_tokens": meta.num_sampled_tokens,
        **(_NOT_STORED if line is None else _payload(line)),
    }


def sample_line(row: Mapping[str, Any]) -> SampleLine:
    """Return the sample of a row with a payload, as `samples.jsonl` has it, except for further outputs of the
    engine, endpoints and chains."""
    at, segments = 0, []
    for segment in row["segments"]:
        tokens = slice(at, at := at + segment["num_tokens"])
        segments.append(_segment_line(segment, {name: row[name] and row[name][tokens] for name in _PER_TOKEN}))
    return SampleLine(
        sample_id=row["sample_id"],
        run=row["run"],
        task=row["task_id"],
        group=row["group_id"],
        episode=row["episode"],
        attempt=row["attempt"],
        split=row["split"],
        labels=dict(row["labels"]),
        oracle_ref=row["oracle_ref"],
        agent=row["agent"],
        scorers=list(row["scorers"]),
        role=row["role"],
        variant=row.get("variant") or "",
        policy=row["policy"],
        trainable=row["trainable"],
        weight=row["weight"],
        finish=row["finish"],
        num_tokens=row["num_tokens"],
        messages=[MessageLine(**message) for message in row["messages"]],
        rewards=[
            RewardLine(**reward, evidence=evidence)
            for reward, evidence in zip(row["rewards"], row["evidence"], strict=True)
        ],
        segments=segments,
        sampling=[SamplingLine(**params) for params in row["sampling"]],
        stage_s=dict(row["stage_s"]),
    )


def _segment_line(segment: Mapping[str, Any], values: Mapping[str, list[Any] | None]) -> SegmentLine:
    names = ("policy", "step", "incarnation", "weights_digest")
    sampled = segment["step"] is not None
    return SegmentLine(
        index=segment["index"],
        role=segment["role"],
        source=segment["source"],
        token_ids=values["token_ids"] or [],
        logprobs=values["logprobs"] if sampled else None,
        logprobs_model=values["logprobs_model"] if sampled else None,
        loss_mask=values["loss_mask"] if sampled else None,
        version=VersionLine(**{name: segment[name] for name in names}) if sampled else None,
        sampling=segment["sampling"],
        finish=segment["finish"],
        text=segment["text"],
    )


def _payload(line: SampleLine) -> dict[str, Any]:
    return {
        "stored": True,
        "messages": [msgspec.structs.asdict(message) for message in line.messages],
        "segments": [_segment(segment) for segment in line.segments],
        "sampling": [msgspec.structs.asdict(params) for params in line.sampling],
        "token_ids": [token for segment in line.segments for token in segment.token_ids],
        "logprobs": _per_token(line.segments, [segment.logprobs for segment in line.segments], None),
        "logprobs_model": _per_token(line.segments, [segment.logprobs_model for segment in line.segments], None),
        "loss_mask": _per_token(line.segments, [segment.loss_mask for segment in line.segments], 0),
        "stage_s": list(line.stage_s.items()),
    }


def _per_token(
    segments: Iterable[SegmentLine], columns: Sequence[Sequence[float] | None], absent: int | None
) -> list[float | None] | None:
    """Return the values of all tokens, with `absent` for those of segments without values; None if no segment has
    values."""
    if all(values is None for values in columns):
        return None
    found: list[float | None] = []
    for segment, values in zip(segments, columns, strict=True):
        found += values if values is not None else [absent] * len(segment.token_ids)
    return found


def _segment(line: SegmentLine) -> dict[str, Any]:
    version = line.version
    return {
        "index": line.index,
        "role": line.role,
        "source": line.source,
        "num_tokens": len(line.token_ids),
        "policy": version.policy if version is not None else None,
        "step": version.step if version is not None else None,
        "incarnation": version.incarnation if version is not None else None,
        "weights_digest": version.weights_digest if version is not None else None,
        "sampling": line.sampling,
        "finish": line.finish,
        "text": line.text,
    }


def _reward(reward: f.Reward) -> dict[str, Any]:
    return {
        "name": reward.name,
        "value": reward.value,
        "outcome": reward.outcome.name.lower(),
        "scorer": reward.scorer,
        "segment": reward.segment,
        "answer": reward.answer,
    }


def _finish(meta: f.SampleMeta, line: SampleLine | None) -> str:
    if line is not None:
        return line.finish or next((s.finish for s in reversed(line.segments) if s.finish), "")
    return meta.summary.finish.name.lower() if meta.summary.finish is not f.FinishReason.UNFINISHED else ""


def _time(seconds: float | None) -> datetime | None:
    """Return the time in UTC, without a zone, because not every reader has a database of zones."""
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).replace(tzinfo=None)
