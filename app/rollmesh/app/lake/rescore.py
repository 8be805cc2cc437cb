"""Score exported samples with the scorers of a configuration, and write their rewards as files beside the samples.

    FOLDER/scores=NAME/run=RUN/update=K/part-0.parquet     sample_id, rewards, evidence of FOLDER/run=RUN/update=K/...

A file has the rewards of one file of samples, and is complete when it has its name. A second call scores what was
exported since, and files in which a scorer failed. Processes share the files among them.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from rollmesh.app.lake.files import FILES, KEY, PartNote, owned, parquet_file, part_note, read_note
from rollmesh.app.lake.query import samples_folder
from rollmesh.app.lake.rows import SCHEMA, sample_line
from rollmesh.app.samples.samples import mean_rewards
from rollmesh.app.samples.scoring import CHUNK_LINES, LineScorer, ScoredLine, has_failed
from rollmesh.shared.errors import ConfigError
from rollmesh.shared.store.private_files import private_folder
from rollmesh.shared.store.records import FileRecord

_SCHEMA = pa.schema([SCHEMA.field(name) for name in ("sample_id", "rewards", "evidence")])


class ScoresNote(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a file of rewards, in its metadata."""

    samples: PartNote
    """Note of the file of samples."""
    scorers: str
    """Digest of the scorers with their options."""
    num_failed: int = 0
    """Samples for which a scorer failed. A later call scores the file again."""


class LakeScores(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a call."""

    folder: str
    num_files: int
    """Files that this call wrote."""
    num_samples: int
    """Samples that this call scored."""
    num_failed: int
    """Samples for which a scorer failed."""
    mean_rewards: dict[str, float]
    """Over the samples that this call scored."""


class _FileScores(msgspec.Struct, frozen=True, kw_only=True):
    num_samples: int
    num_failed: int
    sums: dict[str, float]
    counts: dict[str, int]


def score_exported(
    folder: Path, config: Path | None, overrides: Sequence[str], *, name: str, processes: int
) -> LakeScores:
    """Score the samples below `folder` that have messages and no scores `name`. Raises ConfigError, FolderBusy,
    RecordError for a sample that cannot be scored."""
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):
        raise ConfigError(f"--name must have 1 to 64 letters, digits, dashes or underscores, got {name!r}")
    samples = samples_folder(folder)
    target = samples / f"scores={name}"
    scorers = asyncio.run(_scorers(config, overrides))
    with owned(target):
        todo = _todo(samples, target, scorers)
        shares = [todo[at::processes] for at in range(processes) if todo[at::processes]]
        if len(shares) <= 1:
            done = [_score_files(share, config, overrides) for share in shares]
        else:
            with ProcessPoolExecutor(len(shares), mp_context=multiprocessing.get_context("spawn")) as pool:
                jobs = [pool.submit(_score_files, share, config, overrides) for share in shares]
                done = [job.result() for job in jobs]
    found = [each for share in done for each in share]
    counts = Counter[str]()
    for each in found:
        counts.update(each.counts)
    return LakeScores(
        folder=str(target),
        num_files=len(found),
        num_samples=sum(each.num_samples for each in found),
        num_failed=sum(each.num_failed for each in found),
        mean_rewards={
            reward: sum(each.sums.get(reward, 0.0) for each in found) / num for reward, num in sorted(counts.items())
        },
    )


async def _scorers(config: Path | None, overrides: Sequence[str]) -> str:
    scorer = LineScorer(config, overrides)
    await scorer.close()
    return scorer.digest


def _todo(samples: Path, target: Path, scorers: str) -> list[tuple[Path, Path]]:
    """Return (file of samples, file of rewards to write), and remove the rewards of files that an export removed.
    Raises ConfigError if the scores of this name are those of other scorers."""
    for path in target.glob(FILES):
        if not (samples / path.relative_to(target)).exists():
            path.unlink()
    todo = []
    for source in sorted(samples.glob(FILES)):
        path = target / source.relative_to(samples)
        if path.exists():
            known = read_note(path, ScoresNote)
            if known.scorers != scorers:
                raise ConfigError(
                    f"{path}: has rewards of other scorers or options than those of the configuration; choose another "
                    "--name"
                )
            if known.samples == part_note(source) and not known.num_failed:
                continue
        todo.append((source, path))
    return todo


def _score_files(
    files: Sequence[tuple[Path, Path]], config: Path | None, overrides: Sequence[str]
) -> list[_FileScores]:
    """Score files one after the other, in this process."""

    async def score() -> list[_FileScores]:
        scorer = LineScorer(config, overrides)
        try:
            return [await _score_file(scorer, source, path) for source, path in files]
        finally:
            await scorer.close()

    return asyncio.run(score())


async def _score_file(scorer: LineScorer, source: Path, path: Path) -> _FileScores:
    private_folder(path.parent)
    samples = part_note(source)
    num_samples = num_failed = 0
    sums, counts = dict[str, float](), Counter[str]()
    with parquet_file(path, _SCHEMA) as writer:
        for records in _records(source):
            lines = await scorer.score(records)
            writer.write_batch(pa.RecordBatch.from_pylist([_row(line) for line in lines], schema=_SCHEMA))
            num_samples += len(lines)
            num_failed += sum(has_failed(line.rewards) for line in lines)
            for line in lines:
                for reward, value in mean_rewards([line.rewards]).items():
                    sums[reward] = sums.get(reward, 0.0) + value
                    counts[reward] += 1
        note = ScoresNote(samples=samples, scorers=scorer.digest, num_failed=num_failed)
        writer.add_key_value_metadata({KEY: msgspec.json.encode(note)})
    return _FileScores(num_samples=num_samples, num_failed=num_failed, sums=sums, counts=dict(counts))


def _records(source: Path) -> Iterator[list[FileRecord]]:
    """Yield the samples of a file that have messages, as lines of samples.jsonl; a line is the number of its row."""
    run = source.parents[1].name.removeprefix("run=")
    number = 0
    with pq.ParquetFile(source) as file:
        for batch in file.iter_batches(CHUNK_LINES):
            records = []
            for row in batch.to_pylist():
                number += 1
                if row["stored"]:
                    fields = msgspec.to_builtins(sample_line({**row, "run": run}))
                    records.append(FileRecord(path=source, line=number, fields=fields))
            if records:
                yield records


def _row(line: ScoredLine) -> dict[str, Any]:
    rewards = [msgspec.structs.asdict(reward) for reward in line.rewards]
    evidence = [reward.pop("evidence") for reward in rewards]
    return {"sample_id": line.sample_id, "rewards": rewards, "evidence": evidence}
