"""A mesh without a learner, and trainers that are processes of their own."""

from __future__ import annotations

import asyncio
import json
import os
import struct
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollmesh.services.mesh import Mesh, MeshConfig
from rollmesh.services.mesh.parts import part_names

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Finished:
    """What a trainer said before it ended."""

    code: int
    output: str


@asynccontextmanager
async def mesh_without_learner(config: MeshConfig, folder: Path) -> AsyncIterator[Mesh]:
    """Every part but the learner, and no run: the trainer makes it."""
    parts = [name for name in part_names(config) if name != "learner"]
    async with Mesh(config, run_dir=folder, parts=parts) as mesh:
        yield mesh


async def finish(command: Sequence[str | Path], *, limit_s: float) -> Finished:
    """Runs a program to its end. Fails with what it said if that takes longer than `limit_s`; it ends with the test."""
    process = await asyncio.create_subprocess_exec(
        *map(str, command),
        cwd=ROOT,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    lines: list[str] = []
    try:
        async with asyncio.timeout(limit_s):
            async for line in process.stdout:
                lines.append(line.decode(errors="replace"))
            return Finished(await process.wait(), "".join(lines))
    except TimeoutError:
        raise AssertionError(f"not done within {limit_s} s; it said\n{''.join(lines)}") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def python_trainer(mesh: Mesh, *, model: Path, spec: Path, out: Path) -> list[str | Path]:
    out.mkdir(parents=True, exist_ok=True)
    script = ROOT / "examples" / "trainer_grpc.py"
    return [sys.executable, script, *_where(mesh, spec, out), "--model", model]


def node_trainer(mesh: Mesh, *, weights: Path, spec: Path, out: Path) -> list[str | Path]:
    script = ROOT / "examples" / "trainer_node" / "trainer.mjs"
    return ["node", script, *_where(mesh, spec, out), "--weights", weights]


def _where(mesh: Mesh, spec: Path, out: Path) -> list[str | Path]:
    token_file = mesh.place.run_dir / "token"
    return ["--address", mesh.gateway_address, "--token-file", token_file, "--spec", spec, "--out", out]


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
