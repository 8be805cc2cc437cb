"""The tools of Prometheus, which `make suite NAME=monitoring` installs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INSTALLED = ROOT / ".tools" / "prometheus" / "usr" / "bin"


def tool(name: str) -> str:
    """Return the path of `prometheus` or `promtool`, or skip the test."""
    found = shutil.which(name, path=str(INSTALLED)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed; run: make suite NAME=monitoring")
    return found
