"""Random choices of agents."""

from __future__ import annotations

import random

from rollmesh.services.rollout.environment import Environment


def drawing(env: Environment, *, group: bool = False) -> random.Random:
    """Return a generator of random numbers that a retry of the episode gets again. With `group`, all episodes of the
    group get the same numbers."""
    key = env.key
    return random.Random("/".join((key.run, key.group, *(() if group else (key.episode,)))))
