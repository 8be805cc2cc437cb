"""Decisions about groups and episodes: admission, leases, reports, retries, finalisation, evaluation."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from math import ceil

from rollmesh.services.coordinator.core import bound
from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core.records import (
    EXTEND_FACTOR_MAX,
    GroupDecision,
    Purpose,
    SampleEnd,
    SampleRewards,
    Task,
)
from rollmesh.services.coordinator.core.state import EpisodeState, EpisodeStatus, GroupPhase, GroupState
from rollmesh.services.coordinator.core.turn import (
    CancelEpisodes,
    DeadLetter,
    DrawTasks,
    FinalizeGroup,
    Turn,
    WorkerWait,
)

DRAW_MAX = 64
"""Most tasks asked for at once; the selector then sees fresh outcomes between draws."""


def acquire(turn: Turn, request: i.AcquireRollouts) -> None:
    """Queue a worker; `grant` answers it in this turn or a later one."""
    turn.volatile.workers.append(
        WorkerWait(request.ticket, request.node_id, request.num_max, turn.now + request.wait_s)
    )


def grant(turn: Turn) -> None:
    """Give pending episodes to waiting workers, first come first served; answer those whose wait is over."""
    waiting = turn.volatile.workers
    while waiting and (turn.state.pending or turn.state.pending_eval):
        worker = waiting.pop(0)
        leases = [_lease(turn, worker.node_id) for _ in range(min(worker.num_max, _num_pending(turn)))]
        turn.reply(worker.ticket, i.Acquired(leases=tuple(leases)))
    for worker in [w for w in waiting if turn.now >= w.deadline]:
        waiting.remove(worker)
        turn.reply(worker.ticket, i.Acquired(waiting_for=why_no_work(turn)))


def _num_pending(turn: Turn) -> int:
    return len(turn.state.pending) + len(turn.state.pending_eval)


def _lease(turn: Turn, node_id: str) -> i.EpisodeLease:
    name, episode_id = (turn.state.pending_eval or turn.state.pending)[0]
    group = turn.state.groups[name]
    episode = group.episodes[episode_id]
    attempt = episode.attempt + 1
    lease_id = f"{episode_id}#{attempt}"
    turn.emit(f.EpisodeLeased(group=name, episode=episode_id, attempt=attempt, lease_id=lease_id, node_id=node_id))
    turn.volatile.episode_deadlines[lease_id] = turn.now + turn.spec.episode_lease_s
    turn.volatile.group_deadlines.setdefault(name, turn.now + turn.spec.group_s_max)
    return i.EpisodeLease(
        lease_id=lease_id,
        group=name,
        episode=episode_id,
        attempt=attempt,
        purpose=group.purpose,
        task=group.task,
        policy=group.policy,
        step_min=group.step_min,
        incarnation_min=group.incarnation_min,
        lease_s=turn.spec.episode_lease_s,
        seed=episode_seed(turn.spec.seed, group, episode_id),
    )


def episode_seed(seed: int, group: GroupState, episode_id: str) -> int:
    """Key of an episode's draws: the same for every try; for evaluation the same at every step (common random numbers)."""
    index = episode_id.rsplit(".", 1)[1]
    name = f"eval/{group.draw}/{index}" if group.purpose is Purpose.EVAL else f"{group.group}/{index}"
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "big") >> 1


def why_no_work(turn: Turn) -> str:
    """For people: what a worker without work waits for."""
    state, clock = turn.state, turn.clock
    if state.ended:
        return f"run ended: {state.ended}"
    if clock.published is None:
        return f"a published version of incarnation {clock.incarnation}"
    if state.stopping:
        return f"run ends: {state.stopping}"
    if clock.published in clock.quarantined:
        cause = clock.refusals.get(clock.published.name, "")
        return f"weights that the nodes accept; {clock.published.name} was refused: {cause}"
    if bound.num_admissible(state) == 0:
        live = len(state.training_groups(*GroupPhase))
        if turn.spec.exports:
            return f"nothing: all {state.num_groups} groups are admitted, {live} have not ended"
        return f"admission: {live} groups live, published step {clock.published.step}, eta {turn.spec.max_staleness}"
    return turn.volatile.data_waiting or "tasks from the data service"


