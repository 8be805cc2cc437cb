"""Check a request on arrival: range, finiteness, size and uniqueness of every field. The core gets only valid input.

Each function raises InvalidInput (INVALID_ARGUMENT) with the field, what it must be, and what it is. The exception is a
finished episode (`why_invalid_report`): an invalid report must not affect the others of its request, so its text
becomes the result of that report. The protos document the limits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import msgspec

from rollmesh.services.coordinator.core.records import (
    EPISODES_LIVE_MAX,
    SAMPLE_TOKENS_MAX,
    SAMPLES_PER_EPISODE_MAX,
)
from rollmesh.services.coordinator.core.replay_log import RESERVED_REASONS
from rollmesh.services.coordinator.core.state import SUBMITTED_SCHEME
from rollmesh.shared.codec import summaries
from rollmesh.shared.codec.checks import (
    EXTEND_MAX,
    MEASURES_MAX,
    NAME_CHARS_MAX,
    REASON_FORM,
    REWARDS_MAX,
    WORD_FORM,
    is_reason,
    is_word,
)
from rollmesh.shared.domain.extras import PUBLIC_BYTES_MAX, check_extras, decode_extras
from rollmesh.shared.domain.reward_range import RANGE_FORM, in_reward_range
from rollmesh.shared.domain.text import count_of
from rollmesh.shared.domain.trajectory import TRAINED_MEASURES
from rollmesh.shared.errors import InvalidInput, PayloadTooLarge, Phrase, field_error
from rollmesh.v1 import coordinator_pb2, reward_pb2, run_pb2, types_pb2

ID_CHARS_MAX = 256
TEXT_CHARS_MAX = 1024
DIGEST_CHARS_MAX = 128
LEASES_MAX = 16
GROUPS_MAX = EPISODES_LIVE_MAX
"""Most groups that a commit describes. A batch does not have more."""
GROUP_TOKENS_MAX = 2**53
"""Most used tokens of a group. Larger numbers are not exact as floating-point values."""
CHANGES_MAX = 1000
RENEWED_MAX = 1 << 16
WALL_S_MAX = 1e11
"""Bound of a time in Unix seconds, in the year 5138."""
RUNS_MAX = 64
OUTPUTS_MAX = 64
"""Most outputs that an engine declares."""
VERSIONS_MAX = 64
"""Most sets of weights that an engine holds."""
CAPACITY_MAX = 1_000_000
SPANS_MAX = 4096
OBJECT_DEPTH_MAX = 100
"""Most levels of a JSON object in an answer key, which services decode recursively."""
TOOL_CALLS_MAX = 2**31 - 1
"""Most tool calls of an episode, so that their sum over episodes fits its field."""
TrainerMessage: TypeAlias = (
    run_pb2.LeaseBatchRequest
    | run_pb2.RenewBatchRequest
    | run_pb2.ReleaseBatchRequest
    | run_pb2.CommitUpdateRequest
    | run_pb2.ReportCheckpointRequest
    | run_pb2.PublishVersionRequest
    | coordinator_pb2.WatchReadyRequest
)
SUBMIT_MAX = 1024
"""Most tasks, and most episodes, of a call that submits."""
SUBMIT_BYTES_MAX = 2 * 1024 * 1024
"""Maximum size of the tasks and answer keys of a call, bytes: with the groups that admit as many tasks at once, they
must fit into a ledger record."""
_TASK_ID = re.compile(r"[A-Za-z0-9_.:-]{1,256}")
TASK_ID_FORM = "have 1 to 256 characters of A-Z a-z 0-9 _ . : -"
_NAME = re.compile(r"[A-Za-z0-9_.-]*")
_SAMPLE_SUFFIX = re.compile(r"[-./][A-Za-z0-9_./-]+")


def check_trainer(request: TrainerMessage) -> None:
    """Check the fields that requests of an attached trainer carry."""
    _check_learner(request)
    check_epoch(request)
    if isinstance(request, run_pb2.RenewBatchRequest | run_pb2.ReleaseBatchRequest):
        check_id("lease_id", request.lease_id)


def check_run(run: str) -> None:
    if not run:
        raise field_error("run", "name a run", run)


def check_epoch(request: TrainerMessage | coordinator_pb2.GetBatchRequest) -> None:
    if request.trainer_epoch < 1:
        raise field_error("trainer_epoch", "be >= 1", request.trainer_epoch, "call AttachTrainer first")


def check_id(field: str, value: str) -> None:
    if not 1 <= len(value) <= ID_CHARS_MAX:
        raise field_error(field, f"have 1 to {ID_CHARS_MAX} characters", value)


def check_update(update: int) -> None:
    if update < 1:
        raise field_error("update", "be >= 1", update)


def check_attach(request: run_pb2.AttachTrainerRequest) -> None:
    _check_learner(request)
    if request.last_update < 0:
        raise field_error("last_update", "be >= 0 (0 for fresh weights)", request.last_update)
    check_text("digest", request.digest, DIGEST_CHARS_MAX)
    check_text("holder", request.holder, ID_CHARS_MAX)
    _check_dispositions(request.samples)
    if request.outcome not in run_pb2.UpdateOutcome.values():
        raise field_error("outcome", "be APPLIED or SKIPPED, or absent for APPLIED", request.outcome)


def check_commit(request: run_pb2.CommitUpdateRequest) -> None:
    check_trainer(request)
    check_update(request.update)
    check_unique("lease_ids", request.lease_ids)
    if len(request.lease_ids) > LEASES_MAX:
        raise field_error("lease_ids", f"have at most {LEASES_MAX} entries", len(request.lease_ids))
    for index, lease_id in enumerate(request.lease_ids):
        check_id(f"lease_ids[{index}]", lease_id)
    _check_dispositions(request.samples)
    if request.outcome not in (run_pb2.UPDATE_OUTCOME_APPLIED, run_pb2.UPDATE_OUTCOME_SKIPPED):
        raise field_error("outcome", "be APPLIED or SKIPPED", request.outcome)
    _check_groups(request)


def _check_groups(request: run_pb2.CommitUpdateRequest) -> None:
    if len(request.groups) > GROUPS_MAX:
        raise field_error("groups", f"have at most {GROUPS_MAX} entries", len(request.groups))
    if request.groups and request.outcome == run_pb2.UPDATE_OUTCOME_SKIPPED:
        raise field_error("groups", "be empty for a skipped update", Phrase(f"{len(request.groups)} entries"))
    check_unique("groups", [group.group for group in request.groups])
    for index, group in enumerate(request.groups):
        check_id(f"groups[{index}].group", group.group)
        fields = {name: getattr(group, name) for name in TRAINED_MEASURES}
        _check_measures(f"groups[{index}].measures", group.measures)
        for name, value in fields.items():
            if not group.measures:
                _check_measure(f"groups[{index}].{name}", name, value)
            elif value not in (0, group.measures.get(name)):
                raise field_error(f"groups[{index}].{name}", "be absent or equal to its entry in `measures`", value)


def _check_measures(field: str, measures: Mapping[str, float]) -> None:
    if len(measures) > MEASURES_MAX:
        raise field_error(field, f"have at most {MEASURES_MAX} entries", len(measures))
    for name, value in sorted(measures.items()):
        if not is_word(name):
            raise field_error(field, f"have names that {WORD_FORM}", name)
        _check_measure(f"{field}[{name}]", name, value)


def _check_measure(field: str, name: str, value: float) -> None:
    if name == "num_tokens" and not 1 <= value <= GROUP_TOKENS_MAX:
        raise field_error(field, f"be in [1, {GROUP_TOKENS_MAX}]", value)
    if name == "num_tokens" and value != int(value):
        raise field_error(field, "be a whole number", value)
    if name == "mean_abs_advantage" and not (math.isfinite(value) and value >= 0):
        raise field_error(field, "be finite and >= 0", value)
    if not math.isfinite(value):
        raise field_error(field, "be finite", value)


def check_submission(request: run_pb2.SubmitTasksRequest, *, task_bytes_max: int) -> None:
    """Check submitted tasks, except for their scorers. Raises PayloadTooLarge for a size."""
    check_run(request.run)
    num = len(request.tasks)
    if not (num or request.finish) or num > SUBMIT_MAX:
        raise field_error("tasks", f"have 1 to {SUBMIT_MAX} entries, or none with `finish`", Phrase(f"{num} entries"))
    check_submitted_bytes("a call of SubmitTasks", request.ByteSize(), count_of(num, "task"))
    check_tasks_with_keys(request, task_bytes_max=task_bytes_max)


def check_submitted_bytes(what: str, size: int, amount: str) -> None:
    """Check the size of a call that submits `amount`. Raises PayloadTooLarge."""
    if size > SUBMIT_BYTES_MAX:
        raise PayloadTooLarge(
            f"{what} must have at most {SUBMIT_BYTES_MAX} bytes, got {size} with {amount}; make several calls",
            bytes=size,
            bytes_max=SUBMIT_BYTES_MAX,
        )


def check_opening(request: run_pb2.OpenEpisodeRequest) -> None:
    """Check an episode to open, except for its task."""
    check_run(request.run)
    if not _TASK_ID.fullmatch(request.key):
        raise field_error("key", TASK_ID_FORM, request.key)
    if request.index < 0:
        raise field_error("index", "be >= 0", request.index)


def check_finish(request: run_pb2.FinishEpisodeRequest) -> None:
    """Check the end of an episode, except for the names of its rewards."""
    check_run(request.run)
    check_id("lease_id", request.lease_id)
    if len(request.rewards) > REWARDS_MAX:
        raise field_error("rewards", f"have at most {REWARDS_MAX} entries", len(request.rewards))
    for name, value in request.rewards.items():
        if not in_reward_range(value):
            raise field_error(f"rewards[{name[:NAME_CHARS_MAX]}]", RANGE_FORM, value)


def check_declared(rewards: Mapping[str, float], declared: Sequence[str]) -> None:
    """Check that the run has a scorer for each reward of an application."""
    for name in rewards:
        if name not in declared:
            known = ", ".join(declared) or "none"
            raise field_error(
                f"rewards[{name[:NAME_CHARS_MAX]}]",
                f"be a reward of the environment that a scorer of the run declares ({known})",
                rewards[name],
                "add a scorer `environment` with this name to reward.scorers, or correct the name",
            )


def check_tasks_with_keys(
    request: run_pb2.SubmitTasksRequest | run_pb2.SubmitSamplesRequest, *, task_bytes_max: int
) -> None:
    """Check the tasks of a request and their answer keys, except for their scorers. Raises PayloadTooLarge."""
    check_unique("tasks.task_id", [task.task_id for task in request.tasks])
    check_unique("answer_keys.task_id", [key.task_id for key in request.answer_keys])
    keys = {key.task_id: key for key in request.answer_keys}
    for index, task in enumerate(request.tasks):
        if not _TASK_ID.fullmatch(task.task_id):
            raise field_error(f"tasks[{index}].task_id", TASK_ID_FORM, task.task_id)
        key = keys.pop(task.task_id, None)
        _check_task(task, key, f"{task_place(index, task)}.")
        size = task.ByteSize() + (key.ByteSize() if key is not None else 0)
        if size > task_bytes_max:
            raise PayloadTooLarge(
                f"task `{task.task_id}` has {size} bytes with its answer key, expected at most {task_bytes_max}; "
                "shorten it, or raise `coordinator.run.submitted.task_bytes_max`",
                task_id=task.task_id,
                bytes=size,
                bytes_max=task_bytes_max,
            )
    if keys:
        raise field_error("answer_keys.task_id", "name a task of the call", next(iter(keys)))


def _check_task(task: types_pb2.Task, key: types_pb2.AnswerKey | None, field: str) -> None:
    if not task.messages:
        raise field_error(f"{field}messages", "have at least one entry, the prompt", None)
    for place, message in enumerate(task.messages):
        if not 1 <= len(message.role) <= NAME_CHARS_MAX:
            must = f"have 1 to {NAME_CHARS_MAX} characters, e.g. 'user'"
            raise field_error(f"{field}messages[{place}].role", must, message.role)
    if task.split not in ("", "train"):
        raise field_error(f"{field}split", "be empty or 'train', because submitted tasks are not evaluated", task.split)
    check_text(f"{field}agent", task.agent, ID_CHARS_MAX)
    try:
        check_extras(decode_extras(task.extras), PUBLIC_BYTES_MAX)
    except ValueError as error:
        raise field_error(
            f"{field}extras", f"have names and JSON values of at most {PUBLIC_BYTES_MAX} bytes", error
        ) from None
    if key is None:
        if task.oracle_ref.startswith(f"{SUBMITTED_SCHEME}:"):
            must = "be empty for a key in `answer_keys`, or name a key that the reward service has itself"
            raise field_error(f"{field}oracle_ref", must, task.oracle_ref)
        check_text(f"{field}oracle_ref", task.oracle_ref)
        return
    if task.oracle_ref:
        raise field_error(f"{field}oracle_ref", "be empty for a task with an entry in `answer_keys`", task.oracle_ref)
    if not (key.answers or key.tests or key.record):
        raise field_error(f"{field}answer_key", "have `answers`, `tests` or `record`", None)
    if key.tests.lstrip().startswith("{"):
        _check_object(f"{field}answer_key.tests", key.tests)
    if key.record:
        _check_object(f"{field}answer_key.record", key.record)


def check_submitted_scorers(
    request: run_pb2.SubmitTasksRequest | run_pb2.SubmitSamplesRequest, known: Sequence[str]
) -> None:
    """Check that each submitted task has a scorer. `known` are the rewards of the run's scorers."""
    for index, task in enumerate(request.tasks):
        field = f"{task_place(index, task)}.scorers"
        if not known:
            raise field_error(field, "have a scorer, and this mesh has none", None, "add one to reward.scorers")
        if len(set(task.scorers)) < len(task.scorers) or not set(task.scorers) <= set(known):
            must = f"have different names of rewards among [{', '.join(known)}], or none for all"
            raise field_error(field, must, ", ".join(task.scorers), "add the scorer to reward.scorers")


