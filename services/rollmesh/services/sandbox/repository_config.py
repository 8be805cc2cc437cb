"""Configuration of a repository that a profile's sessions begin with."""

from __future__ import annotations

import re

import msgspec

_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class RepositoryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tree of files that every session finds at /session/<name>, its own to change."""

    path: str
    """Absolute path of a git repository on the node, bare or with a working tree. Owned by the service's user, or git refuses it."""
    commit: str
    """Full commit id: a branch would make two environments of one profile. Only its files are shown, never the history, which holds
    later commits, and with them the answers."""
    name: str = "repository"
    """Directory below /session."""

    def __post_init__(self) -> None:
        if not self.path.startswith("/"):
            raise ValueError(f"repository.path must be absolute, got {self.path!r}")
        if not _COMMIT.fullmatch(self.commit):
            raise ValueError(f"repository.commit must be a full commit id in lower-case hex, got {self.commit!r}")
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"repository.name must be a plain directory name, got {self.name!r}")