def want_tasks(turn: Turn) -> None:
    """Ask for tasks while workers wait and admission has room; dead letters to be tried again come first."""
    purpose, split = (Purpose.EXPORT, turn.spec.export_split) if turn.spec.exports else (Purpose.TRAIN, "")
    for replay in list(turn.state.replays):
        if _demand(turn) > 0 and bound.num_admissible(turn.state) > 0:
            _reserve(turn, purpose, replay.task, replay.draw, dead_id=replay.dead_id)
    demand = _demand(turn)
    if demand <= 0 or turn.volatile.drawing or turn.volatile.exhausted:
        return
    num = min(bound.num_admissible(turn.state), ceil(demand / turn.spec.group_size), DRAW_MAX)
    if num > 0:
        turn.volatile.drawing = True
        turn.effect(DrawTasks(purpose, turn.state.next_draw, num, split))


def _demand(turn: Turn) -> int:
    """Episodes that workers wait for and nobody has."""
    return sum(w.num_max for w in turn.volatile.workers) - len(turn.state.pending)


def tasks_drawn(turn: Turn, answer: i.TasksDrawn) -> None:
    """Reserve a group per task, as far as admission still has room. What is not recorded was not drawn."""
    if answer.purpose is Purpose.EVAL:
        _reserve_eval(turn, answer)
        return
    turn.volatile.drawing = False
    turn.volatile.data_waiting = "" if answer.tasks else "the data service has no more tasks"
    for draw, task in answer.tasks:
        if bound.num_admissible(turn.state) == 0:
            return
        _reserve(turn, answer.purpose, task, draw)


def _reserve(turn: Turn, purpose: Purpose, task: Task, draw: int, dead_id: int = 0) -> None:
    turn.emit(
        f.GroupReserved(
            group=f"g{turn.state.num_groups}",
            purpose=purpose,
            policy=turn.clock.policy,
            task=task,
            draw=draw,
            num_episodes=turn.spec.group_size,
            update_intended=0 if turn.spec.exports else bound.next_intended_update(turn.state),
            step_min=0 if turn.spec.exports else bound.step_min(turn.state),
            incarnation_min=turn.clock.incarnation,
            dead_id=dead_id,
        )
    )


def draw_failed(turn: Turn, answer: i.DrawFailed) -> None:
    """Nothing was drawn. Training asks again with the next turn; an evaluation without tasks is given up, an export ends."""
    if answer.purpose is Purpose.EVAL:
        key = (answer.step, answer.incarnation)
        turn.volatile.eval_deadlines.pop(key, None)
        turn.volatile.evals_given_up.add(key)
    else:
        turn.volatile.drawing = False
        turn.volatile.exhausted = answer.exhausted
        turn.volatile.data_waiting = f"the data service: {answer.cause}"


def want_eval(turn: Turn) -> None:
    """Ask for the evaluation of the version just published, where the spec asks for one."""
    version, spec = turn.clock.published, turn.spec
    if version is None or spec.eval_every == 0 or spec.eval_tasks == 0:
        return
    last = bool(turn.state.stopping) and version.step == turn.clock.applied
    due = version.step % spec.eval_every == 0 or last
    key = (version.step, version.incarnation)
    asked = key in turn.volatile.eval_deadlines or key in turn.volatile.evals_given_up
    if due and not asked and turn.state.eval_of(*key) is None:
        turn.volatile.eval_deadlines[key] = turn.now + spec.eval_s_max
        turn.effect(DrawTasks(Purpose.EVAL, 0, spec.eval_tasks, spec.eval_split, *key))


def _reserve_eval(turn: Turn, answer: i.TasksDrawn) -> None:
    step, incarnation = key = answer.step, answer.incarnation
    if key not in turn.volatile.eval_deadlines or turn.state.eval_of(*key) is not None:
        return  # it was cancelled before its tasks came, or they came before
    for draw, task in answer.tasks:
        turn.emit(
            f.GroupReserved(
                group=f"e{step}.{incarnation}.{draw}",
                purpose=Purpose.EVAL,
                policy=turn.clock.policy,
                task=task,
                draw=draw,
                num_episodes=1,
                step_min=step,
                incarnation_min=incarnation,
            )
        )


def renew(turn: Turn, request: i.RenewLeases) -> None:
    gone = []
    for lease_id in request.lease_ids:
        if lease_id in turn.volatile.episode_deadlines:
            turn.volatile.episode_deadlines[lease_id] = turn.now + turn.spec.episode_lease_s
        else:
            gone.append(lease_id)
    turn.reply(request.ticket, i.Renewed(gone=tuple(gone), lease_s=turn.spec.episode_lease_s))


