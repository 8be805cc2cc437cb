"""Return the memory of large requests to the system.

gRPC receives a message in many small pieces. When they are freed, glibc keeps the memory for later allocations, so that a burst of large
requests leaves a process 100 MiB larger for as long as it runs.
"""

from __future__ import annotations

import asyncio
import ctypes

LARGE_BYTES = 256 * 1024
"""Size from which a request counts as large, in bytes."""
TRIM_AFTER_BYTES = 64 * 1024 * 1024
"""Bytes of large requests after which the heap is trimmed."""
PAUSE_S = 5.0
"""Shortest time between two trims, in seconds. Each takes some milliseconds, in a thread."""


class HeapTrimmer:
    """Trims the heap some time after large requests. It does nothing if the C library has no such function."""

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._num_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def received(self, num_bytes: int) -> None:
        """Count a request."""
        if num_bytes < LARGE_BYTES or self._trim is None:
            return
        self._num_bytes += num_bytes
        if self._num_bytes >= TRIM_AFTER_BYTES and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(PAUSE_S, self._run)

    def close(self) -> None:
        """Cancel the trim that is due."""
        if self._timer is not None:
            self._timer.cancel()

    def _run(self) -> None:
        self._num_bytes, self._timer = 0, None
        assert self._trim is not None
        asyncio.get_running_loop().run_in_executor(None, self._trim, 0)
