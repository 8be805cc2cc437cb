"""The depot keeps the newest versions of each policy."""

from __future__ import annotations

from rollmesh.services.weights.retention import outdated


def test_the_newest_versions_of_each_policy_stay() -> None:
    owners = [f"weights:main@{step}.0" for step in (1, 2, 10, 9)] + ["weights:critic@0.0", "snapshot:7"]
    assert outdated(owners, versions_max=2) == ["weights:main@1.0", "weights:main@2.0"]


def test_a_newer_incarnation_is_newer_than_any_void_step() -> None:
    owners = ["weights:main@8.0", "weights:main@9.0", "weights:main@5.1"]
    assert outdated(owners, versions_max=2) == ["weights:main@8.0"]
