"""Where a run lives on this host: its folder, secret, and addresses that stay the same over restarts.

runs/<name>/
  config.yaml  token  addresses.json
  nats/  coordinator/  depot/  inference-0/  sandbox-0/  checkpoints/
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rollmesh.services.mesh.config import MeshConfig
from rollmesh.shared.errors import ConfigError
from rollmesh.shared.ids import new_secret
from rollmesh.shared.ports import lasting_ports
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.server import ServerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One run on one host. Make it with `open_place`."""

    config: MeshConfig
    run_dir: Path
    base_dir: Path
    """Where files that the config names are looked up."""
    access: Access
    """The run's token is in `run_dir/token`, readable by its owner only."""
    coordinator: str
    """host:port of the coordinator."""
    gateway: str
    """host:port of the gateway."""
    depot: str
    """host:port of the depot: a learner is told once, when it attaches."""

    @property
    def run(self) -> str:
        return self.config.run.name

    def folder(self, name: str) -> Path:
        """A part's own folder, made if missing."""
        path = self.run_dir / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def model_dir(self) -> Path:
        """The initial model. ConfigError if it is not there."""
        path = (self.base_dir / self.config.model).resolve()
        if not self.config.model or not (path / "config.json").is_file():
            raise ConfigError(
                f"`model`: {path} holds no config.json; name a folder with a model in transformers format",
                path=str(path),
            )
        return path

    def served_at(self, address: str, config: ServerConfig) -> ServerConfig:
        """`config` bound to a fixed address."""
        return msgspec.structs.replace(config, address=address)


def open_place(config: MeshConfig, *, run_dir: Path, base_dir: Path) -> Place:
    """The run's place, made on first use. Addresses are chosen once and kept, so that a restarted part is found again."""
    run_dir = run_dir.resolve()
    run_dir.mkdir(parents=True, exist_ok=True)
    addresses = _addresses(run_dir / "addresses.json", ("coordinator", "gateway", "depot"))
    return Place(
        config=config,
        run_dir=run_dir,
        base_dir=base_dir.resolve(),
        access=Access(_token(run_dir / "token")),
        coordinator=addresses["coordinator"],
        gateway=addresses["gateway"],
        depot=addresses["depot"],
    )


def _token(path: Path) -> str:
    if not path.exists():
        _write_once(path, new_secret())
    return path.read_text().strip()


def _addresses(path: Path, names: tuple[str, ...]) -> dict[str, str]:
    if not path.exists():
        ports = lasting_ports(len(names))
        _write_once(path, json.dumps({name: f"127.0.0.1:{port}" for name, port in zip(names, ports, strict=True)}))
    known: dict[str, str] = json.loads(path.read_text())
    return known


def _write_once(path: Path, text: str) -> None:
    """Whole or not at all, and the first writer wins: processes of one run may start together."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")  # readable by its owner only
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        os.unlink(temporary)
