"""The manifest of a version: its files in content-addressed chunks, and the probes that tell right weights from wrong
ones.

The manifest's bytes are a blob too, and their SHA-256 is the version's `weights_digest`. Digests are taken over the
bytes as stored, and a reader does not serialize a manifest again to check it. Free of numpy, since thin clients publish
too.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from google.protobuf.message import DecodeError

from rollmesh.shared.codec.refusal import refuse_unknown
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.errors import Phrase, field_error
from rollmesh.shared.weights.digests import check_digest, sha256_hex
from rollmesh.shared.weights.precision import check_precision, state_precision
from rollmesh.v1 import weights_pb2

CHUNK_BYTES = 16 << 20
"""What a lost transfer costs at most; small models are one chunk, which needs no putting together."""
CHUNK_BYTES_MAX = 64 << 20
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
"""The files of a low-rank adapter, as peft names them."""
PROBE_TOLERANCE = 0.01
"""Nats. Reordered float32 sums differ by 1e-5; a stale layer of a small model showed 1e-1 and more."""
ROUNDED_PROBE_TOLERANCE = 1.0
"""Nats, where the trainer, the published weights or the engine are in bfloat16. Between such a pair and float32, the
model of the demo showed differences of up to 0.56 on 16,128 tokens that it drew (99 % are below 0.09), and a random
model of 12 layers of width 512 with logits of up to 21 one of 0.24 on 1,008. A layer that stayed behind by 70 updates
showed 2.0 and more on every four probes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSource:
    """Where the bytes of a chunk are: `size_bytes` from `offset` of a file."""

    path: Path
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltManifest:
    """A manifest ready for upload: its bytes, its digest, and where its chunks are."""

    data: bytes
    weights_digest: str
    chunks: Mapping[str, ChunkSource] = field(repr=False)


def version_owner(version: PolicyVersion, run: str = "") -> str:
    """Owner of a version's blobs: `weights:<run>/main@12.0` at the depot, `weights:main@12.0` in a node's own store.

    With the run, because the depot keeps the newest versions of each: a young run's would be older than an old run's.
    """
    return f"weights:{run}/{version}" if run else f"weights:{version}"


def is_version_of(owner: str, run: str) -> bool:
    """Return whether an owner at the depot is a version of `run`."""
    return owner.startswith(f"weights:{run}/")


def build_manifest(
    files: Mapping[str, Path],
    *,
    adapter: Mapping[str, Path] = MappingProxyType({}),
    tied: Sequence[str] = (),
    probes: Sequence[weights_pb2.WeightProbe] = (),
    probe_tolerance: float = PROBE_TOLERANCE,
    chunk_bytes: int = CHUNK_BYTES,
    known: Mapping[str, weights_pb2.WeightFile] = MappingProxyType({}),
) -> BuiltManifest:
    """Reads and hashes the safetensors files (about 1.8 GB/s): call it in a thread. Together they are one whole state
    dict.

    With an `adapter`, the two files of peft by their names, the version is that state dict with the adapter. Its chunks
    are those of the versions with the same base, so only the adapter travels. `known` has the chunks of files that were
    hashed before and have not changed since; they are not read again. Raises `InvalidInput` for a file that is not
    safetensors, OSError for one that cannot be read. The same files, probes and settings give the same digest.
    """
    if not 0 < chunk_bytes <= CHUNK_BYTES_MAX:
        raise field_error("chunk_bytes", f"be in [1, {CHUNK_BYTES_MAX}]", chunk_bytes)
    chunks: dict[str, ChunkSource] = {}
    manifest = weights_pb2.WeightManifest(
        kind=weights_pb2.WeightManifest.KIND_LORA if adapter else weights_pb2.WeightManifest.KIND_FULL,
        files=[
            _place(known[name], path, chunks) if name in known else _file(name, path, chunk_bytes, chunks)
            for name, path in sorted({**files, **adapter}.items())
        ],
        tied=sorted(tied),
        probes=probes,
        probe_tolerance=probe_tolerance,
    )
    state_precision(manifest, files.values())
    check_manifest(manifest)
    data = manifest.SerializeToString(deterministic=True)
    return BuiltManifest(data=data, weights_digest=sha256_hex(data), chunks=chunks)


def parse_manifest(data: bytes) -> weights_pb2.WeightManifest:
    """The manifest in verified bytes. Raises `InvalidInput`."""
    manifest = weights_pb2.WeightManifest()
    try:
        manifest.ParseFromString(data)
    except DecodeError as err:
        got = Phrase(f"{len(data)} bytes that cannot be decoded ({err})")
        remedy = "send the SHA-256 of its bytes as `weights_digest`"
        raise field_error("manifest", "be an encoded rollmesh.v1.WeightManifest", got, remedy) from err
    check_manifest(manifest)
    return manifest


