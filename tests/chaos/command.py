"""`rollmesh`, whose services pass traps: the command as a person calls it but for the program of its processes."""

from __future__ import annotations

import functools
import sys

from rollmesh.cli import session
from rollmesh.cli.__main__ import main
from rollmesh.mesh.supervisor import Supervisor

LAUNCH = (sys.executable, "-m", "tests.chaos.launch")

if __name__ == "__main__":
    vars(session)["Supervisor"] = functools.partial(Supervisor, command=LAUNCH)
    main()
