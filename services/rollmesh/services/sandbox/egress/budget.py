"""Limit the request rate per tenant by token buckets. Time comes from the caller's clock."""

from __future__ import annotations

from collections import OrderedDict

from rollmesh.services.sandbox.egress.exchange import EgressRefused
from rollmesh.shared.clock import Clock

_TENANTS_MAX = 4096
"""Maximum number of buckets. The least recently used one is dropped, and is full when its tenant returns."""


class Rates:
    """One token bucket per tenant, full at first."""

    def __init__(self, rate_per_s: float, burst: int, clock: Clock) -> None:
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Tenant -> tokens, and the time when they were counted."""

    def spend(self, tenant: str) -> None:
        """Spend one token. Raises EgressRefused."""
        now_s = self._clock.monotonic_s()
        tokens, counted_s = self._buckets.pop(tenant, (float(self._burst), now_s))
        tokens = min(float(self._burst), tokens + (now_s - counted_s) * self._rate_per_s)
        self._buckets[tenant] = (tokens - 1 if tokens >= 1 else tokens, now_s)
        if len(self._buckets) > _TENANTS_MAX:
            self._buckets.popitem(last=False)
        if tokens < 1:
            wait_s = (1 - tokens) / self._rate_per_s
            raise EgressRefused("rate", f"more than {self._rate_per_s:g} requests per second; retry in {wait_s:.2f} s")
