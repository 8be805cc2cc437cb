"""Find the episodes that applications open, in the state of a run.

Pure reads: an episode is opened by the submission of its task, and ends with the report of its worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile

from rollmesh.services.coordinator.core.facts import Purpose, SampleEnd, Task
from rollmesh.services.coordinator.core.state import (
    RESULTS_KEPT_MAX,
    EpisodeResult,
    EpisodeState,
    EpisodeStatus,
    GroupState,
    State,
    end_text,
)
from rollmesh.shared.domain.application_reasons import DISCARDED
from rollmesh.shared.errors import EpisodeConflict, EpisodeLost, EpisodeOver, RunEnded, UnknownEpisode, field_error

_ENDED = (EpisodeStatus.SCORED, EpisodeStatus.ENDED)


def is_known(state: State, key: str, index: int) -> bool:
    """Return whether a key was submitted. Raises InvalidInput if a new key cannot have the episode `index`."""
    if key in state.submitted:
        return True
    if state.spec is not None:
        _check_index(index, state.spec.group_size)
    return False


def task_of(state: State, key: str) -> Task | None:
    """Return the task of a key while it waits or its group is in progress; None if the key is not known. Raises
    EpisodeOver if its group has left the state."""
    if (group := _group_of(state, key)) is not None:
        return group.task
    if key not in state.submitted:
        return None
    waiting = (*(one.task for one in state.submitted_open), *(one.task for one in state.replays))
    task = next((task for task in waiting if task.task_id == key), None)
    if task is None:
        raise _over(key, "answered")
    return task


class Search:
    """Finds the lease of an episode in a state that is read repeatedly, for many applications at once. The first read
    looks at all groups and waiting tasks, and a later one only at the groups that are new, because a task waits until
    it gets a group."""

    def __init__(self, key: str, index: int) -> None:
        self._key = key
        self._index = index
        self._group = ""
        self._num_groups: int | None = None
        """Number of groups at the last read; None before the first one."""

    def task(self, state: State) -> Task | None:
        """Return the task, as `task_of`; None also if nothing has changed since the last read."""
        if self._num_groups is None or (self._group and self._group not in state.groups):
            task, group = task_of(state, self._key), _group_of(state, self._key)
        elif self._group:
            return None
        else:
            new = takewhile(lambda group: group.number >= (self._num_groups or 0), reversed(state.groups.values()))
            group = next((one for one in new if _is_of(one, self._key)), None)
            task = group.task if group is not None else None
        self._num_groups = state.num_groups
        self._group = group.group if group is not None else ""
        return task

    def lease(self, state: State) -> str:
        """Return the lease under which a worker holds the episode of the task that `task` found; empty while none does.
        Raises EpisodeOver if it has ended, and RunEnded if no worker will get it."""
        group, index = state.groups.get(self._group), self._index
        _check_index(index, len(group.episodes) if group is not None else state.the_spec.group_size)
        if group is None:
            if why := state.ended or state.stopping:
                raise RunEnded(
                    f"run {state.the_spec.run} has ended: {why}; no worker serves the episode of key {self._key!r}"
                )
            return ""
        episode = group.episodes[f"{group.group}.{index}"]
        if episode.status in _ENDED:
            result = state.episode_results.get(episode.episode)
            raise _over(self._key, (result.end if result is not None else "") or "scored")
        return episode.lease_id if episode.status is EpisodeStatus.LEASED else ""


def result_of(state: State, lease_id: str) -> EpisodeResult | None:
    """Return how the attempt with a lease has ended; None while its worker holds it. Raises EpisodeLost for an attempt
    that was lost, and UnknownEpisode."""
    name = lease_id.rpartition("#")[0]
    result, episode = state.episode_results.get(name), _episode(state, name)
    last = result.lease_id if result is not None else episode.lease_id if episode is not None else ""
    forgotten = result is None and episode is not None and episode.status in _ENDED
    if not last or forgotten or _attempt(lease_id) > _attempt(last):
        raise UnknownEpisode(
            f"no episode of run {state.the_spec.run} has the lease {lease_id!r:.100}, or it ended before the newest "
            f"{RESULTS_KEPT_MAX} episodes; pass `lease_id` as OpenEpisode returned it",
            lease_id=lease_id,
        )
    if result is not None and last == lease_id:
        return result
    if result is None and episode is not None and last == lease_id and episode.status is EpisodeStatus.LEASED:
        return None
    cause = episode.cause if episode is not None else ""
    raise EpisodeLost(
        f"the attempt {lease_id} of the episode was lost{f' ({cause})' if cause else ''}, and nothing of it counts; "
        "open the episode again with OpenEpisode and the same key",
        lease_id=lease_id,
    )


def check_result(result: EpisodeResult, rewards: Mapping[str, float]) -> tuple[str, ...]:
    """Return the samples of an ended episode that an application finishes with `rewards`. Raises EpisodeConflict if
    it was finished with others, and EpisodeOver if it ended otherwise."""
    discarded = result.end == end_text(SampleEnd.FILTERED, DISCARDED)
    if result.end and not discarded:
        raise _over(result.lease_id, result.end)
    if discarded is bool(rewards) or any(result.rewards.get(name, rewards[name]) != rewards[name] for name in rewards):
        raise conflict(result.lease_id)
    return result.sample_ids


def conflict(lease_id: str) -> EpisodeConflict:
    return EpisodeConflict(
        f"the episode {lease_id} was finished with other rewards, and the first ones count; send the same ones, or "
        "open another episode",
        lease_id=lease_id,
    )


def _check_index(index: int, num: int) -> None:
    if not 0 <= index < num:
        raise field_error("index", f"be in [0, {num}), the episodes of the key", index)


def _over(name: str, end: str) -> EpisodeOver:
    return EpisodeOver(f"the episode {name} has ended: {end}; open another one with a new key", end=end)


def _group_of(state: State, key: str) -> GroupState | None:
    """Return the newest group of a submitted task."""
    found = (group for group in state.groups.values() if _is_of(group, key))
    return max(found, key=lambda group: group.number, default=None)


def _is_of(group: GroupState, key: str) -> bool:
    return group.task.task_id == key and _is_open_to_clients(group)


def _episode(state: State, name: str) -> EpisodeState | None:
    group = state.groups.get(name.rpartition(".")[0])
    if group is None or not state.the_spec.submitted_tasks or not _is_open_to_clients(group):
        return None
    return group.episodes.get(name)


def _is_open_to_clients(group: GroupState) -> bool:
    return group.purpose in (Purpose.TRAIN, Purpose.EXPORT) and not group.source


def _attempt(lease_id: str) -> int:
    attempt = lease_id.rpartition("#")[2]
    return int(attempt) if attempt.isdecimal() and len(attempt) < 10 else 1 << 31