def task_place(index: int, task: types_pb2.Task) -> str:
    return f"tasks[{index}] (task {task.task_id})"


def _check_object(field: str, text: str) -> None:
    """Check a JSON object of an answer key. The error does not quote it."""
    must = f"be a JSON object of at most {OBJECT_DEPTH_MAX} levels"
    try:
        value = msgspec.json.decode(text)
        is_object = isinstance(value, dict)
        levels = _num_levels(value)
    except (msgspec.DecodeError, RecursionError) as error:
        raise field_error(field, must, Phrase(f"{len(text)} characters: {error}")) from None
    if not is_object or levels > OBJECT_DEPTH_MAX:
        raise field_error(field, must, Phrase(f"{len(text)} characters of another kind"))


def _num_levels(value: object) -> int:
    """Return how deep a JSON value is nested, at most one more than the limit."""
    layer, num = [value], 0
    while num <= OBJECT_DEPTH_MAX and (nested := [part for part in layer if isinstance(part, (dict, list))]):
        layer = [one for part in nested for one in (part.values() if isinstance(part, dict) else part)]
        num += 1
    return num


def check_checkpoint(request: run_pb2.ReportCheckpointRequest) -> None:
    check_trainer(request)
    if request.update < 0:
        raise field_error("update", "be >= 0", request.update)
    check_text("digest", request.digest, DIGEST_CHARS_MAX)


