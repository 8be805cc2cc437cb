"""Read the current values of the metrics of a coordinator node from its state."""

from __future__ import annotations

from collections import Counter

from rollmesh.services.coordinator.core import demand
from rollmesh.services.coordinator.core.core import Core
from rollmesh.services.coordinator.core.facts import Purpose, SampleEnd
from rollmesh.services.coordinator.core.state import EpisodeStatus, SampleCounters, State
from rollmesh.services.coordinator.metrics import (
    AHEAD,
    DROPPED,
    FAILED_ATTEMPTS,
    GROUPS,
    HELDOUT,
    IDLE_SECONDS,
    LEASES,
    LEDGER_USED,
    NODES,
    PENDING,
    POSITION,
    REJECTED,
    REPLAY_BYTES,
    REPLAY_GROUPS,
    REPLAY_LEFT,
    REPLAY_STALENESS,
    REWARD,
    SAMPLES,
    STALENESS,
    STALLED,
    STEP,
    SUBMITTED,
    TOKENS,
    WAITING,
)
from rollmesh.services.coordinator.node import CoordinatorNode
from rollmesh.services.coordinator.run_state import GROUP_STATES, run_state
from rollmesh.shared.domain.ledger_head import LedgerHead
from rollmesh.shared.telemetry.metrics import Reading
from rollmesh.v1 import coordinator_pb2 as pb
from rollmesh.v1 import run_pb2


async def read(node: CoordinatorNode) -> list[Reading]:
    """Read the values of every run that is led here, and of the fleet."""
    found = _nodes(node.fleet_nodes())
    for run, driver in node.runs.drivers.items():
        found += await driver.read(lambda core, head, run=run: _run(run, core, head, node.now_s()))  # type: ignore[misc]
        found.append(Reading(LEDGER_USED, driver.ledger_used if driver.live else 0.0, (run,)))
    return found


def _run(run: str, core: Core, head: LedgerHead, now_s: float) -> list[Reading]:
    if core.state.spec is None:
        return []
    state = run_state(core, head)
    policy = state.policies[0]
    return [
        *_samples(run, core.state.counters, "train"),
        *_samples(run, core.state.eval_counters, "eval"),
        *(one for name, source in core.state.foreign.items() for one in _samples(run, source.counters, name)),
        *_replay(run, core.state),
        *(Reading(DROPPED, num, (run, reason)) for reason, num in state.samples.reasons.items()),
        *(Reading(GROUPS, policy.groups.get(phase, 0), (run, phase)) for phase in GROUP_STATES),
        *(
            Reading(AHEAD, num, (run, limit))
            for limit, num in demand.ahead_groups(core.state, core.ephemeral.demand).items()
        ),
        *_submitted(run, state),
        *_queues(run, core),
        Reading(STALENESS, _staleness(policy), (run,)),
        *_clock(run, policy),
        *(Reading(REWARD, value, (run, name)) for name, value in state.mean_rewards.items()),
        *(Reading(HELDOUT, success, (run,)) for success in _newest_success(state, core.state.the_spec.success_reward)),
        Reading(IDLE_SECONDS, 0.0 if state.ended else core.idle_s(now_s), (run,)),
        Reading(STALLED, float(bool(state.stalled)), (run,)),
        Reading(REJECTED, len(policy.refused), (run,)),
        Reading(FAILED_ATTEMPTS, state.failed_attempts.num, (run,)),
        Reading(POSITION, head.position, (run,)),
    ]


def _newest_success(state: run_pb2.RunState, reward: str) -> list[float]:
    """Return the success of the newest complete evaluation, or nothing before the first."""
    complete = [result for result in state.evals if result.complete and result.num_samples]
    return [result.mean_rewards[reward] for result in complete[-1:] if reward in result.mean_rewards]


def _samples(run: str, counters: SampleCounters, purpose: str) -> list[Reading]:
    ends = {end.name.lower(): counters.ends.get(end, 0) for end in SampleEnd if end is not SampleEnd.LIVE}
    return [
        Reading(SAMPLES, counters.live, (run, purpose, "live")),
        *(Reading(SAMPLES, num, (run, purpose, end)) for end, num in ends.items()),
    ]


def _replay(run: str, state: State) -> list[Reading]:
    lags = {lag: num for lag, num in state.replay.trained_by_staleness.items() if lag >= 0}
    return [
        *_samples(run, state.replay.counters, "replay"),
        Reading(REPLAY_STALENESS, lags, (run,)),
        Reading(REPLAY_GROUPS, len(state.replay.entries), (run,)),
        Reading(REPLAY_BYTES, state.replay.num_bytes, (run,)),
        *(Reading(REPLAY_LEFT, state.replay.left.get(cause, 0), (run, cause)) for cause in ("capacity", "bound")),
    ]


def _staleness(policy: run_pb2.PolicyState) -> dict[int, int]:
    """Return the trained samples by staleness. Those without tokens of the policy have none."""
    return {int(lag): int(num) for lag, num in policy.trained_by_staleness.items() if lag >= 0}


def _submitted(run: str, state: run_pb2.RunState) -> list[Reading]:
    """Return the numbers of submitted tasks, or nothing for a run that draws its tasks from the data service."""
    tasks = state.submitted
    numbers = {"open": tasks.open, "drawn": tasks.drawn, "answered": tasks.answered}
    return [Reading(SUBMITTED, num, (run, name)) for name, num in numbers.items() if state.HasField("submitted")]


def _queues(run: str, core: Core) -> list[Reading]:
    state, ephemeral = core.state, core.ephemeral
    in_doubt = sum(batch.in_doubt for batch in state.batches.values())
    return [
        Reading(LEASES, _leased(state), (run, "episode")),
        Reading(LEASES, len(state.batches) - in_doubt, (run, "batch")),
        Reading(LEASES, in_doubt, (run, "in_doubt")),
        Reading(PENDING, len(state.pending_of(Purpose.TRAIN)), (run, "train")),
        Reading(PENDING, len(state.pending_of(Purpose.EVAL)), (run, "eval")),
        Reading(WAITING, len(ephemeral.workers), (run, "workers")),
        Reading(WAITING, len(ephemeral.trainers), (run, "trainers")),
    ]


def _leased(state: State) -> int:
    episodes = (episode for group in state.groups.values() for episode in group.episodes.values())
    return sum(episode.status is EpisodeStatus.LEASED for episode in episodes)


def _clock(run: str, policy: run_pb2.PolicyState) -> list[Reading]:
    return [
        Reading(STEP, policy.applied_step, (run, "applied")),
        Reading(STEP, policy.published_step, (run, "published")),
        Reading(STEP, policy.checkpoint_update, (run, "checkpoint")),
        Reading(TOKENS, policy.tokens_generated, (run, "scored")),
        Reading(TOKENS, policy.tokens_trained, (run, "trained")),
    ]


def _nodes(nodes: list[pb.FleetNode]) -> list[Reading]:
    counted = Counter(
        (
            pb.NodeKind.Name(node.kind).removeprefix("NODE_KIND_").lower(),
            pb.NodeState.Name(node.state).removeprefix("NODE_STATE_").lower(),
        )
        for node in nodes
    )
    # An empty fleet is reported too: a mesh without this metric has no coordinator.
    return [Reading(NODES, num, labels) for labels, num in counted.items()] or [Reading(NODES, 0, ("learner", "ready"))]
