"""Clean up after a previous process of the service, through records in a state directory.

The kernel kills a service's launchers, zygotes and sessions together with the service (see `sandbox_runtime.contain`).
After a SIGKILL of all of them, empty cgroups can remain; they are recorded before they are created. If that chain ever
fails, launchers can remain; they are recorded once they run. A lock prevents two services from using one directory; the
kernel releases it when the holder exits.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import select
import signal
from dataclasses import dataclass
from pathlib import Path

from rollmesh.sandbox_runtime import cgroups
from rollmesh.sandbox_runtime.cgroups import Hierarchy
from rollmesh.services.sandbox.engines.file_trees import remove_tree
from rollmesh.shared.errors import ConfigError

_log = logging.getLogger(__name__)

_END_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleared:
    """What a start found and removed."""

    num_processes: int
    num_groups: int


class StateDir:
    """The state directory of one service, locked while it runs. Blocking: call from a thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock_fd = -1

    def acquire(self) -> None:
        """Create and lock the directory. Raises ConfigError if another service has locked it."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(self.path / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise ConfigError(f"{self.path} is in use by another sandbox service; give each a directory") from None
        self._lock_fd = fd

    def release(self) -> None:
        """Release the lock."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def has_records(self) -> bool:
        """Return whether something is recorded that an end without a kill removes."""
        return any(next(self.path.glob(f"{kind}-*"), None) for kind in ("launcher", "groups", "folders"))

    def clean_up(self, hierarchy: Hierarchy | None) -> Cleared:
        """Kill recorded launchers that still run and delete recorded cgroups and directories."""
        num_processes = num_groups = 0
        for record in sorted(self.path.glob("launcher-*.json")):
            num_processes += _end_recorded(json.loads(record.read_text()))
            record.unlink()
        for record in sorted(self.path.glob("groups-*")):
            if hierarchy is not None:
                num_groups += _end_groups(hierarchy, record.name.removeprefix("groups-"))
            record.unlink()
        for record in sorted(self.path.glob("folders-*")):
            _end_folders(record)
        return Cleared(num_processes=num_processes, num_groups=num_groups)

    def record_groups(self, name: str) -> None:
        """Record cgroups. Call before the first cgroup of that name is created."""
        (self.path / f"groups-{name}").touch()

    def forget_groups(self, name: str) -> None:
        """Remove the record of deleted cgroups."""
        (self.path / f"groups-{name}").unlink(missing_ok=True)

    def record_launcher(self, pid: int) -> None:
        """Record a running launcher. Its start time distinguishes it from a later process with the same pid."""
        text = json.dumps({"pid": pid, "start_ticks": start_ticks(pid)})
        (self.path / f"launcher-{pid}.json").write_text(text)

    def forget_launcher(self, pid: int) -> None:
        """Remove the record of a launcher that has exited."""
        (self.path / f"launcher-{pid}.json").unlink(missing_ok=True)

    def record_folders(self, name: str, path: str) -> None:
        """Record the directory that holds the private directories of sessions, right after its creation."""
        (self.path / f"folders-{name}").write_text(path)

    def forget_folders(self, name: str) -> None:
        """Remove the record of a deleted directory."""
        (self.path / f"folders-{name}").unlink(missing_ok=True)


def clean_up_after(path: Path) -> None:
    """Clean up after a service that is not started again in this directory. Does nothing if nothing is recorded. Raises
    ConfigError if a service uses the directory."""
    state = StateDir(path)
    if not state.has_records():
        return
    state.acquire()
    try:
        cleared = state.clean_up(cgroups.detect_here())
        _log.warning("cleaned up after the sandbox service of %s, which was killed: %s", path, cleared)
    finally:
        state.release()


def start_ticks(pid: int) -> int:
    """Return the start time of a process in clock ticks since boot; 0 if it does not exist."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[19])


def _end_recorded(record: dict[str, int]) -> bool:
    """Kill a launcher if it is still the recorded one. Return whether it was."""
    pid = record["pid"]
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        if not record["start_ticks"] or start_ticks(pid) != record["start_ticks"]:
            return False
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        select.select([pidfd], [], [], _END_S)
        return True
    finally:
        os.close(pidfd)


def _end_folders(record: Path) -> None:
    """Delete a recorded directory. It stays recorded if it cannot be deleted. A directory of another user is
    skipped."""
    path = record.read_text()
    try:
        if os.lstat(path).st_uid == os.geteuid():
            remove_tree(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        _log.warning("cannot delete the files of earlier sessions in %s: %s", path, error)
        return
    record.unlink()


def _end_groups(hierarchy: Hierarchy, name: str) -> int:
    groups = list(hierarchy.find(f"{name}-"))
    for group in groups:
        with contextlib.suppress(OSError):  # it stays recorded, and the next start retries
            cgroups.kill_all(group)
    return cgroups.remove_all(groups)
