"""Describe a node for DescribeSandbox: profiles, languages, driver and enforced mechanisms. Blocking: call from a
thread."""

from __future__ import annotations

from rollmesh.sandbox_runtime import launcher, mechanisms
from rollmesh.sandbox_runtime.languages.registry import present
from rollmesh.sandbox_runtime.limits import Limits
from rollmesh.services.sandbox.capability_probe import probe_host
from rollmesh.services.sandbox.config import SandboxConfig
from rollmesh.services.sandbox.environments import environment_digest
from rollmesh.services.sandbox.languages import declared_commands
from rollmesh.v1 import sandbox_pb2


def describe(config: SandboxConfig) -> sandbox_pb2.DescribeSandboxResponse:
    """Return the whole description. Raises SandboxFailed if the mechanisms cannot be probed."""
    isolated = config.engine.name in mechanisms.DRIVERS
    languages = declared_commands(config.languages)
    return sandbox_pb2.DescribeSandboxResponse(
        profiles=[
            sandbox_pb2.SandboxProfile(
                name=name,
                digest=environment_digest(profile, config.python, languages),
                limits=_limits(profile.resolved_limits()),
                stateless=profile.stateless,
            )
            for name, profile in sorted(config.profiles.items())
        ],
        languages=present(launcher.ENVIRONMENT["PATH"], languages),
        driver=config.engine.name if isolated else "none",
        mechanisms=[
            sandbox_pb2.SandboxMechanism(
                name=status.mechanism.name,
                enforced=status.enforced,
                guarantee=status.mechanism.guarantee if status.enforced else status.mechanism.without,
            )
            for status in probe_host(config)
        ],
    )


def _limits(limits: Limits) -> sandbox_pb2.SandboxLimits:
    return sandbox_pb2.SandboxLimits(
        wall_s=limits.call_s, cpu_s=limits.cpu_s, memory_bytes=limits.memory_bytes, processes_max=limits.processes_max,
        output_bytes=limits.output_bytes, disk_bytes=limits.disk_bytes, cpus=limits.cpus,
    )  # fmt: skip