def check_publish(request: run_pb2.PublishVersionRequest) -> None:
    check_trainer(request)
    version = request.version
    check_name("version.policy", version.policy)
    for name in ("step", "incarnation"):
        if getattr(version, name) < 0:
            raise field_error(f"version.{name}", "be >= 0", getattr(version, name))
    _check_digest("version.weights_digest", version.weights_digest)


def _check_digest(field: str, digest: str) -> None:
    if not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise field_error(field, "be the SHA-256 of the uploaded manifest in lower-case hex", digest)


def check_change(request: run_pb2.ChangeRunRequest) -> None:
    if not 1 <= len(request.change_id) <= ID_CHARS_MAX:
        raise field_error(
            "change_id",
            f"have 1 to {ID_CHARS_MAX} characters",
            request.change_id,
            "choose one, and repeat it with the request",
        )
    if len(request.changes) > CHANGES_MAX:
        raise field_error("changes", f"have at most {CHANGES_MAX} entries", len(request.changes))


def check_name(field: str, value: str) -> None:
    """Check a name of a policy or learner. Empty means the default."""
    if len(value) > NAME_CHARS_MAX or not _NAME.fullmatch(value):
        raise field_error(field, f"have at most {NAME_CHARS_MAX} characters of A-Z a-z 0-9 _ . -", value)


