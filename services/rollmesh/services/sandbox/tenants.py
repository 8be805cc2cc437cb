"""Count sessions, starts and commands by tenant and reject requests beyond a quota.

Counting is exact: the same block that counts also uncounts, and the one function that ends leases uncounts sessions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from rollmesh.services.sandbox.config import TenantsConfig
from rollmesh.shared.errors import Overloaded


class Tenants:
    """Counters by tenant. Tenants without activity are removed."""

    def __init__(self, config: TenantsConfig, retry_after_s: float) -> None:
        self._config = config
        self._retry_after_s = retry_after_s
        self._sessions: Counter[str] = Counter()
        self._starts: Counter[str] = Counter()
        self._commands: Counter[str] = Counter()

    def num_live(self) -> dict[str, int]:
        """Return the number of sessions by tenant."""
        return dict(self._sessions)

    def begin_session(self, tenant: str) -> None:
        """Count a session until `end_session`. Raises Overloaded."""
        quota = self._config.quota(tenant)
        self._require(self._sessions[tenant], quota.sessions_max, tenant, "sessions", "sessions_max")
        self._require(
            self._starts[tenant], quota.starts_inflight_max, tenant, "starts in flight", "starts_inflight_max"
        )
        self._sessions[tenant] += 1

    def end_session(self, tenant: str) -> None:
        """Uncount a session."""
        _take_one(self._sessions, tenant)

    @contextmanager
    def starting(self, tenant: str) -> Iterator[None]:
        """Count the start of a session that `begin_session` has just admitted."""
        with _counted(self._starts, tenant):
            yield

    @contextmanager
    def commanding(self, tenant: str) -> Iterator[None]:
        """Count a command. Raises Overloaded before the command is executed."""
        self.begin_command(tenant)
        try:
            yield
        finally:
            self.end_command(tenant)

    def begin_command(self, tenant: str) -> None:
        """Count a command until `end_command`. Raises Overloaded."""
        most = self._config.quota(tenant).commands_inflight_max
        self._require(self._commands[tenant], most, tenant, "commands in flight", "commands_inflight_max")
        self._commands[tenant] += 1

    def end_command(self, tenant: str) -> None:
        """Uncount a command."""
        _take_one(self._commands, tenant)

    def _require(self, num: int, most: int, tenant: str, what: str, setting: str) -> None:
        if most and num >= most:
            raise Overloaded(
                f"tenant {tenant!r} has reached its quota of {most} {what} on this sandbox node; wait, or raise "
                f"{setting} in sandbox.tenants",
                retry_after_s=self._retry_after_s,
                tenant=tenant,
            )


@contextmanager
def _counted(counts: Counter[str], tenant: str) -> Iterator[None]:
    counts[tenant] += 1
    try:
        yield
    finally:
        _take_one(counts, tenant)


def _take_one(counts: Counter[str], tenant: str) -> None:
    counts[tenant] -= 1
    if not counts[tenant]:
        del counts[tenant]
