"""Where a running mesh is, as a person names it: the folder of its run on this host, or an address and a token file.

Collaborators: `run_folder` (what lies in the folder), `mesh.security` (TLS files by `security.*=` overrides).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rollmesh.cli.run_folder import open_folder
from rollmesh.mesh.joining import own_security
from rollmesh.mesh.run_layout import open_place
from rollmesh.mesh.run_lock import is_owned
from rollmesh.mesh.security import open_access
from rollmesh.shared.errors import ConfigError, Unavailable
from rollmesh.shared.rpc.access import Access

REMEDY = "name the folder of a run on this host, or --join HOST:PORT and --token-file FILE"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshAddress:
    """One public address of a mesh, and what lets a caller in."""

    address: str
    access: Access
    run: Path | None = None
    """The folder of the run, if it was named by that."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around calls: says in plain words that nothing serves at the address."""
        try:
            yield
        except Unavailable as err:
            if self.run is None:
                raise Unavailable(
                    f"no mesh answers at {self.address}: {err}; check the address, and that the mesh is running",
                    address=self.address,
                ) from err
            if is_owned(self.run):
                raise  # it is running, and cannot answer now
            raise Unavailable(
                f"the run in {self.run} is not running: nothing answers at {self.address}; `rollmesh train {self.run}` continues "
                f"it, `rollmesh audit {self.run}` and `rollmesh show {self.run}` read what it left",
                address=self.address,
            ) from err


def find_mesh(run: Path | None, join: str, token_file: Path | None, overrides: Sequence[str]) -> MeshAddress:
    """Raises ConfigError for both, neither or half of them."""
    if run is not None and not join and token_file is None:
        folder, config, base_dir = open_folder(run, [])
        layout = open_place(config, run_dir=folder.root, base_dir=base_dir)
        return MeshAddress(address=layout.gateway, access=layout.access, run=run)
    if run is None and join and token_file is not None:
        access = open_access(own_security(overrides), base_dir=Path.cwd(), run_token=token_file)
        return MeshAddress(address=join, access=access)
    raise ConfigError(f"which mesh? {REMEDY}")
