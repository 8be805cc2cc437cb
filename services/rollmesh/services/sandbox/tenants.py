"""Whose sessions, starts and commands are under way, and refusal of what is beyond a tenant's quota.

Counting is exact: everything counted is uncounted in the same block or, for sessions, by the one place where a lease ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from rollmesh.services.sandbox.tenants_config import TenantsConfig
from rollmesh.shared.errors import Overloaded


class Tenants:
    """Counts by tenant; whoever has nothing under way is forgotten."""

    def __init__(self, config: TenantsConfig, retry_after_s: float) -> None:
        self._config = config
        self._retry_after_s = retry_after_s
        self._sessions: Counter[str] = Counter()
        self._starts: Counter[str] = Counter()
        self._commands: Counter[str] = Counter()

    def num_live(self) -> dict[str, int]:
        """Sessions by tenant."""
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
        """One less."""
        _take_one(self._sessions, tenant)

    @contextmanager
    def starting(self, tenant: str) -> Iterator[None]:
        """Around the start of a session that `begin_session` admitted at this moment."""
        with _counted(self._starts, tenant):
            yield

    @contextmanager
    def commanding(self, tenant: str) -> Iterator[None]:
        """Around a command. Raises Overloaded before it begins: it was not carried out."""
        most = self._config.quota(tenant).commands_inflight_max
        self._require(self._commands[tenant], most, tenant, "commands in flight", "commands_inflight_max")
        with _counted(self._commands, tenant):
            yield

    def _require(self, num: int, most: int, tenant: str, what: str, setting: str) -> None:
        if most and num >= most:
            raise Overloaded(
                f"tenant {tenant!r} has all its {most} {what} on this sandbox node; wait, or raise {setting} in sandbox.tenants",
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