def check_text(field: str, value: str, chars_max: int = TEXT_CHARS_MAX) -> None:
    if len(value) > chars_max:
        raise field_error(field, f"have at most {chars_max} characters", len(value))


def check_renew(request: coordinator_pb2.RenewLeasesRequest) -> None:
    check_id("node_id", request.node_id)
    if len(request.lease_ids) > RENEWED_MAX:
        raise field_error("lease_ids", f"have at most {RENEWED_MAX} entries", len(request.lease_ids))


def check_hello(hello: coordinator_pb2.NodeHello) -> None:
    """Check the parts of a hello that every kind of node has."""
    check_id("hello.node_id", hello.node_id)
    check_text("hello.address", hello.address, ID_CHARS_MAX)
    if not 0 <= hello.capacity <= CAPACITY_MAX:
        raise field_error("hello.capacity", f"be in [0, {CAPACITY_MAX}]", hello.capacity)
    if not 0 <= hello.wall_s < WALL_S_MAX:
        raise field_error("hello.wall_s", f"be in [0, {WALL_S_MAX:g})", hello.wall_s)
    if len(hello.runs) > RUNS_MAX:
        raise field_error("hello.runs", f"have at most {RUNS_MAX} entries", len(hello.runs))
    _check_node_version("hello.active", hello.active)
    _check_held("hello.held", hello.held)
    can = hello.capabilities
    check_text("hello.capabilities.engine", can.engine, ID_CHARS_MAX)
    for field, names in (("outputs", can.outputs), ("score_outputs", can.score_outputs)):
        if len(names) > OUTPUTS_MAX:
            raise field_error(f"hello.capabilities.{field}", f"have at most {OUTPUTS_MAX} entries", len(names))
        for index, name in enumerate(names):
            check_text(f"hello.capabilities.{field}[{index}]", name, ID_CHARS_MAX)
    if not 0 <= can.versions_max <= VERSIONS_MAX:
        raise field_error("hello.capabilities.versions_max", f"be in [0, {VERSIONS_MAX}]", can.versions_max)


