"""Give a finished episode of another source in place of an agent: what a client submitted with SubmitSamples.

An episode with token ids is appended as it is. The messages of one without are encoded by the chat template of this
model, turn by turn, as the environment encodes those of a rollout. Tags of content in a turn, such as <think> and those
of tool calls, are encoded as one token, and tags that open or end turns as plain text. PEER tokens without log-probs
get those of the current weights of the policy under its plain softmax, as the swarm of SAPO does (2025-09,
arXiv:2509.08721): the ratio of the loss is then 1 at the weights that scored them.

An episode yields no sample if it is longer than `rollout.limits.context_tokens_max`, would reach
`rollout.limits.segments_max`, or has a token id that the tokenizer does not have.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from rollmesh.services.rollout.agent import Agent, Task
from rollmesh.services.rollout.environment import Environment
from rollmesh.shared.codec.arrays import decode_floats, decode_ints, decode_mask
from rollmesh.shared.codec.trajectory import decode_sampling_params, decode_version
from rollmesh.shared.domain.trajectory import (
    ROOT,
    FinishReason,
    IntArray,
    Message,
    Role,
    SamplingParams,
    Segment,
    Source,
)
from rollmesh.v1 import types_pb2

_log = logging.getLogger(__name__)
CONTENT = ("<think>", "</think>", "<answer>", "</answer>")
"""Tags of thoughts and answers, which a model may have as special tokens."""


class GivenAgent(Agent):
    """See the module. It is made for one episode, and no configuration names it."""

    def __init__(self, episode: types_pb2.Episode, source: Source) -> None:
        """`source` is that of the trained tokens."""
        self._episode = episode
        self._source = source
        self._has_tokens = any(segment.token_ids for segment in episode.segments)

    def begin(self, task: Task, env: Environment) -> None:
        """Start the context with the prompt of the task, unless the episode has the tokens of its prompt."""
        if not self._has_tokens:
            env.context(task.messages)

    async def run(self, task: Task, env: Environment) -> None:
        if self._has_tokens and (why := self._why_unknown(env)):
            _warn(task, why)
            return
        segments = self._decoded(task, env) if self._has_tokens else self._encoded(env)
        prompt = env.token_ids
        tokens = np.concatenate([segment.token_ids for segment in segments])
        if why := _why_too_long(env, prompt.size + tokens.size, len(segments)):
            _warn(task, why)
            return
        if any(s.source is Source.PEER and s.logprobs is None for s in segments):
            segments = await _scored(env, segments, prompt, tokens)
        params = [decode_sampling_params(one) for one in self._episode.sampling_params]
        for segment in segments:
            env.give_segment(segment, _params_of(params, segment.sampling))

    def _why_unknown(self, env: Environment) -> str:
        """Return why the tokenizer cannot have made the token ids; empty if it can."""
        messages = enumerate(self._episode.segments)
        ids = np.concatenate([decode_ints(one.token_ids, f"segments[{index}].token_ids") for index, one in messages])
        if 0 <= int(ids.min()) <= int(ids.max()) < env.num_ids:
            return ""
        return f"its token ids are in [{ids.min()}, {ids.max()}], those of the tokenizer in [0, {env.num_ids})"

    def _decoded(self, task: Task, env: Environment) -> list[Segment]:
        """Return the segments of an episode with token ids. A trained one without a mask is trained as a whole, and one
        without messages has its text as message, or those of the task at the beginning."""
        found = []
        for index, message in enumerate(self._episode.segments):
            tokens = decode_ints(message.token_ids, f"segments[{index}].token_ids")
            mask = decode_mask(message.loss_mask) if message.loss_mask else None
            if mask is None and Source(message.source) is self._source and Role(message.role) is Role.ACTION:
                mask = np.ones(tokens.shape, dtype=np.uint8)
            logprobs = decode_floats(message.logprobs, f"segments[{index}].logprobs") if message.logprobs else None
            segment = replace(_segment(message, tokens), loss_mask=mask, logprobs=logprobs)
            if not segment.messages:
                segment = replace(segment, messages=task.messages if not index else (_text_of(env, segment),))
            found.append(segment)
        return found

    def _encoded(self, env: Environment) -> list[Segment]:
        """Return the segments of an episode without token ids, encoded for this model."""
        found = []
        for message in self._episode.segments:
            text = message.messages[0].content
            if Role(message.role) is Role.OBSERVATION:
                text = env.shortened(text)
                segment = _segment(message, env.observation(text))
                speaker = env.format.tool_role
            else:
                tokens = _turn(env, text, ends=FinishReason(message.finish) is not FinishReason.LENGTH)
                segment = _segment(message, tokens)
                segment = replace(segment, loss_mask=np.ones(tokens.shape, dtype=np.uint8))
                speaker = env.format.assistant_role
            found.append(replace(segment, sampling=-1, messages=(Message(role=speaker, content=text),)))
        return found


def _warn(task: Task, why: str) -> None:
    _log.warning("given episode has no sample: task=%s reason=%s", task.task_id, why)


def _why_too_long(env: Environment, length: int, num_segments: int) -> str:
    """Return why an episode of this length cannot be trained as a whole; empty if it can."""
    if length > env.context_tokens_max:
        return f"it has {length} tokens, at most rollout.limits.context_tokens_max = {env.context_tokens_max} fit"
    if num_segments > env.segments_left:
        return f"it has {num_segments} segments, and rollout.limits.segments_max leaves {env.segments_left}"
    return ""


def _segment(message: types_pb2.Segment, tokens: IntArray) -> Segment:
    has_version = message.HasField("version")
    finish = FinishReason(message.finish)
    if Role(message.role) is Role.ACTION and finish is FinishReason.UNFINISHED and not message.token_ids:
        finish = FinishReason.STOP
    return Segment(
        parent=ROOT,
        role=Role(message.role),
        source=Source(message.source),
        token_ids=tokens,
        version=decode_version(message.version) if has_version else None,
        kv_step_oldest=message.version.step if has_version else None,
        sampling=message.sampling,
        finish=finish,
        messages=tuple(Message(role=one.role, content=one.content) for one in message.messages),
    )


def _text_of(env: Environment, segment: Segment) -> Message:
    speaker = {Role.ACTION: env.format.assistant_role, Role.OBSERVATION: env.format.tool_role}.get(segment.role, "user")
    return Message(role=speaker, content=env.format.without_end(env.decode(segment.token_ids)))


def content_tags(env: Environment) -> list[str]:
    """Return the tags that a turn may have as single tokens: those that are not special tokens, and those of
    thoughts, answers and tool calls. No tag that ends a turn is one."""
    tags, ends = env.tags, env.format.turn_ends
    calls = [tag for tag in (env.format.tool_call_start, env.format.tool_call_end) if tag]
    content = [tag for tag, special in tags.items() if not special or tag in CONTENT]
    return [tag for tag in dict.fromkeys([*calls, *content]) if tag not in ends]


def _turn(env: Environment, text: str, *, ends: bool) -> IntArray:
    """Return the tokens of a turn of the model. Only tags of content in it are markup."""
    tags = content_tags(env)
    parts = re.split(f"({'|'.join(map(re.escape, tags))})", text) if tags else [text]
    last = len(parts) - 1
    encoded = [
        env.encode(part, markup=part in tags, end=ends and index == last)
        for index, part in enumerate(parts)
        if part or index == last
    ]
    return np.concatenate(encoded).astype(np.int32)


def _params_of(params: Sequence[SamplingParams], index: int) -> SamplingParams | None:
    return params[index] if 0 <= index < len(params) else None


async def _scored(env: Environment, segments: list[Segment], prompt: IntArray, tokens: IntArray) -> list[Segment]:
    """Return the segments with log-probs of the current weights in those of source PEER."""
    if prompt.size:
        scored = await env.logprobs(tokens, under=prompt)
        values = scored.logprobs
    else:  # the first segment has the tokens of the prompt
        first = segments[0].token_ids
        scored = await env.logprobs(tokens[first.size :], under=first)
        values = np.concatenate([np.zeros(first.size, dtype=np.float32), scored.logprobs])
    found, at = [], 0
    for segment in segments:
        of_it = values[at : at + segment.num_tokens]
        found.append(replace(segment, logprobs=of_it) if segment.source is Source.PEER else segment)
        at += segment.num_tokens
    return found
