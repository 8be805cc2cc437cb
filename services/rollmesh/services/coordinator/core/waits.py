"""The wait chain of a run: which component waits for which other, from the run to the root cause. Pure; for status and
watchdog.

    run -> trainer                         a batch is held, READY groups are not leased, no version is published
    run -> groups -> worker -> inference | sandbox | reward        episodes are in progress
                  -> reward                                        groups wait to be finalized
                  -> workers, data, admission                      no group is in progress

A component that is missing, without heartbeat or behind ends the chain: it is the root cause. A component that reports
what it waits for continues the chain. If all components are available and attempts still fail, the component where they
fail is the root cause.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from rollmesh.services.coordinator.core import batches, rollouts
from rollmesh.services.coordinator.core.decision_context import DecisionContext, describe
from rollmesh.services.coordinator.core.fleet import Fleet, Node, NodeKind, NodeState
from rollmesh.services.coordinator.core.state import EpisodeStatus, GroupPhase
from rollmesh.shared.domain.text import count_of

_SHOWN_MAX = 4
"""Maximum number of nodes of a kind that a link names."""
_FAILED_AT = {
    "inference": NodeKind.INFERENCE,
    "sandbox": NodeKind.SANDBOX,
    "init": NodeKind.SANDBOX,
    "scorer": NodeKind.REWARD,
    "score": NodeKind.REWARD,
}
"""Components of an episode, and the kind of node behind them."""


@dataclass(frozen=True, slots=True)
class Wait:
    """One link of the chain."""

    who: str
    what: str

    def __str__(self) -> str:
        return f"{self.who} {self.what}"


Links = list[Wait]


def chain(ctx: DecisionContext, fleet: Fleet, reward_error: str = "") -> Links:
    """Return the chain of a run; empty once it has ended. `reward_error` is the last error of a finalization."""
    if ctx.state.ended:
        return []
    return _Chain(ctx, fleet, reward_error).run_links()


def to_text(links: Links) -> str:
    return "; ".join(map(str, links))


class _Chain:
    def __init__(self, ctx: DecisionContext, fleet: Fleet, reward_error: str) -> None:
        self._ctx = ctx
        self._state = ctx.state
        self._fleet = fleet
        self._reward_trouble = reward_error

    # The run and its trainer ------------------------------------------------------------------------------------------

    def run_links(self) -> Links:
        clock, spec = self._ctx.clock, self._ctx.spec
        if spec.exports and clock.published is not None:
            return [Wait("run", "waits for episodes to be scored"), *self._groups()]
        last = bool(spec.updates_max) and clock.applied >= spec.updates_max
        ready = len(self._state.training_groups(GroupPhase.READY))
        if clock.trainer_epoch == 0:
            return self._on_trainer("waits for a trainer to attach")
        if self._state.batches:
            return self._on_trainer(self._batch_out())
        if clock.published is None or (last and clock.published.step < clock.applied):
            return self._on_trainer(f"waits for weights: step {clock.applied}, incarnation {clock.incarnation}")
        if last and clock.checkpoint < clock.applied:
            return self._on_trainer(f"waits for a checkpoint with update {clock.applied}, its last")
        if last:
            return [Wait("run", "waits for its last evaluation"), *self._groups()]
        if not self._ctx.ephemeral.trainers and batches.has_batch(self._ctx):
            return self._on_trainer(
                f"waits for update {clock.applied + 1}: {count_of(ready, 'READY group')} not leased"
            )
        return [Wait(f"learner/{clock.learner}", f"waits for {batches.why_no_batch(self._ctx)}"), *self._groups()]

    def _batch_out(self) -> str:
        batch = next(iter(self._state.batches.values()))
        if batch.in_doubt:
            return f"waits for a trainer to attach: the use of batch {batch.lease_id} is unknown"
        return f"waits for update {batch.update}: the trainer holds batch {batch.lease_id}"

    def _on_trainer(self, what: str) -> Links:
        node = max(self._of(NodeKind.LEARNER), key=lambda n: n.last_seen, default=None)
        if node is None:
            return [Wait("run", what), self._missing(NodeKind.LEARNER)]
        return [Wait("run", what), self._silence(node) or Wait(node.node_id, _status_text(node))]

    # Groups and their workers -----------------------------------------------------------------------------------------

    def _groups(self) -> Links:
        finalizing = sum(g.phase is GroupPhase.FINALIZING for g in self._state.groups.values())
        if finalizing and (self._reward_trouble or not self._held()):
            return [Wait("groups", f"{finalizing} wait to be finalized"), *self._reward()]
        if held := self._held():
            return self._worker(held)
        pending = len(self._state.pending) + len(self._state.pending_eval)
        if pending:
            return [Wait("groups", f"{pending} episodes wait for a worker"), *self._workers(), *self._failing()]
        return self._no_groups()

    def _held(self) -> Counter[str]:
        """Return the number of leased episodes by worker."""
        episodes = (e for g in self._state.groups.values() for e in g.episodes.values())
        return Counter(e.node_id for e in episodes if e.status is EpisodeStatus.LEASED)

    def _worker(self, held: Counter[str]) -> Links:
        """Return the chain of the worker with most episodes. A worker without heartbeat comes first."""
        nodes = {node_id: self._fleet.nodes.get(node_id) for node_id in held}
        for node_id, node in nodes.items():
            if node is None:
                return [Wait(node_id, f"has left with {count_of(held[node_id], 'episode')}; the leases expire")]
            if silence := self._silence(node):
                return [silence]
        node = self._fleet.nodes[held.most_common(1)[0][0]]
        waits = node.waiting_on not in (None, NodeKind.LEARNER) and bool(node.waiting_for)
        what = _status_text(node) if waits else f"runs {count_of(held[node.node_id], 'episode')}"
        below = self._service(node.waiting_on) if waits and node.waiting_on is not None else self._gone()
        return [Wait(node.node_id, what), *(below or self._failing())]

    def _gone(self) -> Links:
        """Return links for services that have joined and are not usable now, because the worker may not have noticed
        yet. A kind that never joined may not be needed."""
        for kind in (NodeKind.INFERENCE, NodeKind.SANDBOX, NodeKind.REWARD):
            if (self._of(kind) or kind in self._fleet.departed) and (found := self._service(kind)):
                return found
        return []

    def _workers(self) -> Links:
        """Return why no worker takes the pending episodes."""
        usable = self._fleet.usable(NodeKind.ROLLOUT)
        if not usable:
            return self._service(NodeKind.ROLLOUT)
        return [Wait(node.node_id, _status_text(node)) for node in usable[:_SHOWN_MAX]]

    def _no_groups(self) -> Links:
        why = rollouts.why_no_work(self._ctx)
        head = Wait("groups", f"no group is in progress: {why}")
        missing = self._service(NodeKind.ROLLOUT) or (self._service(NodeKind.DATA) if "data service" in why else [])
        return [head, *(missing or self._failing())]

    # Services ---------------------------------------------------------------------------------------------------------

    def _reward(self) -> Links:
        return self._service(NodeKind.REWARD) or [Wait("reward", self._reward_trouble or "has not responded yet")]

    def _service(self, kind: NodeKind) -> Links:
        """Return no link if a node of this kind is usable, else what is wrong with its nodes."""
        if kind is NodeKind.INFERENCE:
            return self._inference()
        if self._fleet.usable(kind):
            return []
        return self._unusable(self._of(kind)) or [self._missing(kind)]

    def _inference(self) -> Links:
        """Return no link if a usable node has weights that the episodes in progress admit."""
        needed = max((g.step_min for g in self._state.groups.values() if g.unfinished), default=0)
        usable = self._fleet.usable(NodeKind.INFERENCE)
        if any(node.active is not None and node.active.step >= needed for node in usable):
            return []
        newest = str(self._ctx.clock.versions[-1]) if self._ctx.clock.versions else ""
        if newest in self._ctx.clock.refusals:
            return [Wait(newest, f"was rejected by the nodes: {self._ctx.clock.refusals[newest]}")]
        return self._unusable(self._of(NodeKind.INFERENCE)) or [self._missing(NodeKind.INFERENCE)]

    def _unusable(self, nodes: list[Node]) -> Links:
        return [self._silence(node) or Wait(node.node_id, self._why_unusable(node)) for node in nodes[:_SHOWN_MAX]]

    def _why_unusable(self, node: Node) -> str:
        why = node.cause or node.waiting_for
        if not why and node.ordered is not None:
            verb, version = node.ordered
            why = f"it has not answered the command to {verb.name} {describe(version)}"
        at = f" at {describe(node.active)}" if node.active is not None else ""
        return f"is {node.state.name}{at}" + (f": {why}" if why else "")

    def _missing(self, kind: NodeKind) -> Wait:
        last = self._fleet.departed.get(kind)
        name = kind.name.lower()
        if last is None:
            return Wait(name, f"is missing: no {name} node has joined")
        gone = "left" if last.left else "fell silent"
        return Wait(last.node_id, f"was the last {name} node and {gone} {self._ctx.now - last.last_seen:.0f} s ago")

    def _silence(self, node: Node) -> Wait | None:
        if node.state not in (NodeState.SUSPECT, NodeState.DEAD):
            return None
        if node.left:
            return Wait(node.node_id, f"has left, {self._ctx.now - node.last_seen:.0f} s ago")
        return Wait(node.node_id, f"without heartbeat for {self._ctx.now - node.last_seen:.0f} s")

    def _of(self, kind: NodeKind) -> list[Node]:
        """Return nodes of a kind; DEAD ones only if there are no others."""
        nodes = sorted((n for n in self._fleet.nodes.values() if n.kind is kind), key=lambda n: n.node_id)
        return [n for n in nodes if n.state is not NodeState.DEAD] or nodes

    # Failures ---------------------------------------------------------------------------------------------------------

    def _failing(self) -> Links:
        """Return where most attempts have failed since the last progress. A missing service comes before the
        failures."""
        failing = self._ctx.ephemeral.failing
        if not failing:
            return []
        where, most = max(failing.items(), key=lambda item: item[1].num)
        kind = _FAILED_AT.get(where)
        missing = self._service(kind) if kind is not None else []
        return missing or [Wait(where, f"failed {most.num} attempts since the last progress, the last by {most.last}")]


def _status_text(node: Node) -> str:
    if node.waiting_for:
        return f"waits for {node.waiting_for}"
    return f"is at work: {node.doing}" if node.doing else f"is {node.state.name} and reports no wait"
