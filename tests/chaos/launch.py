"""A host of the mesh (`rollmesh.mesh.host`) whose parts pass traps."""

from __future__ import annotations

import sys

from rollmesh.mesh.host import Options, main
from rollmesh.services.learner.moments import Moment as LearnerMoment
from rollmesh.services.rollout.moments import Moment as RolloutMoment

from .traps import passes


async def at_learner(moment: LearnerMoment) -> None:
    passes(f"learner-{moment}")


async def at_rollout(moment: RolloutMoment) -> None:
    passes(f"rollout-{moment}")


OPTIONS: Options = {
    "learner": {"at": at_learner},
    "rollout-0": {"at": at_rollout},
    "rollout-1": {"at": at_rollout},
}

if __name__ == "__main__":
    sys.exit(main(options=OPTIONS))
