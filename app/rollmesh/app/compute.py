"""The environment of torch, set before it is loaded."""

from __future__ import annotations

import os


def set_up_compute() -> None:
    """Set the environment of torch before it is loaded: threads that spin on barriers cost up to 70 times on busy
    cores."""
    for name, value in {
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TQDM_DISABLE": "1",  # progress bars would corrupt the live display
    }.items():
        os.environ.setdefault(name, value)
