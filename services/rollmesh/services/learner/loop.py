"""The life of a learner: one tenure after another until the run ends.

A tenure that loses its place (fenced, lease expired, nobody answered in time) is followed by another from the newest checkpoint. A
checkpoint is progress; without one in between, the number of returns is bounded, so that a learner that can't get on stops
and says why.
"""

from __future__ import annotations

import logging

from rollmesh.services.learner.trainer_session import Parts, begin_session
from rollmesh.shared.errors import (
    BeyondBound,
    CommitConflict,
    DiskFull,
    Fenced,
    LeaseExpired,
    MeshError,
    NotPublished,
    UnknownLease,
    WrongUpdate,
    WrongVersion,
)
from rollmesh.shared.retry import Backoff, worth_retrying

_log = logging.getLogger(__name__)

_PLACE_LOST = (
    Fenced,
    LeaseExpired,
    UnknownLease,
    BeyondBound,
    CommitConflict,
    NotPublished,
    WrongUpdate,
    WrongVersion,
)
"""What ends a tenure but not the learner: the weights in memory are no longer those of the ledger, the checkpoint's are."""


async def run_learner(parts: Parts) -> None:
    """Trains until the run ends or a stop is commanded; the last weights are then in a checkpoint and published.

    In a run that exports its samples it publishes the initial weights, and trains nothing.

    Raises what cannot be helped by going back: another history, a refused configuration, or too many returns in a row.
    """
    backoff = Backoff(parts.config.retry, parts.clock)
    returns, checkpoint = 0, parts.progress.checkpoint_update
    while True:
        try:
            session = await begin_session(parts)
            if session.exports:
                del session  # the depot has the weights now; the model's memory is free for others
                return await _outlast(parts)
            return await session.train()
        except MeshError as err:
            if isinstance(err, DiskFull) or (not isinstance(err, _PLACE_LOST) and not worth_retrying(err)):
                raise  # going back would undo updates, and the disk be as full as before
            if parts.progress.checkpoint_update > checkpoint:
                returns, checkpoint = 0, parts.progress.checkpoint_update
                backoff.reset()
            returns += 1
            parts.progress.last_error = f"{err.reason}: {err}"
            if returns > parts.config.retry.restarts_max:
                raise
            _log.warning("back to the newest checkpoint (%d in a row): %s: %s", returns, err.reason, err)
        await backoff.pause()


async def _outlast(parts: Parts) -> None:
    """Until the run has ended, which WatchRun tells again after every break, or a stop is commanded."""
    parts.progress.waiting_for = "the end of the export"
    await parts.commands.stop.wait()
    parts.progress.waiting_for = ""
