"""`rollmesh up` as a process: a mesh without a run, and its command line."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rollmesh.mesh import MeshConfig
from rollmesh.services.coordinator.audit_report import AuditReport
from rollmesh.shared.config.loader import to_yaml

END_S = 90.0
COMMAND = (sys.executable, "-m", "rollmesh.cli")


@dataclass(frozen=True, slots=True)
class UpMesh:
    """The address and token that an external trainer needs."""

    process: asyncio.subprocess.Process
    gateway: str
    folder: Path

    @property
    def token_file(self) -> Path:
        return self.folder / "token"


@asynccontextmanager
async def up(config: MeshConfig, folder: Path) -> AsyncIterator[UpMesh]:
    """Run until the block ends; then it is stopped and has exited cleanly."""
    await asyncio.to_thread((folder / "mesh.yaml").write_text, to_yaml(config))
    async with _started(folder / "out", str(folder / "mesh.yaml"), "--out", str(folder / "out")) as mesh:
        yield mesh


@asynccontextmanager
async def up_again(folder: Path) -> AsyncIterator[UpMesh]:
    """Restart the mesh that `up` has left in `folder`, until the block ends."""
    async with _started(folder / "out", str(folder / "out")) as mesh:
        yield mesh


@asynccontextmanager
async def _started(out: Path, *arguments: str) -> AsyncIterator[UpMesh]:
    process = await asyncio.create_subprocess_exec(*(*COMMAND, "up", *arguments), stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(END_S):
            while not (line := (await process.stdout.readline()).decode()).startswith("gateway"):
                assert not process.stdout.at_eof(), "it ended before its gateway served"
        yield UpMesh(process, line.split()[1], out)
        if process.returncode is None:
            process.terminate()
        async with asyncio.timeout(END_S):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def rollmesh(*arguments: str) -> str:
    """What the command prints; it succeeds."""
    process = await asyncio.create_subprocess_exec(*COMMAND, *arguments, stdout=asyncio.subprocess.PIPE)
    async with asyncio.timeout(END_S):
        said, _ = await process.communicate()
    assert process.returncode == 0
    return said.decode()


async def audited(folder: Path, run: str) -> AuditReport:
    """The proof of a mesh's run, once the mesh has ended; it holds."""
    return msgspec.json.decode(await rollmesh("audit", str(folder), "--run-name", run, "--json"), type=AuditReport)
