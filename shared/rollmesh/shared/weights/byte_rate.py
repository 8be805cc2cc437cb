"""A limit of bytes per second for the transfers of one process."""

from __future__ import annotations

from rollmesh.shared.clock import Clock, SystemClock

BURST_S = 0.02
"""Time without use that may be caught up. A longer one would let idle links exceed the limit."""


class ByteRate:
    """A token bucket. Its users share it; each waits its turn."""

    def __init__(self, bytes_per_s: float, clock: Clock | None = None) -> None:
        """0 means unlimited."""
        self.num_bytes = 0
        """Bytes that were let through, since start."""
        self._bytes_per_s = bytes_per_s
        self._clock = clock or SystemClock()
        self._free_at = 0.0

    async def take(self, num_bytes: int) -> None:
        """Wait until `num_bytes` more may be moved."""
        self.num_bytes += num_bytes
        if self._bytes_per_s:
            now = self._clock.monotonic_s()
            self._free_at = max(self._free_at, now - BURST_S) + num_bytes / self._bytes_per_s
            if self._free_at > now:
                await self._clock.sleep(self._free_at - now)
