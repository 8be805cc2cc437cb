"""A mesh without a learner, and trainers in separate processes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import struct
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rollmesh.mesh import Mesh, MeshConfig
from rollmesh.mesh.mesh_services import service_names

from .up_mesh import UpMesh

ROOT = Path(__file__).resolve().parents[2]


@asynccontextmanager
async def mesh_without_learner(config: MeshConfig, folder: Path) -> AsyncIterator[Mesh]:
    """Every service but the learner, and no run: the trainer makes it."""
    services = [name for name in service_names(config) if name != "learner"]
    async with Mesh(config, run_dir=folder, services=services) as mesh:
        yield mesh


@asynccontextmanager
async def program(command: Sequence[str | Path]) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that ends with the context; its output, errors included, is in `stdout`."""
    process = await asyncio.create_subprocess_exec(
        *map(str, command),
        cwd=ROOT,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def said(process: asyncio.subprocess.Process, pattern: str | None, *, limit_s: float) -> str:
    """Its output up to a line that matches, or to its end. Fails with the output after `limit_s`, or if it never
    comes."""
    assert process.stdout is not None
    lines: list[str] = []
    try:
        async with asyncio.timeout(limit_s):
            async for line in process.stdout:
                lines.append(line.decode(errors="replace"))
                if pattern is not None and re.search(pattern, lines[-1]):
                    return "".join(lines)
            await process.wait()
    except TimeoutError:
        raise AssertionError(f"not within {limit_s} s; it said\n{''.join(lines)}") from None
    assert pattern is None, f"it ended without {pattern!r}; it said\n{''.join(lines)}"
    return "".join(lines)


async def finish(command: Sequence[str | Path], *, limit_s: float) -> str:
    """What a program said until it ended well."""
    async with program(command) as process:
        output = await said(process, None, limit_s=limit_s)
    assert process.returncode == 0, output
    return output


def python_trainer(mesh: UpMesh, *, model: Path, spec: Path, out: Path) -> list[str | Path]:
    script = ROOT / "examples" / "trainer_grpc.py"
    return [sys.executable, script, mesh.gateway, mesh.token_file, model, spec, out]


def node_trainer(mesh: UpMesh, *, weights: Path, spec: Path, out: Path) -> list[str | Path]:
    script = ROOT / "examples" / "trainer_node" / "trainer.mjs"
    where: list[str | Path] = [
        mesh.gateway,
        "--token-file",
        mesh.token_file,
        "--spec",
        spec,
        "--out",
        out,
        "--weights",
        weights,
    ]
    return ["node", script, "--address", *where]


def write_spec(path: Path, **changes: Any) -> Path:
    """The example's spec with changes."""
    spec = json.loads((ROOT / "configs" / "trainer_grpc.json").read_text())
    path.write_text(json.dumps(spec | changes))
    return path


def write_weights(path: Path, values: Sequence[float] = (0.5, -1.0, 2.0)) -> Path:
    """A safetensors file of one tensor, which the fake engine takes for weights."""
    data = struct.pack(f"<{len(values)}f", *values)
    header = json.dumps({"weights": {"dtype": "F32", "shape": [len(values)], "data_offsets": [0, len(data)]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path
