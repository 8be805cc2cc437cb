"""SQL over exported samples, with DuckDB.

The view `samples` has one row per sample, `rewards` one per reward, `updates` one per update, and `scores` one per
reward that `rollmesh score` added. DuckDB reads only the columns and files that a query needs.
"""

from __future__ import annotations

import glob
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb

from rollmesh.app.lake.files import FILES, FOLDER, SCORES
from rollmesh.shared.errors import ConfigError, InvalidInput

FETCH_ROWS = 1024
"""Rows of a result that are in memory at once."""
_REWARDS = """
CREATE VIEW rewards AS
SELECT run, "update", sample_id, task_id, group_id, purpose, ended_as, reward.*, evidence FROM (
    SELECT run, "update", sample_id, task_id, group_id, purpose, ended_as,
        unnest(rewards) AS reward, unnest(evidence) AS evidence
    FROM samples)
"""
_UPDATES = """
CREATE VIEW updates AS
SELECT run, "update", any_value(incarnation) AS incarnation, any_value(applied) AS applied,
    min(ended_time) AS committed_time, count(*) AS num_samples, count(DISTINCT group_id) AS num_groups,
    sum(num_tokens) AS num_tokens, avg(staleness) AS staleness_mean, max(staleness) AS staleness_max
FROM samples WHERE "update" IS NOT NULL GROUP BY ALL
"""


_SCORES = """
CREATE VIEW scores AS
SELECT scores, run, "update", sample_id, reward.*, evidence FROM (
    SELECT scores, run, TRY_CAST("update" AS BIGINT) AS "update", sample_id, unnest(rewards) AS reward,
        unnest(evidence) AS evidence
    FROM {source})
"""


@dataclass(frozen=True, slots=True)
class QueryResult:
    """The columns of a result, and its rows, which are read once."""

    columns: list[str]
    rows: Iterator[tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class SampleTables:
    """A connection with the views. Use `opened`."""

    connection: duckdb.DuckDBPyConnection
    folder: Path
    link: Path
    """Temporary link to the folder. DuckDB takes a column from each NAME=VALUE in a path, also above the folder."""

    def query(self, sql: str) -> QueryResult:
        """Run one statement. Raises InvalidInput with the columns that exist if it is wrong."""
        try:
            statements = self.connection.extract_statements(sql)
            if len(statements) != 1:
                raise InvalidInput(f"SQL: must be one statement, got {len(statements)}")
            result = self.connection.execute(statements[0])
        except duckdb.Error as err:
            raise self.error(err) from err
        return QueryResult([column[0] for column in result.description or ()], self._rows(result))

    def error(self, err: duckdb.Error) -> InvalidInput:
        """Return the error for a statement of the user."""
        tables: dict[str, list[str]] = {}
        for table, column in self.connection.execute(
            "SELECT table_name, column_name FROM duckdb_columns() WHERE NOT internal ORDER BY table_name, column_index"
        ).fetchall():
            tables.setdefault(table, []).append(column)
        columns = "\n".join(f"  {name}: {', '.join(names)}" for name, names in tables.items())
        return InvalidInput(f"SQL: {self.text(err)}\nThe views and their columns (docs/samples.md):\n{columns}")

    def text(self, err: duckdb.Error) -> str:
        """Return the message of an error with the paths of the user."""
        return str(err).replace(str(self.link), str(self.folder))

    def _rows(self, result: duckdb.DuckDBPyConnection) -> Iterator[tuple[Any, ...]]:
        try:
            while rows := result.fetchmany(FETCH_ROWS):
                yield from rows
        except duckdb.Error as err:
            raise self.error(err) from err


def samples_folder(folder: Path) -> Path:
    """Return the folder of the files of a run folder, or of samples of several runs. Raises ConfigError if nothing was
    exported."""
    for path in (folder / FOLDER, folder):
        if any(path.glob(FILES)):
            return path
    raise ConfigError(
        f"{folder}: has no exported samples; run `rollmesh export {folder}` when samples have ended", path=folder
    )


@contextmanager
def opened(folder: Path) -> Iterator[SampleTables]:
    """Open the samples of a run folder, or of several runs. Raises ConfigError if nothing was exported or a file is
    damaged."""
    samples = samples_folder(folder)
    with tempfile.TemporaryDirectory() as spill, duckdb.connect() as connection:
        connection.execute(f"SET temp_directory = {quoted(spill)}")
        connection.execute("SET parquet_metadata_cache = true")  # a statement binds the view again
        connection.execute("SET autoinstall_known_extensions = false")
        tables = SampleTables(connection, samples, Path(spill, FOLDER))
        tables.link.symlink_to(samples.resolve())
        try:
            _create_views(connection, tables.link)
        except duckdb.Error as err:
            remedy = "" if isinstance(err, duckdb.BinderException) else "; remove the file, then export again"
            raise ConfigError(f"{samples}: cannot be read: {tables.text(err)}{remedy}") from err
        yield tables


def _create_views(connection: duckdb.DuckDBPyConnection, samples: Path) -> None:
    """Create the views. Names of rewards that differ only in case are one field, as they are for DuckDB."""
    source = _source(samples, FILES)
    names = connection.execute(
        "SELECT min(reward.name) AS name FROM (SELECT unnest(rewards) AS reward "
        f"FROM {source}) GROUP BY lower(reward.name) ORDER BY name"
    ).fetchall()
    values = ", ".join(
        f"{quoted(name)}: [r.value for r in rewards if lower(r.name) = lower({quoted(name)}) AND r.segment < 0 AND "
        "r.outcome = 'ok'][1]"
        for (name,) in names
    )
    reward = f"{{{values}}}" if values else "NULL"
    connection.execute(
        f'CREATE VIEW samples AS SELECT run, TRY_CAST("update" AS BIGINT) AS "update", '
        f'* EXCLUDE (run, "update"), {reward} AS reward FROM {source}'
    )
    connection.execute(_REWARDS)
    connection.execute(_UPDATES)
    if any(samples.glob(SCORES)):
        connection.execute(_SCORES.format(source=_source(samples, SCORES)))


def _source(samples: Path, files: str) -> str:
    pattern = quoted(f"{glob.escape(str(samples))}/{files}")
    return (
        f"read_parquet({pattern}, union_by_name = true, hive_partitioning = true, "
        "hive_types = {'run': VARCHAR, 'update': VARCHAR})"
    )


def quoted(text: str) -> str:
    """Return a text as an SQL literal."""
    return "'" + text.replace("'", "''") + "'"
