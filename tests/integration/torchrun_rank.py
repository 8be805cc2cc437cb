"""A rank of torchrun other than 0, for tests: python -m tests.integration.torchrun_rank CONFIG (JSON)."""

from __future__ import annotations

import sys

import msgspec

from rollmesh.services.learner.config import LearnerConfig
from rollmesh.services.learner.engines.rank_process import run_torchrun_rank

if __name__ == "__main__":
    run_torchrun_rank(msgspec.json.decode(sys.argv[1], type=LearnerConfig))
