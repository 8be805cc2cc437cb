"""Host some services of a run in one process. Several hosts over one run folder form a mesh of processes.

    python -m rollmesh.mesh --run-dir runs/mine --config run.yaml --services nats
    python -m rollmesh.mesh --run-dir runs/mine --config run.yaml --services coordinator,depot,reward,data,gateway
    python -m rollmesh.mesh --run-dir runs/mine --config run.yaml --services inference-0,rollout-0
    python -m rollmesh.mesh --run-dir runs/mine --config run.yaml --services learner

The hosts share the folder (token, addresses) and start in any order. Service `nats` is the embedded server. The others
find its port in the folder, or use the cluster at bus.url. A host exits when one of its services ends: with 0 after a
clean end (the run is over, the worker has drained), with 1 after an error, so that a supervisor restarts it, with 2 for
an unusable configuration and with 3 for a full disk. SIGTERM, SIGINT and SIGHUP stop it cleanly (a learner finishes its
update and writes a checkpoint) within `stop_s`, with code 143. A second signal ends it immediately.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollmesh.mesh.config import MeshConfig
from rollmesh.mesh.mesh import Mesh
from rollmesh.mesh.mesh_services import NATS, service_names
from rollmesh.mesh.process_events import BAD_CONFIG, DISK_FULL, STOPPED
from rollmesh.mesh.run_layout import open_layout
from rollmesh.shared.bus.bus import BusUnavailable
from rollmesh.shared.bus.embedded_server import EmbeddedServer
from rollmesh.shared.config.loader import load_config
from rollmesh.shared.errors import ConfigError, DiskFull, MeshError
from rollmesh.shared.process.stop_signals import stop_signals
from rollmesh.shared.telemetry import set_up_logging

_FINISH_SHARE = 0.8
"""Share of `stop_s` for the learner's last update and checkpoint. The rest is for the stop itself."""
_POLL_S = 0.05
_log = logging.getLogger(__name__)

Options = Mapping[str, Mapping[str, Any]]


class HostOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a host."""

    run_dir: Path
    config: Path
    services: tuple[str, ...]
    base_dir: Path
    overrides: tuple[str, ...] = ()
    stop_s: float = 30.0
    """Timeout of a clean stop, in seconds."""


def main(argv: Sequence[str] | None = None, options: Options | None = None) -> int:
    """Host services until they end. `options` are keyword arguments for their nodes, as for `Mesh`. Return the exit
    code."""
    host = _parse(argv)
    set_up_logging()  # until the configuration is read
    try:
        stopped = asyncio.run(run_host(host, options))
    except ConfigError as err:
        print(f"error: {err}", file=sys.stderr)
        return BAD_CONFIG
    except DiskFull as err:
        print(f"error: {err}", file=sys.stderr)
        return DISK_FULL
    except (MeshError, ExceptionGroup, OSError) as err:
        print(f"error: {','.join(host.services)} failed: {err}", file=sys.stderr)
        return 1
    except TimeoutError:
        print(f"error: {','.join(host.services)} did not stop within {host.stop_s} s", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)  # a thread that does not end would keep the interpreter running
    return STOPPED if stopped else 0


def _parse(argv: Sequence[str] | None) -> HostOptions:
    parser = argparse.ArgumentParser(prog="python -m rollmesh.mesh", description="Host some services of a run.")
    parser.add_argument("--run-dir", type=Path, required=True, help="folder of the run, shared by all of its hosts")
    parser.add_argument("--config", type=Path, required=True, help="the run's config file")
    parser.add_argument("--services", required=True, help="services by name, e.g. nats,coordinator or rollout-0")
    parser.add_argument(
        "--base-dir", type=Path, help="folder of the files that the config names; default: folder of the config"
    )
    parser.add_argument("--stop-s", type=float, default=30.0, help="timeout of a clean stop, seconds")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the config")
    found = parser.parse_args(argv)
    services = tuple(service for service in found.services.split(",") if service)
    return HostOptions(
        run_dir=found.run_dir,
        config=found.config,
        services=services,
        base_dir=found.base_dir or found.config.resolve().parent,
        overrides=tuple(found.overrides),
        stop_s=found.stop_s,
    )


async def run_host(host: HostOptions, options: Options | None = None) -> bool:
    """Wait until a service ends or a signal arrives. Return whether it was a signal. Raises the error of a service,
    ConfigError, and TimeoutError for a stop that took too long."""
    config = load_config(MeshConfig, host.config, host.overrides)
    set_up_logging(config.telemetry.logging())
    base_dir = host.base_dir
    _check_services(host.services, config)
    bus_url = "" if NATS in host.services or config.bus.url else await _bus_of_folder(config, host.run_dir, base_dir)
    names = [name for name in service_names(config) if name in host.services]
    mesh = Mesh(config, run_dir=host.run_dir, base_dir=base_dir, services=names, options=options, bus_url=bus_url)
    return await run_until_ended(mesh, host.stop_s)


async def run_until_ended(
    mesh: Mesh,
    stop_s: float,
    *,
    on_started: Callable[[], None] = lambda: None,
    away: Callable[[], Coroutine[Any, Any, None]] | None = None,
    drains: bool = False,
) -> bool:
    """Run the services of `mesh` until they have ended or a signal arrives. Return whether it was a signal. Raises as
    `run_host`.

    `away` watches the rest of the mesh. An error that it raises ends the services. With `drains`, SIGTERM is an end and
    not a stop: nodes drain, each within its limit, and a coordinator stops.
    """
    stopping = asyncio.create_task(_signalled(then_ignore=drains), name="signals")
    serving = asyncio.create_task(_serve(mesh, stop_s, on_started, away), name="services")
    drained = False
    try:
        await asyncio.wait([stopping, serving], return_when=asyncio.FIRST_COMPLETED)
        if drains and stopping.done() and stopping.result() is signal.SIGTERM and not serving.done():
            _log.info("SIGTERM: draining %s", ", ".join(mesh.running))
            drained = True
            if mesh.entered and (mesh.drainable or not mesh.running):  # not while it starts, and also while it stops
                await mesh.drain()
                await asyncio.wait([serving])
        if not serving.done():
            await _finish_update(mesh, _FINISH_SHARE * stop_s)
    finally:
        stopping.cancel()
        serving.cancel()
        await asyncio.wait([serving])
    if serving.cancelled():
        return not drained
    serving.result()
    return False


async def _serve(
    mesh: Mesh,
    stop_s: float,
    on_started: Callable[[], None],
    away: Callable[[], Coroutine[Any, Any, None]] | None,
) -> None:
    """Run the services until one ends or this is cancelled, then stop them within `stop_s`."""
    await mesh.__aenter__()
    try:
        on_started()
        await _ended(mesh, *([away()] if away is not None else []))
    finally:
        async with asyncio.timeout(stop_s):
            await mesh.__aexit__(None, None, None)


async def _finish_update(mesh: Mesh, limit_s: float) -> None:
    """Let the learner write a last checkpoint before the stop, unless the rest of the mesh has already exited."""
    if "learner" not in mesh.running:
        return
    try:
        async with asyncio.timeout(limit_s):
            await mesh.service("learner").stop()
    except (MeshError, TimeoutError) as err:
        _log.warning("the learner stops without a last checkpoint: %s: %s", type(err).__name__, err)


def _check_services(services: Sequence[str], config: MeshConfig) -> None:
    known = [NATS, *service_names(config)]
    for service in services:
        if service not in known:
            raise ConfigError(f"--services must name services of this config ({', '.join(known)}), got `{service}`")
    if not services:
        raise ConfigError(f"--services must name at least one of {', '.join(known)}")
    if NATS in services and config.bus.url:
        raise ConfigError(f"--services must not include nats, because bus.url is {config.bus.url}; remove one of them")


async def _bus_of_folder(config: MeshConfig, run_dir: Path, base_dir: Path) -> str:
    """Return the URL of the run's embedded server when it has a port. Raises BusUnavailable."""
    layout = open_layout(config, run_dir=run_dir, base_dir=base_dir)
    server = layout.bus_server()
    limit_s = config.bus.embedded.start_s
    try:
        async with asyncio.timeout(limit_s):
            while not (url := server.known_url()):  # noqa: ASYNC110 (another process writes it)
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise BusUnavailable(
            f"no nats-server has written its port into {layout.run_dir / NATS} within {limit_s} s; host the service "
            "`nats`, or set bus.url"
        ) from None
    return url


async def _ended(mesh: Mesh, *watches: Coroutine[Any, Any, None]) -> None:
    """Wait until the learner is done, or all services have drained. Raises the error of a service or of a watch."""
    waits = [asyncio.create_task(watch) for watch in watches]
    if mesh.nats is not None:
        waits.append(asyncio.create_task(_server_gone(mesh.nats)))
    if mesh.running:
        waits.append(asyncio.create_task(mesh.finished()))
    elif mesh.nats is not None:
        waits.append(asyncio.create_task(mesh.nats.watch_disk()))
    try:
        if not waits:
            await asyncio.Event().wait()  # until cancelled by a signal
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in waits:
            task.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


async def _server_gone(server: EmbeddedServer) -> None:
    while not server.exited:  # noqa: ASYNC110 (another process ends)
        await asyncio.sleep(_POLL_S)
    raise BusUnavailable(f"nats-server at {server.url} exited; its log is in the run folder")


async def _signalled(*, then_ignore: bool) -> signal.Signals:
    """Return the first of SIGTERM, SIGINT or, unless it is ignored, SIGHUP. The next signal ends the process as if
    there were no handler.

    With `then_ignore`, SIGTERM is ignored after a cancellation, because a process that has drained is about to exit
    with its result.
    """
    loop = asyncio.get_running_loop()
    came: asyncio.Future[signal.Signals] = loop.create_future()

    def note(number: signal.Signals) -> None:
        if not came.done():
            came.set_result(number)

    signals = stop_signals()
    for one in signals:
        loop.add_signal_handler(one, note, one)
    try:
        return await came
    finally:
        for one in signals:
            loop.remove_signal_handler(one)
        if then_ignore and came.cancelled():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
