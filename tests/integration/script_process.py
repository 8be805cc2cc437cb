"""Python processes that a test starts from a script, to kill them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

from rollmesh.shared.rpc.access import Access

LIMIT_S = 60.0


@contextlib.contextmanager
def script_process(script: str, *args: object, access: Access) -> Iterator[subprocess.Popen[str]]:
    """A process that runs `script` with the token in SECRET. It is killed at the end."""
    command = [sys.executable, "-c", script, *map(str, args)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"SECRET": access.token}) as one:
        try:
            yield one
        finally:
            one.kill()


async def line_of(one: subprocess.Popen[str]) -> str:
    """Return the next line that a process prints."""
    assert one.stdout is not None
    line = await asyncio.wait_for(asyncio.to_thread(one.stdout.readline), LIMIT_S)
    assert line, "the process has ended"
    return line.strip()
