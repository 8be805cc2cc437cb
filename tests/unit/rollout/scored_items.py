"""The samples of an episode as scorers read them, from what a worker sent."""

from __future__ import annotations

from collections.abc import Sequence

from rollmesh.services.reward.item import AnswerKey, ScoreItem, TaskView, judged_path
from rollmesh.shared.codec.trajectory import decode_segment
from rollmesh.shared.domain.trajectory import EpisodeKey, FinishReason
from rollmesh.v1 import reward_pb2


def items_of(request: reward_pb2.ScoreItem, answers: Sequence[str] = ()) -> list[ScoreItem]:
    """Return the samples of a request, whose task has these answers."""
    segments = [decode_segment(segment) for segment in request.segments]
    made = []
    for sample in request.samples:
        path, messages = judged_path(segments, sample.leaf)
        made.append(
            ScoreItem(
                key=EpisodeKey(run="r", task="t", group="g", episode=request.key.episode),
                task=TaskView(task_id="t"),
                answer_key=AnswerKey(answers=tuple(answers)),
                messages=messages,
                sample_id=sample.sample_id,
                leaf=sample.leaf,
                role=sample.role,
                finish=FinishReason(sample.finish),
                path=path,
            )
        )
    return made
