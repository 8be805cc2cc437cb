"""Fault points of a learner."""

from __future__ import annotations

from rollmesh.shared.process.fault_points import FaultPoint


class LearnerFaultPoint(FaultPoint):
    """Points in the order in which one update reaches them."""

    LEASED = "leased"
    """A batch is leased; fetching has not started."""
    MID_FETCH = "mid_fetch"
    """The first episode of the batch has arrived."""
    STEPPED = "stepped"
    """The weights in memory contain the update; the ledger does not."""
    COMMITTED = "committed"
    """The ledger contains the update too; checkpoints do not."""
    MID_CHECKPOINT = "mid_checkpoint"
    """A checkpoint with the update is durable; the coordinator has not been notified."""
    CHECKPOINTED = "checkpointed"
    """The checkpoint is reported: its samples are TRAINED."""
    COPIED = "copied"
    """The weights of a version are copied; they may be announced now. Also reached after every attach."""
    PUBLISHED = "published"
    """A version is announced, at any time before the next commit. Also reached after every attach."""
