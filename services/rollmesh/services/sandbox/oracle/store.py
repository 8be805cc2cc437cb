"""The manifest store: manifests by `oracle_ref`, read from an operator's directory or file by the service alone.

    DIR/calc/sum.json            one manifest                 oracle_ref "calc/sum"
    DIR/easy.jsonl               one manifest per line, each  oracle_ref "easy:add-two"
                                 with a field "ref"
    FILE.jsonl                   the same without a prefix    oracle_ref "add-two"

Every manifest is checked when the store is opened. Afterwards only its location is kept, because the tests of a data
set may exceed memory. A file that has changed since is rejected, so that old and new content never mix.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollmesh.services.sandbox.oracle.compare import strict_json
from rollmesh.services.sandbox.oracle.manifest import Manifest, ManifestError, manifest_of
from rollmesh.shared.errors import ConfigError, UnknownOracle
from rollmesh.shared.store.jsonl import LINE_BYTES_MAX
from rollmesh.shared.store.records import RecordError

MANIFEST_BYTES_MAX = LINE_BYTES_MAX
_REF_FIELD = "ref"
_Stamp = tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Location:
    """Location of a manifest."""

    path: Path
    stamp: _Stamp
    offset: int
    size: int
    line: int
    """Line number from 1; 0 for a file that is one manifest."""


class ManifestStore:
    """Manifests by reference. Raises ConfigError or RecordError for an unusable source or manifest. `check` raises
    ManifestError for a manifest that this node cannot judge."""

    def __init__(self, source: str | Path, check: Callable[[Manifest], None] = lambda _: None) -> None:
        self._source = Path(source)
        self._locations: dict[str, _Location] = {}
        try:
            for ref, location, manifest in _scan(self._source):
                with _locating(location):
                    check(manifest)
                if ref in self._locations:
                    first = self._locations[ref]
                    cause = f"oracle_ref {ref!r} is already defined at {first.path}:{first.line or 1}"
                    raise _wrong(location, cause, _REF_FIELD)
                self._locations[ref] = location
        except OSError as error:
            raise ConfigError(
                f"cannot read oracles at {source}: {error.strerror}; give a directory or a JSONL file"
            ) from error

    def __len__(self) -> int:
        return len(self._locations)

    def manifest(self, oracle_ref: str) -> Manifest:
        """Return the manifest of a reference. Raises UnknownOracle."""
        location = self._locations.get(oracle_ref)
        if location is None:
            raise UnknownOracle(
                f"unknown hidden tests `{oracle_ref[:200]}` ({len(self)} are known); see `oracles` of the sandbox node",
                oracle_ref=oracle_ref[:200],
            )
        try:
            if _stamp(location.path) == location.stamp:
                return _read(location)[1]
        except OSError:
            pass
        raise UnknownOracle(
            f"hidden tests `{oracle_ref}`: {location.path} has changed since the node started; restart it",
            oracle_ref=oracle_ref,
        )


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of a file with one manifest. Raises ConfigError, RecordError."""
    try:
        return _read(_Location(path, _stamp(path), 0, path.stat().st_size, 0))[1]
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; give the path of a manifest", path=path) from error


def _scan(source: Path) -> Iterator[tuple[str, _Location, Manifest]]:
    if not source.is_dir():
        yield from _lines(source, "")
        return
    for path in sorted(source.rglob("*")):
        ref = path.relative_to(source).with_suffix("").as_posix()
        if path.suffix == ".jsonl":
            yield from _lines(path, f"{ref}:")
        elif path.suffix == ".json":
            location = _Location(path, _stamp(path), 0, path.stat().st_size, 0)
            yield ref, location, _read(location)[1]


def _lines(path: Path, prefix: str) -> Iterator[tuple[str, _Location, Manifest]]:
    stamp, offset, line = _stamp(path), 0, 0
    with path.open("rb") as file:
        while raw := file.readline(MANIFEST_BYTES_MAX + 1):
            line += 1
            if raw.strip():
                location = _Location(path, stamp, offset, len(raw), line)
                ref, manifest = _decode(raw, location)
                yield prefix + ref, location, manifest
            offset += len(raw)


def _read(location: _Location) -> tuple[str, Manifest]:
    with location.path.open("rb") as file:
        file.seek(location.offset)
        return _decode(file.read(min(location.size, MANIFEST_BYTES_MAX + 1)), location)


def _decode(raw: bytes, location: _Location) -> tuple[str, Manifest]:
    """Decode the reference (of a line) and the manifest. Raises RecordError with file, line and field."""
    if len(raw) > MANIFEST_BYTES_MAX:
        raise _wrong(location, f"is longer than {MANIFEST_BYTES_MAX} bytes")
    try:
        value: Any = strict_json(raw)
    except ValueError as error:
        raise _wrong(location, f"is not JSON: {error}") from None
    ref = ""
    if location.line:
        ref = value.pop(_REF_FIELD, "") if isinstance(value, dict) else ""
        if not isinstance(ref, str) or not ref:
            raise _wrong(location, "must be a string that names the manifest", _REF_FIELD)
    with _locating(location):
        return ref, manifest_of(value)


@contextmanager
def _locating(location: _Location) -> Iterator[None]:
    """Convert a ManifestError to a RecordError with file and line."""
    try:
        yield
    except ManifestError as error:
        raise _wrong(location, error.cause, error.field) from None


def _wrong(location: _Location, cause: str, field: str = "") -> RecordError:
    return RecordError.at(location.path, location.line or 1, cause, field=field)


def _stamp(path: Path) -> _Stamp:
    found = os.stat(path)
    return found.st_mtime_ns, found.st_size
