"""Check a request of SubmitSamples on arrival, and take it apart into groups for the core.

Each check raises InvalidInput with the episode and the field, what it must be, and what it is. The codec of payloads
checks the arrays. The stored episodes have only what a worker needs: segments and sampling parameters.
"""

from __future__ import annotations

import re
from typing import get_args

from msgspec import structs

from rollmesh.services.coordinator import validation
from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core.facts import AnswerKey, Provenance, SegmentSource, SubmittedGroup, Task
from rollmesh.services.coordinator.core.records import SubmittedSource
from rollmesh.services.coordinator.fact_codec import decode
from rollmesh.shared.codec.trajectory import decode_episode
from rollmesh.shared.domain.text import count_of
from rollmesh.shared.errors import Phrase, TokenizerMismatch, field_error
from rollmesh.v1 import run_pb2, types_pb2

SEGMENTS_MAX = 1024
SOURCES = {name.upper(): SegmentSource[name.upper()] for name in get_args(SubmittedSource)}
"""Sources of submitted samples by name."""
ACTION, OBSERVATION = types_pb2.SEGMENT_ROLE_ACTION, types_pb2.SEGMENT_ROLE_OBSERVATION
CONTEXT = types_pb2.SEGMENT_ROLE_CONTEXT
_GIVEN = frozenset(
    types_pb2.SegmentSource.Value(f"SEGMENT_SOURCE_{name}") for name in ("PROMPT", "TOOL", "HINT", "SUMMARY")
)
"""Sources of segments beside the trained ones."""
_KEY = re.compile(r"[A-Za-z0-9_.:/-]{1,256}")
_KEY_FORM = "have 1 to 256 characters of A-Z a-z 0-9 _ . : / -"


def check(request: run_pb2.SubmitSamplesRequest, *, task_bytes_max: int, tokenizer_digest: str) -> None:
    """Check a request, except for scorers, tools and oracles of its tasks. `tokenizer_digest` is that of the run; empty
    if it is not known, and then no episode may have token ids. Raises PayloadTooLarge for a size, TokenizerMismatch for
    tokens of another tokenizer."""
    validation.check_run(request.run)
    num, num_tasks, most = len(request.episodes), len(request.tasks), validation.SUBMIT_MAX
    if not 1 <= num <= most:
        raise field_error("episodes", f"have 1 to {most} entries", Phrase(f"{num} entries"))
    if num_tasks > most:
        raise field_error("tasks", f"have at most {most} entries", Phrase(f"{num_tasks} entries"))
    validation.check_submitted_bytes("a call of SubmitSamples", request.ByteSize(), count_of(num, "episode"))
    if _name(request.source) not in SOURCES:
        raise field_error("source", f"be one of {', '.join(get_args(SubmittedSource))}", _name(request.source))
    for name in ("mesh", "run"):
        validation.check_text(f"provenance.{name}", getattr(request.provenance, name), validation.ID_CHARS_MAX)
    if request.provenance.step < 0:
        raise field_error("provenance.step", "be >= 0", request.provenance.step)
    validation.check_tasks_with_keys(request, task_bytes_max=task_bytes_max)
    _check_keys(request)
    _check_recorded(request)
    for index, episode in enumerate(request.episodes):
        _check_episode(episode, request.source, _place(index, episode))
    if any(_has_tokens(episode) for episode in request.episodes):
        _check_tokenizer(request.tokenizer_digest, tokenizer_digest)


def to_input(
    ticket: int, request: run_pb2.SubmitSamplesRequest, submission: str, limits: i.SubmissionLimits
) -> i.SubmitSamples:
    """Return a checked request as an input of the core. No agent runs on the tasks, so they name none."""
    tasks = {task.task_id: structs.replace(decode(Task, task), split="train", agent="") for task in request.tasks}
    episodes: dict[str, list[bytes]] = {}
    task_of = {episode.key.group: episode.key.task for episode in request.episodes}
    for episode in request.episodes:
        episodes.setdefault(episode.key.group, []).append(_stored(episode).SerializeToString(deterministic=True))
    return i.SubmitSamples(
        ticket=ticket,
        submission=submission,
        source=SOURCES[_name(request.source)],
        groups=tuple(
            SubmittedGroup(key=key, task=tasks[task_of[key]], episodes=tuple(of_group))
            for key, of_group in episodes.items()
        ),
        answer_keys=tuple(decode(AnswerKey, key) for key in request.answer_keys),
        provenance=decode(Provenance, request.provenance),
        limits=limits,
    )


