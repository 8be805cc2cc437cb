"""Configuration of tenants' quotas on a node."""

from __future__ import annotations

import msgspec


class TenantQuota(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one tenant may hold at a time; more is refused as OVERLOADED, naming the tenant. 0 means only the node's own bound."""

    sessions_max: int = 0
    """Live sessions, those being opened included."""
    starts_inflight_max: int = 0
    """Sessions being opened, those that wait for their turn included."""
    commands_inflight_max: int = 0
    """Runs, calls and file transfers in progress, those that wait for their session included."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")


class TenantsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Quotas by tenant. A run's workers open sessions under the run's name; who names no tenant shares the empty one."""

    default: TenantQuota = TenantQuota()
    """Of each tenant that `by_name` lacks, for itself."""
    by_name: dict[str, TenantQuota] = {}
    """Replaces the default as a whole."""

    def quota(self, tenant: str) -> TenantQuota:
        """The one that counts."""
        return self.by_name.get(tenant, self.default)
