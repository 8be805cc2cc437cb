"""Start the sandbox profiles of a configuration once, because only a start finds the mistakes in their code.

A start runs the prelude and the imports of a profile, as every session of a run begins. Then the signatures of the
functions that tools name are read in a session. No function is called, and the profile has neither its repository nor
network access here.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from rollmesh.sandbox_runtime.program import Program
from rollmesh.services.rollout.config import ToolConfig
from rollmesh.services.sandbox.config import PROFILES, SandboxConfig
from rollmesh.services.sandbox.engine import RunOutcome, SandboxEngine
from rollmesh.services.sandbox.node import make_engine
from rollmesh.shared.domain.ids import RandomIds
from rollmesh.shared.errors import ConfigError, MeshError, SandboxFailed

_SIGNATURE_S = 5.0
"""Time limit to read a signature, seconds."""


def check_profiles(config: SandboxConfig, tools: Mapping[str, ToolConfig]) -> list[MeshError]:
    """Return the mistakes in the profiles that the user changed and in those of `tools`, and in the functions of
    `tools`."""
    changed = {name for name, profile in config.profiles.items() if profile != PROFILES.get(name)}
    chosen = [name for name in config.profiles if name in changed.union(tool.profile for tool in tools.values())]
    if not chosen or config.engine.name == "fake":  # which executes no Python
        return []
    return asyncio.run(_mistakes(config, chosen, tools))


async def _mistakes(config: SandboxConfig, chosen: Sequence[str], tools: Mapping[str, ToolConfig]) -> list[MeshError]:
    replace = msgspec.structs.replace
    profiles = {name: replace(profile, repository=None, egress="") for name, profile in config.profiles.items()}
    pools = replace(config.pools, ready_max=0)
    config = replace(config, profiles=profiles, egress={}, warm=(), pools=pools)
    with tempfile.TemporaryDirectory(prefix="rollmesh-check-") as folder:
        engine = make_engine(config, state_dir=Path(folder), ids=RandomIds())
        try:
            await engine.start()
        except SandboxFailed as err:
            return [ConfigError(f"`sandbox.engine`: this host cannot run it: {err.message}", key="sandbox.engine")]
        try:
            return [mistake for name in chosen for mistake in await _of_profile(engine, name, tools)]
        finally:
            await engine.close()


async def _of_profile(engine: SandboxEngine, profile: str, tools: Mapping[str, ToolConfig]) -> list[MeshError]:
    try:
        await engine.open(profile, profile, engine.limits(profile))
    except SandboxFailed as err:
        key = f"sandbox.profiles.{profile}"
        return [ConfigError(f"`{key}`: the profile does not start: {err.message}; correct its code", key=key)]
    try:
        found = [
            (name, tool, await _why_not(engine, profile, tool.function))
            for name, tool in tools.items()
            if tool.profile == profile and tool.function
        ]
    finally:
        await engine.end(profile)
    return [
        ConfigError(
            f"`rollout.tools.{name}.function` must be a function of the profile `{profile}` that takes one text, got "
            f"{tool.function!r}: {why}",
            key=f"rollout.tools.{name}.function",
        )
        for name, tool, why in found
        if why
    ]


async def _why_not(engine: SandboxEngine, session: str, function: str) -> str:
    """Return why a function of a session cannot be called with one text; empty if it can."""
    if not function.isidentifier():
        return "it is not the name of a function"
    code = f'__import__("inspect").signature({function}).bind("")'
    result = await engine.run(session, Program(code=code), _SIGNATURE_S)
    if result.outcome is RunOutcome.OK or result.error_type == "ValueError":  # a function in C without a signature
        return ""
    return result.error_message or result.error_type
