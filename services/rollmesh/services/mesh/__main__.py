"""`python -m rollmesh.services.mesh`: hosts some parts of a run; see `host`."""

import sys

from rollmesh.services.mesh.host import main

if __name__ == "__main__":
    sys.exit(main())
