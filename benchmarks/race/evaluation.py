"""Measure the held-out success of model folders, as the same evaluator for all arms of the race.

`python -m benchmarks.race.evaluation` reads an `EvalWork` as one line of JSON from stdin, then one model folder per
line. It writes one success in [0, 1] per line. Every model plays the same tasks with the same random numbers.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import torch

from benchmarks.race.play import RaceLimits, RacePlayer, RaceTask
from rollmesh.trainer.model_files import load_model, load_tokenizer

SEED = 17


class EvalWork(msgspec.Struct, frozen=True, kw_only=True):
    """The held-out tasks."""

    tasks: tuple[RaceTask, ...]
    num_samples: int
    """Episodes per task."""
    limits: RaceLimits


def success(folder: Path, work: EvalWork) -> float:
    """Return the share of correct episodes at temperature 1."""
    model = load_model(folder).train(False)
    torch.manual_seed(SEED)
    tasks = [task for task in work.tasks for _ in range(work.num_samples)]
    with torch.inference_mode():
        played = RacePlayer(load_tokenizer(folder), work.limits).play(model, tasks)
    return sum(episode.correct for episode in played) / len(played)


def main() -> None:
    torch.set_num_threads(1)
    work = msgspec.json.decode(sys.stdin.buffer.readline(), type=EvalWork)
    for line in sys.stdin.buffer:
        sys.stdout.buffer.write(msgspec.json.encode(success(Path(line.decode().strip()), work)) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
