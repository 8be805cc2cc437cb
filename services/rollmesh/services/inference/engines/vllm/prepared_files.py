"""The weight files of prepared versions, for an engine whose processes read the files themselves.

`prepare` gets paths that are valid until it returns. This folder keeps the files by a link, or by a copy if they are on
another file system, until the version is taken, dropped or discarded. Its users check the tensors first, so that no
process loads a file that does not fit.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

from rollmesh.shared.domain.versions import PolicyVersion


class PreparedFiles:
    """Files by version in one folder, at most `prepared_max` versions. `keep` may run in a thread, the other methods on
    one thread."""

    def __init__(self, folder: str, prepared_max: int) -> None:
        """`folder` is used by this object alone, and emptied. Empty: a temporary folder."""
        self._prepared_max = prepared_max
        self._versions: OrderedDict[PolicyVersion, Path] = OrderedDict()
        self._number = 0
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
        self._folder = Path(folder) if folder else Path(tempfile.mkdtemp(prefix="rollmesh-weights-"))

    def __contains__(self, version: PolicyVersion) -> bool:
        return version in self._versions

    def new_folder(self) -> Path:
        """Return the path of a folder for one version. It does not exist yet."""
        self._number += 1
        return self._folder / str(self._number)

    def put(self, version: PolicyVersion, folder: Path) -> None:
        """Register the files of a version, and drop the oldest ones beyond the limit."""
        self.discard(version)
        self._versions[version] = folder
        while len(self._versions) > self._prepared_max:
            self.discard(next(iter(self._versions)))

    def take(self, version: PolicyVersion) -> Path:
        """Return the folder of a version, which the caller deletes. Raises KeyError if it is not prepared."""
        return self._versions.pop(version)

    def discard(self, version: PolicyVersion) -> None:
        folder = self._versions.pop(version, None)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Delete everything."""
        self._versions.clear()
        shutil.rmtree(self._folder, ignore_errors=True)


def keep_files(files: Mapping[str, Path], folder: Path) -> None:
    """Link or copy the files into a new folder under numbers, in the order of their names. Blocks. Raises OSError."""
    folder.mkdir(parents=True)
    for number, name in enumerate(sorted(files)):
        target = folder / f"{number:05}.safetensors"
        try:
            os.link(files[name], target)
        except OSError:  # another file system, or one without links
            shutil.copyfile(files[name], target)


def files_in(folder: Path) -> list[str]:
    """Return the paths of the files in the order of `keep_files`."""
    return [str(path) for path in sorted(folder.iterdir())]
