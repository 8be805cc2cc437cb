"""samples.jsonl: one finished sample per line, for the tools of a user. docs/rollouts.md describes the fields.

Only this module reads and writes it. The arrays of a segment have one entry per token. Segments that were not sampled
have no log-probs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from rollmesh.shared.codec.summaries import sample_summary
from rollmesh.shared.codec.trajectory import decode_episode, decode_summary, wire
from rollmesh.shared.domain.trajectory import (
    Episode,
    FinishReason,
    Outcome,
    Reward,
    Role,
    Sample,
    SampleSummary,
    Segment,
    Source,
    text_view,
)
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.v1 import types_pb2

ACTION = Role.ACTION.name.lower()


class Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of the structs of a line. Unknown fields are ignored, because a later version may write more."""


class MessageLine(Line, frozen=True, kw_only=True, omit_defaults=True):
    role: str
    content: str


class VersionLine(Line, frozen=True, kw_only=True, omit_defaults=True):
    """The weights that sampled a segment."""

    policy: str
    step: int
    incarnation: int = 0
    weights_digest: str = ""


class SegmentLine(Line, frozen=True, kw_only=True, omit_defaults=True):
    """A span of tokens with one author. Segments of a line are in order and make up the whole sample."""

    role: str
    """context, observation or action."""
    source: str
    """Author: policy, prompt, tool, ..."""
    token_ids: list[int]
    logprobs: list[float] | None = None
    """Natural logarithm, under the sampling distribution."""
    logprobs_model: list[float] | None = None
    """Natural logarithm, under the softmax of the model."""
    loss_mask: list[int] | None = None
    """1 where a trainer may train; absent means nowhere."""
    version: VersionLine | None = None
    sampling: int = -1
    """Index into `sampling` of the line; -1 if nothing was sampled."""
    finish: str = ""
    """stop, length, cancelled, error, or unfinished if the next segment continues it. Empty if nothing was sampled."""
    index: int = -1
    """Number of the segment in its episode, which rewards refer to; -1 if unknown."""
    text: str = ""
    """Text of the messages that end with this segment."""
    arrays: dict[str, list[Any]] = {}
    """Further outputs of the engine by name (`rollout.outputs`): one number, or a list of numbers, per token."""


