"""Write prepared weights as model folders on a file system that a server reads.

Each version gets a folder with its safetensors files and the small files of the model folder (configuration,
tokenizer), so that the server loads it like any other model. Files are linked if both sides are on one file system,
else copied. A folder appears complete or not at all. Nothing else in the directory is touched.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from rollmesh.services.inference.engines.attached.weight_files import Shapes, check_files, folder_shapes
from rollmesh.shared.domain.versions import PolicyVersion

_PREFIX = "rollmesh-"
_LOCK = ".rollmesh.lock"
_SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model")


def version_label(version: PolicyVersion) -> str:
    """Return the name of a version at a server: letters, digits, dots and hyphens, and different for different
    weights."""
    digest = hashlib.sha256(f"{version}/{version.weights_digest}".encode()).hexdigest()
    return f"{_PREFIX}{version.step}.{version.incarnation}-{digest[:16]}"


class WeightFolders:
    """The folders of one engine. Its methods block; call them in one thread at a time."""

    def __init__(self, directory: Path, at_server: str, model: Path) -> None:
        """`directory` is at `at_server` on the server's machine; empty means at the same path."""
        self._directory = directory.expanduser().resolve()
        self._at_server = at_server or str(self._directory)
        self._model = model
        self._shapes: Shapes | None = None
        self._lock: TextIO | None = None

    def open(self) -> None:
        """Create the directory, lock it and remove what an earlier process left. Raises OSError."""
        self._directory.mkdir(parents=True, exist_ok=True)
        lock = (self._directory / _LOCK).open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as err:
            lock.close()
            raise OSError("another node uses it; give each node its own folder and its own server") from err
        self._lock = lock
        self._remove_all()
        self._shapes = folder_shapes(self._model)

    def write(self, version: PolicyVersion, files: Mapping[str, Path]) -> None:
        """Check the files and write the folder. Raises WeightsMismatch, OSError.

        Tensors are compared with those of the model folder or, if it has no weights, with those of the first version.
        """
        self._shapes = check_files(files, self._shapes)
        self.remove(version)
        target, draft = self._folder(version), self._draft(version)
        draft.mkdir()
        for pattern in _SMALL_FILES:
            for small in self._model.glob(pattern):
                if not small.name.endswith(".index.json"):  # it lists the files of other weights
                    shutil.copyfile(small, draft / small.name)
        for name, path in files.items():
            _link_or_copy(path, draft / name)
        draft.rename(target)

    def path_at_server(self, version: PolicyVersion) -> str:
        return f"{self._at_server.rstrip('/')}/{self._folder(version).name}"

    def remove(self, version: PolicyVersion) -> None:
        """Remove the folder of a version, also one that was not completed."""
        for folder in (self._draft(version), self._folder(version)):
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        if self._lock is not None:
            self._remove_all()
            self._lock.close()
            self._lock = None

    def _remove_all(self) -> None:
        for folder in self._directory.glob(f"{_PREFIX}*"):
            shutil.rmtree(folder, ignore_errors=True)

    def _folder(self, version: PolicyVersion) -> Path:
        return self._directory / version_label(version)

    def _draft(self, version: PolicyVersion) -> Path:
        return self._directory / f"{version_label(version)}.draft"


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)