def _name(source: types_pb2.SegmentSource.ValueType) -> str:
    known = source in types_pb2.SegmentSource.values()
    return types_pb2.SegmentSource.Name(source).removeprefix("SEGMENT_SOURCE_") if known else str(source)


def _place(index: int, episode: types_pb2.Episode) -> str:
    return f"episodes[{index}] (group {episode.key.group[:100]})"


def _check_keys(request: run_pb2.SubmitSamplesRequest) -> None:
    """Check that the keys name groups of one task, with different episodes."""
    tasks = {task.task_id for task in request.tasks}
    by_group: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    for index, episode in enumerate(request.episodes):
        field, key = f"{_place(index, episode)}.key", episode.key
        if not _KEY.fullmatch(key.group):
            raise field_error(f"{field}.group", _KEY_FORM, key.group)
        validation.check_id(f"{field}.episode", key.episode)
        if key.task not in tasks:
            raise field_error(f"{field}.task", "name one of `tasks`", key.task)
        if by_group.setdefault(key.group, key.task) != key.task:
            raise field_error(f"{field}.task", f"be that of its group, {by_group[key.group]!r}", key.task)
        if (key.group, key.episode) in seen:
            raise field_error(f"{field}.episode", "differ in the group", key.episode)
        seen.add((key.group, key.episode))
    if unused := tasks - set(by_group.values()):
        raise field_error("tasks", "be tasks of the episodes", min(unused))


def _check_recorded(request: run_pb2.SubmitSamplesRequest) -> None:
    """Check the size of the ledger record of the call: each of its groups has its task."""
    tasks = {task.task_id: task.ByteSize() for task in request.tasks}
    of_groups = {episode.key.group: tasks[episode.key.task] for episode in request.episodes}
    size = sum(of_groups.values()) + sum(one.ByteSize() for one in (*request.episodes, *request.answer_keys))
    what = "the episodes and answer keys of a call of SubmitSamples, with the task of each group,"
    validation.check_submitted_bytes(what, size, count_of(len(of_groups), "group"))


def _check_tokenizer(given: str, known: str) -> None:
    if not known:
        must = "have no token ids, because the coordinator does not know the tokenizer of the run"
        raise field_error("episodes", must, Phrase("token ids"), "submit the episodes as text")
    if not given:
        must = "be set, because episodes have token ids: the SHA-256 of the tokenizer.json that made them"
        raise field_error("tokenizer_digest", must, None, "or submit the episodes as text")
    if given != known:
        raise TokenizerMismatch(
            f"`tokenizer_digest` is {given[:64]!r}, and that of the run is {known!r}: the token ids mean other text; "
            "submit the episodes as text, without token ids",
            tokenizer_digest=known,
        )


def _has_tokens(episode: types_pb2.Episode) -> bool:
    return any(segment.token_ids for segment in episode.segments)


def _stored(episode: types_pb2.Episode) -> types_pb2.Episode:
    """Return what a worker needs. The index of sampling parameters means something only if there are some."""
    stored = types_pb2.Episode(segments=episode.segments, sampling_params=episode.sampling_params)
    for segment in stored.segments:
        if not stored.sampling_params:
            segment.sampling = -1
    return stored