def check_node_report(report: coordinator_pb2.NodeReport) -> None:
    for name in ("num_running", "num_waiting"):
        if getattr(report, name) < 0:
            raise field_error(f"report.{name}", "be >= 0", getattr(report, name))
    _check_held("report.held", report.held)
    for index, weights in enumerate(report.weights):
        field = f"report.weights[{index}]"
        _check_node_version(f"{field}.version", weights.version)
        _check_digest(f"{field}.version.weights_digest", weights.version.weights_digest)
        if weights.phase not in coordinator_pb2.WeightReport.Phase.values()[1:]:
            raise field_error(f"{field}.phase", "be PREPARED, ACTIVE, FAILED or PROBE_MISMATCH", weights.phase)


def _check_held(field: str, held: Sequence[types_pb2.PolicyVersion]) -> None:
    if len(held) > VERSIONS_MAX:
        raise field_error(field, f"have at most {VERSIONS_MAX} entries", len(held))
    for index, version in enumerate(held):
        _check_node_version(f"{field}[{index}]", version)


def _check_node_version(field: str, version: types_pb2.PolicyVersion) -> None:
    check_name(f"{field}.policy", version.policy)
    for name in ("step", "incarnation"):
        if getattr(version, name) < 0:
            raise field_error(f"{field}.{name}", "be >= 0", getattr(version, name))


# Finished episodes ----------------------------------------------------------------------------------------------------


def why_invalid_report(report: coordinator_pb2.EpisodeReport) -> str:
    """Return what is wrong with the fields of a finished episode; empty if nothing."""
    try:
        if report.outcome == coordinator_pb2.EPISODE_OUTCOME_COMPLETED:
            _check_completed(report)
        elif report.outcome not in coordinator_pb2.EpisodeOutcome.values()[1:]:
            raise field_error("outcome", "be COMPLETED, INFRA_FAILURE or CANCELLED", report.outcome)
    except InvalidInput as error:
        return error.message
    return ""


