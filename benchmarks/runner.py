"""Run benches by name and print their tables. Each is a module with `run(quick: bool) -> Report`."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import Report, machine
from rollmesh.shared.errors import InvalidInput

BENCHES = (
    "engine",
    "prefix",
    "admission",
    "rows_per_step",
    "shared_prefix",
    "mesh_turn",
    "router",
    "sandbox",
    "staleness",
    "replay",
    "handover",
    "ledger",
    "lake",
    "recovery",
    "time_to_success",
    "recipes",
    "scorers",
    "judge",
)
"""Modules of this package, imported on demand, because some load torch and transformers."""
BY_NAME = ("swarm", "vllm", "race", "weights", "publish_to_active", "open_connections", "task_files")
"""Modules that run by name only: they need another environment, 12 GB of memory, 2,000 open files, or 2 GB of disk.
`methods` is a command with its own options."""
WITH_OPTIONS = ("race",)
"""Modules whose `run` has further options."""
FOLDERS = {name: f"{name}.bench" for name in ("handover", "race", "sandbox", "vllm", "weights")}
MODULES = FOLDERS | {"publish_to_active": "weights.publish_to_active"}
"""Modules of benches that are not named like the bench."""
METHODS = "methods"


def run_benches(names: Sequence[str], *, quick: bool, json_file: Path | None, options: Mapping[str, Any]) -> bool:
    """Run the benches in `names`, or `BENCHES` if it is empty. Return whether they met their targets, which short runs
    do not judge.

    `options` are for `WITH_OPTIONS`. Raises InvalidInput for an unknown bench."""
    if METHODS in names:
        raise InvalidInput(f"NAME must be `{METHODS}` alone or other benches; got {', '.join(names)}")
    known = (*BENCHES, *BY_NAME, METHODS)
    if unknown := [name for name in names if name not in known]:
        raise InvalidInput(f"NAME must be one of {', '.join(known)}; got {unknown[0]!r}")
    results = []
    for name in names or BENCHES:
        results.append(_run(name, quick, options if name in WITH_OPTIONS else {}))
        if json_file is not None:  # after each bench, because a later one can fail
            json_file.write_text(json.dumps(results, indent=2) + "\n")
    return quick or all(target["met"] for result in results for target in result["targets"])


def _run(name: str, quick: bool, options: Mapping[str, Any]) -> dict[str, Any]:
    before = machine()
    report: Report = importlib.import_module(f"benchmarks.{MODULES.get(name, name)}").run(quick, **options)
    after = machine()
    print(report.text(judged=not quick))
    print(
        f"- machine: {before['cores']} cores, {before['cpu']}; load {before['load_1m']} -> {after['load_1m']}\n",
        flush=True,
    )
    return report.as_json(judged=not quick) | {"machine": before, "load_1m_after": after["load_1m"]}
