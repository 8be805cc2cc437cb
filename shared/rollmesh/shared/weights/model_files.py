"""The small files of a model, which a host provides and a node with an empty disk fetches.

They are configuration, tokenizer and chat template, which a rollout worker or an engine reads before it has weights.
Weights come from the depot, version by version, and are excluded here by name and by size.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from rollmesh.shared.errors import HashMismatch, UnknownBlob
from rollmesh.shared.rpc.status import typed_errors
from rollmesh.shared.store.whole_files import write_whole
from rollmesh.v1 import coordinator_pb2

SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken")
WEIGHT_INDEX = ".index.json"
FILE_BYTES_MAX = 64 << 20
"""Maximum size of a small file, in bytes. A larger file counts as weights and is excluded."""
PIECE_BYTES = 1 << 20
FETCH_S_MAX = 120.0


class ModelFiles:
    """The small files in a model's folder, as they were at construction."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.listing = [_describe(path) for path in sorted(folder.iterdir()) if _is_small(path)]

    async def pieces(self, names: Sequence[str]) -> AsyncIterator[coordinator_pb2.FetchModelFilesResponse]:
        """Return the named files, or all. Raises `UnknownBlob`."""
        known = [file.name for file in self.listing]
        for name in names:
            if name not in known:
                raise UnknownBlob(f"no model file {name!r} is offered; known: {', '.join(known)}", file=name)
        for name in known:
            if not names or name in names:
                data = await asyncio.to_thread((self._folder / name).read_bytes)
                for start in range(0, max(1, len(data)), PIECE_BYTES):
                    piece = data[start : start + PIECE_BYTES]
                    yield coordinator_pb2.FetchModelFilesResponse(name=name, offset=start, data=piece)


async def fetch_model_files(stub: Any, listing: Sequence[coordinator_pb2.ModelFile], folder: Path) -> None:
    """Fetch the listed files into `folder`. Existing files stay. Raises `HashMismatch` or the error of the server."""
    missing = await asyncio.to_thread(_missing, folder, listing)
    if not missing:
        return
    contents: dict[str, bytearray] = {}
    call = stub.FetchModelFiles(coordinator_pb2.FetchModelFilesRequest(names=list(missing)), timeout=FETCH_S_MAX)
    with typed_errors():
        async for piece in call:
            if len(content := contents.setdefault(piece.name, bytearray())) > FILE_BYTES_MAX:
                break  # the digest is checked below
            content += piece.data
    for name, file in missing.items():
        await asyncio.to_thread(_store, folder, file, bytes(contents.get(name, b"")))


def _missing(folder: Path, listing: Sequence[coordinator_pb2.ModelFile]) -> dict[str, coordinator_pb2.ModelFile]:
    folder.mkdir(parents=True, exist_ok=True)
    return {file.name: file for file in listing if not _is_there(folder, file)}


def _store(folder: Path, file: coordinator_pb2.ModelFile, data: bytes) -> None:
    if Path(file.name).name != file.name or hashlib.sha256(data).hexdigest() != file.sha256:
        raise HashMismatch(
            f"model file {file.name!r} has a different content than announced ({len(data)} of {file.num_bytes} bytes); "
            "try again",
            file=file.name,
        )
    write_whole(folder / file.name, data, private=False)


def _is_there(folder: Path, file: coordinator_pb2.ModelFile) -> bool:
    path = folder / Path(file.name).name
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == file.sha256


def _is_small(path: Path) -> bool:
    name = path.name
    return (
        path.is_file()
        and not name.startswith(".")
        and name.endswith(SUFFIXES)
        and not name.endswith(WEIGHT_INDEX)
        and path.stat().st_size <= FILE_BYTES_MAX
    )


def _describe(path: Path) -> coordinator_pb2.ModelFile:
    data = path.read_bytes()
    return coordinator_pb2.ModelFile(name=path.name, num_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