def _check_episode(episode: types_pb2.Episode, source: types_pb2.SegmentSource.ValueType, field: str) -> None:
    if not 1 <= len(episode.segments) <= SEGMENTS_MAX:
        raise field_error(f"{field}.segments", f"have 1 to {SEGMENTS_MAX} entries", len(episode.segments))
    if episode.samples:
        must = "be absent, because the run makes and scores the samples"
        raise field_error(f"{field}.samples", must, Phrase(f"{len(episode.samples)} entries"))
    for index, segment in enumerate(episode.segments):
        _check_segment(segment, index, source, f"{field}.segments[{index}]")
    checked = _stored(episode)
    checked.key.MergeFrom(types_pb2.EpisodeKey(run="-", task="-", group="-", episode="-", attempt=1))
    checked.purpose = types_pb2.PURPOSE_TRAIN
    if not _has_tokens(episode):
        _check_text(episode, field)
    else:
        _check_tokens(episode, source, field)
        for segment in checked.segments:  # a worker computes absent log-probs
            if segment.source == types_pb2.SEGMENT_SOURCE_PEER and not segment.logprobs:
                segment.logprobs = bytes(len(segment.token_ids))
    decode_episode(checked, field)


def _check_segment(
    segment: types_pb2.Segment, index: int, source: types_pb2.SegmentSource.ValueType, field: str
) -> None:
    if segment.parent != index - 1:
        must = f"be {index - 1}, because an episode is one path: -1 for its first segment, then the one before"
        raise field_error(f"{field}.parent", must, segment.parent)
    if segment.arrays:
        raise field_error(f"{field}.arrays", "be absent, because another engine made them", min(segment.arrays))
    if segment.role == ACTION and segment.source == source:
        return
    if segment.source not in _GIVEN:
        must = f"be {_name(source)} in an ACTION, or PROMPT, TOOL, HINT or SUMMARY"
        raise field_error(
            f"{field}.source", must, _name(segment.source), "only tokens of the `source` of the request are trained"
        )
    if any(segment.loss_mask):
        must = f"be absent or 0, because only ACTION segments of source {_name(source)} are trained"
        raise field_error(f"{field}.loss_mask", must, Phrase(f"{sum(segment.loss_mask)} tokens with loss"))


def _check_text(episode: types_pb2.Episode, field: str) -> None:
    """Check an episode without token ids."""
    for index, segment in enumerate(episode.segments):
        at = f"{field}.segments[{index}]"
        if len(segment.messages) != 1 or not segment.messages[0].content:
            must = "have one message with a text in an episode without token ids"
            raise field_error(f"{at}.messages", must, Phrase(f"{len(segment.messages)} messages"))
        for name in ("logprobs", "logprobs_model", "loss_mask"):
            if getattr(segment, name):
                raise field_error(f"{at}.{name}", "be absent without token ids", Phrase("values"))
        if segment.role != (OBSERVATION if index % 2 else ACTION):
            must = "alternate in an episode without token ids: ACTION, then OBSERVATION, ..., ACTION"
            known = segment.role in types_pb2.SegmentRole.values()
            raise field_error(f"{at}.role", must, types_pb2.SegmentRole.Name(segment.role) if known else segment.role)
    if len(episode.segments) % 2 == 0:
        raise field_error(f"{field}.segments", "end with an ACTION", Phrase("an OBSERVATION"))
    _check_trains(episode, field)


def _check_tokens(episode: types_pb2.Episode, source: types_pb2.SegmentSource.ValueType, field: str) -> None:
    """Check an episode with token ids."""
    if episode.segments[0].role != CONTEXT:
        must = "be CONTEXT, because the first tokens are the prompt"
        raise field_error(f"{field}.segments[0].role", must, episode.segments[0].role)
    for index, segment in enumerate(episode.segments):
        if not segment.token_ids:
            raise field_error(f"{field}.segments[{index}].token_ids", "be set in all segments or in none", None)
    actions = [segment for segment in episode.segments if segment.source == source]
    if any(segment.logprobs for segment in actions) and not all(segment.logprobs for segment in actions):
        raise field_error(
            f"{field}.segments", f"have log-probs in all {_name(source)} segments or in none", Phrase("some")
        )
    _check_trains(episode, field)


def _check_trains(episode: types_pb2.Episode, field: str) -> None:
    trained = (s for s in episode.segments if s.role == ACTION and s.source not in _GIVEN)
    if not any(not segment.loss_mask or any(segment.loss_mask) for segment in trained):
        raise field_error(f"{field}.segments", "have an ACTION segment of the source that is trained", Phrase("none"))
