"""The protocol version of this release, and the rule which processes of different releases work together.

`PROTOCOL` covers everything that processes of one mesh exchange: the messages of `protos/`, the configuration that
GetMesh returns, and the facts of the ledger that a node reads. The minor number rises when something is added, or when
a call goes away that always returned UNIMPLEMENTED; the major number when something else changes or goes away. The
coordinator decides: it accepts nodes of its major number whose minor number equals its own or is one lower. So the
coordinator is upgraded first, and every node must work with peers one minor number older, in both directions.
docs/upgrades.md describes the procedure.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollmesh.shared.errors import InvalidInput

OLDER_MINORS = 1
"""Number of older minor versions that a coordinator accepts."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class ProtocolVersion:
    """The fields of `ProtocolVersion` in coordinator.proto."""

    major: int = 1
    minor: int = 0

    @classmethod
    def parse(cls, text: str) -> ProtocolVersion:
        """Return the version that `str` made; `UNREPORTED` for an empty text."""
        major, _, minor = text.strip().partition(".")
        return cls(major=int(major), minor=int(minor)) if major else UNREPORTED

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


UNREPORTED = ProtocolVersion(major=1, minor=0)
"""Version of a peer that reports none: releases before 1.1, and clients that are not part of this package."""
PROTOCOL = ProtocolVersion(major=1, minor=1)
"""Version of this release. A test compares it with the committed descriptors of the last release
(`protos/released-*.binpb`)."""


class ProtocolMismatch(InvalidInput):
    """A node and the coordinator are of releases that do not work together. The message names both versions and the
    remedy."""

    reason = "PROTOCOL_MISMATCH"


def check_protocol(
    node: ProtocolVersion,
    coordinator: ProtocolVersion,
    *,
    node_name: str,
    node_build: str = "",
    coordinator_build: str = "",
) -> None:
    """Raise ProtocolMismatch unless a node may join a coordinator. The builds are package versions, for the message."""
    if node.major == coordinator.major and 0 <= coordinator.minor - node.minor <= OLDER_MINORS:
        return
    theirs = f"{node_name}{_build(node_build)} has protocol {node}"
    if node.major != coordinator.major:
        remedy = (
            "different major versions never work together: stop the mesh, install one release on every host, then "
            "resume the run"
        )
    elif node.minor > coordinator.minor:
        remedy = "upgrade the coordinator first, or install its release on the host of the node"
    else:
        remedy = (
            f"it accepts {coordinator.major}.{coordinator.minor - OLDER_MINORS} to {coordinator}; install its release "
            "on the host of the node"
        )
    raise ProtocolMismatch(
        f"{theirs}, and the coordinator{_build(coordinator_build)} has {coordinator}: {remedy} (docs/upgrades.md)",
        node=node,
        coordinator=coordinator,
    )


def _build(version: str) -> str:
    return f" (rollmesh {version})" if version else ""
