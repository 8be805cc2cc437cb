"""Files that an export replaces, and the payloads in them.

A payload may be purged since it was exported. Therefore the files are removed only after the export has written their
samples elsewhere, with the payloads that only these files still have.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq

from rollmesh.app.lake.rows import sample_line
from rollmesh.app.samples.samples import SampleLine


class ReplacedFiles:
    """Files of one run. Their names of samples are in memory, and one row group at a time."""

    def __init__(self, run: str, paths: Sequence[Path]) -> None:
        self._run = run
        self._paths = paths
        self._groups: dict[str, tuple[Path, int]] = {}
        """File and row group of each sample with a payload."""
        for path in paths:
            with pq.ParquetFile(path) as file:
                for number in range(file.num_row_groups):
                    rows = file.read_row_group(number, columns=["sample_id", "stored"]).to_pylist()
                    self._groups |= {row["sample_id"]: (path, number) for row in rows if row["stored"]}

    def lines(self, sample_ids: Iterable[str]) -> dict[str, SampleLine]:
        """Return those of the samples whose payload is in the files."""
        wanted: dict[tuple[Path, int], list[str]] = {}
        for name in sample_ids:
            if name in self._groups:
                wanted.setdefault(self._groups[name], []).append(name)
        found: dict[str, SampleLine] = {}
        for (path, number), names in wanted.items():
            with pq.ParquetFile(path) as file:
                rows = file.read_row_group(number).filter(pc.field("sample_id").isin(names)).to_pylist()
            found |= {row["sample_id"]: sample_line({**row, "run": self._run}) for row in rows}
        return found

    def remove(self) -> None:
        """Remove the files, and folders that are then empty."""
        for path in self._paths:
            path.unlink()
            with suppress(OSError):
                path.parent.rmdir()
