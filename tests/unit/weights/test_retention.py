"""The depot keeps the newest versions of each run's policy."""

from __future__ import annotations

from rollmesh.services.weights.servicer import outdated


def test_the_newest_versions_of_each_policy_stay() -> None:
    owners = [f"weights:main@{step}.0" for step in (1, 2, 10, 9)] + ["weights:critic@0.0", "snapshot:7"]
    assert outdated(owners, versions_max=2) == ["weights:main@1.0", "weights:main@2.0"]


def test_a_young_run_is_not_pushed_out_by_the_steps_of_an_old_one() -> None:
    owners = [f"weights:old/main@{step}.0" for step in range(7, 10)] + ["weights:young/main@0.0"]
    assert outdated(owners, versions_max=2) == ["weights:old/main@7.0"]


def test_a_newer_incarnation_is_newer_than_any_void_step() -> None:
    owners = ["weights:main@8.0", "weights:main@9.0", "weights:main@5.1"]
    assert outdated(owners, versions_max=2) == ["weights:main@8.0"]
