"""The rows of `rollmesh weights`: kind, precision, size and base of each version."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from rollmesh.app.views.weights_view import VersionRow, row, weights_table
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.weights.manifest import ADAPTER_CONFIG, ADAPTER_WEIGHTS, build_manifest, parse_manifest

from ..shared.safetensors_files import write_safetensors


def version(step: int) -> PolicyVersion:
    return PolicyVersion(policy="main", step=step, weights_digest=f"{step}" * 64)


def rows(folder: Path) -> list[VersionRow]:
    """A full version, an adapter to it, an adapter to files that are not listed, and a version without a manifest."""
    first = {"m.safetensors": write_safetensors(folder / "m", 1)}
    other = {"m.safetensors": write_safetensors(folder / "o", 2)}
    (folder / "config").write_text("{}")
    adapter = {ADAPTER_CONFIG: folder / "config", ADAPTER_WEIGHTS: write_safetensors(folder / "a", 3, num_values=10)}
    built = [build_manifest(first), build_manifest(first, adapter=adapter), build_manifest(other, adapter=adapter)]
    manifests = {version(step): parse_manifest(one.data) for step, one in enumerate(built)}
    return [row(version(step), {"inf-0": "active"}, manifests) for step in range(4)]


def test_an_adapter_names_the_listed_version_with_the_files_of_its_base(tmp_path: Path) -> None:
    full, adapter, alone, gone = rows(tmp_path)
    assert (full.kind, full.precision, full.base, full.adapter_bytes) == ("full", "float32", "", 0)
    assert full.size_bytes == (tmp_path / "m").stat().st_size
    assert (adapter.kind, adapter.base) == ("adapter", "main@0.0")
    assert adapter.size_bytes == full.size_bytes + adapter.adapter_bytes
    assert adapter.adapter_bytes == (tmp_path / "a").stat().st_size + 2
    assert (alone.kind, alone.base) == ("adapter", "")
    assert gone == VersionRow(version="main@3.0", digest="3" * 64, nodes={"inf-0": "active"})


def test_the_table_has_a_line_per_version(tmp_path: Path) -> None:
    console = Console(width=160, record=True)
    console.print(weights_table(rows(tmp_path)))
    lines = console.export_text().splitlines()
    assert [line.split()[0] for line in lines] == ["version", "main@0.0", "main@1.0", "main@2.0", "main@3.0"]
    assert lines[2].split()[-3:] == ["main@0.0", "inf-0", "active"]
    assert "its own files" in lines[3]
    assert "not at the depot" in lines[4]
