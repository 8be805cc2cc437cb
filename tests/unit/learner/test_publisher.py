"""What the publisher reads of a copy of the weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from rollmesh.services.learner import publisher as publisher_module
from rollmesh.services.learner.compute import ComputeThread
from rollmesh.services.learner.config import PublishConfig
from rollmesh.services.learner.engine import ExportedWeights
from rollmesh.services.learner.publisher import Publisher, WeightsCopy
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.errors import WeightsRejected
from rollmesh.shared.weights.finite import first_not_finite
from rollmesh.shared.weights.manifest import ADAPTER_CONFIG, ADAPTER_WEIGHTS, build_manifest

VERSION = PolicyVersion(policy="main", step=1, incarnation=0)


@pytest.fixture
def publisher(tmp_path: Path) -> Any:
    unused: Any = ComputeThread
    return Publisher(unused, unused, PublishConfig(), tmp_path / "publishing")


def test_a_base_that_versions_share_is_read_once(
    tmp_path: Path, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, scratch = tmp_path / "model.safetensors", tmp_path / "publishing" / "files"
    scratch.mkdir(parents=True)
    save_file({"w": np.zeros(4, np.float32)}, base)
    adapter = {ADAPTER_CONFIG: scratch / ADAPTER_CONFIG, ADAPTER_WEIGHTS: scratch / ADAPTER_WEIGHTS}
    adapter[ADAPTER_CONFIG].write_text("{}")
    checked: list[Path] = []

    def check(path: Path) -> str:
        checked.append(path)
        return first_not_finite(path)

    monkeypatch.setattr(publisher_module, "first_not_finite", check)
    files, weights = {base.name: base}, adapter[ADAPTER_WEIGHTS]
    for value in (1.0, 2.0):
        save_file({"a": np.full(4, value, np.float32)}, weights)
        built = publisher._build(WeightsCopy(VERSION, ExportedWeights(files=files, adapter=adapter), ()))
        assert built == build_manifest(files, adapter=adapter), "the same as if it were read"
    assert checked == [base, weights, weights]

    save_file({"w": np.full(4, np.nan, np.float32)}, base)
    os.utime(base, ns=(0, 0))
    with pytest.raises(WeightsRejected, match="tensor w of main@1"):
        publisher._build(WeightsCopy(VERSION, ExportedWeights(files=files, adapter=adapter), ()))


def test_a_file_of_the_copy_is_read_for_each_version(tmp_path: Path, publisher: Publisher) -> None:
    path = tmp_path / "publishing" / "files" / "model.safetensors"
    path.parent.mkdir(parents=True)
    digests = set()
    for value in (1.0, 2.0):
        save_file({"w": np.full(4, value, np.float32)}, path)
        os.utime(path, ns=(0, 0))
        copy = WeightsCopy(VERSION, ExportedWeights(files={path.name: path}), ())
        digests.add(publisher._build(copy).weights_digest)
    assert len(digests) == 2
