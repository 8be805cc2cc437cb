"""Seed the global random generators of libraries that a profile preloads. A session is a fork, so without new seeds all
sessions of a profile would draw equal numbers. The `random` module seeds itself after a fork.

Not covered: generators created by a preloaded module or the prelude, and other libraries.
"""

from __future__ import annotations

import sys

_MODULES = ("numpy.random", "torch.random", "sympy.core.random")
"""Modules whose `seed()` takes a seed from the operating system."""


def seed_generators() -> None:
    """Seed the loaded modules."""
    for name in _MODULES:
        if (module := sys.modules.get(name)) is not None:
            module.seed()
