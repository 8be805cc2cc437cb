"""Fault points of a learner."""

from __future__ import annotations

from rollmesh.shared.fault_points import FaultPoint


class LearnerFaultPoint(FaultPoint):
    """In the order in which they occur for one update."""

    LEASED = "leased"
    """A batch is leased; nothing of it is fetched."""
    MID_FETCH = "mid_fetch"
    """The first episode of the batch is here."""
    STEPPED = "stepped"
    """The weights in memory contain the update, the ledger does not."""
    COMMITTED = "committed"
    """The ledger contains it, too; no checkpoint does."""
    MID_CHECKPOINT = "mid_checkpoint"
    """A checkpoint with it is durable; the coordinator has not been notified."""
    CHECKPOINTED = "checkpointed"
    """The checkpoint is reported: its samples are TRAINED."""
    PUBLISHED = "published"
    """A version is announced. Also after every attach."""
