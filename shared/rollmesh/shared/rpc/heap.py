"""Reuse the memory of messages, and return that of many large requests to the system.

A message of 1 MiB takes several blocks of that size while it is sent or received. By default glibc returns freed blocks
of 128 KiB and more to the system, and each page of the next message is then a page fault, which costs more than the
copies. A server therefore lets it keep some MiB.

gRPC receives a message in many small pieces. When they are freed, glibc keeps the memory for later allocations, so that
a burst of large requests leaves a process 100 MiB larger for as long as it runs.
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

REUSED_BYTES = 8 * 1024 * 1024
"""Size of the largest freed block that is reused, in bytes."""


def reuse_freed_memory() -> None:
    """Let this process reuse freed blocks of up to `REUSED_BYTES` instead of returning each to the system. Idempotent.

    When a block that was mapped separately is freed, glibc raises the limit from which it maps blocks to the size of
    that block, and the free memory that it keeps at the top of a heap to twice that size (M_MMAP_THRESHOLD in
    mallopt(3)). One block sets both here. Setting them with mallopt would also stop them from rising further, which
    torch needs for larger tensors.

    The price is up to 16 MiB of free memory for each heap, of which a process has one per thread that allocates large
    blocks: 2 to 10 MiB in a node that fetched 64 MB. An operator who has set MALLOC_MMAP_THRESHOLD_ or
    MALLOC_TRIM_THRESHOLD_ keeps these limits. Another C library ignores the call.
    """
    bytes(REUSED_BYTES)


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
