"""Changes of groups that several facts share: add and end episodes, end samples, count evaluations, advance groups.

Only `apply.py` uses it, and decides what each fact changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.core.facts import Purpose, Reward, RewardOutcome, SampleEnd, SampleMeta, Task
from rollmesh.services.coordinator.core.state import (
    RESULTS_KEPT_MAX,
    REWARD_NAMES_MAX,
    RUN_ENDED,
    VOID_VERSION,
    EpisodeResult,
    EpisodeState,
    EpisodeStatus,
    EvalState,
    GroupPhase,
    GroupState,
    OpenTask,
    SampleState,
    State,
    end_text,
    task_bytes,
)
from rollmesh.shared.domain.text import short_labels

EVALS_KEPT_MAX = 1000
OF_ENVIRONMENT = "environment@"
"""Beginning of the label of the scorer that returns rewards of the environment as they were given."""
LABELS_MAX = 256
"""Number of labels whose success an evaluation keeps. A label with another value for each task is not a group of
tasks."""


def add_episodes(state: State, group: GroupState, num: int) -> None:
    first = len(group.episodes)
    for index in range(first, first + num):
        episode = EpisodeState(episode=f"{group.group}.{index}")
        group.episodes[episode.episode] = episode
        state.pending_of(group.purpose).append((group.group, episode.episode))
    group.num_unfinished += num
    state.counters_of(group).reserve(num)


def finish(state: State, group: GroupState, episode: EpisodeState, status: EpisodeStatus) -> None:
    """Make a pending or leased episode SCORED or ENDED."""
    if episode.status is EpisodeStatus.PENDING:
        state.pending_of(group.purpose).remove((group.group, episode.episode))
    episode.status = status
    group.num_unfinished -= 1


def without_evidence(rewards: tuple[Reward, ...]) -> tuple[Reward, ...]:
    """Return the rewards as groups, batches and finalizers have them. The evidence remains in EpisodeScored and in the
    payload, because no decision reads it."""
    if not any(reward.evidence for reward in rewards):
        return rewards
    return tuple(msgspec.structs.replace(reward, evidence="") for reward in rewards)


def settle(state: State, group: GroupState) -> None:
    """Advance a group when its last episode has ended, and remove it when its last sample has ended. A submitted task
    whose group was lost is drawn again."""
    if group.unfinished:
        return
    if group.phase is GroupPhase.OPEN:
        group.phase = GroupPhase.FINALIZING
        group.given = ()
    if group.num_live == 0:
        del state.groups[group.group]
        used = any(sample.end in (SampleEnd.TRAINED, SampleEnd.EXPORTED) for sample in group.samples.values())
        drawn = group.purpose in (Purpose.TRAIN, Purpose.EXPORT) and not group.source
        if group.lost and not used and drawn and group.task.task_id in state.submitted:
            open_task(state, group.task, 0, 0)


def open_task(state: State, task: Task, num_key_bytes: int, place: int) -> None:
    """Let a submitted task wait for admission at `place`."""
    waiting = OpenTask(task=task, num_bytes=task_bytes(task) + num_key_bytes)
    state.submitted_open.insert(place, waiting)
    state.submitted_open_bytes += waiting.num_bytes


def end_episode(state: State, group: GroupState, episode: EpisodeState, end: SampleEnd, reason: str) -> None:
    finish(state, group, episode, EpisodeStatus.ENDED)
    group.lost |= reason in (RUN_ENDED, VOID_VERSION)
    state.counters_of(group).end(end, reason)
    keep_result(state, group, episode, end_text(end, reason), ())


def keep_result(
    state: State, group: GroupState, episode: EpisodeState, end: str, samples: Sequence[SampleMeta]
) -> None:
    """Keep how an episode of a submitted task has ended."""
    if not state.the_spec.submitted_tasks or group.source or group.purpose not in (Purpose.TRAIN, Purpose.EXPORT):
        return
    given = [reward for sample in samples for reward in sample.rewards if reward.scorer.startswith(OF_ENVIRONMENT)]
    state.episode_results[episode.episode] = EpisodeResult(
        lease_id=episode.lease_id,
        end=end,
        sample_ids=tuple(sample.sample_id for sample in samples),
        rewards={reward.name: reward.value for reward in given if reward.outcome is RewardOutcome.OK},
    )
    while len(state.episode_results) > RESULTS_KEPT_MAX:
        del state.episode_results[next(iter(state.episode_results))]


def end_samples(state: State, group: GroupState, sample_ids: Iterable[str], end: SampleEnd, reason: str) -> None:
    for sample_id in sample_ids:
        end_sample(state, group, group.samples[sample_id], end, reason)
    settle(state, group)


def end_sample(state: State, group: GroupState, sample: SampleState, end: SampleEnd, reason: str) -> None:
    assert sample.end is SampleEnd.LIVE, f"sample {sample.sample_id} ended twice: {sample.end.name}, then {end.name}"
    sample.end = end
    sample.reason = reason
    group.lost |= reason in (RUN_ENDED, VOID_VERSION)
    state.counters_of(group, sample).end(end, reason)


def open_eval(state: State, fact: f.GroupReserved) -> None:
    found = state.eval_of(fact.step_min, fact.incarnation_min)
    if found is None:
        found = EvalState(step=fact.step_min, incarnation=fact.incarnation_min, split=fact.task.split)
        state.evals.append(found)
        del state.evals[:-EVALS_KEPT_MAX]
    found.num_reserved += fact.num_episodes
    found.num_open += fact.num_episodes


def count_eval(state: State, group: GroupState, rewards: tuple[Reward, ...]) -> None:
    result = state.eval_of(group.step_min, group.incarnation_min)
    if result is None:
        return  # older than the evaluations kept
    result.num_samples += 1
    for reward in rewards:
        if reward.outcome is RewardOutcome.OK and (
            reward.name in {*result.reward_sums, state.the_spec.success_reward}
            or len(result.reward_sums) < REWARD_NAMES_MAX
        ):
            result.reward_sums[reward.name] = result.reward_sums.get(reward.name, 0.0) + reward.value
            if reward.name == state.the_spec.success_reward:
                result.graded |= reward.value not in (0.0, 1.0)
                for label, value in short_labels(group.task.labels).items():
                    key = f"{label}={value}"
                    if key not in result.label_sums and len(result.label_sums) >= LABELS_MAX:
                        continue
                    result.label_sums[key] = result.label_sums.get(key, 0.0) + reward.value
                    result.label_nums[key] = result.label_nums.get(key, 0) + 1


def close_eval_episode(state: State, group: GroupState) -> None:
    if group.purpose is Purpose.EVAL:
        result = state.eval_of(group.step_min, group.incarnation_min)
        if result is not None:
            result.num_open -= 1