def _check_completed(report: coordinator_pb2.EpisodeReport) -> None:
    if len(report.samples) > SAMPLES_PER_EPISODE_MAX:
        raise field_error("samples", f"have at most {SAMPLES_PER_EPISODE_MAX} entries", len(report.samples))
    if report.samples and not 1 <= report.payload.sequence < 1 << 63:
        raise field_error("payload.sequence", "be the sequence of the stored payload, >= 1", report.payload.sequence)
    if not report.samples and not is_reason(report.failure.reason):
        raise field_error("failure.reason", REASON_FORM, report.failure.reason)
    if report.payload.size_bytes < 0:
        raise field_error("payload.size_bytes", "be >= 0", report.payload.size_bytes)
    if not 0 <= report.num_tool_calls <= TOOL_CALLS_MAX:
        raise field_error("num_tool_calls", f"be in [0, {TOOL_CALLS_MAX}]", report.num_tool_calls)
    if not 0 <= report.num_tool_calls_failed <= report.num_tool_calls:
        must = f"be in [0, num_tool_calls = {report.num_tool_calls}]"
        raise field_error("num_tool_calls_failed", must, report.num_tool_calls_failed)
    check_unique("samples.sample_id", [sample.sample_id for sample in report.samples])
    for index, sample in enumerate(report.samples):
        _check_sample(sample, f"samples[{index}]", report.key.episode)


def _check_sample(sample: types_pb2.SampleMeta, field: str, episode: str) -> None:
    suffix = sample.sample_id.removeprefix(episode)
    if len(sample.sample_id) > ID_CHARS_MAX or suffix == sample.sample_id or not _SAMPLE_SUFFIX.fullmatch(suffix):
        must = (
            f"be the episode's id {episode!r}, one of - . / and letters, digits, - _ . /, at most {ID_CHARS_MAX} "
            "characters"
        )
        raise field_error(f"{field}.sample_id", must, sample.sample_id)
    check_name(f"{field}.policy", sample.policy)
    if sample.leaf < 0:
        raise field_error(f"{field}.leaf", "be >= 0", sample.leaf)
    if not 0 <= sample.num_tokens <= SAMPLE_TOKENS_MAX:
        raise field_error(f"{field}.num_tokens", f"be in [0, {SAMPLE_TOKENS_MAX}]", sample.num_tokens)
    if not 0 <= sample.num_sampled_tokens <= sample.num_tokens:
        raise field_error(
            f"{field}.num_sampled_tokens", f"be in [0, num_tokens = {sample.num_tokens}]", sample.num_sampled_tokens
        )
    _check_trained(sample, field)
    _check_summary(sample, f"{field}.summary")
    _check_rewards(sample.rewards, f"{field}.rewards")


def _check_trained(sample: types_pb2.SampleMeta, at: str) -> None:
    field = f"{at}.steps"
    if len(sample.steps) > SPANS_MAX:
        raise field_error(field, f"have at most {SPANS_MAX} entries", len(sample.steps))
    for index, span in enumerate(sample.steps):
        for name, least in (("step", 0), ("incarnation", 0), ("num_tokens", 1)):
            if getattr(span, name) < least:
                raise field_error(f"{field}[{index}].{name}", f"be >= {least}", getattr(span, name))
    check_unique(field, [f"step {span.step}, incarnation {span.incarnation}" for span in sample.steps])
    known = types_pb2.SegmentSource.values()[2:]
    for index, external in enumerate(sample.external):
        if external.source not in known:
            raise field_error(f"{at}.external[{index}].source", "be a source other than POLICY", external.source)
        if external.num_tokens < 1:
            raise field_error(f"{at}.external[{index}].num_tokens", "be >= 1", external.num_tokens)
    check_unique(f"{at}.external", [types_pb2.SegmentSource.Name(external.source) for external in sample.external])
    trained = sum(span.num_tokens for span in sample.steps) + sum(span.num_tokens for span in sample.external)
    if trained > sample.num_tokens:
        raise field_error(field, f"have with `external` at most num_tokens = {sample.num_tokens} tokens", trained)


def _check_summary(sample: types_pb2.SampleMeta, field: str) -> None:
    summary = sample.summary
    check_text(f"{field}.role", summary.role, ID_CHARS_MAX)
    check_text(f"{field}.variant", summary.variant, ID_CHARS_MAX)
    if found := summaries.why_invalid_summary(summary):
        name, must, got = found
        raise field_error(f"{field}.{name}", must, got)
    if summary.turns and summary.turns[-1].segment > sample.leaf:
        raise field_error(
            f"{field}.turns[{len(summary.turns) - 1}].segment", f"be <= leaf = {sample.leaf}", summary.turns[-1].segment
        )
    if (num_tokens := sum(turn.num_tokens for turn in summary.turns)) > sample.num_tokens:
        raise field_error(f"{field}.turns", f"have at most num_tokens = {sample.num_tokens} tokens", num_tokens)


