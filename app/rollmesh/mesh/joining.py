"""Join a node on this host to a mesh that runs elsewhere. One address and a token are enough.

    layout, name = await open_joined(JoinOptions(kind="inference", address="10.0.0.1:7000", ...))
    stopped = await run_until_ended(Mesh(layout.config, run_dir=layout.run_dir, layout=layout, services=[name]), stop_s)

GetMesh gives the configuration, the addresses and the model's small files. The settings of this host (network, TLS
files) come from the defaults and from `overrides`. The node's folder holds only files that the node fetches, and it may
start empty. Collaborators: `mesh_description` (the other side), `mesh` (runs the node).
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollmesh.mesh.config import MeshConfig
from rollmesh.mesh.run_layout import RunLayout
from rollmesh.mesh.security import SecurityConfig, open_access
from rollmesh.shared.clock import Clock, SystemClock
from rollmesh.shared.config.loader import UNKNOWN_KEY, all_in_one, config_from_dict, load_config, read_config, to_yaml
from rollmesh.shared.domain.ids import RandomIds
from rollmesh.shared.domain.protocol import PROTOCOL, check_protocol
from rollmesh.shared.errors import AlreadyExists, ConfigError, DeadlineExceeded, MeshError, Unavailable
from rollmesh.shared.membership.membership import reported_protocol
from rollmesh.shared.process.process_info import installed_version
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.addresses import host_of, is_loopback, port_of, split_addresses
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.rpc.server import ServerConfig
from rollmesh.shared.rpc.status import typed_errors
from rollmesh.shared.weights.model_files import fetch_model_files
from rollmesh.v1 import coordinator_pb2 as pb
from rollmesh.v1 import coordinator_pb2_grpc

MANY = ("inference", "rollout", "sandbox", "reward", "data", "gateway")
"""Kinds of which a mesh accepts any number, because they share the work."""
SINGLE = ("depot", "learner")
"""Kinds of which a mesh accepts one. Weights are fetched from one depot, and a second learner fences the first."""
KINDS = (*MANY, *SINGLE)
CONFIG_FILE = "mesh.yaml"
"""File in the node's folder with the received configuration. It is informational."""
_CLIENTS = ("rollout", "learner")
"""Kinds that serve no other process."""
ASK_S_MAX = 30.0
TLS_S_MAX = 5.0
GATEWAY_POLL_S = 0.5
CHECK_S = 10.0
"""Seconds between two calls to the coordinator, and the deadline of each."""
_log = logging.getLogger(__name__)
_SECURITY = "security."
ANY_PORT = "127.0.0.1:0"
"""Address on which a joined gateway or depot listens. `network.host` replaces it."""
_LEAVING = (pb.NODE_STATE_SUSPECT, pb.NODE_STATE_DEAD)


class JoinOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a joining node."""

    kind: str
    address: str
    """host:port of the mesh's gateway, or of its coordinator."""
    token_file: Path
    name: str = ""
    """Part of the node's id, unique in the mesh. Empty: derived from the host name and a random number."""
    base_dir: Path | None = None
    """Folder of files that the configuration names. None: the mesh's folder, if this host has it."""
    folder: Path | None = None
    """Folder of the node. None: nodes/ID."""
    overrides: tuple[str, ...] = ()


async def open_joined(options: JoinOptions) -> tuple[RunLayout, str]:
    """Return the layout of a node and its id. Raises ConfigError, Unavailable, Unauthenticated, AlreadyExists,
    ProtocolMismatch."""
    if options.kind not in KINDS and not re.fullmatch(r"endpoint-[A-Za-z0-9_]+", options.kind):
        raise ConfigError(
            f"the kind of a joining node must be one of {', '.join(KINDS)} or endpoint-NAME, got `{options.kind}`"
        )
    access = open_access(own_security(options.overrides), base_dir=Path.cwd(), run_token=options.token_file)
    await refuse_without_tls(options.address, access)
    async with open_channel(options.address, access=access) as channel:
        stub: Any = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        described = await _ask(stub, options.address)
        check_described_protocol(described, options)
        if options.kind == "learner" and options.address == described.coordinator:
            described = await _ask_for_gateway(stub, options.address, described)
        name = await _free_name(stub, options, described)
        folder = _make_folder(options.folder or Path("nodes") / name)
        if described.model_files:
            await fetch_model_files(stub, described.model_files, folder / "model")
    config = _joined_config(described, options, folder)
    refuse_loopback(config, options.kind, described.coordinator)
    return _layout(config, described, access, folder, options), name


