"""Global random generators of the libraries that a profile preloads: a session is a fork, and without a new seed all sessions of a profile
would draw the same numbers. The `random` module seeds itself after a fork.

Not covered: generators that a preloaded module or the prelude made, and other libraries.
"""

from __future__ import annotations

import sys

_MODULES = ("numpy.random", "torch.random", "sympy.core.random")
"""Those whose `seed()` takes a seed from the operating system."""


def seed_generators() -> None:
    """Seed those that are loaded."""
    for name in _MODULES:
        if (module := sys.modules.get(name)) is not None:
            module.seed()
