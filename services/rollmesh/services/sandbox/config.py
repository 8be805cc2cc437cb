"""Configuration of a sandbox node."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Self

import msgspec
from msgspec import Meta

from rollmesh.sandbox_runtime.limits import Limits
from rollmesh.sandbox_runtime.mechanisms import LANDLOCK, MECHANISMS
from rollmesh.services.sandbox.egress.config import EgressConfig
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.config.settings import (
    FIXED,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Settings,
)

_COMMIT = "^([0-9a-f]{40}|[0-9a-f]{64})$"
_NAME = "^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"


class RepositoryConfig(Settings):
    """Files of a repository. Every session gets its own copy at /session/<name>."""

    path: Annotated[str, Meta(pattern="^/")]
    """Absolute path of a git repository on the node, bare or with a working tree. It must belong to the service's user,
    otherwise git rejects it."""
    commit: Annotated[str, Meta(pattern=_COMMIT)]
    """Full commit id, because a branch would give one profile two environments. Sessions get only the files of the
    commit. The history could hold later commits with the solutions."""
    name: Annotated[str, Meta(pattern=_NAME)] = "repository"
    """Directory below /session."""


class ProfileConfig(Settings):
    """The environment of a profile's sessions. All of it is code of the operator and runs once before containment."""

    preload: tuple[str, ...] = ()
    """Modules imported before the fork. They make their import free for sessions, and a fork slower by about 1 ms per
    30 MB."""
    library_paths: tuple[Annotated[str, Meta(pattern="^/")], ...] = ()
    """Absolute directories added to sys.path and readable in the jail, e.g. a site-packages. They must not contain
    secrets."""
    tools: tuple[str, ...] = ()
    """Modules whose public functions every session can call."""
    prelude: str = ""
    """Source executed once per zygote; every session starts with its definitions."""
    stateless: tuple[str, ...] = ()
    """Functions of `tools` or `prelude` whose result depends only on their arguments and that leave nothing behind.
    Their calls run in live sessions that the episodes of a run share, see docs/sandbox/stateless.md. A function that
    executes or evaluates its argument as code must not be named."""
    library_lock: Annotated[str, Meta(pattern="^(/|$)")] = ""
    """Absolute path of a file that represents the content of `library_paths` in the environment's digest, e.g. a lock
    file with exact versions. If empty, every file of the libraries is hashed."""
    repository: RepositoryConfig | None = None
    """Repository whose files every new session gets."""
    egress: str = ""
    """Name of a policy in `egress` for network access. If empty, sessions have no network access and no socket to a
    proxy."""
    limits: dict[str, int | float] = {}
    """Limits that differ from the defaults, by field of `rollmesh.sandbox_runtime.limits.Limits`."""

    def check_fields(self) -> None:
        known = {field.name for field in fields(Limits)}
        if unknown := sorted(self.limits.keys() - known):
            raise ValueError(f"`limits` must have keys of {', '.join(sorted(known))}, got {unknown[0]!r}")
        if self.stateless and (self.repository is not None or self.egress):
            raise ValueError(
                "`stateless` must be empty with a repository or egress, which sessions must not share, got "
                f"{self.stateless!r}"
            )
        self.resolved_limits()

    def resolved_limits(self) -> Limits:
        """Return the default limits with this profile's changes."""
        return Limits(**self.limits)  # type: ignore[arg-type]


PROFILES = {
    "python": ProfileConfig(
        preload=(
            "collections",
            "datetime",
            "decimal",
            "fractions",
            "itertools",
            "json",
            "math",
            "random",
            "re",
            "statistics",
        )
    ),
    "calc": ProfileConfig(
        tools=("rollmesh.sandbox_runtime.tools.calc",),
        stateless=("call",),
        limits={"call_s": 2.0, "cpu_s": 2.0, "memory_bytes": 128 << 20, "processes_max": 4, "disk_bytes": 1 << 20},
    ),
    "shell": ProfileConfig(
        limits={
            "call_s": 60.0,
            "cpu_s": 60.0,
            "cpu_total_s": 1800,
            "memory_bytes": 1 << 30,
            "address_space_bytes": 4 << 30,
            "processes_max": 64,
            "disk_bytes": 256 << 20,
            "inodes_max": 16384,
            "file_bytes": 128 << 20,
            "open_files_max": 256,
        }
    ),
    "sql": ProfileConfig(
        preload=("decimal", "json", "sqlite3", "urllib.parse"),
        limits={
            "call_s": 30.0,
            "cpu_s": 30.0,
            "address_space_bytes": 2 << 30,
            "disk_bytes": 128 << 20,
            "file_bytes": 128 << 20,
            "output_bytes": 256 << 10,
        },
    ),
}
"""Default profiles: plain Python, the calculator of the demo, a shell with the host's compilers, and databases (duckdb
too if `library_paths` and `preload` name it)."""


