"""A lease on one episode, as the worker uses it."""

from __future__ import annotations

import msgspec

from rollmesh.services.rollout.agent_types import Task
from rollmesh.shared.clients.generated import Target
from rollmesh.shared.codec.plans import decode_variant
from rollmesh.shared.codec.trajectory import decode_key
from rollmesh.shared.domain.extras import ExtraError, decode_extras
from rollmesh.shared.domain.plans import Variant
from rollmesh.shared.domain.trajectory import EpisodeKey, Message, Purpose, Source
from rollmesh.shared.domain.versions import DEFAULT_POLICY
from rollmesh.shared.errors import InvalidInput
from rollmesh.v1 import coordinator_pb2, types_pb2


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """Permission to run one episode."""

    lease_id: str
    key: EpisodeKey
    purpose: Purpose
    task: Task
    task_message: types_pb2.Task
    """The received message, for the reward service."""
    target: Target
    seed: int
    term_s: float
    index: int
    """Number of the episode in its group, from 0."""
    submitted: bool = False
    """Whether a client submitted the task, so that the data service does not have it."""
    given: types_pb2.Episode | None = None
    """A finished episode of another source, which is given in place of an agent."""
    given_source: Source | None = None
    """Source of its trained tokens."""
    variant: Variant | None = None
    """What distinguishes the episode within its group; None if its episodes are alike. `task.agent` is its agent."""


def decode_lease(message: coordinator_pb2.EpisodeLease) -> Lease:
    """Decode a lease. Raise `InvalidInput` for an unknown purpose, for extras that are not JSON, and for a variant that
    is out of range."""
    try:
        purpose = Purpose(message.purpose)
    except ValueError as err:
        raise InvalidInput(
            f"lease {message.lease_id}: this worker does not support purpose {message.purpose}; update the worker"
        ) from err
    target = Target(
        policy=message.policy or DEFAULT_POLICY,
        step=message.step_min,
        incarnation=message.incarnation_min,
        exact=purpose is Purpose.EVAL,  # an evaluation measures one step, not later ones
    )
    variant = decode_variant(message.variant) if message.HasField("variant") else None
    return Lease(
        lease_id=message.lease_id,
        key=decode_key(message.key),
        purpose=purpose,
        task=_task(message.task, variant.agent if variant is not None else ""),
        task_message=message.task,
        target=target,
        seed=message.seed,
        term_s=message.lease_s,
        index=message.index,
        submitted=message.submitted,
        given=message.given if message.HasField("given") else None,
        given_source=Source(message.given_source) if message.HasField("given") else None,
        variant=variant,
    )


def _task(message: types_pb2.Task, agent: str) -> Task:
    """Return the task. `agent` replaces its agent unless it is empty."""
    try:
        extras = decode_extras(message.extras)
    except ExtraError as err:
        raise InvalidInput(f"task {message.task_id}: {err}") from None
    return Task(
        task_id=message.task_id,
        messages=tuple(Message(role=m.role, content=m.content) for m in message.messages),
        tools=tuple(message.tools),
        labels=dict(message.labels),
        agent=agent or message.agent,
        scorers=tuple(message.scorers),
        extras=extras,
    )
