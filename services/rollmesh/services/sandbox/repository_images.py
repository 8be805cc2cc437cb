"""Check out the files of a repository at a commit once per node and unpack them into each fresh session that needs
them.

An image has the format of a snapshot without Python state, so a session gets it as a fork gets its files: unpacked
inside the jail, into the private directory, within disk_bytes and inodes_max. This works with and without root. Changes
of a session are private and part of its snapshots. Images are keyed by commit and name and persist over restarts.

git runs in the service, on the operator's repository, with hooks and user configuration disabled. Submodules are empty
directories. Content filters (LFS) that the repository's configuration does not define leave pointers.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
import tempfile
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import BinaryIO

from rollmesh.sandbox_runtime import tree
from rollmesh.sandbox_runtime.records import RecordWriter, TooLarge
from rollmesh.services.sandbox.config import RepositoryConfig
from rollmesh.shared.errors import SandboxFailed
from rollmesh.shared.shared_tasks import SharedTasks

_GIT_S = 300.0
_PIECE_BYTES = 1 << 20
_ENVIRONMENT = {
    "PATH": os.defpath,
    "LC_ALL": "C",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_TERMINAL_PROMPT": "0",
}


class RepositoryImages:
    """Images in `directory`, which contains nothing else."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._making: SharedTasks[Path, None] = SharedTasks("the creation of image")

    async def image(self, repository: RepositoryConfig, bytes_max: int) -> AsyncGenerator[bytes]:
        """Return an image for a fresh session; the first use creates it. Raises SandboxFailed with the output of
        git."""
        return _pieces(await self._made(repository, bytes_max))

    async def _made(self, repository: RepositoryConfig, bytes_max: int) -> Path:
        # The commit id determines the files, whatever the path of the repository.
        key = f"{repository.name}\0{repository.commit}"
        path = self._directory / hashlib.sha256(key.encode()).hexdigest()
        if not await asyncio.to_thread(path.exists):
            await self._making.join(path, lambda: asyncio.to_thread(_make, repository, path, bytes_max))
        return path


async def _pieces(path: Path) -> AsyncGenerator[bytes]:
    with await asyncio.to_thread(path.open, "rb") as file:
        while piece := await asyncio.to_thread(file.read, _PIECE_BYTES):
            yield piece


def _make(repository: RepositoryConfig, path: Path, bytes_max: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(prefix="making-", dir=path.parent) as scratch:
        try:
            _check_out(repository, Path(scratch))
            with open(f"{scratch}/image", "wb") as image:
                _write(Path(scratch, "tree"), image, bytes_max)
        except subprocess.CalledProcessError as error:
            raise _failed(repository, error.stderr.decode("utf-8", "replace").strip()) from error
        except TooLarge as error:
            raise _failed(repository, f"its files exceed the profile's disk_bytes {bytes_max}; raise it") from error
        except (OSError, subprocess.TimeoutExpired) as error:
            raise _failed(repository, str(error)) from error
        os.replace(f"{scratch}/image", path)


def _check_out(repository: RepositoryConfig, scratch: Path) -> None:
    """Check out through a temporary index, so that the repository is only read. `git archive` would omit paths with
    export-ignore."""
    target = scratch / "tree" / repository.name
    target.mkdir(parents=True)
    for arguments in (
        ("read-tree", f"{repository.commit}^{{tree}}"),
        ("checkout-index", "--all", "--force", f"--prefix={target}/"),
    ):
        subprocess.run(
            ["git", "-C", repository.path, "-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false", *arguments],
            env=_ENVIRONMENT | {"GIT_INDEX_FILE": str(scratch / "index"), "GIT_WORK_TREE": str(target)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
            timeout=_GIT_S,
        )


def _write(root: Path, image: BinaryIO, bytes_max: int) -> None:
    writer = RecordWriter(image.write, bytes_max)
    tree.pack(writer, str(root))
    writer.end_section()
    writer.end_section()


def _failed(repository: RepositoryConfig, reason: str) -> SandboxFailed:
    return SandboxFailed(f"repository {repository.path} at {repository.commit[:12]}: {reason}")
