"""Add nodes to a world with the command, as an operator on another host does."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rollmesh.v1 import coordinator_pb2

from .world import ROOT, World

END_S = 60.0
COMMAND = (sys.executable, "-m", "rollmesh.cli")


@dataclass
class Joined:
    """A node that joined a world from outside."""

    world: World
    kind: str
    name: str
    log: Path
    overrides: Sequence[str] = ()
    process: asyncio.subprocess.Process = field(init=False)

    async def start(self) -> None:
        """Start it, or restart it with its folder."""
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *(*COMMAND, "serve", self.kind, *at(self.world), "--name", self.name),
                *("--dir", str(self.log.parent / self.name)), *self.overrides,
                cwd=ROOT, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)

    async def ended(self) -> int:
        """Wait for its exit code."""
        async with asyncio.timeout(END_S):
            return await self.process.wait()

    async def look(self) -> coordinator_pb2.FleetNode | None:
        """Return its state in the coordinator."""
        return next((node for node in await self.world.fleet() if node.node_id == self.name), None)

    async def until(self, *states: coordinator_pb2.NodeState.ValueType) -> coordinator_pb2.FleetNode:
        """Wait until it is in one of `states`."""
        async with asyncio.timeout(END_S):
            while (node := await self.look()) is None or node.state not in states:
                assert self.process.returncode in (None, 0, -signal.SIGKILL), self.log.read_text()
                await asyncio.sleep(0.05)
        return node

    async def drain(self) -> int:
        """Drain it with the command, which waits until it has left. Return the exit code of the node."""
        code, said = await command(self.world, "drain", self.name, *at(self.world), "--wait")
        assert code == 0, said
        return await self.ended()


def at(world: World) -> Sequence[str]:
    """Return the address and the token."""
    return (
        "--join",
        world.layout.gateway,
        "--token-file",
        str(world.layout.config.security.token_file or world.layout.run_dir / "token"),
    )


async def command(world: World, *arguments: str) -> tuple[int | None, str]:
    """Run `rollmesh ...` and return exit code and output."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND, *arguments, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    async with asyncio.timeout(END_S):
        said, _ = await process.communicate()
    return process.returncode, said.decode()


@asynccontextmanager
async def joined(world: World, folder: Path, kind: str, name: str, *overrides: str) -> AsyncIterator[Joined]:
    """Add a node named `kind-name`; it is killed at the end if it still runs."""
    node = Joined(world=world, kind=kind, name=f"{kind}-{name}", log=folder / f"{kind}-{name}.log", overrides=overrides)
    await node.start()
    try:
        yield node
    finally:
        if node.process.returncode is None:
            node.process.kill()
            await node.process.wait()
