"""A host process of the mesh (`rollmesh.mesh.host`) whose services pass traps."""

from __future__ import annotations

import sys

from rollmesh.mesh.host import Options, main
from rollmesh.services.learner.fault_points import LearnerFaultPoint
from rollmesh.services.rollout.fault_points import RolloutFaultPoint

from .traps import passes


async def at_learner(moment: LearnerFaultPoint) -> None:
    passes(f"learner-{moment}")


async def at_rollout(moment: RolloutFaultPoint) -> None:
    passes(f"rollout-{moment}")


OPTIONS: Options = {
    "learner": {"at": at_learner},
    **{f"rollout-{number}": {"at": at_rollout} for number in range(4)},
}

if __name__ == "__main__":
    sys.exit(main(options=OPTIONS))
