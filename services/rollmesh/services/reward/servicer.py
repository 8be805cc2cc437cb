"""RewardService over gRPC: translate between protobuf and the types of the engine, and resolve oracle references.

The answer key is passed from the oracles to the scorers. It is in no response.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rollmesh.services.reward.engine import RewardEngine
from rollmesh.services.reward.finalizer import FinalizerDecision, Group, Verdict
from rollmesh.services.reward.item import (
    AnswerKey,
    ScoreItem,
    TaskView,
    check_task_scorers,
    judged_path,
    num_action_tokens,
)
from rollmesh.services.reward.metrics import GROUPS
from rollmesh.services.reward.oracles import NO_KEYS, Oracles
from rollmesh.services.reward.scorer_run import Uses
from rollmesh.shared.codec.checks import EXTEND_MAX
from rollmesh.shared.codec.environment_rewards import decode_environment_rewards
from rollmesh.shared.codec.trajectory import (
    decode_group_context,
    decode_key,
    decode_segment,
    decode_use,
    encode_rewards,
    encode_use,
)
from rollmesh.shared.domain.extras import ExtraError, decode_extras
from rollmesh.shared.domain.text import count_of
from rollmesh.shared.domain.trajectory import ROOT, FinishReason, Message
from rollmesh.shared.errors import InvalidInput, field_error
from rollmesh.shared.telemetry import tracing
from rollmesh.shared.telemetry.metrics import count
from rollmesh.v1 import reward_pb2, reward_pb2_grpc, types_pb2

ITEMS_MAX = 256


class RewardServicer(reward_pb2_grpc.RewardServiceServicer):
    """Serves one engine."""

    def __init__(self, engine: RewardEngine) -> None:
        self._engine = engine

    async def Score(
        self, request: reward_pb2.RewardServiceScoreRequest, context: object
    ) -> reward_pb2.RewardServiceScoreResponse:
        fetched = await self._engine.oracles.fetch(item.task.oracle_ref for item in request.items[:ITEMS_MAX])
        if any(self._engine.oracles.blocks(item.task.oracle_ref) for item in request.items[:ITEMS_MAX]):
            items = await asyncio.to_thread(list, self._items(request, fetched))
        else:
            items = list(self._items(request, fetched))
        with tracing.spans_below((item.traceparent for item in request.items), "scorers", "reward"):
            uses: Uses = {}
            scored = await self._engine.score(items, uses)
        response = reward_pb2.RewardServiceScoreResponse()
        for item, rewards in zip(items, scored, strict=True):
            response.samples.add(sample_id=item.sample_id, rewards=encode_rewards(rewards))
        for sample_id, asked in uses.items():
            response.endpoints.add(sample_id=sample_id, uses=map(encode_use, asked))
        return response

    async def FinalizeGroup(
        self, request: reward_pb2.FinalizeGroupRequest, context: object
    ) -> reward_pb2.FinalizeGroupResponse:
        group = decode_group_context(request.group)
        if not group.members:
            raise field_error(
                "group.members", "have a scored member, because a group without one is not finalized", None
            )
        verdict = self._engine.finalize(
            Group(
                group=group.group,
                task=_task_view(request.task),
                members=group.members,
                advantages=self._engine.advantages(group),
                num_unscored=request.num_unscored,
                deadline_passed=request.deadline_passed,
                num_extend_max=request.num_extend_max if request.HasField("num_extend_max") else EXTEND_MAX,
                propensity=group.propensity,
            )
        )
        filtered = len(verdict.dropped) == len(group.members) and verdict.decision is not FinalizerDecision.EXTEND
        count(GROUPS, "filter" if filtered else verdict.decision.name.lower())
        return _encode_verdict(verdict)

    async def ListScorers(
        self, request: reward_pb2.ListScorersRequest, context: object
    ) -> reward_pb2.ListScorersResponse:
        response = reward_pb2.ListScorersResponse(finalizer=", ".join(one.name for one in self._engine.finalizers))
        for scorer in self._engine.scorers:
            response.scorers.add(
                name=scorer.name,
                scorer=scorer.label,
                rewards=scorer.reward_names,
                description=scorer.description,
                columns=scorer.columns,
                reads=scorer.reads,
                environment_rewards=scorer.scorer.environment_rewards,
            )
        return response

    def _items(
        self, request: reward_pb2.RewardServiceScoreRequest, fetched: Mapping[str, AnswerKey]
    ) -> Iterator[ScoreItem]:
        if len(request.items) > ITEMS_MAX:
            raise field_error("items", f"have at most {ITEMS_MAX} entries", len(request.items), "send them in parts")
        known = [scorer.name for scorer in self._engine.scorers]
        for index, item in enumerate(request.items):
            check_task_scorers(item.task.scorers, known, f"items[{index}].task.scorers")
            self._check_declared(item)
            yield from decode_items(item, self._engine.oracles, f"items[{index}]", number=index, fetched=fetched)

    def _check_declared(self, item: reward_pb2.ScoreItem) -> None:
        """Reject a reward of the environment that no scorer reads, because the run would train without it."""
        declared = {name for configured in self._engine.scorers for name in configured.scorer.environment_rewards}
        for reward in item.environment_rewards:
            if reward.name not in declared:
                known = ", ".join(sorted(declared)) or "no name"
                raise InvalidInput(
                    f"the environment gave the reward {reward.name[:100]!r}, but scorers declare {known}; add {{name: "
                    "environment, reward: NAME, options: {min: MIN, max: MAX}} to reward.scorers, or do not give it",
                    reward=reward.name[:100],
                )


def decode_items(
    item: reward_pb2.ScoreItem,
    oracles: Oracles,
    field: str = "item",
    number: int = 0,
    fetched: Mapping[str, AnswerKey] = NO_KEYS,
) -> Iterator[ScoreItem]:
    """Yield the samples of an episode as the input of scorers. `number` is that of the request. Raises InvalidInput or
    UnknownOracle."""
    _check_item(item, field)
    key = decode_key(item.key, f"{field}.key")
    task = _task_view(item.task)
    answer_key = oracles.resolve(item.task.oracle_ref, fetched)
    segments = [decode_segment(segment, f"{field}.segments[{i}]") for i, segment in enumerate(item.segments)]
    for index, segment in enumerate(segments):
        if not ROOT <= segment.parent < index:
            must = f"be {ROOT} (root) or the index of an earlier segment, below {index}"
            raise field_error(f"{field}.segments[{index}].parent", must, segment.parent)
        for name, values in segment.arrays.items():
            if len(values) != segment.num_tokens:
                where = f"{field}.segments[{index}].arrays[{name}]"
                raise field_error(where, f"have {count_of(segment.num_tokens, 'row')}, one per token", len(values))
    endpoints = tuple(map(decode_use, item.endpoints))
    given = decode_environment_rewards(
        item.environment_rewards, f"{field}.environment_rewards", num_segments=len(segments)
    )
    for sample in item.samples:
        path, messages = judged_path(segments, sample.leaf)
        indices = {segment.index for segment in path}
        yield ScoreItem(
            key=key,
            task=task,
            answer_key=answer_key,
            messages=messages,
            sample_id=sample.sample_id,
            leaf=sample.leaf,
            role=sample.role,
            num_action_tokens=num_action_tokens(path),
            finish=FinishReason(sample.finish),
            path=path,
            endpoints=endpoints,
            scorers=tuple(item.scorers),
            request=number,
            environment=tuple(reward for reward in given if reward.of(indices)),
        )


def _check_item(item: reward_pb2.ScoreItem, field: str) -> None:
    if not item.samples:
        raise field_error(f"{field}.samples", "have at least one entry, which is scored", None)
    if not item.task.task_id:
        raise field_error(f"{field}.task", "be set", None, "send the task as the data service returned it")
    known = {int(reason) for reason in FinishReason}
    for index, sample in enumerate(item.samples):
        if sample.finish not in known:
            raise field_error(f"{field}.samples[{index}].finish", "be a known FinishReason", sample.finish)
        if not 0 <= sample.leaf < len(item.segments):
            must = f"be the index of one of {len(item.segments)} segments"
            raise field_error(f"{field}.samples[{index}].leaf", must, sample.leaf)


def _messages(messages: Iterable[types_pb2.Message]) -> tuple[Message, ...]:
    return tuple(Message(role=m.role, content=m.content) for m in messages)


def _task_view(task: types_pb2.Task) -> TaskView:
    try:
        extras = decode_extras(task.extras)
    except ExtraError as error:
        raise field_error("task.extras", "have JSON values", error) from None
    return TaskView(
        task_id=task.task_id,
        messages=_messages(task.messages),
        tools=tuple(task.tools),
        split=task.split,
        labels=dict(task.labels),
        scorers=tuple(task.scorers),
        extras=extras,
    )


def _encode_verdict(verdict: Verdict) -> reward_pb2.FinalizeGroupResponse:
    # The generated stubs have a separate type for the enum. A test checks that the numbers are equal.
    decision: Any = int(verdict.decision)
    response = reward_pb2.FinalizeGroupResponse(decision=decision, reason=verdict.reason, num_extend=verdict.num_extend)
    for sample_id, rewards in verdict.adjusted.items():
        response.adjusted.add(sample_id=sample_id, rewards=encode_rewards(rewards))
    for sample_id, reason in verdict.dropped.items():
        response.dropped.add(sample_id=sample_id, reason=reason)
    return response
