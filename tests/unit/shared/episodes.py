"""Builders of episodes for the tests of what carries them."""

from __future__ import annotations

import numpy as np

from rollmesh.shared.domain.trajectory import (
    Episode,
    EpisodeKey,
    FinishReason,
    Message,
    Outcome,
    Purpose,
    Reward,
    Role,
    Sample,
    SamplingParams,
    Segment,
    Source,
)
from rollmesh.shared.domain.versions import PolicyVersion

KEY = EpisodeKey(run="r1", task="calc-7", group="g3", episode="e9", attempt=2)


def version(step: int, *, incarnation: int = 0, policy: str = "main") -> PolicyVersion:
    return PolicyVersion(policy=policy, step=step, incarnation=incarnation, weights_digest="ab" * 32)


def given(parent: int, tokens: list[int], source: Source = Source.PROMPT, *messages: Message) -> Segment:
    role = Role.OBSERVATION if source is Source.TOOL else Role.CONTEXT
    return Segment(parent=parent, role=role, source=source, token_ids=np.array(tokens, np.int32), messages=messages)


def sampled(parent: int, tokens: list[int], step: int, *, source: Source = Source.POLICY, masked: int = 0) -> Segment:
    """An action whose first `masked` tokens are not trained on."""
    n = len(tokens)
    return Segment(
        parent=parent,
        role=Role.ACTION,
        source=source,
        token_ids=np.array(tokens, np.int32),
        logprobs=np.array([-(i + 1) / 8 for i in range(n)], np.float32),
        logprobs_model=np.array([-(i + 1) / 4 for i in range(n)], np.float32),
        loss_mask=np.array([0] * masked + [1] * (n - masked), np.uint8),
        version=version(step),
        kv_step_oldest=max(0, step - 1),
        sampling=0,
        finish=FinishReason.STOP,
        arrays={
            "entropy": np.array([(i + 1) / 2 for i in range(n)], np.float32),
            "top": np.array([[i, i + 1] for i in range(n)], np.int32),
        },
    )


def rich_episode() -> Episode:
    """Two turns with a tool, a weight update in mid-sequence, a branch, a peer's words, two samples, every reward
    outcome."""
    return Episode(
        key=KEY,
        purpose=Purpose.TRAIN,
        segments=(
            given(
                -1,
                [1, 2, 3],
                Source.PROMPT,
                Message(role="system", content="é"),
                Message(role="user", content="6 * 7?"),
            ),
            sampled(0, [10, 11], 3),
            sampled(1, [12, 13, 14], 4, masked=1),
            given(2, [20, 21], Source.TOOL),
            sampled(3, [30], 4),
            sampled(3, [31, 32], 5, source=Source.PEER),
            given(0, [], Source.HINT),
        ),
        sampling_params=(
            SamplingParams(
                temperature=0.5,
                top_p=0.75,
                top_k=20,
                max_tokens=64,
                stop=("</s>", "é\n"),
                stop_token_ids=(2, 7),
                seed=2**64 - 1,
            ),
        ),
        samples=(
            Sample(
                sample_id="e9.0",
                leaf=4,
                finish=FinishReason.LENGTH,
                rewards=(
                    Reward(name="correct", value=1.0, scorer="exact@1", evidence="42 == 42"),
                    Reward(name="format", value=-0.5, segment=1, scorer="format@2"),
                    Reward(name="judge", value=0.0, outcome=Outcome.INFRA_FAILURE),
                    Reward(name="length", value=0.0, outcome=Outcome.NOT_APPLICABLE),
                ),
            ),
            Sample(sample_id="e9.1", leaf=5, role="critic", policy="critic", weight=0.25, trainable=False),
        ),
        stage_s={"init": 0.125, "run": 2.5, "score": 0.25},
        traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    )
