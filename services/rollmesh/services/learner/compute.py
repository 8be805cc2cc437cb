"""One thread for all that computes, so that the event loop goes on renewing leases meanwhile.

A single thread also makes the trainer's calls strictly sequential: what a cancelled caller left running ends before the next
call begins. A computation cannot be interrupted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from rollmesh.shared.disk import disk_told

T = TypeVar("T")
_log = logging.getLogger(__name__)


class ComputeThread:
    """Open until `close`."""

    def __init__(self, folder: Path = Path(), name: str = "learner-compute") -> None:
        """`folder` is where the work writes, to name it when its disk is full."""
        self._folder = folder
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    async def run(self, work: Callable[[], T]) -> T:
        """The result of `work()`; DiskFull if that is what broke it. If the caller is cancelled, work that has begun goes on."""
        with disk_told(self._folder):
            return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    async def close(self, limit_s: float) -> None:
        """Waits for the work in progress, at most `limit_s`; work that has not begun is dropped."""
        ending = asyncio.create_task(asyncio.to_thread(self._executor.shutdown, wait=True, cancel_futures=True))
        done, _ = await asyncio.wait([ending], timeout=limit_s)
        if not done:
            _log.warning("a computation goes on %s s after its learner was stopped; it is left behind", limit_s)
