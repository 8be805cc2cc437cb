"""Random sequences of calls, valid and invalid, compared with a model of the contract; with --minutes, while services
are killed.

    python -m tests.contract --sequences 500 --calls 60 --seed 0      # or: make suite NAME=contract
    python -m tests.contract --minutes 20                             # or: make suite NAME=contract-kills
    python -m tests.contract --sequences 1 --seed 17                  # repeat sequence 17

The seed determines a sequence, except for the timing of the mesh. The exit code is 1 if any sequence found a violation.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from .mesh import kill_at_random, process_mesh, quiet_mesh
from .player import Plan, Result
from .sequences import play, play_all, to_text

SEQUENCES_OF_A_MESH = 250
"""Each sequence is a run, and the streams of ended runs keep their room at the NATS server of the mesh."""


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.contract", description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=20, help="number of sequences. Default: 20.")
    parser.add_argument("--calls", type=int, default=60, help="calls of a sequence before its end. Default: 60.")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first sequence. Default: 0.")
    parser.add_argument("--parallel", type=int, default=4, help="sequences at a time, without kills. Default: 4.")
    parser.add_argument("--minutes", type=float, default=0.0, help="kill services for this long. Default: 0, no kills.")
    return parser.parse_args()


async def _quiet(options: argparse.Namespace, folder: Path) -> list[Result]:
    seeds = range(options.seed, options.seed + options.sequences)
    results: list[Result] = []
    for first in range(0, len(seeds), SEQUENCES_OF_A_MESH):
        async with quiet_mesh(folder / str(first)) as ends:
            plans = [Plan(seed, options.calls) for seed in seeds[first : first + SEQUENCES_OF_A_MESH]]
            results += await play_all(ends, plans, parallel=options.parallel, on_result=_print)
    return results


async def _killing(options: argparse.Namespace, folder: Path) -> list[Result]:
    """Play until the time is over, then finish the current sequence."""
    results: list[Result] = []
    killed: Counter[str] = Counter()
    seeds = itertools.count(options.seed)
    until = time.monotonic() + 60 * options.minutes

    async with process_mesh(folder) as (ends, mesh):
        killer = asyncio.create_task(kill_at_random(ends, mesh, random.Random(options.seed), killed))
        try:
            while time.monotonic() < until:  # one after the other, because such a mesh serves one run at a time
                results.append(await play(ends, Plan(next(seeds), options.calls, kills=True)))
                _print(results[-1])
        finally:
            killer.cancel()
            with suppress(asyncio.CancelledError):
                await killer  # without the killer the mesh would not be tested
    print(f"{sum(killed.values())} kills: " + ", ".join(f"{name} {num}" for name, num in killed.most_common()))
    return results


def _print(result: Result) -> None:
    outcome = f"VIOLATION: {result.violation}" if result.violation else "held"
    print(f"seed {result.seed}: {result.calls} calls, {result.updates} updates, {outcome}", flush=True)


def main() -> int:
    options = _parse()
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    with tempfile.TemporaryDirectory(prefix="rollmesh-contract-") as folder:
        results = asyncio.run((_killing if options.minutes else _quiet)(options, Path(folder)))
    print(to_text(results))
    return 1 if any(result.violation for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
