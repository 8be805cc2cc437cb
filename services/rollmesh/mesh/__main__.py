"""`python -m rollmesh.mesh`: hosts some parts of a run; see `host`."""

import sys

from rollmesh.mesh.host import main

if __name__ == "__main__":
    sys.exit(main())
