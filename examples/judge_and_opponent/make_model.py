"""Make the model of the example, a tiny one that knows the rules of the duel: `python make_model.py`.

It writes the folder `model` beside this file. The policy starts with these weights, and the opponent keeps them.
"""

import sys
from pathlib import Path

from rollmesh.demo.config import MadeModelConfig
from rollmesh.demo.make_model import make_model
from rollmesh.shared.config.registry import Extension

here = Path(__file__).resolve().parent
folder = Path(sys.argv[1]) if len(sys.argv) > 1 else here / "model"
tasks = Extension(f"{here}/duel.py:LargestSource", {"level_max": 3, "num_validation": 90})
config = MadeModelConfig(
    tasks=tasks,
    shape={"hidden_size": 128, "intermediate_size": 256},
    warm_start={"levels": 3, "levels_first": 3, "target_success": 0.4},
)
last = make_model(config, folder, seed=7, on_step=lambda progress: None)
print(f"{folder}: {last.step} steps, success {last.success:.2f}")
