"""Decide on groups and episodes: admission, leases, retries, finalization, evaluation."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from math import ceil

import msgspec

from rollmesh.services.coordinator.core import bound, demand, foreign_samples, group_plans, submissions
from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core import messages as m
from rollmesh.services.coordinator.core.decision_context import (
    CancelEpisodes,
    DeadLetter,
    DecisionContext,
    DrawTasks,
    FinalizeGroup,
    WorkerWait,
)
from rollmesh.services.coordinator.core.facts import GroupDecision, Purpose, SampleEnd, SampleRewards, Task
from rollmesh.services.coordinator.core.records import EXTEND_FACTOR_MAX
from rollmesh.services.coordinator.core.state import (
    EpisodeState,
    EpisodeStatus,
    GroupPhase,
    GroupState,
    WaitingSamples,
    task_bytes,
)
from rollmesh.shared.domain.plans import Plan, variant_of, variants_bytes

REWARDS_BYTES_MAX = 3 * 1024 * 1024
"""Maximum size of the rewards of a group, bytes. The decision on a group names them up to twice, and must fit into a
ledger record."""
_REWARD_BYTES = 40
"""Size of a reward without its texts, bytes, rounded up."""
LEASES_BYTES_MAX = 4 * 1024 * 1024
"""Maximum size of the tasks that a worker gets at once, bytes, so that its leases fit into a message."""
SUBMITTED_BYTES_MAX = 1024 * 1024
"""Maximum size of the submitted tasks, and of those of dead letters, that one decision draws, with the variants of
their groups, bytes, unless it is one larger task. A record may also contain a request of 6 MiB, such as the reports of
episodes."""
DRAW_MAX = 64
"""Maximum number of tasks per request. The selector then gets new outcomes between draws."""
_TOO_OLD = "episodes without a variant, which is all that a worker of protocol 1.0 can run; upgrade the worker"


def acquire(ctx: DecisionContext, request: i.AcquireRollouts) -> None:
    """Queue a worker. `grant` replies to it in this decision or a later one."""
    ctx.ephemeral.workers.append(WorkerWait(request, ctx.now + request.wait_s))


def grant(ctx: DecisionContext) -> None:
    """Lease pending episodes to waiting workers, first come first served, and reply to workers whose wait is over."""
    waiting = ctx.ephemeral.workers
    for worker in list(waiting):
        if leases := _leases(ctx, worker):
            waiting.remove(worker)
            ctx.reply(worker.request, i.Acquired(leases=leases))
    for worker in [w for w in waiting if ctx.now >= w.deadline]:
        waiting.remove(worker)
        why = why_no_work(ctx) if worker.request.reads_variants or not ctx.state.pending else _TOO_OLD
        ctx.reply(worker.request, i.Acquired(waiting_for=why))


def _leases(ctx: DecisionContext, worker: WorkerWait) -> tuple[i.EpisodeLease, ...]:
    """Lease pending episodes to a worker: at most `num_max`, and at most as many as fit into the reply, but at least
    one if there is any."""
    leases: list[i.EpisodeLease] = []
    num_bytes = 0
    while len(leases) < worker.request.num_max and (pending := _next_pending(ctx, worker)):
        group = ctx.state.groups[pending[0]]
        variant = variant_of(group.variants, episode_index(pending[1]))
        num_bytes += len(msgspec.json.encode(group.task)) + len(_given(group, pending[1]))
        num_bytes += variants_bytes(variant[:1]) if variant else 0
        if leases and num_bytes > LEASES_BYTES_MAX:
            break
        leases.append(_lease(ctx, worker.request.node_id, *pending))
    return tuple(leases)


def _next_pending(ctx: DecisionContext, worker: WorkerWait) -> tuple[str, str] | None:
    """Return the group and the episode that a worker gets next."""
    pending = ctx.state.pending_eval or ctx.state.pending
    if worker.request.reads_variants:
        return pending[0] if pending else None
    return next((one for one in pending if not ctx.state.groups[one[0]].variants), None)


def _lease(ctx: DecisionContext, node_id: str, name: str, episode_id: str) -> i.EpisodeLease:
    group = ctx.state.groups[name]
    episode = group.episodes[episode_id]
    variant = variant_of(group.variants, episode_index(episode_id))
    attempt = episode.attempt + 1
    lease_id = f"{episode_id}#{attempt}"
    ctx.emit(f.EpisodeLeased(group=name, episode=episode_id, attempt=attempt, lease_id=lease_id, node_id=node_id))
    ctx.ephemeral.episode_deadlines[lease_id] = ctx.now + ctx.spec.episode_lease_s
    ctx.ephemeral.group_deadlines.setdefault(name, ctx.now + ctx.spec.group_s_max)
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
        lease_s=ctx.spec.episode_lease_s,
        seed=episode_seed(ctx.spec.seed, group, episode_id),
        index=episode_index(episode_id),
        submitted=bool(group.source) or (ctx.spec.submitted_tasks and group.purpose is not Purpose.EVAL),
        given=_given(group, episode_id),
        given_source=group.source,
        variant=variant[0] if variant else None,
    )


def _given(group: GroupState, episode_id: str) -> bytes:
    """Return the submitted episode that a worker is given for an episode; empty for a rollout."""
    return group.given[episode_index(episode_id)] if group.given else b""


def episode_seed(seed: int, group: GroupState, episode_id: str) -> int:
    """Return the key of an episode's random draws. It is the same for every attempt, for every step of an evaluation,
    and for episodes whose variants have the same seed (common random numbers)."""
    index = episode_index(episode_id)
    name = f"eval/{group.draw}/{index}" if group.purpose is Purpose.EVAL else f"{group.group}/{index}"
    if (found := variant_of(group.variants, index)) and found[0].seed is not None:
        name = f"{group.group}/seed {found[0].seed}/{found[1]}"
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "big") >> 1


def episode_index(episode_id: str) -> int:
    """Return the number of an episode in its group, from 0."""
    return int(episode_id.rsplit(".", 1)[1])


def why_rejected(ctx: DecisionContext) -> str:
    """Return the cause if the nodes rejected the published version, otherwise an empty text."""
    clock = ctx.clock
    if clock.published not in clock.quarantined:
        return ""
    return f"{clock.published} was rejected: {clock.refusals.get(str(clock.published), '')}"


def why_no_work(ctx: DecisionContext) -> str:
    """Return what a worker without work waits for, for display."""
    state, clock = ctx.state, ctx.clock
    if state.ended:
        return f"run ended: {state.ended}"
    if clock.published is None:
        return f"a published version of incarnation {clock.incarnation}"
    if state.stopping:
        return f"run ends: {state.stopping}"
    if rejected := why_rejected(ctx):
        return f"weights that the nodes accept; {rejected}"
    if bound.num_admissible(state) == 0:
        live = len(state.training_groups(*GroupPhase))
        if ctx.spec.exports:
            return f"nothing: all {state.num_groups} groups are admitted, {live} have not ended"
        return f"admission: {live} groups live, published step {clock.published.step}, eta {ctx.spec.max_staleness}"
    if num_wanted(ctx) == 0:
        ready, busy = len(state.training_groups(GroupPhase.READY)), len(demand.on_their_way(state))
        return f"demand: {ready} READY groups and {busy} on their way are enough until the learner finishes an update"
    if ctx.spec.submitted_tasks:
        return submissions.why_no_task(state)
    return ctx.ephemeral.data_waiting or "tasks from the data service"


def num_wanted(ctx: DecisionContext) -> int:
    """Return how many groups are admitted now: within the bound, and as many as the learner needs ahead."""
    return demand.num_wanted(ctx.state, ctx.ephemeral.demand)


def request_tasks(ctx: DecisionContext) -> None:
    """Request tasks while workers wait and admission has room, or take submitted ones. Replayed dead letters come
    first."""
    purpose, split = (Purpose.EXPORT, ctx.spec.export_split) if ctx.spec.exports else (Purpose.TRAIN, "")
    ctx.ephemeral.draw_at = None
    if not _reserve_dead(ctx, purpose):
        return
    _reserve_samples(ctx)
    if ctx.spec.submitted_tasks:
        _reserve_submitted(ctx, purpose)
        return
    lacking = _num_lacking(ctx)
    if lacking <= 0 or ctx.ephemeral.drawing or ctx.ephemeral.exhausted:
        return
    num = min(num_wanted(ctx), ceil(lacking / ctx.spec.group_size), DRAW_MAX)
    if ctx.spec.variants:  # the record has them once per group
        num = min(num, max(1, SUBMITTED_BYTES_MAX // variants_bytes(ctx.spec.variants)))
    if num > 0:
        ctx.ephemeral.drawing = True
        ctx.effect(DrawTasks(purpose, ctx.state.next_draw, num, split))


def _reserve_dead(ctx: DecisionContext, purpose: Purpose) -> bool:
    """Reserve a group per replayed dead letter. Return False if a record has no room for all of them that are admitted;
    a tick continues."""
    num_bytes, of_variants = 0, variants_bytes(ctx.spec.variants)
    for replay in list(ctx.state.replays):
        if _num_lacking(ctx) <= 0 or num_wanted(ctx) <= 0:
            break
        size = task_bytes(replay.task) + of_variants
        num_bytes += size
        if num_bytes > SUBMITTED_BYTES_MAX and num_bytes > size:
            ctx.ephemeral.draw_at = ctx.now
            return False
        _reserve(ctx, purpose, replay.task, replay.draw, dead_id=replay.dead_id)
    return True


def _reserve_submitted(ctx: DecisionContext, purpose: Purpose) -> None:
    """Reserve a group per submitted task, as many as fit into a record. A tick continues."""
    num_bytes, of_variants = 0, variants_bytes(ctx.spec.variants)
    while ctx.state.submitted_open and _num_lacking(ctx) > 0 and num_wanted(ctx) > 0:
        task = ctx.state.submitted_open[0].task
        size = task_bytes(task) + of_variants
        num_bytes += size
        if num_bytes > SUBMITTED_BYTES_MAX and num_bytes > size:
            ctx.ephemeral.draw_at = ctx.now
            return
        _reserve(ctx, purpose, task, ctx.state.next_draw)


def _reserve_samples(ctx: DecisionContext) -> None:
    """Reserve groups of submitted samples, as many as fit into a record. A tick continues."""
    foreign_samples.drop_old(ctx)
    if not ctx.state.foreign_waiting or _num_lacking(ctx) <= 0 or num_wanted(ctx) <= 0:
        return
    num_bytes = 0
    for waiting in foreign_samples.admissible(ctx):
        if _num_lacking(ctx) <= 0 or num_wanted(ctx) <= 0:
            return
        num_bytes += task_bytes(waiting.group.task)
        if num_bytes > SUBMITTED_BYTES_MAX and num_bytes > task_bytes(waiting.group.task):
            ctx.ephemeral.draw_at = ctx.now
            return
        _reserve(ctx, Purpose.TRAIN, waiting.group.task, 0, samples=waiting)


def _num_lacking(ctx: DecisionContext) -> int:
    """Return the number of episodes that workers wait for and that are not pending."""
    return sum(w.request.num_max for w in ctx.ephemeral.workers) - len(ctx.state.pending)


def tasks_drawn(ctx: DecisionContext, answer: i.TasksDrawn) -> None:
    """Reserve a group per task while admission has room. A task without a recorded group was not drawn."""
    if answer.purpose is Purpose.EVAL:
        _reserve_eval(ctx, answer)
        return
    ctx.ephemeral.drawing = False
    ctx.ephemeral.data_waiting = "" if answer.tasks else "the data service has no more tasks"
    for draw, task in answer.tasks:
        if num_wanted(ctx) == 0:
            return
        _reserve(ctx, answer.purpose, task, draw, plan=answer.plans.get(draw, group_plans.DEFAULT))


def _reserve(
    ctx: DecisionContext,
    purpose: Purpose,
    task: Task,
    draw: int,
    dead_id: int = 0,
    samples: WaitingSamples | None = None,
    plan: Plan = group_plans.DEFAULT,
) -> None:
    size, variants = group_plans.group_of(ctx.spec, plan)
    if samples is not None:
        size, variants = len(samples.group.episodes), ()
    ctx.emit(
        f.GroupReserved(
            group=f"g{ctx.state.num_groups}",
            purpose=purpose,
            policy=ctx.clock.policy,
            task=task,
            draw=draw,
            num_episodes=size,
            update_intended=0 if ctx.spec.exports else bound.next_intended_update(ctx.state),
            step_min=0 if ctx.spec.exports else bound.step_min(ctx.state),
            incarnation_min=ctx.clock.incarnation,
            dead_id=dead_id,
            submitted_key=samples.group.key if samples is not None else "",
            variants=variants,
            propensity=plan.propensity,
            together=plan.together,
        )
    )


def draw_failed(ctx: DecisionContext, answer: i.DrawFailed) -> None:
    """Handle a draw without tasks. Training requests tasks again at the next decision; an evaluation is dropped, an
    export ends."""
    if answer.purpose is Purpose.EVAL:
        key = (answer.step, answer.incarnation)
        ctx.ephemeral.eval_deadlines.pop(key, None)
        ctx.ephemeral.evals_dropped.add(key)
    else:
        ctx.ephemeral.drawing = False
        ctx.ephemeral.exhausted = answer.exhausted
        ctx.ephemeral.data_waiting = f"the data service: {answer.cause}"


def request_eval(ctx: DecisionContext) -> None:
    """Request the evaluation of the version that was just published, if the spec demands one."""
    version, spec = ctx.clock.published, ctx.spec
    if version is None or spec.eval_every == 0 or spec.eval_tasks == 0:
        return
    last = bool(ctx.state.stopping) and version.step == ctx.clock.applied
    due = version.step % spec.eval_every == 0 or last
    key = (version.step, version.incarnation)
    asked = key in ctx.ephemeral.eval_deadlines or key in ctx.ephemeral.evals_dropped
    if due and not asked and ctx.state.eval_of(*key) is None:
        ctx.ephemeral.eval_deadlines[key] = ctx.now + spec.eval_s_max
        ctx.effect(DrawTasks(Purpose.EVAL, 0, spec.eval_tasks, spec.eval_split, *key))


def _reserve_eval(ctx: DecisionContext, answer: i.TasksDrawn) -> None:
    step, incarnation = key = answer.step, answer.incarnation
    if key not in ctx.ephemeral.eval_deadlines or ctx.state.eval_of(*key) is not None:
        return  # it was cancelled before its tasks came, or they came before
    for draw, task in answer.tasks:
        ctx.emit(
            f.GroupReserved(
                group=f"e{step}.{incarnation}.{draw}",
                purpose=Purpose.EVAL,
                policy=ctx.clock.policy,
                task=task,
                draw=draw,
                num_episodes=1,
                step_min=step,
                incarnation_min=incarnation,
            )
        )


def renew(ctx: DecisionContext, request: m.RenewLeases) -> None:
    """Renew the leases that the node holds. The others are gone for it, as a report of them is UNKNOWN_LEASE."""
    gone = []
    for lease_id in request.lease_ids:
        if lease_id in ctx.ephemeral.episode_deadlines and _holds(ctx, request.node_id, lease_id):
            ctx.ephemeral.episode_deadlines[lease_id] = ctx.now + ctx.spec.episode_lease_s
        else:
            gone.append(lease_id)
    ctx.reply(request, m.RenewLeasesResponse(gone=tuple(gone), lease_s=ctx.spec.episode_lease_s))


def _holds(ctx: DecisionContext, node_id: str, lease_id: str) -> bool:
    episode_id = lease_id.rpartition("#")[0]
    group = ctx.state.groups.get(episode_id.rpartition(".")[0])
    episode = group.episodes.get(episode_id) if group else None
    return episode is not None and (episode.lease_id, episode.node_id) == (lease_id, node_id)


def return_episode(
    ctx: DecisionContext,
    group: GroupState,
    episode: EpisodeState,
    *,
    counts: bool,
    cause: str,
    traceback: str = "",
    failed: bool = False,
) -> None:
    """Retry an episode, or end it and write a dead letter when its attempts are used up. `failed` reports the cause of
    an attempt that does not count."""
    ctx.ephemeral.episode_deadlines.pop(episode.lease_id, None)
    if counts or failed:
        ctx.ephemeral.note_failure(cause, traceback)
    if counts and episode.failures + 1 >= ctx.spec.tries_max:
        ctx.emit(
            f.EpisodeEnded(
                group=group.group, episode=episode.episode, end=SampleEnd.FAILED, reason="TRIES_EXHAUSTED", cause=cause
            )
        )
        draw, tries = group.draw, ctx.spec.tries_max
        key = group.submitted_key
        ctx.effect(
            DeadLetter(episode.episode, cause, group.task, group.group, group.purpose, draw, tries, traceback, key)
        )
    else:
        ctx.emit(f.EpisodeReturned(group=group.group, episode=episode.episode, counts=counts, cause=cause))


def node_dead(ctx: DecisionContext, node: i.NodeDead) -> None:
    """Release the episodes of a removed worker."""
    for group, episode in list(leased_episodes(ctx)):
        if episode.node_id == node.node_id:
            return_episode(ctx, group, episode, counts=True, cause=f"NODE_DEAD {node.node_id}")


def leased_episodes(ctx: DecisionContext) -> Iterable[tuple[GroupState, EpisodeState]]:
    for group in list(ctx.state.groups.values()):
        for episode in group.episodes.values():
            if episode.status is EpisodeStatus.LEASED:
                yield group, episode


def expire(ctx: DecisionContext) -> None:
    """Expire what is overdue: episode leases, groups, evaluations."""
    overdue = {lease for lease, at in ctx.ephemeral.episode_deadlines.items() if ctx.now >= at}
    for group, episode in list(leased_episodes(ctx)) if overdue else ():
        if episode.lease_id in overdue:
            _cancel_at_node(ctx, [episode], "LEASE_EXPIRED")
            return_episode(ctx, group, episode, counts=True, cause="LEASE_EXPIRED")
    for name, deadline in list(ctx.ephemeral.group_deadlines.items()):
        found = ctx.state.groups.get(name)
        if found is None or not found.unfinished:
            del ctx.ephemeral.group_deadlines[name]
        elif ctx.now >= deadline:
            ctx.ephemeral.overdue.add(name)
            cancel_unfinished(ctx, found, "GROUP_DEADLINE")
    for key, deadline in list(ctx.ephemeral.eval_deadlines.items()):
        _expire_eval(ctx, key, deadline)


def _expire_eval(ctx: DecisionContext, key: tuple[int, int], deadline: float) -> None:
    result = ctx.state.eval_of(*key)
    if result is not None and result.num_open == 0:
        del ctx.ephemeral.eval_deadlines[key]
    elif ctx.now >= deadline:
        ctx.ephemeral.evals_dropped.add(key)
        _cancel_eval(ctx, key, "EVAL_DEADLINE")


def _cancel_eval(ctx: DecisionContext, key: tuple[int, int], reason: str) -> None:
    del ctx.ephemeral.eval_deadlines[key]
    for group in list(ctx.state.groups.values()):
        if group.purpose is Purpose.EVAL and (group.step_min, group.incarnation_min) == key:
            cancel_unfinished(ctx, group, reason)


def roll_back(ctx: DecisionContext, to_update: int) -> None:
    """Before a roll-back, end work that only the current incarnation can serve, because no node serves it afterwards.
    Cancel open evaluations, and release the episodes that are out of reach. Neither counts as an attempt."""
    for key in list(ctx.ephemeral.eval_deadlines):
        _cancel_eval(ctx, key, "ROLLED_BACK")
    for group in bound.out_of_reach(ctx.state, to_update):
        leased = [e for e in group.episodes.values() if e.status is EpisodeStatus.LEASED]
        _cancel_at_node(ctx, leased, "ROLLED_BACK")
        for episode in leased:
            return_episode(ctx, group, episode, counts=False, cause="ROLLED_BACK")


def cancel_unfinished(ctx: DecisionContext, group: GroupState, reason: str) -> None:
    """End the unfinished episodes of a group. Its finished episodes remain."""
    unfinished = [e for e in group.episodes.values() if e.status in (EpisodeStatus.PENDING, EpisodeStatus.LEASED)]
    _cancel_at_node(ctx, [e for e in unfinished if e.status is EpisodeStatus.LEASED], reason)
    for episode in unfinished:
        ctx.ephemeral.episode_deadlines.pop(episode.lease_id, None)
        ctx.emit(f.EpisodeEnded(group=group.group, episode=episode.episode, end=SampleEnd.CANCELLED, reason=reason))


def _cancel_at_node(ctx: DecisionContext, episodes: Iterable[EpisodeState], reason: str) -> None:
    by_node: dict[str, list[str]] = {}
    for episode in episodes:
        by_node.setdefault(episode.node_id, []).append(episode.lease_id)
    for node_id, lease_ids in by_node.items():
        ctx.effect(CancelEpisodes(node_id, tuple(lease_ids), reason))


def cancel_group(ctx: DecisionContext, group: GroupState, reason: str) -> None:
    """End a whole group that no batch holds."""
    cancel_unfinished(ctx, group, reason)
    live = tuple(s.sample_id for s in group.live_samples())
    if live:
        ctx.emit(f.SamplesEnded(group=group.group, sample_ids=live, end=SampleEnd.CANCELLED, reason=reason))


def request_decisions(ctx: DecisionContext) -> None:
    """Request a decision on every group whose episodes have ended. Evaluations end without one."""
    for group in [g for g in ctx.state.groups.values() if g.phase is GroupPhase.FINALIZING]:
        if group.purpose is Purpose.EVAL:
            live = tuple(s.sample_id for s in group.live_samples())
            ctx.emit(f.SamplesEnded(group=group.group, sample_ids=live, end=SampleEnd.EXPORTED, reason="EVALUATED"))
        elif group.group not in ctx.ephemeral.finalizing:
            ctx.ephemeral.finalizing.add(group.group)
            ctx.effect(FinalizeGroup(group.group, group.group in ctx.ephemeral.overdue))


def group_decided(ctx: DecisionContext, answer: i.GroupDecided) -> None:
    """Keep, filter or extend a group. Dropped members end first, each with its reason."""
    ctx.ephemeral.finalizing.discard(answer.group)
    group = ctx.state.groups.get(answer.group)
    if group is None or group.phase is not GroupPhase.FINALIZING:
        return  # cancelled meanwhile
    if unknown := next((name for name in answer.dropped if name not in group.samples), ""):
        cause = (
            f"scorer: the decision drops sample {unknown!r}, which is not a member of group {group.group}, expected "
            "ids of its members; correct the finalizer that the reward service runs"
        )
        finalize_failed(ctx, i.FinalizeFailed(group=group.group, cause=cause))
        return
    ctx.ephemeral.failed.num_undecided = 0
    extend = answer.decision is GroupDecision.EXTEND and _may_grow(ctx, group, answer.num_extend)
    changed = () if extend else answer.adjusted  # the finalizers decide again on the larger group
    adjusted = {a.sample_id: a.rewards for a in changed if a.sample_id in group.samples}
    members = tuple(
        SampleRewards(sample_id=s.sample_id, rewards=adjusted.get(s.sample_id, s.meta.rewards))
        for s in group.samples.values()
    )
    if (size := _rewards_bytes(members)) > REWARDS_BYTES_MAX:
        cause = (
            f"scorer: the rewards of group {group.group} have {size} bytes, expected at most {REWARDS_BYTES_MAX}: let "
            f"scorers and finalizers return fewer rewards or shorter answers, or lower `run.group_size` (now "
            f"{ctx.spec.group_size}) or the size that the selector plans (this group began with {group.size} episodes)"
        )
        finalize_failed(ctx, i.FinalizeFailed(group=group.group, cause=cause))
        return
    decision = GroupDecision.KEEP if answer.decision is GroupDecision.EXTEND and not extend else answer.decision
    reason = answer.reason
    if decision is GroupDecision.KEEP and foreign_samples.is_without_signal(ctx, group, adjusted):
        decision, reason = GroupDecision.FILTER, foreign_samples.ZERO_VARIANCE
    if not extend and (drops := _drops(group, answer.dropped)):
        if sum(map(len, drops.values())) == group.num_live:  # the filter ends those of the most frequent reason
            decision, reason = GroupDecision.FILTER, max(drops, key=lambda name: len(drops[name]))
            del drops[reason]
        for why, ids in drops.items():
            ctx.emit(f.SamplesEnded(group=group.group, sample_ids=tuple(ids), end=SampleEnd.FILTERED, reason=why))
    ctx.emit(
        f.GroupFinalized(
            group=group.group,
            decision=decision,
            reason=reason,
            adjusted=tuple(SampleRewards(sample_id=k, rewards=v) for k, v in adjusted.items()),
            members=members,
        )
    )
    if extend:
        ctx.emit(f.EpisodesAdded(group=group.group, num_episodes=answer.num_extend))
    elif decision is GroupDecision.KEEP:
        _drop_untrainable(ctx, group)
    if group.group not in ctx.state.groups:
        ctx.ephemeral.overdue.discard(group.group)


def _drops(group: GroupState, dropped: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the live members that are dropped, by reason."""
    drops: dict[str, list[str]] = {}
    for sample in group.live_samples():
        if sample.sample_id in dropped:
            drops.setdefault(dropped[sample.sample_id], []).append(sample.sample_id)
    return drops


