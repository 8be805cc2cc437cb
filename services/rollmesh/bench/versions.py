"""Memory of several versions at once: the resident memory of a torch engine that holds one, two and three sets of weights.

Each row is a new process (`versions_arm`) that goes through six updates and samples from every version that it holds. Models: the demo's,
and one of 42 million parameters, both with random weights in float32.

How to read it: `weights` is the size of one set. `weights in memory` is the growth of the resident memory since the engine started without
weights, as a multiple of that size; it includes what the first forward loads, about 20 MB, which dominates with the demo's model. `one more
set` is the difference to the row with one version less, as such a multiple; 1 is the minimum. `peak` is the largest growth, which a version
that is being loaded causes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.report import Report
from benchmarks.torch_engine import tiny_folder
from rollmesh.demo.tokenizer import build_tokenizer
from rollmesh.trainer.model_files import WEIGHTS_NAME, write_model_folder

ARM_S_MAX = 300.0


def run(quick: bool) -> Report:
    report = Report("versions", "resident memory of a torch engine after six updates, by versions held at once")
    with tiny_folder() as (small, _), _larger_folder() as larger:
        for name, folder in (("demo", small), ("larger", larger))[: 1 if quick else 2]:
            weights = (folder / WEIGHTS_NAME).stat().st_size
            rows = [_measure(folder, number) for number in (1, 2, 3)]
            for index, row in enumerate(rows):
                more = (row["serving"] - rows[index - 1]["serving"]) / weights if index else None
                report.rows.append(
                    {
                        "model": name,
                        "weights, MB": round(weights / 1e6, 1),
                        "versions_max": index + 1,
                        "resident, MB": round(row["serving"] / 1e6),
                        "weights in memory": round((row["serving"] - row["before"]) / weights, 2),
                        "one more set": "" if more is None else round(more, 2),
                        "peak": round((row["peak"] - row["before"]) / weights, 2),
                    }
                )
    return report


def _measure(folder: Path, versions_max: int) -> dict[str, Any]:
    arm = [sys.executable, "-m", "rollmesh.bench.versions_arm", str(folder), str(versions_max)]
    done = subprocess.run(arm, capture_output=True, text=True, check=True, timeout=ARM_S_MAX)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@contextmanager
def _larger_folder() -> Iterator[Path]:
    """Return the folder of a Qwen3 of 42 million parameters."""
    import transformers

    model_class: Any = transformers.Qwen3ForCausalLM
    config = transformers.Qwen3Config(
        vocab_size=32000, hidden_size=512, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4, head_dim=64,
        intermediate_size=1536, max_position_embeddings=256, tie_word_embeddings=True,
    )  # fmt: skip
    with TemporaryDirectory(prefix="rollmesh-bench-") as name:
        write_model_folder(model_class(config), build_tokenizer(), Path(name))
        yield Path(name)
