"""Names of the sources of tokens in settings: those of `rollmesh.shared.domain.trajectory.Source`, in lower case.

They are a type, so that the configuration rejects another name with the accepted ones. This module imports no arrays.
"""

from __future__ import annotations

from typing import Literal, get_args

ExternalSource = Literal["prompt", "tool", "hint", "summary", "dataset", "replay", "rewritten", "peer", "human"]
"""A source of tokens that no policy of the run sampled."""
EXTERNAL_SOURCES: tuple[ExternalSource, ...] = get_args(ExternalSource)
