"""`python -m tests.bench [NAME ...] [--quick] [--json FILE]`: run benches and print their tables."""

from __future__ import annotations

import argparse
import importlib
import json
import os
from pathlib import Path
from typing import Any

from tests.bench.report import Report, machine

BENCHES = {
    "engine": "tests.bench.engine",
    "prefix": "tests.bench.prefix",
    "admission_latency": "tests.bench.admission_latency",
    "mesh_turn": "tests.bench.mesh_turn",
    "switch_interval": "tests.bench.switch_interval",
    "staleness": "tests.bench.staleness",
}
"""Name to module; each has `run(quick: bool) -> Report`. Imported when asked for: some load torch and transformers."""

SPINNING = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(BENCHES)}; all by default")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions: does it run, not how fast is it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.names if name not in BENCHES]:
        parser.error(f"no bench is called {unknown[0]!r}; there are {', '.join(BENCHES)}")
    for variable, value in SPINNING.items():  # before anything imports torch
        os.environ.setdefault(variable, value)
    results = [_run(name, arguments.quick) for name in arguments.names or BENCHES]
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


def _run(name: str, quick: bool) -> dict[str, Any]:
    before = machine()
    report: Report = importlib.import_module(BENCHES[name]).run(quick)
    after = machine()
    print(report.text())
    print(
        f"- machine: {before['cores']} cores, {before['cpu']}; load {before['load_1m']} -> {after['load_1m']}\n",
        flush=True,
    )
    return report.as_json() | {"machine": before, "load_1m_after": after["load_1m"]}


if __name__ == "__main__":
    main()
