"""The loop of a learner: one trainer session after another until the run ends.

A session that is lost (fenced, lease expired, no reply in time) is followed by another one from the newest checkpoint.
A new checkpoint counts as progress. Without one, the number of restarts is bounded, so that a learner that cannot
progress stops with the cause.
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
from rollmesh.shared.net.retry import Backoff, worth_retrying

_log = logging.getLogger(__name__)

_SESSION_LOST = (
    Fenced,
    LeaseExpired,
    UnknownLease,
    BeyondBound,
    CommitConflict,
    NotPublished,
    WrongUpdate,
    WrongVersion,
)
"""Errors that end a session but not the learner: the weights in memory no longer match the ledger, but the checkpoint
does."""


async def run_learner(parts: Parts) -> None:
    """Train until the run ends or a stop is requested; the last weights are then in a checkpoint and published.

    In a run that exports its samples, publish the initial weights and do not train.

    Raise errors that a restart cannot resolve: another history, a rejected configuration, or too many consecutive
    restarts.
    """
    backoff = Backoff(parts.config.retry, parts.clock)
    restarts, checkpoint = 0, parts.progress.checkpoint_update
    while True:
        try:
            session = await begin_session(parts)
            if session.exports:
                del session  # frees the model's memory, because the depot has the weights
                return await _wait_for_end(parts)
            return await session.train()
        except MeshError as err:
            if isinstance(err, DiskFull) or (not isinstance(err, _SESSION_LOST) and not worth_retrying(err)):
                raise  # a restart would undo updates, and the disk would still be full
            if parts.progress.checkpoint_update > checkpoint:
                restarts, checkpoint = 0, parts.progress.checkpoint_update
                backoff.reset()
            restarts += 1
            parts.progress.last_error = f"{err.reason}: {err}"
            if restarts > parts.config.retry.restarts_max:
                raise
            _log.warning(
                "restarting from the newest checkpoint: restarts=%d reason=%s cause=%s", restarts, err.reason, err
            )
        await backoff.pause()


async def _wait_for_end(parts: Parts) -> None:
    """Wait until the run ends or a stop is requested. WatchRun repeats the state after a reconnect."""
    parts.progress.waiting_for = "the end of the export"
    await parts.commands.stop.wait()
    parts.progress.waiting_for = ""
