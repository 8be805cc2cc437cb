"""Make the model in a separate process, which keeps the terminal responsive and frees its memory at its end.

Collaborators: `make_model` (the code of the process).
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from rollmesh.demo.config import MadeModelConfig
from rollmesh.shared.errors import FailedPrecondition
from rollmesh.shared.process.process_launch import bound_to_parent

_ERROR_CHARS_MAX = 2000


class WarmStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step of the warm start; see `rollmesh.demo.sft.WarmStartProgress`."""

    step: int = 0
    level: int = 0
    loss: float = 0.0
    loss_smoothed: float = 0.0
    num_tokens: int = 0
    success: float | None = None
    error: str = ""
    """Cause of a failure of the process. All other fields are then empty."""


class ModelNotMade(FailedPrecondition):
    """The process that makes the model failed or crashed. The message contains the cause."""

    reason = "MODEL_NOT_MADE"


async def make_in_process(
    config: MadeModelConfig, folder: Path, *, seed: int, limit_s: float, on_step: Callable[[WarmStep], None]
) -> WarmStep:
    """Make the model in `folder`, and return the last step. A cancellation ends the process.

    Raise ModelNotMade if the process fails or exceeds `limit_s` seconds.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    process = await asyncio.create_subprocess_exec(
        *bound_to_parent([sys.executable, "-m", "rollmesh.demo.make_model", str(folder), str(seed)]),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment,
    )
    try:
        async with asyncio.timeout(limit_s):
            return await _follow(process, config, on_step)
    except TimeoutError as err:
        raise ModelNotMade(f"the warm start took longer than {limit_s:.0f} s; try another seed (--seed)") from err
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _follow(
    process: asyncio.subprocess.Process, config: MadeModelConfig, on_step: Callable[[WarmStep], None]
) -> WarmStep:
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    # Read continuously, because a full pipe would block the process.
    errors = asyncio.create_task(process.stderr.read())
    try:
        process.stdin.write(msgspec.json.encode(config))
        process.stdin.close()
        last = WarmStep()
        async for line in process.stdout:
            last = msgspec.json.decode(line, type=WarmStep)
            if not last.error:
                on_step(last)
        code = await process.wait()
        if last.error:
            raise ModelNotMade(last.error)
        if code:
            text = (await errors).decode(errors="replace")[-_ERROR_CHARS_MAX:]
            raise ModelNotMade(f"the process that makes the model exited with code {code}:\n{text}")
        return last
    finally:
        errors.cancel()
        await asyncio.wait([errors])
