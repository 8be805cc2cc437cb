"""What a node offers, for DescribeSandbox: profiles, languages, driver, and the walls as they stand here. Blocking: call from a thread."""

from __future__ import annotations

from rollmesh.sandbox_runtime import launcher, mechanisms
from rollmesh.sandbox_runtime.languages.registry import present
from rollmesh.sandbox_runtime.limits import Limits
from rollmesh.services.sandbox.capability_probe import Standing, survey
from rollmesh.services.sandbox.config import ProfileConfig, SandboxConfig
from rollmesh.services.sandbox.environments import environment_digest
from rollmesh.v1 import sandbox_pb2


def describe(config: SandboxConfig) -> sandbox_pb2.DescribeSandboxResponse:
    """The whole answer. Raises SandboxFailed if the walls can't be tried."""
    isolated = config.engine in mechanisms.DRIVERS
    return sandbox_pb2.DescribeSandboxResponse(
        profiles=[_profile(name, profile, config.python) for name, profile in sorted(config.profiles.items())],
        languages=present(launcher.ENVIRONMENT["PATH"]),
        driver=config.engine if isolated else "none",
        walls=[_wall(standing) for standing in survey(config)],
    )


def _profile(name: str, profile: ProfileConfig, python: str) -> sandbox_pb2.SandboxProfile:
    return sandbox_pb2.SandboxProfile(
        name=name, digest=environment_digest(profile, python), limits=_limits(profile.resolved_limits())
    )


def _limits(limits: Limits) -> sandbox_pb2.SandboxLimits:
    return sandbox_pb2.SandboxLimits(
        wall_s=limits.call_s, cpu_s=limits.cpu_s, memory_bytes=limits.memory_bytes, processes_max=limits.processes_max,
        output_bytes=limits.output_bytes, disk_bytes=limits.disk_bytes, cpus=limits.cpus,
    )  # fmt: skip


def _wall(standing: Standing) -> sandbox_pb2.SandboxWall:
    wall = standing.wall
    return sandbox_pb2.SandboxWall(
        name=wall.name, stands=standing.raised, guarantee=wall.guarantee if standing.raised else wall.without
    )
