"""Conversations of exported samples for other tools: fine-tuning (sft) and agent trajectories (atif).

Both are queries over the Parquet files, and a condition in SQL chooses the samples. Samples whose payload was purged
before the export have no messages, so they are not written.

ATIF is the Agent Trajectory Interchange Format of Harbor (RFC 1, version 1.7): steps with a source, the tokens and
log-probs of the agent's steps, and results of tools as the observation of the step before.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec

from rollmesh.app.lake.files import stored_file
from rollmesh.app.lake.query import SampleTables, quoted
from rollmesh.app.lake.rows import sample_line
from rollmesh.app.samples.samples import SampleLine
from rollmesh.app.samples.transcript import TranscriptTurn, generated_messages, turns_of
from rollmesh.shared.errors import ConfigError
from rollmesh.shared.process.process_info import installed_version

ATIF = "ATIF-v1.7"
_SFT = "messages, sample_id, task_id, split, labels, reward, run, update"
_LINEAGE = ("run", "update", "group_id", "task_id", "split", "ended_as", "reason", "staleness", "reward")
"""Columns in `extra` of a trajectory."""
_CHOSEN = "chosen"
"""View of the samples to write."""
_SOURCES = {"system": "system", "assistant": "agent"}
"""Source of a step by the role of its message; `user` for all other roles."""
Row = dict[str, Any]


def write_sft(tables: SampleTables, path: Path, where: str = "", run: str = "") -> int:
    """Write one conversation per line, or as Parquet if `path` ends in .parquet. Return their number. Samples of
    evaluations are omitted unless the condition names `purpose`. Raises InvalidInput for a wrong condition,
    ConfigError, DiskFull."""
    trained = "true" if re.search(r"\bpurpose\b", where, re.IGNORECASE) else "purpose <> 'eval'"
    _choose(tables, _SFT, trained, where, run)
    kind = "PARQUET" if path.suffix == ".parquet" else "JSON"
    with _file(path) as partial:
        copy = f"COPY (FROM {_CHOSEN}) TO {quoted(str(partial))} (FORMAT {kind}, USE_TMP_FILE false)"
        return int(next(tables.query(copy).rows)[0])


def write_atif(tables: SampleTables, path: Path, where: str = "", run: str = "") -> int:
    """Write one trajectory per line. Return their number. Raises as `write_sft`."""
    if path.suffix == ".parquet":
        raise ConfigError(f"--out {path}: a trajectory of ATIF is a JSON document; name a file that ends in .jsonl")
    _choose(tables, "*", "true", where, run)
    with _file(path) as partial, partial.open("wb") as file:
        result, num = tables.query(f"FROM {_CHOSEN}"), 0
        for values in result.rows:
            file.write(msgspec.json.encode(trajectory(dict(zip(result.columns, values, strict=True)))) + b"\n")
            num += 1
        return num


def trajectory(row: Row) -> Row:
    """Return a sample as an ATIF trajectory. `row` has its columns."""
    line = sample_line(row)
    generated = generated_messages(line)
    starts = _starts(line)
    steps: list[Row] = []
    for index, message in enumerate(line.messages):
        if message.role == "tool" and steps and steps[-1]["source"] == "agent":
            results = steps[-1].setdefault("observation", {"results": []})["results"]
            results.append({"content": message.content})
            continue
        source = _SOURCES.get(message.role, "user")
        step: Row = {"step_id": len(steps) + 1, "source": source, "message": message.content}
        if (turn := generated.get(index)) is not None:
            step |= _generation(turn, starts[turn.segments[0].index])
        elif source == "agent":
            step["is_copied_context"] = True
        steps.append(step)
    turns = turns_of(line.segments)
    return {
        "schema_version": ATIF,
        "session_id": line.episode,
        "trajectory_id": line.sample_id,
        "agent": {"name": line.agent or "rollmesh", "version": installed_version(), "model_name": line.policy},
        "steps": steps,
        "final_metrics": {
            "total_prompt_tokens": sum(starts[turn.segments[0].index] for turn in turns),
            "total_completion_tokens": sum(turn.num_tokens for turn in turns),
            "total_steps": len(steps),
        },
        "extra": {name: row[name] for name in _LINEAGE if row[name] is not None},
    }


def _starts(line: SampleLine) -> dict[int, int]:
    """Return the number of tokens before each segment, by its index."""
    lengths = (len(segment.token_ids) for segment in line.segments)
    return dict(zip((segment.index for segment in line.segments), accumulate(lengths, initial=0), strict=False))


def _generation(turn: TranscriptTurn, num_before: int) -> Row:
    logprobs = [value for segment in turn.segments for value in segment.logprobs or ()]
    metrics: Row = {
        "prompt_tokens": num_before,
        "completion_tokens": turn.num_tokens,
        "completion_token_ids": [token for segment in turn.segments for token in segment.token_ids],
    }
    if len(logprobs) == turn.num_tokens:
        metrics["logprobs"] = logprobs
    return {"model_name": ", ".join(turn.versions), "metrics": metrics}


def _choose(tables: SampleTables, columns: str, kind: str, where: str, run: str) -> None:
    """Create the view of the samples to write. The condition of the user is inside a statement without effects, and may
    end with a comment."""
    conditions = ["stored", kind, *([f"run = {quoted(run)}"] if run else []), *([f"(\n{where}\n)"] if where else [])]
    tables.query(
        f"CREATE OR REPLACE TEMP VIEW {_CHOSEN} AS SELECT {columns} FROM samples WHERE {' AND '.join(conditions)}"
    )


@contextmanager
def _file(path: Path) -> Iterator[Path]:
    try:
        with stored_file(path) as partial:
            yield partial
    except OSError as err:
        raise ConfigError(f"--out {path}: cannot be written: {err.strerror}; name another file", path=path) from err
