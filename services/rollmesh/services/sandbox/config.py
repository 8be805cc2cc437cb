"""Configuration of a sandbox node."""

from __future__ import annotations

from dataclasses import fields

import msgspec

from rollmesh.sandbox_runtime.limits import Limits
from rollmesh.sandbox_runtime.mechanisms import DRIVERS, LANDLOCK, MECHANISMS
from rollmesh.services.sandbox.egress.config import EgressConfig
from rollmesh.services.sandbox.pools_config import PoolsConfig
from rollmesh.services.sandbox.repository_config import RepositoryConfig
from rollmesh.services.sandbox.snapshots_config import SnapshotsConfig
from rollmesh.services.sandbox.tenants_config import TenantsConfig


class ProfileConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What sessions of a profile find ready. All of it is the operator's code, run once before containment."""

    preload: tuple[str, ...] = ()
    """Modules imported ahead. More of them make a session's fork dearer (about 1 ms per 30 MB) and first imports free."""
    library_paths: tuple[str, ...] = ()
    """Absolute directories put on sys.path and shown read-only in the jail, e.g. a site-packages. Never one with secrets."""
    tools: tuple[str, ...] = ()
    """Modules whose public functions every session can call."""
    prelude: str = ""
    """Source executed once; every session starts with what it defines."""
    library_lock: str = ""
    """Absolute path of a file that stands for the content of `library_paths` in the environment's digest, e.g. a lock file of exact versions.
    Empty: every file of them is hashed."""
    repository: RepositoryConfig | None = None
    """Files of a repository at a commit, in every fresh session."""
    egress: str = ""
    """Policy of `egress` for what sessions may reach outside. Empty: nothing, and no socket that could lead there."""
    limits: dict[str, int | float] = {}
    """Changes to the default limits, by field of `rollmesh.sandbox_runtime.limits.Limits`."""

    def __post_init__(self) -> None:
        known = {field.name for field in fields(Limits)}
        for name in self.limits:
            if name not in known:
                raise ValueError(f"limits: unknown limit {name!r}; known: {', '.join(sorted(known))}")
        for path in self.library_paths:
            if not path.startswith("/"):
                raise ValueError(f"library_paths must be absolute, got {path!r}")
        if self.library_lock and not self.library_lock.startswith("/"):
            raise ValueError(f"library_lock must be absolute, got {self.library_lock!r}")
        self.resolved_limits()

    def resolved_limits(self) -> Limits:
        """The defaults with this profile's changes."""
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
"""The profiles every node has unless its configuration names others: plain Python, the demo's calculator, a shell with the host's
compilers, and databases (duckdb too where `library_paths` and `preload` are changed to name it)."""


class SandboxConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One node: its places, leases and profiles."""

    engine: str = "jail"
    """`jail`; `landlock`, for hosts that forbid namespaces: it holds less, see docs/sandbox.md; `none`: no isolation, for code that is
    trusted with the host; `fake`: the calculator in the service's own process, for tests."""
    sessions_dir: str = ""
    """Absolute directory that every user can enter, where `landlock` and `none` make a private directory per session. Empty: the system's
    temporary directory. Sessions are not bounded in bytes there: give it a file system of its own."""
    without: tuple[str, ...] = ()
    """Walls given up, by the names that `rollmesh doctor` shows: the service starts without them, and says so at each start. By default
    it refuses to start where one that the engine requires does not stand."""
    profiles: dict[str, ProfileConfig] = msgspec.field(default_factory=lambda: dict(PROFILES))
    """By name."""
    egress: dict[str, EgressConfig] = {}
    """Egress policies by name, for profiles to name."""
    warm: tuple[str, ...] = ()
    """Profiles whose zygote starts with the service (about 0.1 s each); others start at their first session."""
    sessions_max: int = 256
    """Live sessions; more are refused as OVERLOADED. Each costs about 3 MB and a uid."""
    starts_inflight_max: int = 4
    """Sessions being made at a time: a storm of starts must not starve the calls of live sessions."""
    starts_queued_max: int = 256
    """Sessions that wait to be made; more are refused as OVERLOADED. Tenants are served in turn."""
    pools: PoolsConfig = PoolsConfig()
    """Sessions kept ready ahead of demand, and the end of unused zygotes."""
    tenants: TenantsConfig = TenantsConfig()
    """Quotas of tenants."""
    ttl_s: float = 120.0
    """Seconds without use after which a session is ended, where its opener names none."""
    ttl_s_max: float = 3600.0
    """Longest time to live an opener may ask for."""
    orphan_s: float = 60.0
    """Seconds without use after which a session is ended whose stream broke, if that is sooner: its worker has probably died, and its
    places are wanted. Long enough for a worker that lives to come back to it with the next call."""
    reap_every_s: float = 1.0
    """Time between looks for expired sessions: how late one may end."""
    grace_s: float = 1.0
    """Between the moment the jail interrupts code that is out of time and the moment the service kills the session."""
    start_timeout_s: float = 30.0
    """For a zygote to import its preloads and contain itself, and for a session to be made."""
    retry_after_s: float = 0.5
    """What a refused opener is told to wait."""
    commands_inflight_max: int = 256
    """Commands of one stream in progress; then the stream is not read."""
    files_bytes_max: int = 4 << 20
    """Bytes of files in one message, each way."""
    snapshots: SnapshotsConfig = SnapshotsConfig()
    """Quotas of saved sessions."""
    drain_s: float = 120.0
    """After a command to drain: how long open sessions may go on, seconds; those that are left end, and their episodes are tried again
    elsewhere."""
    stop_s: float = 2.0
    """How long commands in progress may go on when the node stops; then their sessions are ended."""
    uid_base: int = 0
    """As root: session in place n runs as uid and gid uid_base + n. 0 takes a range that no other sandbox node on this host holds
    and that systemd's allocation leaves unused (60578-61183, then 65536-524287). `landlock` and `none` take two uids per place. As an ordinary user each session gets a user
    namespace instead."""
    cgroups: bool = True
    """Bound each session's memory and processes by cgroup where one is writable."""
    oracles: str = ""
    """Directory, or JSONL file, with the manifests of hidden tests (`oracle/store.py` has the layout). Read by the service alone: it must
    lie outside everything that jails are shown. Empty means that callers send manifests with their candidates."""
    judgements_inflight_max: int = 16
    """Judgements under way; each holds at most two sessions at a time."""
    judgements_queued_max: int = 1024
    """Judgements that wait for one of those places; more are refused as OVERLOADED."""
    python: str = ""
    """Interpreter of the zygotes; empty means the service's own. It must be readable by the service's user."""

    def __post_init__(self) -> None:
        for name in (
            "sessions_max", "starts_inflight_max", "starts_queued_max", "ttl_s", "orphan_s", "reap_every_s", "grace_s", "start_timeout_s",
            "retry_after_s", "drain_s", "stop_s", "commands_inflight_max", "files_bytes_max", "judgements_inflight_max",
            "judgements_queued_max",
        ):  # fmt: skip
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.uid_base < 0:
            raise ValueError(f"uid_base must not be negative, got {self.uid_base}")
        if self.ttl_s > self.ttl_s_max:
            raise ValueError(f"ttl_s must not exceed ttl_s_max {self.ttl_s_max}, got {self.ttl_s}")
        _check_engine(self)
        for name, profile in self.profiles.items():
            if profile.egress and self.engine == "fake":
                raise ValueError(f"profile {name!r} names egress, which the engine `fake` does not have")
            if profile.egress and profile.egress not in self.egress:
                raise ValueError(f"profile {name!r} names egress {profile.egress!r}, which is not in egress")
        _check_without(self.without)
        for field, names in (("warm", self.warm), ("pools.by_profile", self.pools.by_profile)):
            for name in names:
                if name not in self.profiles:
                    raise ValueError(f"{field} names {name!r}, which is not in profiles ({', '.join(self.profiles)})")


def _check_engine(config: SandboxConfig) -> None:
    known = (*DRIVERS, "fake")
    if config.engine not in known:
        raise ValueError(f"engine must be one of {', '.join(known)}, got {config.engine!r}")
    if config.engine == "landlock" and LANDLOCK in config.without:
        raise ValueError("without: the engine `landlock` can't be without landlock")
    if config.sessions_dir and not config.sessions_dir.startswith("/"):
        raise ValueError(f"sessions_dir must be absolute, got {config.sessions_dir!r}")
    for name, profile in config.profiles.items():
        if profile.repository is not None and config.engine in ("landlock", "none"):
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