def check_manifest(manifest: weights_pb2.WeightManifest) -> None:
    """Raises `InvalidInput` naming the field."""
    refuse_unknown(manifest, "manifest")
    if manifest.kind not in (weights_pb2.WeightManifest.KIND_FULL, weights_pb2.WeightManifest.KIND_LORA):
        raise field_error("manifest.kind", "be 1 (full) or 2 (adapter)", int(manifest.kind))
    if not manifest.files:
        raise field_error("manifest.files", "have at least one entry", None)
    names = [file.name for file in manifest.files]
    for index, file in enumerate(manifest.files):
        _check_file(file, f"manifest.files[{index}]")
        if names.count(file.name) > 1:
            raise field_error(f"manifest.files[{index}].name", "be unique in the manifest", file.name)
    is_adapter = manifest.kind == weights_pb2.WeightManifest.KIND_LORA
    if is_adapter != ({ADAPTER_CONFIG, ADAPTER_WEIGHTS} <= set(names)) or (is_adapter and len(names) < 3):
        must = f"contain {ADAPTER_CONFIG}, {ADAPTER_WEIGHTS} and the files of the base exactly if it is an adapter"
        raise field_error("manifest.files", must, names)
    check_precision(manifest)
    if not (math.isfinite(manifest.probe_tolerance) and manifest.probe_tolerance >= 0):
        raise field_error("manifest.probe_tolerance", "be finite and >= 0", manifest.probe_tolerance)
    for index, probe in enumerate(manifest.probes):
        _check_probe(probe, f"manifest.probes[{index}]")


def chunk_sizes(manifest: weights_pb2.WeightManifest) -> dict[str, int]:
    """Bytes of every distinct chunk, in order of first use."""
    return {chunk.digest: chunk.size_bytes for file in manifest.files for chunk in file.chunks}


# Parts ----------------------------------------------------------------------------------------------------------------


def _file(name: str, path: Path, chunk_bytes: int, chunks: dict[str, ChunkSource]) -> weights_pb2.WeightFile:
    message = weights_pb2.WeightFile(name=name)
    for offset, data in _cut(path, chunk_bytes):
        digest = sha256_hex(data)
        chunks[digest] = ChunkSource(path=path, offset=offset, size_bytes=len(data))
        message.chunks.add(digest=digest, size_bytes=len(data))
        message.size_bytes += len(data)
    return message


def _place(message: weights_pb2.WeightFile, path: Path, chunks: dict[str, ChunkSource]) -> weights_pb2.WeightFile:
    """Add the chunks of a known file, and return it."""
    offset = 0
    for chunk in message.chunks:
        chunks[chunk.digest] = ChunkSource(path=path, offset=offset, size_bytes=chunk.size_bytes)
        offset += chunk.size_bytes
    return message


def _cut(path: Path, chunk_bytes: int) -> Iterator[tuple[int, bytes]]:
    offset = 0
    with path.open("rb") as file:
        while data := file.read(chunk_bytes):
            yield offset, data
            offset += len(data)


def _check_file(file: weights_pb2.WeightFile, field_: str) -> None:
    # Names become paths on every node: a bare file name, or it could write elsewhere.
    if not file.name or Path(file.name).name != file.name or file.name in (".", ".."):
        raise field_error(f"{field_}.name", "be a file name without a directory", file.name)
    for index, chunk in enumerate(file.chunks):
        check_digest(chunk.digest, f"{field_}.chunks[{index}].digest")
        if not 0 < chunk.size_bytes <= CHUNK_BYTES_MAX:
            raise field_error(f"{field_}.chunks[{index}].size_bytes", f"be in [1, {CHUNK_BYTES_MAX}]", chunk.size_bytes)
    total = sum(chunk.size_bytes for chunk in file.chunks)
    if file.size_bytes != total:
        raise field_error(f"{field_}.size_bytes", f"be {total}, the size of its chunks", file.size_bytes)


def _check_probe(probe: weights_pb2.WeightProbe, field_: str) -> None:
    num_tokens, logprobs = len(probe.token_ids) // 4, array("f")
    if len(probe.logprobs) != len(probe.token_ids) or len(probe.token_ids) % 4 or num_tokens < 2:
        must = f"have one value for each of at least 2 tokens (`token_ids` has {num_tokens})"
        raise field_error(f"{field_}.logprobs", must, len(probe.logprobs) // 4)
    logprobs.frombytes(probe.logprobs)
    if sys.byteorder == "big":
        logprobs.byteswap()
    if not all(map(math.isfinite, logprobs)):
        raise field_error(
            f"{field_}.logprobs", "be finite", next(value for value in logprobs if not math.isfinite(value))
        )
