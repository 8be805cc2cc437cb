"""Translate RunTests requests from protobuf to a judgment and back."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from rollmesh.services.sandbox.config import SandboxConfig
from rollmesh.services.sandbox.oracle.judge import Judge
from rollmesh.services.sandbox.oracle.manifest import (
    LIMIT_FORM,
    LimitsPerTest,
    Manifest,
    ManifestError,
    is_limit,
    parse_manifest,
)
from rollmesh.services.sandbox.oracle.store import MANIFEST_BYTES_MAX, ManifestStore
from rollmesh.services.sandbox.oracle.verdict import JudgeReport
from rollmesh.services.sandbox.sessions import Sessions
from rollmesh.shared.clock import Clock
from rollmesh.shared.domain.ids import IdSource
from rollmesh.shared.errors import ConfigError, UnknownOracle, field_error
from rollmesh.v1 import sandbox_pb2

_SHOWN = ("/usr", "/bin", "/sbin", "/lib", "/lib64")
"""Directories that every jail can read, besides its interpreter and library paths."""


class HiddenTests:
    """The manifest store, if one is configured, and the judge."""

    def __init__(self, sessions: Sessions, config: SandboxConfig, *, clock: Clock, ids: IdSource) -> None:
        """Raises ConfigError or RecordError for an unusable store."""
        self._judge = Judge(sessions, config, clock=clock, ids=ids)
        self._store: ManifestStore | None = None
        if config.oracles:
            require_hidden(config)
            self._store = ManifestStore(config.oracles, check=self._judge.check)

    async def answer(self, request: sandbox_pb2.RunTestsRequest) -> sandbox_pb2.RunTestsResponse:
        """Return the verdicts. Raises MeshError, but never because of the candidate."""
        limits = _limits(request.limits)
        files = {file.path: file.content for file in request.files}
        report = await self._judge.judge(
            self._manifest(request), files, limits=limits, owner=request.owner, budget_s=request.budget_s
        )
        return _encode(report)

    def _manifest(self, request: sandbox_pb2.RunTestsRequest) -> Manifest:
        if bool(request.oracle_ref) == bool(request.manifest):
            raise field_error("oracle_ref", "be set exactly if `manifest` is not", request.oracle_ref)
        if request.oracle_ref:
            if self._store is None:
                raise UnknownOracle(
                    "this sandbox node has no oracle store: set `oracles`, or send the manifest",
                    oracle_ref=request.oracle_ref[:200],
                )
            return self._store.manifest(request.oracle_ref)
        if len(request.manifest) > MANIFEST_BYTES_MAX:
            raise field_error("manifest", f"have at most {MANIFEST_BYTES_MAX} bytes", len(request.manifest))
        try:
            return parse_manifest(request.manifest)
        except ManifestError as error:
            raise field_error("manifest", "be valid", error) from None


def require_hidden(config: SandboxConfig) -> None:
    """Raise ConfigError if a jail can read the oracle store."""
    oracles = Path(config.oracles).resolve()
    libraries = [path for profile in config.profiles.values() for path in profile.library_paths]
    for shown in (*_SHOWN, sys.base_prefix, *libraries):
        path = Path(os.path.realpath(shown))
        if oracles.is_relative_to(path) or path.is_relative_to(oracles):
            raise ConfigError(
                f"oracles: {config.oracles} overlaps {shown}, which jails can read; move the hidden tests to another "
                "directory",
                path=config.oracles,
            )


def _limits(asked: sandbox_pb2.SandboxLimits) -> LimitsPerTest:
    """Decode limits. Raises InvalidInput with the field and its range."""
    limits = {name: getattr(asked, name) for name in LimitsPerTest.__struct_fields__}
    for name, value in limits.items():
        if not is_limit(value):
            raise field_error(f"limits.{name}", LIMIT_FORM, value)
    return LimitsPerTest(**limits)


def _encode(report: JudgeReport) -> sandbox_pb2.RunTestsResponse:
    response = sandbox_pb2.RunTestsResponse(
        num_tests=report.num_tests, num_accepted=report.num_accepted, accepted_share=report.accepted_share
    )
    for verdict in report.verdicts:
        # The generated stubs use a separate type for the enum; a test checks that the numbers are equal.
        outcome: Any = verdict.verdict.value
        response.verdicts.add(name=verdict.name, outcome=outcome, message=verdict.message, wall_s=verdict.wall_s)
    return response