def give_back(
    turn: Turn, group: GroupState, episode: EpisodeState, *, counts: bool, cause: str, traceback: str = ""
) -> None:
    """Give an episode another try, or end it and quarantine its task when its tries are used up."""
    turn.volatile.episode_deadlines.pop(episode.lease_id, None)
    if counts:
        turn.volatile.note_failure(cause, traceback)
    if counts and episode.failures + 1 >= turn.spec.tries_max:
        turn.emit(
            f.EpisodeEnded(
                group=group.group, episode=episode.episode, end=SampleEnd.FAILED, reason="TRIES_EXHAUSTED", cause=cause
            )
        )
        draw, tries = group.draw, turn.spec.tries_max
        turn.effect(DeadLetter(episode.episode, cause, group.task, group.group, group.purpose, draw, tries, traceback))
    else:
        turn.emit(f.EpisodeReturned(group=group.group, episode=episode.episode, counts=counts, cause=cause))


def node_dead(turn: Turn, node: i.NodeDead) -> None:
    """Give a dead worker's episodes to others."""
    for group, episode in list(leased_episodes(turn)):
        if episode.node_id == node.node_id:
            give_back(turn, group, episode, counts=True, cause=f"NODE_DEAD {node.node_id}")


def leased_episodes(turn: Turn) -> Iterable[tuple[GroupState, EpisodeState]]:
    for group in list(turn.state.groups.values()):
        for episode in group.episodes.values():
            if episode.status is EpisodeStatus.LEASED:
                yield group, episode


def expire(turn: Turn) -> None:
    """Take back what is overdue: episode leases, whole groups, evaluations."""
    overdue = {lease for lease, at in turn.volatile.episode_deadlines.items() if turn.now >= at}
    for group, episode in list(leased_episodes(turn)) if overdue else ():
        if episode.lease_id in overdue:
            _cancel_at_node(turn, [episode], "LEASE_EXPIRED")
            give_back(turn, group, episode, counts=True, cause="LEASE_EXPIRED")
    for name, deadline in list(turn.volatile.group_deadlines.items()):
        found = turn.state.groups.get(name)
        if found is None or not found.unfinished:
            del turn.volatile.group_deadlines[name]
        elif turn.now >= deadline:
            turn.volatile.overdue.add(name)
            cancel_unfinished(turn, found, "GROUP_DEADLINE")
    for key, deadline in list(turn.volatile.eval_deadlines.items()):
        _expire_eval(turn, key, deadline)


def _expire_eval(turn: Turn, key: tuple[int, int], deadline: float) -> None:
    result = turn.state.eval_of(*key)
    if result is not None and result.num_open == 0:
        del turn.volatile.eval_deadlines[key]
    elif turn.now >= deadline:
        turn.volatile.evals_given_up.add(key)
        _cancel_eval(turn, key, "EVAL_DEADLINE")


def _cancel_eval(turn: Turn, key: tuple[int, int], reason: str) -> None:
    del turn.volatile.eval_deadlines[key]
    for group in list(turn.state.groups.values()):
        if group.purpose is Purpose.EVAL and (group.step_min, group.incarnation_min) == key:
            cancel_unfinished(turn, group, reason)


def roll_back(turn: Turn, to_update: int) -> None:
    """Before a roll-back: end what only weights of the present incarnation could serve. No node serves them afterwards, so open
    evaluations are cancelled, and episodes that are out of reach are leased again; both through no fault of a worker."""
    for key in list(turn.volatile.eval_deadlines):
        _cancel_eval(turn, key, "ROLLED_BACK")
    for group in bound.out_of_reach(turn.state, to_update):
        leased = [e for e in group.episodes.values() if e.status is EpisodeStatus.LEASED]
        _cancel_at_node(turn, leased, "ROLLED_BACK")
        for episode in leased:
            give_back(turn, group, episode, counts=False, cause="ROLLED_BACK")


def cancel_unfinished(turn: Turn, group: GroupState, reason: str) -> None:
    """End a group's unfinished episodes; its finished ones go on."""
    unfinished = [e for e in group.episodes.values() if e.status in (EpisodeStatus.PENDING, EpisodeStatus.LEASED)]
    _cancel_at_node(turn, [e for e in unfinished if e.status is EpisodeStatus.LEASED], reason)
    for episode in unfinished:
        turn.volatile.episode_deadlines.pop(episode.lease_id, None)
        turn.emit(f.EpisodeEnded(group=group.group, episode=episode.episode, end=SampleEnd.CANCELLED, reason=reason))


