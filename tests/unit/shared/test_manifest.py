"""Manifests are deterministic, cover the files whole, and are refused when they could mislead a node."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.errors import InvalidInput
from rollmesh.shared.weights.digests import sha256_hex
from rollmesh.shared.weights.manifest import (
    BuiltManifest,
    build_manifest,
    check_manifest,
    parse_manifest,
    version_owner,
)
from rollmesh.shared.weights.precision import dtypes_of, misstated, precision_text, rounded
from rollmesh.shared.weights.probes import Probe
from rollmesh.v1 import weights_pb2

from .safetensors_files import write_safetensors

PROBE = Probe(token_ids=np.array([1, 2, 3], np.int32), logprobs=np.array([0, -1, -2], np.float32))


def built(folder: Path, *, chunk_bytes: int = 1000) -> BuiltManifest:
    files = {
        name: write_safetensors(folder / name, seed) for seed, name in enumerate(["b.safetensors", "a.safetensors"])
    }
    return build_manifest(files, probes=[PROBE.encode()], tied=["lm_head=embed"], chunk_bytes=chunk_bytes)


def test_the_same_files_give_the_same_digest(tmp_path: Path) -> None:
    assert built(tmp_path).weights_digest == built(tmp_path).weights_digest
    assert built(tmp_path).weights_digest == sha256_hex(built(tmp_path).data)
    assert built(tmp_path).weights_digest != built(tmp_path, chunk_bytes=999).weights_digest


def test_chunks_in_order_are_the_file(tmp_path: Path) -> None:
    result = built(tmp_path)
    manifest = parse_manifest(result.data)
    assert [file.name for file in manifest.files] == ["a.safetensors", "b.safetensors"]
    for file in manifest.files:
        whole = (tmp_path / file.name).read_bytes()
        parts = []
        for chunk in file.chunks:
            source = result.chunks[chunk.digest]
            parts.append(source.path.read_bytes()[source.offset : source.offset + source.size_bytes])
            assert sha256_hex(parts[-1]) == chunk.digest
        assert b"".join(parts) == whole
        assert len(file.chunks) == -(-len(whole) // 1000)
    assert manifest.dtype == "float32"


def mixed(path: Path) -> Path:
    """Two tensors of float32, one of bfloat16 and one of int64."""
    header = {
        "big": {"dtype": "BF16", "shape": [100], "data_offsets": [0, 200]},
        "gate": {"dtype": "F32", "shape": [2], "data_offsets": [200, 208]},
        "bias": {"dtype": "F32", "shape": [2], "data_offsets": [208, 216]},
        "ids": {"dtype": "I64", "shape": [1], "data_offsets": [216, 224]},
    }
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(224))
    return path


def test_the_precision_is_that_of_most_bytes_with_the_other_tensors_as_exceptions(tmp_path: Path) -> None:
    files = {"m.safetensors": mixed(tmp_path / "m.safetensors")}
    manifest = parse_manifest(build_manifest(files).data)
    assert manifest.dtype == "bfloat16"
    assert {group.dtype: list(group.tensors) for group in manifest.exceptions} == {
        "float32": ["bias", "gate"],
        "int64": ["ids"],
    }
    assert precision_text(manifest) == "bfloat16, 2 tensors float32, 1 tensor int64"
    dtypes = dtypes_of(files.values())
    assert misstated(manifest, dtypes) == ""
    assert rounded(dtypes, "bfloat16") == ["gate", "bias"]
    assert rounded(dtypes, "float16") == ["big", "gate", "bias"], "float16 has a smaller range than bfloat16"
    assert rounded(dtypes, "float32") == rounded(dtypes, "") == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: setattr(m, "dtype", "float32"), "tensor big is bfloat16, but the manifest states float32"),
        (lambda m: m.exceptions.pop(), "tensor ids is int64, but the manifest states bfloat16"),
        (lambda m: m.exceptions[0].tensors.append("x"), "the manifest states the type of tensor x, which no file has"),
        (lambda m: m.ClearField("dtype"), ""),
    ],
)
def test_a_manifest_that_states_another_precision_than_the_files_have_is_found_out(
    tmp_path: Path, change: Callable[[weights_pb2.WeightManifest], object], message: str
) -> None:
    files = {"m.safetensors": mixed(tmp_path / "m.safetensors")}
    manifest = parse_manifest(build_manifest(files).data)
    change(manifest)
    assert misstated(manifest, dtypes_of(files.values())) == message


def test_a_file_that_is_no_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"PK\x03\x04 a zip archive, surely")
    with pytest.raises(InvalidInput, match=r"x\.safetensors is not a safetensors file"):
        build_manifest({"x.safetensors": tmp_path / "x.safetensors"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda m: m.ClearField("files"), "manifest.files` must have at least one entry"),
        (
            lambda m: setattr(m.files[0], "name", "../x"),
            "files[0].name` must be a file name without a directory, got '../x'",
        ),
        (lambda m: setattr(m.files[1], "name", m.files[0].name), "must be unique in the manifest"),
        (lambda m: setattr(m.files[0], "size_bytes", 5), ", the size of its chunks, got 5"),
        (
            lambda m: setattr(m.files[0].chunks[0], "digest", "x"),
            "files[0].chunks[0].digest` must have 64 lower-case hex digits, got 'x'",
        ),
        (
            lambda m: setattr(m.files[0].chunks[0], "size_bytes", 65 << 20),
            "chunks[0].size_bytes` must be in [1, 67108864], got 68157440",
        ),
        (
            lambda m: setattr(m.probes[0], "logprobs", bytes(8)),
            "probes[0].logprobs` must have one value for each of at least 2 tokens (`token_ids` has 3), got 2",
        ),
        (lambda m: setattr(m, "probe_tolerance", float("nan")), "probe_tolerance` must be finite and >= 0, got nan"),
        (lambda m: setattr(m, "kind", 0), "manifest.kind` must be 1 (full) or 2 (adapter), got 0"),
        (lambda m: setattr(m, "dtype", "bfloat16,float32"), "manifest.dtype` must be one of"),
        (lambda m: m.exceptions.add(dtype="int64"), "exceptions[0].tensors` must name at least one tensor"),
        (lambda m: m.exceptions.add(dtype="float32", tensors=["w"]), "exceptions[0].dtype` must be one of"),
        (lambda m: m.exceptions.add(dtype="int64", tensors=["w", "w"]), "exceptions[0].tensors` must name"),
        (
            lambda m: (m.exceptions.add(dtype="int64", tensors=["w"]), m.ClearField("dtype")),
            "manifest.dtype` must be set, because `exceptions` is",
        ),
    ],
)
def test_a_misleading_manifest_is_refused(
    tmp_path: Path, damage: Callable[[weights_pb2.WeightManifest], object], message: str
) -> None:
    manifest = parse_manifest(built(tmp_path).data)
    damage(manifest)
    with pytest.raises(InvalidInput) as caught:
        check_manifest(manifest)
    assert message in str(caught.value)


def test_owner_names_run_policy_step_and_incarnation() -> None:
    version = PolicyVersion(policy="main", step=12, incarnation=1)
    assert version_owner(version, "mine") == "weights:mine/main@12.1"
    assert version_owner(version) == "weights:main@12.1"
