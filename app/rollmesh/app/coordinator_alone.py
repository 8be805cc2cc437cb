"""Open a coordinator that runs alone in its process, with a NATS cluster that runs elsewhere; the other services join
it.

Its folder is that of a mesh: `status`, `drain`, `audit`, `trace` and `health` take it. Only its snapshots are worth
keeping: without them it recovers from the ledger. Collaborators: `mesh.host` (runs it), `commands.serve`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollmesh.app.checks.config_checks import load_checked
from rollmesh.app.run_folder import RunFolder, new_folder, origin_now
from rollmesh.mesh.run_layout import RunLayout, open_layout
from rollmesh.shared.errors import AlreadyExists, ConfigError, DeadlineExceeded, MeshError, Unavailable
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.rpc.status import typed_errors
from rollmesh.v1 import coordinator_pb2, coordinator_pb2_grpc

COORDINATOR = "coordinator"
OTHER_S_MAX = 3.0
"""Deadline of the call that finds another coordinator, in seconds."""
_NODES = ("inference", "rollout", "sandbox")


def open_coordinator(arguments: Sequence[str], folder: Path | None, base_dir: Path | None) -> RunLayout:
    """Return the layout of a coordinator; `arguments` are its configuration file and overrides. Write its folder, which
    may hold an earlier one.

    Raises InvalidInput with every mistake in the configuration, ConfigError if it names no NATS cluster or no fixed
    address.
    """
    file, overrides = _split(arguments)
    config, _ = load_checked(file, [*(f"counts.{kind}=0" for kind in _NODES), *overrides], learner=False)
    if not config.bus.url:
        raise ConfigError(
            "`bus.url` must name the NATS cluster of a coordinator that runs alone, e.g. tls://nats:4222; `rollmesh "
            "up` starts a server itself",
            key="bus.url",
        )
    if config.made_model is not None:
        raise ConfigError(
            "`made_model` must be empty for a coordinator that runs alone, because it has no learner; name a model "
            "folder in `model`",
            key="made_model",
        )
    base_dir = (base_dir or file.parent).resolve()
    origin = origin_now(sys.argv, base_dir, is_mesh=True)
    root = (folder or Path(COORDINATOR)).resolve()
    if (held := RunFolder(root)).origin.exists():
        if not held.read_origin().is_mesh:
            raise ConfigError(f"--dir {root} holds a run; choose another folder for the coordinator", path=root)
        held.write(config, origin)
    else:
        new_folder(config, origin, root)
    return open_layout(config, run_dir=root, base_dir=base_dir)


async def refuse_second(layout: RunLayout) -> None:
    """Raise AlreadyExists if a coordinator responds at the address that this one is about to serve: the two would fence
    each other in turn."""
    async with open_channel(layout.coordinator, access=layout.access) as channel:
        stub: Any = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        try:
            with typed_errors():
                await stub.GetFleet(coordinator_pb2.GetFleetRequest(), timeout=OTHER_S_MAX)
        except (Unavailable, DeadlineExceeded):
            return
        except MeshError as err:
            raise AlreadyExists(
                f"another server responds at {layout.coordinator} ({err}); choose another port"
            ) from err
    raise AlreadyExists(
        f"a coordinator serves at {layout.coordinator} already, and a mesh has one; stop this one, or set the number "
        "of replicas to 1",
        coordinator=layout.coordinator,
    )


def _split(arguments: Sequence[str]) -> tuple[Path, list[str]]:
    if not arguments or "=" in arguments[0]:
        raise ConfigError("name the configuration file: rollmesh serve coordinator CONFIG [KEY=VALUE]...")
    return Path(arguments[0]), list(arguments[1:])