def _cancel_at_node(turn: Turn, episodes: Iterable[EpisodeState], reason: str) -> None:
    by_node: dict[str, list[str]] = {}
    for episode in episodes:
        by_node.setdefault(episode.node_id, []).append(episode.lease_id)
    for node_id, lease_ids in by_node.items():
        turn.effect(CancelEpisodes(node_id, tuple(lease_ids), reason))


def cancel_group(turn: Turn, group: GroupState, reason: str) -> None:
    """End a whole group that no batch holds."""
    cancel_unfinished(turn, group, reason)
    live = tuple(s.sample_id for s in group.live_samples())
    if live:
        turn.emit(f.SamplesEnded(group=group.group, sample_ids=live, end=SampleEnd.CANCELLED, reason=reason))


def want_finalized(turn: Turn) -> None:
    """Ask for a decision on every group that has ended; evaluations end by themselves."""
    for group in [g for g in turn.state.groups.values() if g.phase is GroupPhase.FINALIZING]:
        if group.purpose is Purpose.EVAL:
            live = tuple(s.sample_id for s in group.live_samples())
            turn.emit(f.SamplesEnded(group=group.group, sample_ids=live, end=SampleEnd.EXPORTED, reason="EVALUATED"))
        elif group.group not in turn.volatile.finalizing:
            turn.volatile.finalizing.add(group.group)
            turn.effect(FinalizeGroup(group.group, group.group in turn.volatile.overdue))


def group_decided(turn: Turn, answer: i.GroupDecided) -> None:
    """Keep, filter or extend a group."""
    turn.volatile.finalizing.discard(answer.group)
    group = turn.state.groups.get(answer.group)
    if group is None or group.phase is not GroupPhase.FINALIZING:
        return  # cancelled meanwhile
    adjusted = {a.sample_id: a.rewards for a in answer.adjusted if a.sample_id in group.samples}
    members = tuple(
        SampleRewards(sample_id=s.sample_id, rewards=adjusted.get(s.sample_id, s.rewards))
        for s in group.samples.values()
    )
    extend = answer.decision is GroupDecision.EXTEND and _may_grow(turn, group, answer.num_extend)
    decision = GroupDecision.KEEP if answer.decision is GroupDecision.EXTEND and not extend else answer.decision
    turn.emit(
        f.GroupFinalized(
            group=group.group,
            decision=decision,
            reason=answer.reason,
            adjusted=tuple(SampleRewards(sample_id=k, rewards=v) for k, v in adjusted.items()),
            members=members,
        )
    )
    if extend:
        turn.emit(f.EpisodesAdded(group=group.group, num_episodes=answer.num_extend))
    elif decision is GroupDecision.KEEP:
        _drop_untrainable(turn, group)
    if group.group not in turn.state.groups:
        turn.volatile.overdue.discard(group.group)


def finalize_failed(turn: Turn, answer: i.FinalizeFailed) -> None:
    """End a group that the reward service cannot decide on. This is an infra failure; the task becomes a dead letter."""
    turn.volatile.finalizing.discard(answer.group)
    group = turn.state.groups.get(answer.group)
    if group is None or group.phase is not GroupPhase.FINALIZING:
        return  # cancelled meanwhile
    turn.volatile.note_failure(answer.cause)
    live = tuple(s.sample_id for s in group.live_samples())
    turn.emit(f.SamplesEnded(group=group.group, sample_ids=live, end=SampleEnd.FAILED, reason="NOT_FINALIZED"))
    episode = next(iter(group.episodes))
    turn.effect(DeadLetter(episode, answer.cause, group.task, group.group, group.purpose, group.draw, 1))


def _may_grow(turn: Turn, group: GroupState, num: int) -> bool:
    room = EXTEND_FACTOR_MAX * turn.spec.group_size - len(group.episodes)
    return 1 <= num <= room and group.group not in turn.volatile.overdue


def _drop_untrainable(turn: Turn, group: GroupState) -> None:
    """Samples that only inform the baseline never reach a batch; their rewards stay with the group."""
    idle = tuple(s.sample_id for s in group.live_samples() if not s.trainable)
    if idle:
        turn.emit(f.SamplesEnded(group=group.group, sample_ids=idle, end=SampleEnd.FILTERED, reason="NOT_TRAINABLE"))
