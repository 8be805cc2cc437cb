"""Safetensors files made by hand: an 8-byte header length, a JSON header, the data."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np


def write_safetensors(path: Path, seed: int, num_values: int = 1000) -> Path:
    """One float32 tensor `w` of values drawn by `seed`."""
    data = np.random.default_rng(seed).standard_normal(num_values).astype("<f4").tobytes()
    header = json.dumps({"w": {"dtype": "F32", "shape": [num_values], "data_offsets": [0, len(data)]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path