async def ask_mesh(address: str, access: Access) -> pb.GetMeshResponse:
    """Return the description of the mesh at an address. Raises ConfigError, Unavailable, Unauthenticated."""
    await refuse_without_tls(address, access)
    async with open_channel(address, access=access) as channel:
        return await _ask(coordinator_pb2_grpc.CoordinatorServiceStub(channel), address)


async def refuse_without_tls(address: str, access: Access, *, option: str = "") -> None:
    """Raise ConfigError if the server accepts only TLS and `access` has no certificates. `option` precedes the
    settings."""
    if access.tls is None and await speaks_tls(address):
        files = " ".join(f"{option}security.{name}=FILE" for name in ("ca", "certificate", "key"))
        raise ConfigError(
            f"the mesh at {address} accepts TLS connections only, and no certificates were given; add {files}"
        )


async def speaks_tls(address: str) -> bool:
    """Return whether a TLS server responds at the address. False if no server responds within a few seconds."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # Nothing is sent, and the response is not trusted.
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    first = split_addresses(address)[0]
    try:
        async with asyncio.timeout(TLS_S_MAX):
            _, writer = await asyncio.open_connection(host_of(first), port_of(first), ssl=context)
    except ssl.SSLError as err:
        return err.reason != "WRONG_VERSION_NUMBER"  # a server without TLS does not answer with a TLS record
    except (OSError, TimeoutError):
        return False
    writer.transport.abort()
    return True


async def until_away(address: str, access: Access, *, limit_s: float, clock: Clock | None = None) -> None:
    """Call the coordinator at `address` repeatedly. Raises Unavailable once it has not answered for `limit_s`."""
    clock = clock or SystemClock()
    seen_s = clock.monotonic_s()
    async with open_channel(address, access=access) as channel:
        stub: Any = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        while (silent_s := clock.monotonic_s() - seen_s) < limit_s:
            try:
                with typed_errors():
                    await stub.GetFleet(pb.GetFleetRequest(), timeout=CHECK_S)
                seen_s = clock.monotonic_s()
            except MeshError as err:
                _log.debug("the coordinator does not answer: %s", err)
            await clock.sleep(min(CHECK_S, limit_s))
    raise Unavailable(
        f"the coordinator at {address} has not answered for {silent_s:.0f} s, so the mesh counts as ended and the node "
        "leaves (--away-s sets the limit)",
        address=address,
    )


async def _ask(stub: Any, address: str) -> pb.GetMeshResponse:
    try:
        with typed_errors():
            described: pb.GetMeshResponse = await stub.GetMesh(
                pb.GetMeshRequest(), timeout=ASK_S_MAX, wait_for_ready=True
            )
    except DeadlineExceeded as err:
        raise Unavailable(
            f"no server responded at {address} within {ASK_S_MAX:.0f} s; --join takes the address of the mesh's "
            "gateway or coordinator (with certificates if it has some)",
            address=address,
        ) from err
    return described


def check_described_protocol(described: pb.GetMeshResponse, options: JoinOptions) -> None:
    """Raise ProtocolMismatch before anything is fetched if this release does not work with the coordinator's."""
    check_protocol(
        PROTOCOL,
        reported_protocol(described),
        node_name=f"this {options.kind} node",
        node_build=installed_version(),
        coordinator_build=described.version,
    )


async def _ask_for_gateway(stub: Any, address: str, described: pb.GetMeshResponse) -> pb.GetMeshResponse:
    """Return a description with a gateway, which a learner that names the coordinator needs. Raises Unavailable if none
    joins in time."""
    clock = SystemClock()
    end_s = clock.monotonic_s() + ASK_S_MAX
    while not described.gateways:
        if clock.monotonic_s() >= end_s:
            raise Unavailable(
                f"no gateway has joined the mesh at {address} within {ASK_S_MAX:.0f} s, and a learner reads its "
                "samples there; start one: rollmesh serve gateway --join HOST:PORT",
                address=address,
            )
        await clock.sleep(GATEWAY_POLL_S)
        described = await _ask(stub, address)
    return described


async def _free_name(stub: Any, options: JoinOptions, described: pb.GetMeshResponse) -> str:
    """Return the node's id. A node of that id without heartbeat counts as an earlier process of this node."""
    if options.kind == "depot" and described.depots:
        raise AlreadyExists(
            f"the mesh has its depot, at {described.depots[0]}; drain that one first", depot=described.depots[0]
        )
    name = _wanted_name(options)
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,128}", name):
        raise ConfigError(f"--name {name!r}: expected letters, digits, dots, dashes and underscores")
    with typed_errors():
        fleet = await stub.GetFleet(pb.GetFleetRequest(), timeout=ASK_S_MAX)
    if any(node.node_id == name and node.state not in _LEAVING for node in fleet.nodes):
        remedy = "drain it first" if options.kind in SINGLE else "choose another --name"
        raise AlreadyExists(f"a node {name} is in the mesh already; {remedy}", node_id=name)
    return name