class PoolsConfig(Settings):
    """Sessions created before they are requested, and the lifetime of idle zygotes."""

    ready_max: NonNegativeInt = 8
    """Maximum number of ready sessions on a node, all profiles together; 0 disables them. Their number follows demand.
    Each uses a slot that no live session needs, and a few MB. Profiles with egress have no ready sessions, because the
    fork binds a session to its proxy."""
    making_max: PositiveInt = 2
    """Maximum number of ready sessions being created at a time. More of them fill a pool faster and take more CPU from
    live sessions. If `starts_inflight_max` is above 1, one start is reserved for requested sessions."""
    by_profile: dict[str, NonNegativeInt] = {}
    """Maximum number of ready sessions by profile; other profiles are bounded by `ready_max` alone. 0 disables them for
    a profile."""
    halflife_s: PositiveFloat = 60.0
    """Half-life of the measured demand, in seconds. A longer half-life keeps sessions ready over longer pauses between
    bursts."""
    zygote_idle_s: NonNegativeFloat = 600.0
    """Seconds without an open after which a zygote without sessions ends, which frees its memory (tens of MB with large
    preloads). The next open starts a new one in about 0.1 s. 0 keeps all zygotes. Zygotes named in `warm` always stay.
    """


class SharedConfig(Settings):
    """Sessions that the calls of stateless functions of one run share."""

    sessions_max: PositiveInt = 4
    """Maximum number of shared sessions per run and profile. The second one starts when calls wait for the first."""
    calls_max: PositiveInt = 1000
    """Number of calls after which a session ends and a fresh one takes the next."""
    calls_at_once: PositiveInt = 64
    """Maximum number of calls that a session gets in one request."""
    slice_s: PositiveFloat = 0.02
    """Seconds after which a session begins no further call of a request, so that a call waits for at most one slow call
    in front of it. Calls that have waited as long start another session."""
    idle_s: PositiveFloat = 10.0
    """Seconds without a call after which a session ends, for example after the end of its run."""
    queued_max: PositiveInt = 8192
    """Maximum number of calls on a node that wait or run; more are rejected as OVERLOADED."""


class TenantQuota(Settings):
    """Quota of one tenant. Requests beyond it are rejected as OVERLOADED with the name of the tenant. 0 means that only
    the bound of the node applies."""

    sessions_max: NonNegativeInt = 0
    """Live sessions, including those being opened."""
    starts_inflight_max: NonNegativeInt = 0
    """Sessions being opened, including those that wait for a start."""
    commands_inflight_max: NonNegativeInt = 0
    """Runs, calls and file transfers in progress, including those that wait for their session."""


class TenantsConfig(Settings):
    """Quotas by tenant. The workers of a run open sessions under the run's name. Sessions without a tenant share one
    quota."""

    default: TenantQuota = TenantQuota()
    """Quota of each tenant that `by_name` does not list."""
    by_name: dict[str, TenantQuota] = {}
    """Quotas of individual tenants. Each replaces `default` completely."""

    def quota(self, tenant: str) -> TenantQuota:
        """Return the quota of a tenant."""
        return self.by_name.get(tenant, self.default)