class SamplingLine(Line, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters."""

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    seed: int


class RewardLine(Line, frozen=True, kw_only=True, omit_defaults=True):
    name: str
    value: float
    scorer: str = ""
    evidence: str = ""
    outcome: str = "ok"
    """ok, infra_failure or not_applicable; `value` counts only with ok."""
    segment: int = -1
    """Segment of the episode that it rates; -1 is the whole sample."""
    answer: str = ""
    """The answer that the scorer found in the text of the model; empty if it found none."""


class EndpointLine(Line, frozen=True, kw_only=True, omit_defaults=True):
    """Sums over the answers of one endpoint to one caller: `agent` or a scorer."""

    endpoint: str
    caller: str
    calls: int = 0
    replayed: int = 0
    """Number of recorded answers among them."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    price: float = 0.0
    """Price of the responses of the server, including those that failed the request, in the currency of the
    configuration."""
    latency_s: float = 0.0
    """Seconds that the caller waited."""
    model: str = ""
    """The model that gave the last answer."""


class ChainsLine(Line, frozen=True, kw_only=True, omit_defaults=True):
    """The conversations of the clients of an episode whose model was served to them."""

    begun: dict[str, int] = {}
    """Number of conversations by cause: first, other, history (changed by the client), tools (other ones)."""
    continued: int = 0
    """Number of requests that continued recorded tokens."""
    forks: int = 0
    """Number of turns after a prefix that another turn already continues."""
    reencoded_tokens: int = 0
    """Tokens of conversations that began with recorded turns, which were encoded again."""


class SampleLine(Line, frozen=True, kw_only=True, omit_defaults=True):
    """A finished sample."""

    sample_id: str
    run: str
    task: str
    group: str
    episode: str
    attempt: int = 1
    split: str = ""
    labels: dict[str, str] = {}
    oracle_ref: str = ""
    """Reference that the reward service resolves to the answer key. A line never contains the key."""
    agent: str = ""
    """Name of the agent of the task. Empty: the default agent."""
    scorers: list[str] = []
    """Names of the rewards that score the task. Empty: all."""
    role: str = ""
    variant: str = ""
    """Name of the variant of its episode in a group with a plan."""
    policy: str = "main"
    trainable: bool = True
    weight: float = 1.0
    finish: str = ""
    """stop, or length, also if a limit of the episode ended the sample. Empty: the finish of its last action."""
    num_tokens: int = 0
    messages: list[MessageLine] = []
    """Text view of the path of the sample: the input of scorers."""
    rewards: list[RewardLine] = []
    segments: list[SegmentLine] = []
    sampling: list[SamplingLine] = []
    stage_s: dict[str, float] = {}
    """Seconds of the episode per stage: init, run, generate, logprobs, tool, ask, score."""
    endpoints: list[EndpointLine] = []
    """What the agent and the scorers of the episode asked of endpoints."""
    chains: ChainsLine | None = None
    """The conversations of the episode's clients; absent if the model was not served to clients."""


def sample_lines(message: types_pb2.Episode, task: types_pb2.Task) -> Iterator[SampleLine]:
    """Yield the samples of an episode, one line each. Raises InvalidInput for an inconsistent episode."""
    episode = decode_episode(message)
    for sample in episode.samples:
        yield _line(episode, sample, task)


def encode_sample_line(line: SampleLine) -> bytes:
    """Return the JSON with a newline."""
    return msgspec.json.encode(line) + b"\n"


def reward_lines(rewards: tuple[Reward, ...]) -> list[RewardLine]:
    return [
        RewardLine(
            name=reward.name,
            value=reward.value,
            scorer=reward.scorer,
            evidence=reward.evidence,
            outcome=reward.outcome.name.lower(),
            segment=reward.segment,
            answer=reward.answer,
        )
        for reward in rewards
    ]


def rewards_of(line: SampleLine) -> tuple[Reward, ...]:
    """Return the rewards of a line, as a scorer gave them."""
    return tuple(
        Reward(
            name=reward.name,
            value=reward.value,
            scorer=reward.scorer,
            evidence=reward.evidence,
            outcome=Outcome[reward.outcome.upper()],
            segment=reward.segment,
            answer=reward.answer,
        )
        for reward in line.rewards
    )


def summary_of_line(line: SampleLine, *, text_chars: int = 0) -> SampleSummary:
    """Return the summary that the group of the sample sees, with at most `text_chars` characters of text."""
    episode = types_pb2.Episode(
        segments=[_wire_segment(segment) for segment in line.segments],
        sampling_params=[types_pb2.SamplingParams(temperature=one.temperature) for one in line.sampling],
        variant=line.variant,
    )
    finish = FinishReason[line.finish.upper()] if line.finish else FinishReason.UNFINISHED
    sample = types_pb2.Sample(leaf=len(line.segments) - 1, role=line.role, finish=wire(finish))
    path = [(index, segment, segment.token_ids) for index, segment in enumerate(episode.segments)]
    summary = decode_summary(sample_summary(episode, sample, path, text_chars=text_chars))
    turns = tuple(replace(turn, segment=line.segments[turn.segment].index) for turn in summary.turns)
    return replace(summary, turns=turns)


def mean_rewards(lines: list[list[RewardLine]]) -> dict[str, float]:
    """Return the mean of each reward of whole samples, over the samples with outcome ok."""
    values: dict[str, list[float]] = {}
    for reward in (r for rewards in lines for r in rewards):
        if reward.outcome == Outcome.OK.name.lower() and reward.segment < 0:
            values.setdefault(reward.name, []).append(reward.value)
    return {name: sum(found) / len(found) for name, found in values.items()}


def _line(episode: Episode, sample: Sample, task: types_pb2.Task) -> SampleLine:
    path = episode.path_segments(sample)
    return SampleLine(
        sample_id=sample.sample_id,
        run=episode.key.run,
        task=episode.key.task,
        group=episode.key.group,
        episode=episode.key.episode,
        attempt=episode.key.attempt,
        split=task.split,
        labels=dict(task.labels),
        oracle_ref=task.oracle_ref,
        agent=task.agent,
        scorers=list(task.scorers),
        role=sample.role,
        variant=episode.variant,
        policy=sample.policy,
        trainable=sample.trainable,
        finish=sample.finish.name.lower() if sample.finish is not FinishReason.UNFINISHED else "",
        weight=sample.weight,
        num_tokens=sum(segment.num_tokens for segment in path),
        messages=[MessageLine(role=m.role, content=m.content) for m in text_view(path)],
        rewards=reward_lines(sample.rewards),
        segments=[_segment(index, episode.segments[index]) for index in episode.path(sample.leaf)],
        sampling=[
            SamplingLine(temperature=p.temperature, top_p=p.top_p, top_k=p.top_k, max_tokens=p.max_tokens, seed=p.seed)
            for p in episode.sampling_params
        ],
        stage_s=dict(episode.stage_s),
        endpoints=[EndpointLine(**msgspec.structs.asdict(use)) for use in episode.endpoints],
        chains=None if episode.chains is None else ChainsLine(**msgspec.structs.asdict(episode.chains)),
    )


def _wire_segment(line: SegmentLine) -> types_pb2.Segment:
    return types_pb2.Segment(
        role=wire(Role[line.role.upper()]),
        source=wire(Source[line.source.upper()]),
        token_ids=np.asarray(line.token_ids, "<i4").tobytes(),
        logprobs=np.asarray(line.logprobs or (), "<f4").tobytes(),
        sampling=line.sampling,
        finish=wire(FinishReason[line.finish.upper()]) if line.finish else types_pb2.FINISH_REASON_UNSPECIFIED,
        messages=[types_pb2.Message(content=line.text)],
    )


def _segment(index: int, segment: Segment) -> SegmentLine:
    return SegmentLine(
        index=index,
        text="\n\n".join(message.content for message in segment.messages),
        role=segment.role.name.lower(),
        source=segment.source.name.lower(),
        token_ids=segment.token_ids.tolist(),
        logprobs=_floats(segment.logprobs),
        logprobs_model=_floats(segment.logprobs_model),
        loss_mask=None if segment.loss_mask is None else segment.loss_mask.tolist(),
        version=_version(segment.version),
        sampling=segment.sampling,
        finish="" if segment.version is None else segment.finish.name.lower(),
        arrays={name: values.tolist() for name, values in sorted(segment.arrays.items())},
    )


def _version(version: PolicyVersion | None) -> VersionLine | None:
    if version is None:
        return None
    return VersionLine(
        policy=version.policy,
        step=version.step,
        incarnation=version.incarnation,
        weights_digest=version.weights_digest,
    )


def _floats(values: np.ndarray | None) -> list[float] | None:
    return None if values is None else values.tolist()