def _check_rewards(rewards: Sequence[types_pb2.Reward], field: str) -> None:
    if len(rewards) > REWARDS_MAX:
        raise field_error(field, f"have at most {REWARDS_MAX} entries", len(rewards))
    for index, reward in enumerate(rewards):
        _check_reward(reward, f"{field}[{index}]")


def _check_reward(reward: types_pb2.Reward, field: str) -> None:
    if not 1 <= len(reward.name) <= NAME_CHARS_MAX:
        raise field_error(f"{field}.name", f"have 1 to {NAME_CHARS_MAX} characters", reward.name)
    check_text(f"{field}.scorer", reward.scorer, ID_CHARS_MAX)
    check_text(f"{field}.answer", reward.answer, ID_CHARS_MAX)
    if reward.segment < -1:
        raise field_error(f"{field}.segment", "be >= -1", reward.segment)
    if reward.outcome not in types_pb2.RewardOutcome.values()[1:]:
        raise field_error(f"{field}.outcome", "be OK, INFRA_FAILURE or NOT_APPLICABLE", reward.outcome)


# Decisions on groups --------------------------------------------------------------------------------------------------


def check_decision(answer: reward_pb2.FinalizeGroupResponse) -> None:
    """Check the decision of a finalizer."""
    if answer.decision not in reward_pb2.GroupDecision.values()[1:]:
        raise field_error("decision", "be KEEP, FILTER or EXTEND", answer.decision)
    if not is_reason(answer.reason):
        raise field_error("reason", REASON_FORM, answer.reason)
    if answer.decision == reward_pb2.GROUP_DECISION_EXTEND and not 1 <= answer.num_extend <= EXTEND_MAX:
        raise field_error("num_extend", f"be in [1, {EXTEND_MAX}]", answer.num_extend)
    check_unique("adjusted", [sample.sample_id for sample in answer.adjusted])
    for index, sample in enumerate(answer.adjusted):
        _check_rewards(sample.rewards, f"adjusted[{index}].rewards")
        for place, reward in enumerate(sample.rewards):
            if reward.outcome == types_pb2.REWARD_OUTCOME_OK and not in_reward_range(reward.value):
                raise field_error(f"adjusted[{index}].rewards[{place}].value", RANGE_FORM, reward.value)
    check_unique("dropped", [member.sample_id for member in answer.dropped])
    for index, member in enumerate(answer.dropped):
        check_id(f"dropped[{index}].sample_id", member.sample_id)
        if not is_word(member.reason):
            raise field_error(f"dropped[{index}].reason", WORD_FORM, member.reason)
        if member.reason in RESERVED_REASONS:
            raise field_error(f"dropped[{index}].reason", f"not be one of {', '.join(RESERVED_REASONS)}", member.reason)


# Parts ----------------------------------------------------------------------------------------------------------------


def _check_learner(request: TrainerMessage | run_pb2.AttachTrainerRequest) -> None:
    check_run(request.run)
    if not isinstance(request, run_pb2.PublishVersionRequest):  # its version names the policy
        check_name("policy", request.policy)
    check_name("learner", request.learner)


def _check_dispositions(samples: Sequence[run_pb2.DisposedSample]) -> None:
    check_unique("samples", [sample.sample_id for sample in samples])
    known = (run_pb2.SAMPLE_DISPOSITION_USED, run_pb2.SAMPLE_DISPOSITION_DROPPED)
    for index, sample in enumerate(samples):
        check_id(f"samples[{index}].sample_id", sample.sample_id)
        if sample.disposition not in known:
            raise field_error(f"samples[{index}].disposition", "be USED or DROPPED", sample.disposition)
        if not is_reason(sample.reason):
            raise field_error(f"samples[{index}].reason", REASON_FORM, sample.reason)


def check_unique(field: str, values: Iterable[str]) -> None:
    seen: set[str] = set()
    for value in values:
        if value in seen:
            raise field_error(field, "name each once", value, "it is named twice")
        seen.add(value)