def _rewards_bytes(members: Iterable[SampleRewards]) -> int:
    """Return an upper bound of the size of the rewards in a record."""
    return sum(
        reward_bytes(reward.name, reward.scorer, reward.answer) for member in members for reward in member.rewards
    )


def reward_bytes(name: str, scorer: str, answer: str = "") -> int:
    """Return an upper bound of the size of a reward in a record."""
    return _REWARD_BYTES + len(name.encode()) + len(scorer.encode()) + len(answer.encode())


def finalize_failed(ctx: DecisionContext, answer: i.FinalizeFailed) -> None:
    """End a group that the reward service cannot decide on. This is an infra failure; the task becomes a dead
    letter."""
    ctx.ephemeral.finalizing.discard(answer.group)
    group = ctx.state.groups.get(answer.group)
    if group is None or group.phase is not GroupPhase.FINALIZING:
        return  # cancelled meanwhile
    live = tuple(s.sample_id for s in group.live_samples())
    ctx.ephemeral.note_failure(answer.cause, answer.traceback, num_undecided=len(live))
    ctx.emit(f.SamplesEnded(group=group.group, sample_ids=live, end=SampleEnd.FAILED, reason="NOT_FINALIZED"))
    episode = next(iter(group.episodes))
    draw, key = group.draw, group.submitted_key
    ctx.effect(
        DeadLetter(episode, answer.cause, group.task, group.group, group.purpose, draw, 1, answer.traceback, key)
    )


def _may_grow(ctx: DecisionContext, group: GroupState, num: int) -> bool:
    return 1 <= num <= num_extend_max(group) and group.group not in ctx.ephemeral.overdue


def num_extend_max(group: GroupState) -> int:
    """Return the number of further episodes that a group may get before its deadline; 0 for submitted samples."""
    if group.source:
        return 0
    return max(EXTEND_FACTOR_MAX * group.size - len(group.episodes), 0)


def _drop_untrainable(ctx: DecisionContext, group: GroupState) -> None:
    """End samples that count in the baseline only, so that they never reach a batch. Their rewards stay with the
    group."""
    idle = tuple(s.sample_id for s in group.live_samples() if not s.meta.trainable)
    if idle:
        ctx.emit(f.SamplesEnded(group=group.group, sample_ids=idle, end=SampleEnd.FILTERED, reason="NOT_TRAINABLE"))
