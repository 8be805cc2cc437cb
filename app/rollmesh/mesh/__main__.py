"""`python -m rollmesh.mesh`: host some services of a run; see `host`."""

import sys

from rollmesh.mesh.host import main

if __name__ == "__main__":
    sys.exit(main())
