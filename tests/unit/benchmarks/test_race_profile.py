"""CPU seconds by part of the mesh."""

from __future__ import annotations

import pytest

from benchmarks.cpu_profile import Profile
from benchmarks.race.profile import LIBRARIES, MODEL, by_part


def test_by_part_puts_generation_and_training_into_their_parts_and_loses_nothing() -> None:
    profile = Profile(
        owners={"inference": 1.0, "learner": 2.0, "trainer": 4.0, "rollout": 8.0},
        threads={"engine": 16.0, "engine-loader_0": 32.0, "learner-compute_0": 64.0, "native grpc_global": 128.0},
        children={"nats-server": 256.0, "python3.11": 512.0},
    )
    parts = by_part(profile)
    assert parts.pop(MODEL) == 4 + 16 + 32 + 64
    assert parts == {
        "inference": 1.0 + 16 + 32,
        "learner": 2.0 + 4 + 64,
        "rollout": 8.0,
        LIBRARIES: 128.0,
        "nats": 256.0,
        "sandbox": 512.0,
    }
    assert sum(parts.values()) == pytest.approx(profile.total_s)
