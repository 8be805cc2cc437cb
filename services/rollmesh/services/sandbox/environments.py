"""The digest of a profile's environment: what a result depends on beside the code that ran. Blocking: call from a thread."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from rollmesh.services.sandbox.config import ProfileConfig

_INTERPRETER_S = 30.0
_SKIPPED = "__pycache__"


def environment_digest(profile: ProfileConfig, python: str = "") -> str:
    """SHA-256 over the profile, the sources of its tools, its libraries' files, the repository's commit, and interpreter and machine.

    `python` is `SandboxConfig.python`. Libraries count by their content, or, where the profile names a `library_lock`, by that file's.
    Not in it: the host's /usr and kernel; and of a repository where it lies, since the commit says all. Raises OSError.
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
    """Tools of the operator are found on the service's path, others in the profile's libraries, which are counted as such."""
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
