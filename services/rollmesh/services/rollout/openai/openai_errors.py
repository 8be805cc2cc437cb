"""Errors that only the clients of the OpenAI-compatible server get."""

from __future__ import annotations

from rollmesh.shared.errors import FailedPrecondition, NotFound


class UnknownModel(NotFound):
    """The request names a model that is neither the policy nor an endpoint of the episode."""

    reason = "UNKNOWN_MODEL"


class EpisodeEnded(FailedPrecondition):
    """The episode ended while the request was in progress. Its key is unknown from now on."""

    reason = "EPISODE_ENDED"


class MethodNotAllowed(NotFound):
    """The path is served with another method."""

    reason = "METHOD_NOT_ALLOWED"
