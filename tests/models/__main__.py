"""Write the table of docs/models.md by running every architecture of `tests.models` in trainer and engine (`make suite
NAME=models`)."""

from __future__ import annotations

import re
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.models.architectures import ARCHITECTURES
from tests.models.engine_column import EngineResult, engine_result
from tests.models.trainer_column import TrainerResult, trainer_result

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- begin of the generated table -->", "<!-- end of the generated table -->"
LOGPROB_ERROR_MAX = 1e-4


def main() -> int:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    verbosity: Any = transformers.utils.logging
    verbosity.set_verbosity_error()
    families = len({family for family, _ in ARCHITECTURES.values()})
    versions = f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}"
    lines = [
        f"{len(ARCHITECTURES)} models of {families} families, {versions}.",
        "",
        "| model | family | trainer | engine | remark |",
        "| --- | --- | --- | --- | --- |",
    ]
    worst = 0.0
    for name, (family, _) in ARCHITECTURES.items():
        trained, served = trainer_result(name), engine_result(name)
        worst = max(worst, trained.logprob_error, served.logprob_error)
        mode = trained.mode.value if trained.mode else "rejected"
        lines.append(f"| {name} | {family} | {mode} | {served.forward or 'rejected'} | {_remark(trained, served)} |")
        print(lines[-1], flush=True)
    head, _, rest = DOCUMENT.read_text().partition(BEGIN)
    _, _, tail = rest.partition(END)
    DOCUMENT.write_text("\n".join([f"{head}{BEGIN}", *lines, f"{END}{tail}"]))
    print(f"largest difference of a log-prob: {worst:.1e} nats")
    return 0 if worst <= LOGPROB_ERROR_MAX else 1


def _remark(trained: TrainerResult, served: EngineResult) -> str:
    """Return the reasons against faster forwards, without numbers that change between runs."""
    reasons = {"trainer": trained.reason, "engine": served.reason if served.forward in ("recompute", "") else ""}
    parts = [f"{part}: {reason.split('; cached: ')[-1]}" for part, reason in reasons.items() if reason]
    return re.sub(r"/tmp/\S+ ", "", "; ".join(parts)).replace("|", "/").replace("\n", " ")


if __name__ == "__main__":
    sys.exit(main())