class SnapshotsConfig(Settings):
    """Number, size and lifetime of the snapshots on a node."""

    snapshots_max: PositiveInt = 1024
    """Maximum number of snapshots on the node. More are rejected as OVERLOADED; the node never drops one to free
    space."""
    tenant_snapshots_max: PositiveInt = 256
    """Maximum number of snapshots per tenant. Sessions without a tenant count as one tenant."""
    bytes_max: PositiveInt = 8 << 30
    """Maximum bytes of all snapshots, on the disk of the node's state directory."""
    tenant_bytes_max: PositiveInt = 2 << 30
    """Maximum bytes of the snapshots of one tenant."""
    snapshot_bytes_max: PositiveInt = 256 << 20
    """Maximum bytes of one snapshot, files and pickled values together."""
    ttl_s: PositiveFloat = 600.0
    """Default time to live: seconds without a fork or restore after which a snapshot is dropped."""
    ttl_s_max: PositiveFloat = 7200.0
    """Maximum time to live that a request may set, in seconds."""

    def check_fields(self) -> None:
        if self.ttl_s > self.ttl_s_max:
            raise ValueError(f"`ttl_s` must be <= ttl_s_max = {self.ttl_s_max}, got {self.ttl_s}")


class SandboxConfig(Settings):
    """Settings of one node: slots, leases and profiles."""

    engine: Extension = Extension("jail")
    """Driver: `jail`; `landlock`, which guarantees less, for hosts that forbid namespaces (see
    docs/sandbox/isolation.md); `none`, without isolation, for trusted code; `fake`, the calculator in the process of
    the service, for tests; or your own."""
    languages: Annotated[dict[str, Extension], FIXED] = {}
    """Languages besides those of the sandbox, by name: `command` with the commands in its options, or your own."""
    sessions_dir: str = ""
    """Absolute directory that every user can enter, in which `landlock` and `none` create a private directory per
    session. If empty, the temporary directory of the system. These sessions have no bound on disk use, so use a
    separate file system."""
    without: tuple[str, ...] = ()
    """Mechanisms to disable, by the names that `rollmesh doctor` shows. The service starts without them and logs them
    at each start. If a required mechanism is missing and not disabled, the service does not start."""
    profiles: Annotated[dict[str, ProfileConfig], FIXED] = msgspec.field(default_factory=lambda: dict(PROFILES))
    """Profiles by name."""
    egress: dict[str, EgressConfig] = {}
    """Egress policies by name. Profiles refer to them."""
    warm: tuple[str, ...] = ()
    """Profiles whose zygotes start with the service (about 0.1 s each). Other zygotes start with their first
    session."""
    sessions_max: PositiveInt = 256
    """Maximum number of live sessions; more are rejected as OVERLOADED. Each costs about 3 MB and a uid."""
    starts_inflight_max: PositiveInt = 4
    """Maximum number of sessions being created at a time. It leaves CPU for the calls of live sessions when many
    sessions start."""
    starts_queued_max: PositiveInt = 256
    """Maximum number of sessions that wait for a start; more are rejected as OVERLOADED. Tenants are served
    round-robin."""
    pools: PoolsConfig = PoolsConfig()
    """Ready sessions and the lifetime of zygotes."""
    shared: SharedConfig = SharedConfig()
    """Shared sessions for calls of stateless functions."""
    tenants: TenantsConfig = TenantsConfig()
    """Quotas of tenants."""
    ttl_s: PositiveFloat = 120.0
    """Default time to live: seconds without use after which a session ends."""
    ttl_s_max: float = 3600.0
    """Maximum time to live that a request may set, in seconds."""
    orphan_s: PositiveFloat = 60.0
    """Seconds without use after which a session ends whose stream broke, if that is sooner than its time to live. The
    worker has probably crashed, and others need the slot. A running worker can return with its next call in this time.
    """
    reap_every_s: PositiveFloat = 1.0
    """Seconds between checks for expired sessions, and so the maximum delay of their end."""
    grace_s: PositiveFloat = 1.0
    """Seconds between the interrupt of code that is out of time and the kill of its session."""
    start_timeout_s: PositiveFloat = 30.0
    """Timeout for a zygote to import its preloads and contain itself, and for the start of a session, in seconds."""
    retry_after_s: PositiveFloat = 0.5
    """Back-off that rejected callers should use, in seconds."""
    commands_inflight_max: PositiveInt = 256
    """Maximum number of commands in progress per stream; the service then stops reading the stream."""
    files_bytes_max: PositiveInt = 4 << 20
    """Maximum bytes of files in one message, in each direction."""
    snapshots: SnapshotsConfig = SnapshotsConfig()
    """Quotas of snapshots."""
    drain_s: PositiveFloat = 120.0
    """Seconds that open sessions may continue after a drain command. The remaining sessions are then ended, and their
    episodes are retried elsewhere."""
    stop_s: PositiveFloat = 2.0
    """Seconds that commands in progress may continue when the node stops. Their sessions are then ended."""
    uid_base: NonNegativeInt = 0
    """First uid of sessions if the service runs as root: the session in slot n has uid and gid uid_base + n. 0 claims a
    range that no other sandbox node on this host uses and that systemd does not allocate (60578-61183, then
    65536-524287). `landlock` and `none` use two uids per slot. Without root, each session gets a user namespace
    instead.
    """
    cgroups: bool = True
    """Whether to bound the memory and processes of each session by control groups, where they are writable."""
    oracles: Annotated[str, FIXED] = ""
    """Directory or JSONL file with the manifests of hidden tests (`oracle/store.py` describes the layout). Only the
    service reads it, and no jail may be able to see it. If empty, callers send manifests with their candidates."""
    judgments_inflight_max: PositiveInt = 16
    """Maximum number of judgments in progress. Each uses at most two sessions at a time."""
    judgments_queued_max: PositiveInt = 1024
    """Maximum number of waiting judgments; more are rejected as OVERLOADED."""
    python: str = ""
    """Path of the interpreter of the zygotes, readable by the service's user. If empty, the interpreter of the
    service."""

    def check_fields(self) -> None:
        if self.ttl_s > self.ttl_s_max:
            raise ValueError(f"`ttl_s` must be <= ttl_s_max = {self.ttl_s_max}, got {self.ttl_s}")
        _check_engine(self)
        for name, profile in self.profiles.items():
            if profile.egress and self.engine.name == "fake":
                raise ValueError(
                    f"`profiles.{name}.egress` must be empty with the engine `fake`, got {profile.egress!r}"
                )
            if profile.egress and profile.egress not in self.egress:
                raise ValueError(f"`profiles.{name}.egress` must be a key of egress, got {profile.egress!r}")
        _check_without(self.without)
        for field, names in (("warm", self.warm), ("pools.by_profile", self.pools.by_profile)):
            for name in names:
                if name not in self.profiles:
                    raise ValueError(f"`{field}` must name profiles ({', '.join(self.profiles)}), got {name!r}")

    def located(self, base_dir: Path) -> Self:
        """Return these settings with absolute user files: relative ones are relative to `base_dir`."""
        replace = msgspec.structs.replace
        egress = {
            name: replace(
                policy, retrieval=replace(policy.retrieval, backend=policy.retrieval.backend.located(base_dir))
            )
            if policy.retrieval is not None
            else policy
            for name, policy in self.egress.items()
        }
        languages = {name: chosen.located(base_dir) for name, chosen in self.languages.items()}
        return replace(self, engine=self.engine.located(base_dir), egress=egress, languages=languages)


def _check_engine(config: SandboxConfig) -> None:
    if config.engine.name == "landlock" and LANDLOCK in config.without:
        raise ValueError("without: the engine `landlock` needs the mechanism landlock")
    if config.sessions_dir and not config.sessions_dir.startswith("/"):
        raise ValueError(f"sessions_dir must be absolute, got {config.sessions_dir!r}")
    for name, profile in config.profiles.items():
        if profile.repository is not None and config.engine.name in ("landlock", "none"):
            raise ValueError(f"profile {name!r} names a repository, which needs the engine `jail`")


def _check_without(names: tuple[str, ...]) -> None:
    free = [mechanism.name for mechanism in MECHANISMS.values() if not mechanism.core]
    for name in names:
        if name in MECHANISMS and MECHANISMS[name].core:
            raise ValueError(f"without: {name!r} cannot be disabled, because other mechanisms depend on it")
        if name not in MECHANISMS:
            raise ValueError(
                f"without: unknown mechanism {name!r}; the mechanisms that can be disabled are {', '.join(free)}"
            )
