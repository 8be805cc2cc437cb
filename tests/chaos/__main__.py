"""Rounds of chaos: real processes under the real supervisor, killed and paused at random. Every round must end with a
finished run and a clean audit.

    python -m tests.chaos --rounds 40 --seed 0          # or: make suite NAME=chaos ROUNDS=40 PARALLEL=2
    python -m tests.chaos --rounds 1 --seed 17          # round 17 again

A round is named by its seed, from which all of its faults are drawn. One that fails keeps its folder; the others go on.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec

from rollmesh.app.config import TrainConfig, load_train_config
from rollmesh.demo.model_process import make_in_process

from ..nats_cluster import NatsCluster
from .plan import CLUSTER_VICTIMS, PROGRAM_VICTIMS, draw
from .programs import program_config
from .round import Outcome, play
from .table import by_victim, to_text, totals
from .world import save_model_folder, with_replay

CONFIG = Path(__file__).parent / "rounds.yaml"
_MAKE_MODEL_S_MAX = 900.0
_CLUSTER_UPDATES = 14


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos", description="Rounds of chaos; see docs/reliability.md."
    )
    parser.add_argument("--rounds", type=int, default=1, help="how many (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first; the next ones count on (default 0)")
    parser.add_argument("--faults", type=int, default=4, help="kills and pauses per round (default 4)")
    parser.add_argument("--parallel", type=int, default=1, help="rounds at a time (default 1)")
    parser.add_argument("--limit-s", type=float, default=240.0, help="longest round, seconds (default 240)")
    parser.add_argument("--out", type=Path, help="folder of model and rounds (default: a new temporary one)")
    parser.add_argument("--model", type=Path, help="warm-started model; by default made in the folder")
    parser.add_argument(
        "--programs", action="store_true", help="agents are programs, 64 at once over four workers, with a fake model"
    )
    parser.add_argument(
        "--cluster",
        action="store_true",
        help="streams on three NATS servers; one at a time is killed, stopped or cut off",
    )
    parser.add_argument("--replay", action="store_true", help="half of each batch is replayed")
    parser.add_argument("--json", type=Path, help="file for the report as JSON")
    parser.add_argument("--keep", action="store_true", help="keep the folders of rounds that held, too")
    return parser.parse_args()


async def _run(options: argparse.Namespace) -> list[Outcome]:
    out = options.out or Path(tempfile.mkdtemp(prefix="rollmesh-chaos-"))
    config = (
        program_config(save_model_folder(out / "model"))
        if options.programs
        else await _config(out, options.model, cluster=options.cluster)
    )
    if options.replay:
        config = with_replay(config)
    room = asyncio.Semaphore(options.parallel)

    async def one(seed: int) -> Outcome:
        async with room:
            return await _round(seed, config, out / f"round-{seed}", options)

    return await asyncio.gather(*map(one, range(options.seed, options.seed + options.rounds)))


async def _round(seed: int, config: TrainConfig, folder: Path, options: argparse.Namespace) -> Outcome:
    def tell(line: str) -> None:
        _tell(f"round {seed}: {line}")

    tell(f"begins at {time.strftime('%H:%M:%S')}")
    turn = {"turn": PROGRAM_VICTIMS} if options.programs else {"turn": CLUSTER_VICTIMS} if options.cluster else {}
    faults = draw(seed, num=options.faults, updates_max=config.run.updates_max, **turn)
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(NatsCluster(folder / "cluster")) if options.cluster else None
        outcome = await play(seed, faults, config, folder, limit_s=options.limit_s, tell=tell, cluster=cluster)
    tell(f"{outcome.seconds:6.1f} s  {f'FAILED, see {folder}: {outcome.cause}' if outcome.cause else 'held'}")
    if not outcome.cause and not options.keep:
        shutil.rmtree(folder)
    return outcome


async def _config(out: Path, model: Path | None, *, cluster: bool) -> TrainConfig:
    """Return the configuration of all rounds, with one model for all of them. A round with a `cluster` is longer,
    because at most one server is down at a time."""
    config = load_train_config(CONFIG)
    plan = config.made_model
    assert plan is not None
    folder = model or out / "model"
    if not folder.is_dir():
        _tell(f"making the model in {folder}")
        folder.parent.mkdir(parents=True, exist_ok=True)
        await make_in_process(plan, folder, seed=1, limit_s=_MAKE_MODEL_S_MAX, on_step=lambda _: None)
    config = msgspec.structs.replace(config, made_model=None, model=str(folder.resolve()))
    if not cluster:
        return config
    return msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, updates_max=_CLUSTER_UPDATES))


def _tell(line: str) -> None:
    print(line, flush=True)


def main() -> int:
    options = _parse()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    outcomes = asyncio.run(_run(options))
    print(to_text(outcomes))
    if options.json:
        report = {"totals": totals(outcomes), "faults": by_victim(outcomes), "rounds": outcomes}
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    return 1 if any(outcome.cause for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