def _wanted_name(options: JoinOptions) -> str:
    """Return the id from the options. It starts with the kind, like the names of a mesh's processes."""
    if options.kind in SINGLE:
        return options.kind
    host = re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname().partition(".")[0]) or "host"
    stem = options.name or f"{host}-{RandomIds().new()[:8]}"
    return stem if stem.startswith(f"{options.kind}-") else f"{options.kind}-{stem}"


def _make_folder(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise ConfigError(f"{folder}: cannot be the node's folder: {err.strerror}; choose another --dir") from err
    return folder.resolve()


def own_security(overrides: Sequence[str]) -> SecurityConfig:
    """Return the TLS files of this host, which the overrides name."""
    own = [item.removeprefix(_SECURITY) for item in overrides if item.startswith(_SECURITY)]
    return config_from_dict(SecurityConfig, {}, own)


def _joined_config(described: pb.GetMeshResponse, options: JoinOptions, folder: Path) -> MeshConfig:
    """Return the mesh's configuration with the settings of this host."""
    import yaml

    tree: dict[str, Any] = yaml.safe_load(described.config_yaml)
    tree["security"] = msgspec.to_builtins(own_security(options.overrides)) | {
        "token_file": str(options.token_file.resolve())
    }
    tree["bus"] |= {"url": described.bus_url}
    tree["inference"]["python"] = ""  # the node runs in this process
    # A learner needs the initial weights, in a folder that the user names.
    if described.model_files and options.kind != "learner":
        tree["model"] = str(folder / "model") if tree["model"] else ""
        tree["rollout"]["model_dir"] = str(folder / "model")
    others = [item for item in options.overrides if not item.startswith(_SECURITY)]
    path = folder / CONFIG_FILE
    path.write_text(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True), encoding="utf-8")
    if reported_protocol(described) > PROTOCOL:
        _drop_newer_settings(path)
    return load_config(MeshConfig, path, others)


def _drop_newer_settings(path: Path) -> None:
    """Remove the settings from a file that a newer coordinator has and this release does not know. Raises ConfigError
    for other errors."""
    config, mistakes = read_config(MeshConfig, path)
    unknown = [one for one in mistakes if one.violations[0].description.startswith(UNKNOWN_KEY)]
    if config is None or len(unknown) < len(mistakes):
        raise all_in_one([one for one in mistakes if one not in unknown])
    if unknown:
        keys = ", ".join(one.violations[0].field for one in unknown)
        _log.warning("settings of the newer coordinator have no effect here: %s", keys)
        path.write_text(to_yaml(config), encoding="utf-8")


def refuse_loopback(config: MeshConfig, kind: str, coordinator: str) -> None:
    """Raise ConfigError if a serving node would advertise an address that only this host reaches to a mesh on another
    address."""
    coordinator = split_addresses(coordinator)[0]
    if kind in _CLIENTS or coordinator.startswith("unix:") or is_loopback(host_of(coordinator)):
        return
    section = "inference" if kind.startswith("endpoint-") else kind
    server = config.network.listening(getattr(getattr(config, section), "server", ServerConfig()))
    host = server.advertise or host_of(server.address)
    if is_loopback(host):
        raise ConfigError(
            f"the mesh is on {host_of(coordinator)}, and this node would advertise {host}, which other hosts cannot "
            "reach; set network.host=ADDRESS to an address of this host"
        )


def _layout(
    config: MeshConfig, described: pb.GetMeshResponse, access: Access, folder: Path, options: JoinOptions
) -> RunLayout:
    return RunLayout(
        config=config,
        run_dir=folder,
        base_dir=_base_dir(options, described),
        access=access,
        coordinator=described.coordinator,
        gateway=ANY_PORT if options.kind == "gateway" else (described.gateways or [options.address])[0],
        depot=ANY_PORT,
    )


def _base_dir(options: JoinOptions, described: pb.GetMeshResponse) -> Path:
    if options.base_dir is not None:
        if not options.base_dir.is_dir():
            raise ConfigError(f"--base-dir {options.base_dir}: no such folder", path=str(options.base_dir))
        return options.base_dir.resolve()
    theirs = Path(described.base_dir)
    return theirs if described.base_dir and theirs.is_dir() else Path.cwd()
