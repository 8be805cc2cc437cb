"""Compute the digest of a profile's environment: everything that a result depends on besides the executed code.
Blocking: call from a thread."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from rollmesh.sandbox_runtime.languages.programs import Command
from rollmesh.services.sandbox.config import ProfileConfig

_INTERPRETER_S = 30.0
_SKIPPED = "__pycache__"


def environment_digest(profile: ProfileConfig, python: str = "", languages: Mapping[str, Command] | None = None) -> str:
    """Return the SHA-256 of the profile, its tools' sources, its libraries' files, the repository's commit, the
    interpreter and the machine.

    `python` is `SandboxConfig.python`, `languages` the declared commands. Libraries are hashed by content, or by
    `library_lock` if the profile names one. The digest does not cover the host's /usr and kernel, or the path of the
    repository, because the commit determines its files. Raises OSError.
    """
    digest = hashlib.sha256()
    declared = msgspec.to_builtins(profile)
    if profile.repository is not None:
        declared["repository"] = {"commit": profile.repository.commit, "name": profile.repository.name}
    parts = {
        "profile": msgspec.json.encode(declared, order="sorted").decode(),
        "limits": msgspec.json.encode(profile.resolved_limits().as_dict(), order="sorted").decode(),
        "python": _interpreter(python),
        "machine": platform.machine(),
    }
    if languages:
        parts["languages"] = msgspec.json.encode(languages, order="sorted").decode()
    for name, value in (*parts.items(), *_sources(profile), *_libraries(profile)):
        digest.update(f"{len(name)} {len(value)}\n{name}{value}".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


@functools.cache
def _interpreter(python: str) -> str:
    if not python:
        return sys.version
    command = [python, "-I", "-S", "-c", "import sys; print(sys.version)"]
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=_INTERPRETER_S, text=True
    ).stdout


def _sources(profile: ProfileConfig) -> Iterator[tuple[str, str]]:
    """Hash the tools on the service's path. Other tools are in the profile's libraries, which are hashed there."""
    for name in profile.tools:
        try:
            spec = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            continue
        if spec is not None and spec.origin is not None:
            yield f"tool {name}", _hashed(Path(spec.origin))


def _libraries(profile: ProfileConfig) -> Iterator[tuple[str, str]]:
    if profile.library_lock:
        yield "lock", _hashed(Path(profile.library_lock))
        return
    for number, library in enumerate(profile.library_paths):
        for directory, directories, files in os.walk(library):
            directories[:] = sorted(name for name in directories if name != _SKIPPED)
            for name in sorted(files):
                path = Path(directory, name)
                yield f"library {number} {path.relative_to(library)}", _hashed(path)


def _hashed(path: Path) -> str:
    if path.is_symlink() and not path.exists():
        return f"dangling {path.readlink()}"
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
