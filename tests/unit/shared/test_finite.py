"""The check of a file's values for NaN and infinity, without numpy."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rollmesh.shared.weights.finite import first_not_finite

NUM_VALUES = 200_001  # more than a block of each type, and an odd number
CODES = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}


def file(folder: Path, dtype: str, data: bytes, num_values: int = NUM_VALUES) -> Path:
    """A file of an integer tensor with all bits set, then the values."""
    tensors = {
        "a.ids": {"dtype": "I32", "shape": [1], "data_offsets": [0, 4]},
        "b.w": {"dtype": dtype, "shape": [num_values], "data_offsets": [4, 4 + len(data)]},
    }
    header = json.dumps(tensors).encode()
    path = folder / "w.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\xff" * 4 + data)
    return path


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("at", [0, 131_071, 131_072, NUM_VALUES - 1])
def test_a_value_that_is_not_finite_is_found_wherever_it_is(tmp_path: Path, dtype: str, bad: float, at: int) -> None:
    values = np.random.default_rng(0).standard_normal(NUM_VALUES).astype(CODES[dtype])
    assert first_not_finite(file(tmp_path, dtype, values.tobytes())) == ""
    values[at] = bad
    assert first_not_finite(file(tmp_path, dtype, values.tobytes())) == "b.w"


@pytest.mark.parametrize("dtype", CODES)
def test_the_largest_finite_values_are_finite(tmp_path: Path, dtype: str) -> None:
    most = np.finfo(np.dtype(CODES[dtype])).max
    values = np.array([most, -most, 0.0, -0.0] * 100, CODES[dtype])
    assert first_not_finite(file(tmp_path, dtype, values.tobytes(), len(values))) == ""


def test_all_values_of_16_bits_are_judged_as_numpy_judges_them(tmp_path: Path) -> None:
    bits = np.arange(1 << 16, dtype="<u2")
    finite = {"F16": np.isfinite(bits.view("<f2")), "BF16": np.isfinite((bits.astype("<u4") << 16).view("<f4"))}
    for dtype, judged in finite.items():
        assert first_not_finite(file(tmp_path, dtype, bits[judged].tobytes(), int(judged.sum()))) == ""
        for value in bits[~judged][::97]:
            assert first_not_finite(file(tmp_path, dtype, value.tobytes(), 1)) == "b.w"
