"""The `rollmesh` command, except that its processes run `tests.chaos.launch` with traps."""

from __future__ import annotations

import functools
import sys

from rollmesh.app import session
from rollmesh.cli.__main__ import main
from rollmesh.mesh.supervisor import Supervisor

LAUNCH = (sys.executable, "-m", "tests.chaos.launch")

if __name__ == "__main__":
    vars(session)["Supervisor"] = functools.partial(Supervisor, command=LAUNCH)
    main()
