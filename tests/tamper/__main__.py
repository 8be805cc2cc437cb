"""`python -m tests.tamper`: random changes to copies of the ledgers of real runs. Each change must be found."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from tests.chaos.world import save_model_folder
from tests.tamper.real_run import MAKERS
from tests.tamper.tamper import tamper, untouched


async def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num", type=int, default=500, help="Number of tamperings. Default: 500.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of where they strike. Default: 0.")
    options = parser.parse_args()
    runs = []
    with tempfile.TemporaryDirectory(prefix="rollmesh-tamper-") as folder:
        model = save_model_folder(Path(folder) / "model")
        for name, make in MAKERS.items():
            runs.append(await make(Path(folder) / name, model))
            report = await untouched(runs[-1])
            print(f"untouched, {name}: {report.to_text()}", flush=True)
            if not report.holds:
                return 1
    tally = await tamper(runs, num=options.num, seed=options.seed)
    print(tally.table())
    return 1 if tally.missed else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
